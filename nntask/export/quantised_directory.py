"""Model directories with quantised weights, in safetensors of our own layout (`nntask.io.block_ranges`): transformers does not read them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from tiles import BLOCK_FORMATS, block_format

from ..hf.model_directory import CONFIG, SINGLE
from ..io.block_ranges import QUANTISED
from ..io.safetensors_file import header_of
from ..io.strided_ranges import FileRange, OpenFile, strides_of
from ..io.translated_files import DecodedBlocks
from .conversion import Conversion, Converted, Convertible, check_apart, copy_weights, is_turned, kinds_of
from .huggingface import Exported, check_replaceable, write_directory, write_json, write_tokenizer

_TYPES: Final = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_FP32: Final = np.dtype(np.float32)


def write_quantised(source: Convertible, path: Path, asked: Conversion, *, force: bool = False) -> Converted:
    """Write a model as a directory.

    Raises:
        UsageError: the directory may not be written.
        DataError: the model is broken.
        StorageError: the disk is full or failed; a directory that existed is kept.
    """
    check_apart(path, source.path)
    check_replaceable(path, force=force)
    kinds, stayed = kinds_of(source, asked)
    nbytes = 0

    def write(directory: Path) -> Exported:
        nonlocal nbytes
        targets, nbytes = _new_file(directory / SINGLE, source, kinds)
        copy_weights(source, targets, kinds, asked)
        write_json(directory / CONFIG, {**source.config.to_dict(), **source.special.to_dict()})
        write_tokenizer(directory, source.tokenizer, source.config.n_positions)
        return Exported((SINGLE,), nbytes, sum(prod(shape) for shape in source.shapes().values()))

    done = write_directory(path, write)
    return Converted(source.nbytes, nbytes, done.num_weights, stayed)


def _new_file(path: Path, source: Convertible, kinds: Mapping[str, str]) -> tuple[dict[str, FileRange], int]:
    """Create a file with its final size; returns the ranges of values with the shapes of the family's files, and the bytes of all tensors."""
    dtypes, stored = source.dtypes(), dict[str, tuple[tuple[int, ...], np.dtype[Any]]]()
    for name, shape in source.shapes().items():
        if kinds[name] in BLOCK_FORMATS:
            rows, columns = shape[::-1] if is_turned(source.config, name) else shape
            stored[name] = (rows, BLOCK_FORMATS[kinds[name]].row_bytes(columns)), np.dtype(np.uint8)
        else:
            stored[name] = shape, _TYPES.get(kinds[name], dtypes[name])
    formats = {name: kind for name, kind in kinds.items() if kind in BLOCK_FORMATS}
    header, spans = header_of(stored, {"format": "pt", **({QUANTISED: json.dumps(formats)} if formats else {})})
    file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.pwrite(file.fd, header, 0)
    end = max(last for _, last in spans.values())
    os.ftruncate(file.fd, len(header) + end)
    shapes = source.shapes()
    return {name: _range(file, len(header) + spans[name][0], source, name, shapes[name], kinds[name], stored[name][1]) for name in stored}, end


def _range(file: OpenFile, offset: int, source: Convertible, name: str, shape: tuple[int, ...], kind: str, dtype: np.dtype[Any]) -> FileRange:
    """The range of a tensor's values with the shape of the family's files."""
    if kind not in BLOCK_FORMATS:
        return FileRange(file, dtype, offset, shape, strides_of(shape, dtype))
    known = BLOCK_FORMATS[kind]
    blocks = DecodedBlocks(
        file,
        offset,
        known.block_values,
        known.block_bytes,
        lambda raw: block_format.decode(raw, known),
        lambda some: block_format.encode(some, known),
    )
    if is_turned(source.config, name):
        return FileRange(blocks, _FP32, 0, shape, strides_of(shape[::-1], _FP32)[::-1])
    return FileRange(blocks, _FP32, 0, shape, strides_of(shape, _FP32))
