"""Export of adapters as a directory that ``peft.PeftModel.from_pretrained(base, directory)`` loads, written without torch or peft.

PEFT adapts the matrices of the family's files. If such a matrix joins several of our layers (q, k and v of GPT-2), the layers share A, and their B
are rows of one B, in the order of the matrix's output features. Both factors are stored as (output features, input features) of a linear layer, for
either orientation of the weight. Factors of all experts of a block are one A and one B. The head of a classifier, which is trained whole, is in
PEFT's modules_to_save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import LoRA, adapted, base_tensors, expert_layers, is_factor
from ..architecture.family_config import ModelConfig
from ..architecture.names import Names
from ..checkpoints.store import MODEL, STATE, Checkpoint
from ..config.resolution import adapters_of
from ..config.stored_run import stored_settings
from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from ..hf.layout import names_of
from ..hf.model_directory import ADAPTER_CONFIG
from ..inference.samples import begins_after_end
from ..nn.layers import Linear
from .huggingface import Exported, as_stored, check_target, kind_of, new_file, write_directory, write_json, write_tokenizer
from .merged_weights import Array, adapter_arrays, capture_of

WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_TASKS: Final = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classify": "SEQ_CLS"}
_CLASSIFIER: Final = "classifier"
"""Module that PEFT saves whole in every model for the classification of sequences."""
_LAST_ARRAY: Final = "down_proj"
"""Last of the two arrays of all experts in a module of transformers."""


def export_adapters(source: Checkpoint, path: Path, *, dtype: str, tokenizer: Tokenizer | None, force: bool = False) -> Exported:
    """Write a checkpoint's adapters as a directory of PEFT.

    Args:
        source: checkpoint to export.
        path: directory to write.
        dtype: "fp32", "fp16", "bf16", or "auto" for the element type of the adapters in the checkpoint (fp32 for fp64).
        tokenizer: tokenizer whose files are written too; None for none.
        force: whether to replace an existing model directory.

    Raises:
        UsageError: the checkpoint holds a whole model, `check_target` refuses `path`, or a weight is too large for `dtype`.
        DataError: the checkpoint is broken, or the files of its frozen base weights have changed.
        StorageError: the disk is full or failed; no file was replaced.
    """
    lora = adapters_of(stored_settings(source))
    if lora is None:
        raise UsageError(f"{source.path} holds a whole model and no adapters", "export the model")
    check_target(path, source, force=force)
    source.verify(MODEL)
    base = FrozenBase.of_state(source.state, str(source.path / STATE))
    if base is not None and base.path and Path(base.path).exists():  # on another machine it may be missing, but not differ
        base.check(source.path)
    model, names = capture_of(source), source.config.names
    arrays, groups = adapter_arrays(source, model), adapted(model)
    experts = {id(layer) for layer in expert_layers(model)} if lora.experts else set()
    stacked = [module for module, layers in groups.items() if not experts.isdisjoint(map(id, layers.values()))]
    tensors = _factors(groups, arrays, stacked, source.config)
    parameters, theirs = model.named_parameters(), names_of(source.config, {name: tensor.shape for name, tensor in base_tensors(model).items()})
    whole = {theirs[name]: arrays[id(p)] for name, p in parameters.items() if p.trainable and not is_factor(name)}
    tensors |= {_PREFIX + name: array for name, array in whole.items()}
    values = _config(lora, groups, base.path if base is not None and base.kind == "directory" else None)
    values |= {"task_type": _TASKS.get(source.config.objective), **_targets(groups, stacked, names, theirs.values())}
    if whole:
        values["modules_to_save"] = sorted({_saved_module(name) for name in whole})
    kind = kind_of({p.dtype for p in model.parameters() if p.trainable}, dtype)

    def write(directory: Path) -> Exported:
        ranges = new_file(directory / WEIGHTS, {name: (array.shape, kind) for name, array in tensors.items()})
        for name, array in tensors.items():
            ranges[name].write(as_stored(name, array, kind))
        write_json(directory / ADAPTER_CONFIG, values)
        write_tokenizer(directory, tokenizer, source.config.n_positions, begins_after_end=begins_after_end(source))
        num_weights = sum(array.size for array in tensors.values())
        return Exported((WEIGHTS,), num_weights * kind.itemsize, num_weights)

    return write_directory(path, write)


def _factors(
    groups: Mapping[str, Mapping[str, Linear]], arrays: Mapping[int, Array], stacked: Collection[str], config: ModelConfig
) -> dict[str, Array]:
    """Return PEFT's names -> A and B of all adapters.

    Args:
        groups: result of `adapted`.
        arrays: id of a parameter -> its values.
        stacked: groups of experts, each an array of all experts and the number of one.
    """
    of_modules: dict[str, list[tuple[Array, Array]]] = {}
    for module, layers in groups.items():
        adapters = [layer.lora for layer in layers.values() if layer.lora is not None]
        up = config.names.rows_out(module, [arrays[id(each.B)] for each in adapters], config)
        pair = arrays[id(adapters[0].A)], up  # (r, K), (N, r)
        of_modules.setdefault(_wrapper(module.rpartition(".")[0]) if module in stacked else module, []).append(pair)
    tensors: dict[str, Array] = {}
    for module, pairs in of_modules.items():
        down, up = _joined(pairs)
        tensors |= {f"{_PREFIX}{module}.lora_A.weight": down, f"{_PREFIX}{module}.lora_B.weight": up}
    return tensors


def _wrapper(array: str) -> str:
    """Return the module in which PEFT wraps an array of all experts: the wrapper of the last array is around that of the first."""
    module, _, name = array.rpartition(".")
    return module if name == _LAST_ARRAY else f"{module}.base_layer"


def _joined(pairs: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return A and B of E experts as PEFT's ``ParamWrapper`` joins them, from A (r, K) and B (N, r) of each; those of one as they are.

    Rows of A (E r, K) are ordered by expert first and by rank second, columns of B (N, r E) by rank first and by expert second.
    """
    downs, ups = zip(*pairs, strict=True)
    up = np.stack(ups, axis=-1)  # (N, r, E)
    return np.concatenate(downs), up.reshape(up.shape[0], -1)


