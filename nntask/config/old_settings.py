"""Settings of earlier versions: their types, the present settings that replace them, and the answer to their flags.

Files and checkpoints with these names keep their meaning. Timed loops, printed sums and files written at the end are gone: `lost` names them, and
`examples/gpt2_custom_training.py` still takes their flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from ..errors import UsageError

_StorageDtype = Literal["fp32", "fp16", "bf16"]
_EXAMPLE: Final = "use examples/gpt2_custom_training.py, which takes NNTile's flags"
_EXPORT: Final = "write it from the run's checkpoint after training, with nntask export"


class Old(NamedTuple):
    """A setting that earlier versions had.

    Args:
        kind: type of its values.
        without_effect: value that asked for nothing.
        instead: replacement of its flag, as the end of a sentence.
    """

    kind: Any
    without_effect: Any
    instead: str


_OLD: Final[Mapping[str, Old]] = {
    "fp32_fast_tf32": Old(bool, False, "use --dtype tf32"),
    "flashattention": Old(bool, True, "use --attention stored"),
    "gpu_attention": Old(Literal["own", "cudnn", "auto"], "own", "use --attention flash, cudnn or auto"),
    "redux": Old(bool, False, "use --lanes 4"),
    "start_lr": Old(float, 0.0, "use --warmup-start-lr"),
    "full_lr_iter": Old(int, 1, "use --warmup-steps, and --warmup-start-lr for the learning rate of step 1, which was 0 by default"),
    "loss_reduction": Old(Literal["mean", "sum"], "mean", f"drop it, since losses are means, or for printed sums {_EXAMPLE}"),
    "nepochs_warmup": Old(int, 0, "add its passes to --nepochs"),
    "nforward": Old(int, 0, f"for timed loops {_EXAMPLE}"),
    "nforward_warmup": Old(int, 0, f"for timed loops {_EXAMPLE}"),
    "nbackward": Old(int, 0, f"for timed loops {_EXAMPLE}"),
    "nbackward_warmup": Old(int, 0, f"for timed loops {_EXAMPLE}"),
    "restrict": Old(Literal["none", "cpu", "cuda"], "none", "use --ngpu 0 for no GPU, or --ngpu -1 for all GPUs, of which there must be one"),
    "strict": Old(bool, False, "use --ncpu 0, which refuses tasks that no GPU can run"),
    "load_checkpoint": Old(str, "", "use --init-from, which takes a safetensors file of weights, too"),
    "save_checkpoint": Old(str, "", f"{_EXPORT} RUN FILE --format weights"),
    "save_checkpoint_dtype": Old(_StorageDtype, "fp32", "use nntask export --dtype"),
    "load_optimizer": Old(str, "", "continue with the optimizer state of a run by --resume RUN"),
    "save_optimizer": Old(str, "", f"{_EXPORT} RUN FILE --format optimizer"),
    "save_optimizer_dtype": Old(_StorageDtype, "fp32", "use nntask export --dtype"),
}
_OF_VALUE: Final[Mapping[tuple[str, str], str]] = {
    ("restrict", "cpu"): "use --ngpu 0, for no GPU",
    ("restrict", "cuda"): "use --ngpu -1, for all GPUs, of which there must be one",
    ("gpu_attention", "cudnn"): "use --attention cudnn",
    ("gpu_attention", "auto"): "use --attention auto",
}
"""(old setting, its value) -> replacement of the flag with this value, instead of `Old.instead`."""
OLD_SETTINGS: Final[Mapping[str, Any]] = {name: old.kind for name, old in _OLD.items()}
"""Name of an old setting -> type of its values."""
_WORDS: Final = {"1": "true", "yes": "true", "0": "false", "no": "false"}
"""Other words for the two values of a switch."""
_LOST: Final = ("loss_reduction", "nforward", "nforward_warmup", "nbackward", "nbackward_warmup", "strict", "save_checkpoint", "save_optimizer")


def instead(name: str, text: str | None) -> str | None:
    """Return what to type instead of a removed flag, as the end of a sentence; None for other names.

    Args:
        name: flag without dashes, perhaps with no- before the name of a switch.
        text: its value; None if it has none.
    """
    positive = name.removeprefix("no-")
    old = _OLD.get(positive.replace("-", "_"))
    if old is None or (name != positive and old.kind is not bool):
        return None
    if old.kind is bool:
        word = (text or "true").lower()
        text = "false" if name != positive else _WORDS.get(word, word)
    return "drop it" if text in _words_of(old.without_effect) else _OF_VALUE.get((positive.replace("-", "_"), text or ""), old.instead)


def _words_of(value: Any) -> tuple[str, ...]:
    """Return the usual words for the value of a setting."""
    return (str(value).lower(), f"{value:g}") if isinstance(value, (int, float)) and not isinstance(value, bool) else (str(value).lower(),)


def translated(values: Mapping[str, Any], source: str, keys: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return settings by their present names.

    Args:
        values: present or old name of a setting -> value, of the right type.
        source: name of their file, for messages.
        keys: name of a setting -> its key as the file spells it, for messages; None for keys that are these names.

    Raises:
        UsageError: an old setting contradicts another one.
    """
    asked, spelled = _with_effect(values), {name: name for name in values} | dict(keys or {})
    if asked.get("full_lr_iter", 1) < 1:
        raise UsageError(f"{spelled['full_lr_iter']} in {source} must be at least 1, got {asked['full_lr_iter']}", "the nearest legal value is 1")
    new = {name: value for name, value in values.items() if name not in _OLD}
    for old, name, value in _replacements(asked, values):
        if values.get(name, value) not in (value, *_UNSET.get(name, ())):
            key = spelled[name]
            raise UsageError(f"{spelled[old]} = {asked[old]} in {source} means {key} = {value}, got {key} = {values[name]}", "drop one of them")
        if name not in _IMPLIED:
            new[name] = value
    if new.get("optimizer") == "fusedadamw":
        new["optimizer"] = "adamw"
    if "nepochs_warmup" in asked:
        new["nepochs"] = new.get("nepochs", 0) + asked["nepochs_warmup"]
    return new


