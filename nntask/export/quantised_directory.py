"""Export as model directories with quantised weights, in safetensors of our own layout (`nntask.io.block_ranges`), which transformers cannot read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from tiles import BLOCK_FORMATS, ENCODED_FORMATS, block_format

from ..hf.model_directory import CONFIG, SINGLE
from ..io.block_ranges import QUANTISED
from ..io.safetensors_file import header_of
from ..io.strided_ranges import FileRange, OpenFile, strides_of
from ..io.translated_files import DecodedBlocks
from .conversion import Conversion, Converted, Convertible, check_apart, copy_weights, is_turned, kinds_of, staying
from .huggingface import Exported, check_replaceable, write_directory, write_json, write_tokenizer

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
    nbytes = 0

    def write(directory: Path) -> Exported:
        nonlocal nbytes
        targets, blocks, nbytes = _new_file(directory / SINGLE, source, kinds)
        copy_weights(source, targets, {name: blocks[name] for name in staying(source, kinds)}, kinds, asked)
        write_json(directory / CONFIG, {**source.config.to_dict(), **source.special.to_dict()})
        write_tokenizer(directory, source.tokenizer, source.config.n_positions)
        return Exported((SINGLE,), nbytes, sum(prod(shape) for shape in source.shapes().values()))

    done = write_directory(path, write)
    return Converted(source.nbytes, nbytes, done.num_weights, stayed)


def _new_file(path: Path, source: Convertible, kinds: Mapping[str, str]) -> tuple[dict[str, FileRange], dict[str, FileRange], int]:
    """Create a file with its final size.

    Returns:
        Ranges of values with the shapes of the family's files, ranges of tensors as they are stored, and the total number of bytes.
    """
    dtypes, stored = source.dtypes(), dict[str, tuple[tuple[int, ...], np.dtype[Any]]]()
    formats = {name: kind for name, kind in kinds.items() if kind in BLOCK_FORMATS and kind not in _TYPES}
    for name, shape in source.shapes().items():
        if name in formats:
            rows, columns = shape[::-1] if is_turned(source.config, name) else shape
            stored[name] = (rows, BLOCK_FORMATS[kinds[name]].row_bytes(columns)), np.dtype(np.uint8)
        else:
            stored[name] = shape, _TYPES.get(kinds[name], dtypes[name])
    header, spans = header_of(stored, {"format": "pt", **({QUANTISED: json.dumps(formats)} if formats else {})})
    file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.pwrite(file.fd, header, 0)
    end = max(last for _, last in spans.values())
    os.ftruncate(file.fd, len(header) + end)
    begin = {name: len(header) + first for name, (first, _) in spans.items()}
    shapes = source.shapes()
    values = {name: _range(file, begin[name], source, name, shapes[name], formats.get(name, ""), dtype) for name, (_, dtype) in stored.items()}
    return values, {name: FileRange(file, dtype, begin[name], shape, strides_of(shape, dtype)) for name, (shape, dtype) in stored.items()}, end


def _range(file: OpenFile, offset: int, source: Convertible, name: str, shape: tuple[int, ...], kind: str, dtype: np.dtype[Any]) -> FileRange:
    """Return the range of a tensor's values with the shape of the family's files; `kind` is a format of blocks or "" for floats."""
    if not kind:
        return FileRange(file, dtype, offset, shape, strides_of(shape, dtype))
    known = BLOCK_FORMATS[kind]
    blocks = DecodedBlocks(
        file,
        offset,
        known.block_values,
        known.block_bytes,
        lambda raw: block_format.decode(raw, known),
        (lambda some: block_format.encode(some, known)) if kind in ENCODED_FORMATS else None,
    )
    if is_turned(source.config, name):
        return FileRange(blocks, _FP32, 0, shape, strides_of(shape[::-1], _FP32)[::-1])
    return FileRange(blocks, _FP32, 0, shape, strides_of(shape, _FP32))
