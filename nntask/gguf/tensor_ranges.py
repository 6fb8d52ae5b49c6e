"""Tensors of a GGUF file as ranges with the names and layouts of transformers' files, for reading and writing.

Ranges of floats belong to the file itself. Quantised weights appear as fp32 (`DecodedBlocks`). Matrices that products read in blocks, including
16-bit floats, also appear as bytes (out, bytes).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tiles import BLOCK_FORMATS, BlockFormat

from ..errors import DataError
from ..io.gguf_file import TensorType
from ..io.strided_ranges import ByteFile, FileRange, strides_of
from ..io.translated_files import DecodedBlocks, PairedRows, ShiftedValues
from .architectures import POSITIONS, Architecture

FLOATS: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
_BYTEWISE: Final = np.dtype(np.uint8)
_ITEM: Final = np.dtype(np.float32)
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of queries, H, and of keys and values, G."""

    queries: int
    keys: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Heads:
        """Return the numbers of heads of a config in transformers' JSON."""
        queries = values.get("num_attention_heads", values.get("n_head"))
        return cls(queries, values.get("num_key_value_heads") or queries) if type(queries) is int else cls(1, 1)


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor in a GGUF file.

    Args:
        file: file of the tensor.
        name: name of the tensor in the file.
        type: type of its values.
        shape: shape in the file, the last axis contiguous.
        offset: offset of its first byte.
        architecture: architecture of the file.
        heads: numbers of heads of the model.
    """

    file: ByteFile
    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    architecture: Architecture
    heads: Heads

    @property
    def format(self) -> BlockFormat | None:
        """Format of a matrix that products read in blocks; None for other tensors."""
        found = BLOCK_FORMATS.get(self.type.name.lower()) if len(self.shape) == 2 and self.name != POSITIONS else None
        return found if found is not None and self.shape[-1] % found.block_values == 0 else None

    def expert(self, number: int) -> LocatedTensor:
        """Return the matrix of one expert of a tensor (experts, out, in)."""
        nbytes = prod(self.shape[1:]) // self.type.block_values * self.type.block_bytes
        return replace(self, shape=self.shape[1:], offset=self.offset + number * nbytes)

    def blocks(self) -> FileRange:
        """Return the bytes of a matrix in blocks, (out, bytes of a row)."""
        file, offset = self._paired()
        shape = (self.shape[0], self._row_nbytes)
        return FileRange(file, _BYTEWISE, offset, shape, strides_of(shape, _BYTEWISE))

    def values(self) -> FileRange:
        """Return the values with the shape of transformers' files, to read or to write.

        Raises:
            DataError: the type is not read here.
        """
        file, offset = self._paired()
        dtype = FLOATS.get(self.type.name)
        if dtype is None:
            file, offset, dtype = self._decoded(file, offset), 0, _ITEM
        if shift := self.architecture.shift(self.name):
            if dtype != _ITEM:
                raise DataError(f"{self.name} in {self.file.path} has the type {self.type.name}, and norms are F32", "convert the model again")
            file, offset = ShiftedValues(file, offset, shift), 0
        shape = (1, *self.shape) if self.architecture.is_row(self.name) and len(self.shape) == 1 else self.shape
        strides = strides_of(shape, dtype)
        if self.architecture.is_transposed(self.name) and len(shape) == 2:
            return FileRange(file, dtype, offset, shape[::-1], strides[::-1])
        return FileRange(file, dtype, offset, shape, strides)

    @property
    def _row_nbytes(self) -> int:
        return self.shape[-1] // self.type.block_values * self.type.block_bytes if len(self.shape) > 1 else self.type.block_bytes

    def _paired(self) -> tuple[ByteFile, int]:
        """Return a file with the rows in transformers' order, and the offset of the first row in it."""
        heads = self.heads.queries if ".attn_q." in self.name else self.heads.keys
        rows = self.shape[0] // heads if heads else 0
        if not self.architecture.is_paired(self.name) or rows * heads != self.shape[0] or rows % 2 or len(self.shape) > 2:
            return self.file, self.offset
        return PairedRows(self.file, self.offset, self._row_nbytes, rows), 0

    def _decoded(self, file: ByteFile, offset: int) -> DecodedBlocks:
        known = BLOCK_FORMATS.get(self.type.name.lower())
        if known is not None:
            return DecodedBlocks.of(file, offset, known)
        return DecodedBlocks(file, offset, self.type.block_values, self.type.block_bytes, self._foreign())

    def _foreign(self) -> Callable[[Array], Array]:
        """Return the decoder of a type that the gguf package knows; raise DataError if the package does not know it, or is not installed."""
        ours = ", ".join(dict.fromkeys((*list(FLOATS)[:3], *(name.upper() for name in BLOCK_FORMATS))))
        if importlib.util.find_spec("gguf") is None:
            raise DataError(
                f"{self.name} in {self.file.path} has the type {self.type.name}, which the gguf package decodes",
                f"pip install -e '.[gguf]', or use a file of {ours}",
            )
        import gguf

        number = gguf.GGMLQuantizationType[self.type.name]
        try:
            gguf.quants.dequantize(np.zeros((1, self.type.block_bytes), np.uint8), number)
        except NotImplementedError:
            raise DataError(
                f"{self.name} in {self.file.path} has the type {self.type.name}, which is not read here", f"use a file of {ours}"
            ) from None

        def decoded(raw: Array) -> Array:
            with np.errstate(all="ignore"):
                values: Array = gguf.quants.dequantize(raw, number)
            return values

        return decoded
