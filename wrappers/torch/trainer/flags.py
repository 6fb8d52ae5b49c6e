"""Flags of ``nntask train`` and ``plan`` for a model that is trained through PyTorch: the refused ones, and the meaning of some others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from nntask import UsageError
from nntask.config import TrainSettings, flag_of

from .language import USUAL_LENGTH, LanguageModelConfig

_TILES: Final = (
    "is about the tiles of nntask's own models, and PyTorch computes whole tensors; drop it, and lower --minibatch where tasks are too large"
)
_LANES: Final = "sums gradients of nntask's own models in parallel, and through PyTorch minibatches are summed in order; drop it"
_GPUS: Final = "is about GPUs, and PyTorch computes on CPUs here; drop it, or try devices with --sim-gpu"
_OBJECTIVE: Final = "is about what nntask's own models learn, and a model through PyTorch learns what its class is for; drop it"
_DASK: Final = "trains nntask's own models on a cluster, and a model through PyTorch trains on one machine; drop it"
_MODEL: Final = "names another model than the one that is continued; drop it, or start a new run"
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    **dict.fromkeys(("model", "config-path"), ((None,), _MODEL)),
    **dict.fromkeys(("minibatch-tile", "seq-tile", "embd-tile", "inner-tile", "head-tile", "vocab-tile"), ((None,), _TILES)),
    **{"auto-tile": (("table",), _TILES), "tile-table": (("",), _TILES)},
    "lanes": ((None, 1), _LANES),
    "dtype": (
        ("auto", "fp32"),
        "is another arithmetic than fp32, in which PyTorch computes here; drop it, or train the module in a program in its type",
    ),
    "attention": (("flash",), "is about nntask's own models; drop it, since PyTorch chooses how it computes attention"),
    "train": (("all",), "puts adapters into nntask's own models; drop it, or train with PEFT's in a program with wrappers.torch.Session"),
    **{"objective": ((None,), _OBJECTIVE), "mask-probability": ((0.15,), _OBJECTIVE), "target-len": ((None,), _OBJECTIVE)},
    **{"document-boundaries": ((False,), _OBJECTIVE), "chat-template": (("",), _OBJECTIVE)},
    **{"ngpu": ((None, 0), _GPUS), "split-gpu": ((1,), _GPUS), "graphs": ((True,), _GPUS)},
    **{"dask": (("",), _DASK), "nodes": ((None,), _DASK), "link-bandwidth": (("",), _DASK), "transport": (("dask",), _DASK)},
}
"""Flag -> values that change nothing, and the reason why any other value is refused."""


def checked_settings(settings: TrainSettings, stated: Mapping[str, Any], config: LanguageModelConfig) -> TrainSettings:
    """Return the settings for a model that is trained through PyTorch.

    Args:
        settings: all settings.
        stated: values that the user has set, by flag; a continued run has others from its checkpoint.
        config: configuration of the model.

    Raises:
        UsageError: a flag does not apply; the message names it and the remedy.
    """
    for flag, (nothing, why) in REFUSED.items():
        if flag in stated and stated[flag] not in nothing:
            value = stated[flag]
            typed = f"--no-{flag}" if value is False else flag_of(flag.replace("-", "_"))
            raise UsageError(why, flag=typed, value=None if isinstance(value, bool) else value)
    run, model = settings.run, settings.model
    if config.kind != "causal":
        if stated.get("sample-tokens") or stated.get("prompt"):
            flag = "sample-tokens" if stated.get("sample-tokens") else "prompt"
            what = f"the text of a model that predicts the next token, which this {config.model_type} is not"
            raise UsageError(f"is for {what}", "drop it", flag=f"--{flag}", value=stated[flag])
        run = replace(run, sample_tokens=0)
    if model.seq_len is None and config.longest is None:
        model = replace(model, seq_len=USUAL_LENGTH)
    if model.seq_len == 1 and config.kind != "masked":
        raise UsageError(f"--seq-len must be at least 2 for a {config.model_type}, which predicts tokens from those before, got 1", "for example 128")
    return replace(settings, run=run, model=model)
