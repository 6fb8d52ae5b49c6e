"""Model directories with quantised weights, made from plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from nntask.hf.model_directory import SINGLE, read_config
from tiles.block_format import BLOCK_FORMATS, decode, encode


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
