"""Small model directories of every family, of random weights whose rows are whole blocks, and the same quantised."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from support.transformers_oracle import CONFIGS

from nntask.hf.model_directory import SINGLE, read_config
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from tiles.block_format import BLOCK_FORMATS, decode, encode

WIDTHS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    "num_key_value_heads": 2,
}


def wide(name: str) -> Any:
    """A family's config with rows of whole blocks."""
    config = CONFIGS[name]
    keys = {field.name: getattr(config, field.name) for field in fields(config)}
    scaling = keys.get("rope_scaling")
    if scaling is not None and scaling.short_factor:  # twice as many features of a head turn
        keys["rope_scaling"] = replace(scaling, short_factor=2 * scaling.short_factor, long_factor=2 * scaling.long_factor)
        config = replace(config, rope_scaling=None)
    wider = {key: value for key, value in WIDTHS.items() if keys.get(key) is not None}
    return replace(config, **wider, **({"rope_scaling": keys["rope_scaling"]} if scaling is not None else {}))


def write_plain(path: Path, config: Any) -> Path:
    """A directory of random weights."""
    path.mkdir()
    model = build(config, ModelTiling(), InlineRuntime(), seed=3)
    tensors = config.names.to_hf({name: tensor.read() for name, tensor in model.tensors().items()}, config)
    rng = np.random.default_rng(0)
    if config.ties_head:
        tensors.pop(config.names.head, None)
    noisy = {name: (value + 0.1 * rng.standard_normal(value.shape)).astype(np.float32) for name, value in tensors.items()}
    for alias, theirs in config.names.aliases.items():
        if alias in noisy and alias not in config.names.spare:
            noisy[alias] = noisy[theirs].copy()
    save_file(noisy, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return path


def write_quantised(source: Path, target: Path, kind: str, *, tables: bool = False) -> dict[str, np.ndarray]:
    """A directory whose matrices of layers, and with `tables` embedding and head, are quantised, and others in fp32; returns the numbers that it
    stands for, in the layout of the source."""
    config, tensors = read_config(source), load_file(source / SINGLE)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    stored, formats, numbers = {}, {}, {}
    for name, values in tensors.items():
        today = config.names.today(name)
        is_table = today in (config.names.embedding, config.names.head, *config.names.aliases)
        of_positions = today.endswith(("wpe.weight", "position_embeddings.weight", "embed_positions.weight"))
        if values.ndim != 2 or of_positions or "relative_attention_bias" in name or "token_type" in name or (is_table and not tables):
            stored[name] = numbers[name] = values.astype(np.float32)
            continue
        turned = config.description.has_rows_in and not is_table
        stored[name] = encode(values.T if turned else values, BLOCK_FORMATS[kind])
        found = decode(stored[name], BLOCK_FORMATS[kind])
        numbers[name], formats[name] = np.ascontiguousarray(found.T if turned else found), kind
    save_file(stored, target / SINGLE, metadata={"format": "pt", "quantised": json.dumps(formats)})
    return numbers


def write_decoded(source: Path, target: Path, numbers: dict[str, np.ndarray]) -> None:
    """A plain directory of these numbers, with everything else of `source`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(numbers, target / SINGLE, metadata={"format": "pt"})
