"""Export of adapters as a directory that ``peft.PeftModel.from_pretrained(base, directory)`` loads, written without torch or peft.

PEFT adapts the matrices of the family's files. If such a matrix joins several of our layers (q, k and v of GPT-2), the layers share A, and their B
are rows of one B, in the order of the matrix's output features. Both factors are stored as (output features, input features) of a linear layer, for
either orientation of the weight. The head of a classifier, which is trained whole, is in PEFT's modules_to_save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import LoRA, adapted, base_tensors, is_factor
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
from .merged_weights import adapter_arrays, capture_of

WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_TASKS: Final = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classify": "SEQ_CLS"}
_CLASSIFIER: Final = "classifier"
"""Module that PEFT saves whole in every model for the classification of sequences."""


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
        DataError: the checkpoint is broken.
        StorageError: the disk is full or failed; no file was replaced.
    """
    lora = adapters_of(stored_settings(source))
    if lora is None:
        raise UsageError(f"{source.path} holds a whole model and no adapters", "export the model")
    check_target(path, source, force=force)
    source.verify(MODEL)
    base = FrozenBase.of_state(source.state, str(source.path / STATE))  # not checked: only its path is exported
    model, names = capture_of(source), source.config.names
    arrays, groups = adapter_arrays(source, model), adapted(model)
    tensors = {}
    for module, layers in groups.items():
        adapters = [layer.lora for layer in layers.values() if layer.lora is not None]
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = arrays[id(adapters[0].A)]  # (r, K)
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = names.rows_out(module, [arrays[id(each.B)] for each in adapters], source.config)  # (N, r)
    parameters, theirs = model.named_parameters(), names_of(source.config, {name: tensor.shape for name, tensor in base_tensors(model).items()})
    whole = {theirs[name]: arrays[id(p)] for name, p in parameters.items() if p.trainable and not is_factor(name)}
    tensors |= {_PREFIX + name: array for name, array in whole.items()}
    values = _config(lora, groups, base.path if base is not None and base.kind == "directory" else None)
    values |= {"task_type": _TASKS.get(source.config.objective), "target_modules": _targets(groups, theirs.values())}
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


def _targets(groups: Collection[str], names: Collection[str]) -> list[str]:
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