def _targets(groups: Collection[str], stacked: Collection[str], names: Names, weights: Collection[str]) -> dict[str, Any]:
    """Return the entries about targets in PEFT's configuration.

    Of a model with experts, feed-forward matrices are parameters for PEFT: it would take modules of these names for experts.

    Args:
        groups: adapted modules and, in `stacked`, arrays of all experts, each with the number of one.
        names: names in the family's files.
        weights: names of the model's weights in files.
    """
    in_experts = {member for each in names.stacked for member in each.members}
    inner = [module for module in groups if module not in stacked and module.rpartition(".")[2] in in_experts]
    parameters = [module.rpartition(".")[0] for module in stacked] + [f"{module}.weight" for module in inner]
    modules = _target_modules(set(groups) - {*stacked, *inner}, weights)
    if not parameters:
        return {"target_modules": modules}
    in_blocks = sorted({name.split(".", 3)[-1] for name in parameters})  # without model.layers.NUMBER
    return {"target_modules": modules, "target_parameters": in_blocks, "lora_dropout": 0.0}  # PEFT refuses others for parameters


def _target_modules(groups: Collection[str], names: Collection[str]) -> list[str]:
    """Return PEFT's target_modules: the last parts of the adapted modules' names, or whole names if other modules have the same last part."""
    short = sorted({module.rpartition(".")[2] for module in groups})
    others = {name.removesuffix(".weight") for name in names if name.endswith(".weight")} - set(groups)
    return sorted(groups) if any(module.rpartition(".")[2] in short for module in others) else short


def _saved_module(name: str) -> str:
    """Return the module of a weight that is trained whole: the classifier, which may have modules of its own, or a layer."""
    module = name.rpartition(".")[0]
    return _CLASSIFIER if module.split(".")[0] == _CLASSIFIER else module


def _config(lora: LoRA, groups: Mapping[str, Mapping[str, Linear]], base: str | None) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json; `base` is the path of the frozen base weights, if they are a model directory."""
    layers = [layer for members in groups.values() for layer in members.values()]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "fan_in_fan_out": all(layer.has_rows_in for layer in layers),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
