"""Export as model directories with quantised weights, in safetensors of our own layout (`nntask.io.block_ranges`), which transformers cannot read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from tiles import BLOCK_FORMATS

from ..hf.model_directory import CONFIG, SINGLE
from ..io.block_ranges import QUANTISED
from ..io.strided_ranges import FileRange, strides_of
from ..io.translated_files import DecodedBlocks
from .conversion import Conversion, Converted, Convertible, copy_weights, is_turned, kinds_of, staying
from .huggingface import METADATA, check_apart, check_replaceable, new_file, write_directory, write_json, write_tokenizer

_TYPES: Final = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_FP32: Final = np.dtype(np.float32)


def write_quantised(source: Convertible, path: Path, asked: Conversion, *, force: bool = False) -> Converted:
    """Write a model as a directory with quantised weights.

    Raises:
        UsageError: the directory may not be written.
        DataError: the model is broken.
        StorageError: the disk is full or failed; an existing directory is kept.
    """
    check_apart(path, source.path)
    check_replaceable(path, force=force)
    kinds, stayed = kinds_of(source, asked)

    def write(directory: Path) -> Converted:
        targets, stored = _new_file(directory / SINGLE, source, kinds)
        copy_weights(source, targets, {name: stored[name] for name in staying(source, kinds)}, kinds, asked)
        write_json(directory / CONFIG, {**source.config.to_dict(), **source.special.to_dict()})
        write_tokenizer(directory, source.tokenizer, source.config.n_positions, begins_after_end=source.begins_after_end)
        nbytes = sum(prod(each.shape) * each.dtype.itemsize for each in stored.values())
        return Converted(source.nbytes, nbytes, sum(prod(shape) for shape in source.shapes().values()), stayed)

    return write_directory(path, write)


def _new_file(path: Path, source: Convertible, kinds: Mapping[str, str]) -> tuple[dict[str, FileRange], dict[str, FileRange]]:
    """Create a file with its final size; return ranges of values with the shapes of the family's files, and ranges of tensors as they are stored."""
    dtypes, shapes, stored = source.dtypes(), source.shapes(), dict[str, tuple[tuple[int, ...], np.dtype[Any]]]()
    formats = {name: kind for name, kind in kinds.items() if kind in BLOCK_FORMATS and kind not in _TYPES}
    for name, shape in shapes.items():
        if name in formats:
            rows, columns = shape[::-1] if is_turned(source.config, name) else shape
            stored[name] = (rows, BLOCK_FORMATS[kinds[name]].row_bytes(columns)), np.dtype(np.uint8)
        else:
            stored[name] = shape, _TYPES.get(kinds[name], dtypes[name])
    ranges = new_file(path, stored, {**METADATA, QUANTISED: json.dumps(formats)} if formats else METADATA)
    return {name: _decoded(each, source, name, shapes[name], formats.get(name, "")) for name, each in ranges.items()}, ranges


def _decoded(stored: FileRange, source: Convertible, name: str, shape: tuple[int, ...], kind: str) -> FileRange:
    """Return the range of a tensor's values with the shape of the family's files; `kind` is a format of blocks or "" for floats."""
    if not kind:
        return stored
    blocks = DecodedBlocks.of(stored.file, stored.offset, BLOCK_FORMATS[kind])
    strides = strides_of(shape[::-1], _FP32)[::-1] if is_turned(source.config, name) else strides_of(shape, _FP32)
    return FileRange(blocks, _FP32, 0, shape, strides)
