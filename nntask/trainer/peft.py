"""Adapters as PEFT writes them: a directory that ``peft.PeftModel.from_pretrained(base, directory)`` loads, written without torch or peft.

PEFT adapts the matrices of the family's files, so what we have of one matrix in several layers is joined: A is theirs in common, and their B stand
one below the other, in the order of the matrix's columns. Both are (out, in) of a linear layer, whatever way the matrix lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..checkpoints import MODEL, STATE, Checkpoint
from ..data import Tokenizer
from ..errors import UsageError
from ..layers import Adaptable
from ..lora import LoRA, adapted
from .base import Base
from .export import ADAPTER_CONFIG, Exported, as_stored, check_target, kind_of, new_file, write_directory, write_json, write_tokenizer
from .merge import adapter_arrays, sketch_of
from .recorded import adapters_of
from .settings import from_dict

WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."


def export_adapters(source: Checkpoint, path: Path, *, dtype: str, tokenizer: Tokenizer | None, force: bool = False) -> Exported:
    """Write a checkpoint's adapters as a directory of PEFT.

    Args:
        dtype: fp32, fp16, bf16, or auto for the one they are stored in (fp32 for fp64).
        tokenizer: written too, unless None.

    Raises:
        UsageError: the checkpoint holds a whole model, the directory may not be written (`check_target`), or a weight is too large for `dtype`.
        DataError: the checkpoint is broken.
        StorageError: the disk is full or failed; nothing was replaced.
    """
    lora = adapters_of(from_dict(source.state["settings"], str(source.path / STATE)))
    if lora is None:
        raise UsageError(f"{source.path} holds a whole model and no adapters; export the model")
    check_target(path, source, force=force)
    source.verify(MODEL)
    base = Base.of_state(source.state, str(source.path / STATE))  # its files need not be there
    model = sketch_of(source)
    arrays, groups = adapter_arrays(source, model), adapted(model)
    found = {}
    for module, layers in groups.items():
        adapters = [layer.lora for layer in layers.values() if layer.lora is not None]
        found[f"{_PREFIX}{module}.lora_A.weight"] = arrays[id(adapters[0].A)]  # (r, K)
        found[f"{_PREFIX}{module}.lora_B.weight"] = np.concatenate([arrays[id(each.B)] for each in adapters])  # (N, r)
    values = _config(lora, groups, base.path if base is not None and base.kind == "directory" else None)
    kind = kind_of({p.dtype for p in model.parameters() if p.trainable}, dtype)

    def write(directory: Path) -> Exported:
        places = new_file(directory / WEIGHTS, {name: array.shape for name, array in found.items()}, kind)
        for name, array in found.items():
            places[name].write(as_stored(name, array, kind))
        write_json(directory / ADAPTER_CONFIG, values)
        write_tokenizer(directory, tokenizer, source.config.n_positions)
        num_weights = sum(array.size for array in found.values())
        return Exported((WEIGHTS,), num_weights * kind.itemsize, num_weights)

    return write_directory(path, write)


def _config(lora: LoRA, groups: Mapping[str, Mapping[str, Adaptable]], base: str | None) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    layers = [layer for members in groups.values() for layer in members.values()]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({module.rpartition(".")[2] for module in groups}),
        "fan_in_fan_out": all(layer.has_rows_in for layer in layers),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