def replaced(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the present settings that `translated` takes from old ones: name -> name of the old one."""
    asked = _with_effect(values)
    names = {name: old for old, name, value in _replacements(asked, values) if name not in _IMPLIED and values.get(name) != value}
    if names.get("warmup_start_lr") and "start_lr" in values:
        names["warmup_start_lr"] = "start_lr"
    if "nepochs_warmup" in asked and not values.get("nepochs"):
        names["nepochs"] = "nepochs_warmup"
    return names


def _with_effect(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old settings in `values` that ask for something."""
    return {name: values[name] for name, old in _OLD.items() if name in values and values[name] != old.without_effect}


_UNSET: Final[Mapping[str, tuple[Any, ...]]] = {
    "dtype": ("auto", "fp32"),
    "gpu_attention": ("auto",),
    "lanes": (None,),
    "warmup_steps": (None, 0),
    "warmup_start_lr": (None,),
    "ngpu": (None,),
    "init_from": ("",),
}
"""Setting -> values that an old setting may replace."""
_IMPLIED: Final = ("gpu_attention", "sim_gpu")
"""Settings whose default is what an old setting implies."""


def _replacements(asked: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each old setting with an effect, the setting that it means, and the value of that one."""
    if "fp32_fast_tf32" in asked:
        yield "fp32_fast_tf32", "dtype", "tf32"
    if "flashattention" in asked:
        yield "flashattention", "gpu_attention", "own"
        yield "flashattention", "attention", "stored"
    elif "gpu_attention" in asked:
        yield "gpu_attention", "attention", asked["gpu_attention"]
    if "redux" in asked:
        yield "redux", "lanes", 4
    if "full_lr_iter" in asked:
        yield "full_lr_iter", "warmup_steps", asked["full_lr_iter"]
        yield "full_lr_iter", "warmup_start_lr", values.get("start_lr", 0.0)
    if "restrict" in asked:
        yield "restrict", "sim_gpu", 0
        if asked["restrict"] == "cpu" or not values.get("ngpu"):
            yield "restrict", "ngpu", 0 if asked["restrict"] == "cpu" else -1
    if "load_checkpoint" in asked:
        yield "load_checkpoint", "init_from", asked["load_checkpoint"]


def lost(values: Mapping[str, Any], source: str, keys: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a sentence for each old setting in `values` that asks for something which training no longer does; arguments as for `translated`."""
    for name in _LOST:
        if name in values and values[name] != _OLD[name].without_effect:
            yield f"{(keys or {}).get(name, name)} in {source} has no effect; {_OLD[name].instead}"
