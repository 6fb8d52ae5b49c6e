"""Creation of GGUF files: a header by the gguf package, followed by tensors that are not written yet."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..io.gguf_file import ALIGNMENT, TENSOR_TYPES, TensorType
from ..io.strided_ranges import OpenFile
from .architectures import Architecture
from .tensor_ranges import Heads, LocatedTensor

_BY_NAME: Final[Mapping[str, tuple[int, TensorType]]] = {each.name: (number, each) for number, each in TENSOR_TYPES.items()}
FILE_TYPES: Final[Mapping[str, int]] = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""Type of most matrices -> value of general.file_type."""


def check_writer() -> None:
    """Check that the package that writes headers is installed.

    Raises:
        DataError: the package is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise DataError("writing GGUF files needs the gguf package", "pip install -e '.[gguf]', or write a directory")


def new_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], architecture: Architecture, heads: Heads
) -> dict[str, LocatedTensor]:
    """Create a file with its header and its final size.

    Args:
        path: path of the file, which must not exist.
        metadata: key -> whole number (written as uint32), float (as fp32), bool, text, or list of one of them; empty lists are left out.
        tensors: name -> (name of the type, shape with the last axis contiguous), in the order of the file.
        architecture, heads: architecture and numbers of heads of the model.

    Returns:
        Name -> tensor, to be written by the caller.

    Raises:
        OSError: the disk is full or failed.
    """
    _write_header(path, metadata, tensors, architecture.name)
    file = OpenFile(path, os.O_RDWR)
    offset = os.fstat(file.fd).st_size
    located = {}
    for name, (kind, shape) in tensors.items():
        tensor_type = _BY_NAME[kind][1]
        located[name] = LocatedTensor(file, name, tensor_type, shape, offset, architecture, heads)
        offset = _aligned(offset + nbytes_of(kind, shape))
    os.ftruncate(file.fd, offset)
    return located


def nbytes_of(kind: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of a type, by its name."""
    each = _BY_NAME[kind][1]
    return prod(shape) // each.block_values * each.block_bytes


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _write_header(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], name: str) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata.items():
        if key == "general.architecture":  # the writer has added it
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for tensor, (kind, shape) in tensors.items():
        number = gguf.GGMLQuantizationType(_BY_NAME[kind][0])
        writer.add_tensor_info(tensor, shape, np.dtype(np.float32), nbytes_of(kind, shape), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % ALIGNMENT))
