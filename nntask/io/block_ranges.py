"""Quantised weights in files: matrices stored as blocks (`tiles.block_format`), and the metadata that declares them in a safetensors file.

The safetensors format has no block types. A quantised matrix is therefore a U8 tensor of shape (rows, bytes per row), and the header's metadata has,
under the key "quantised", a JSON object that maps the tensor's name to its block format. Rows are output features, even in model families whose
files store other matrices as (in, out).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tiles import BLOCK_FORMATS, BlockFormat, block_format

from ..errors import DataError
from .strided_ranges import PASS_NBYTES, ByteFile, FileRange, RowGroups, Rows

Array = npt.NDArray[Any]
STORED_FLOATS: Final[Mapping[str, np.dtype[Any]]] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
"""Block format that stores plain floating-point numbers -> their element type."""
QUANTISED: Final = "quantised"
"""Key of the block formats in the metadata of a safetensors header."""
_FP32: Final = np.dtype(np.float32)
_AT_ONCE: Final = 1 << 14
"""Number of values that are decoded at a time."""


def formats_in(metadata: Mapping[str, str], ranges: Mapping[str, FileRange], path: Any) -> dict[str, BlockFormat]:
    """Return name -> block format for the quantised matrices of a safetensors file, from its metadata and the ranges of its tensors.

    Raises:
        DataError: the metadata is malformed, names an unknown format, or does not match the tensors.
    """
    text = metadata.get(QUANTISED)
    if text is None:
        return {}
    try:
        named = json.loads(text)
        pairs = {str(name): str(kind) for name, kind in named.items()}
    except (ValueError, AttributeError, RecursionError):
        raise DataError(f"{path} has a list of quantised tensors that cannot be parsed: {text[:80]!r}", 'write it as {"name": "q8_0"}') from None
    for name, kind in pairs.items():
        if kind not in BLOCK_FORMATS:
            raise DataError(f"{name} in {path} must be quantised as one of {', '.join(BLOCK_FORMATS)}, got {kind[:40]}", "quantise it again")
        stored = ranges.get(name)
        block_bytes = BLOCK_FORMATS[kind].block_bytes
        if stored is None or stored.dtype != np.uint8 or len(stored.shape) != 2 or 0 in stored.shape or stored.shape[1] % block_bytes:
            what = "is not there" if stored is None else f"is {stored.dtype.name} of shape {stored.shape}"
            raise DataError(f"{name} in {path} must be U8 (rows, whole blocks of {block_bytes} bytes) as {kind}, but {what}", "copy the file again")
    return {name: BLOCK_FORMATS[kind] for name, kind in pairs.items()}


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A quantised matrix in a file, or a window of one, seen as decoded numbers.

    Args:
        blocks: uint8 range (rows, bytes per row) of whole blocks in the file.
        block_format: format of the blocks.
        first, stop: range of decoded columns that the window covers, relative to `blocks`.
        is_turned: whether the matrix is the transpose of the stored one.
    """

    blocks: Rows
    block_format: BlockFormat
    first: int
    stop: int
    is_turned: bool = False

    @classmethod
    def of(cls, blocks: Rows, block_format: BlockFormat, *, is_turned: bool = False) -> BlockRange:
        """Return the range of a whole stored matrix."""
        return cls(blocks, block_format, 0, block_format.columns(blocks.shape[1]), is_turned)

    @property
    def file(self) -> ByteFile:
        """The open file."""
        return self.blocks.file

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the numbers."""
        return STORED_FLOATS.get(self.block_format.name, _FP32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the numbers."""
        stored = self.blocks.shape[0], self.stop - self.first
        return stored[::-1] if self.is_turned else stored

    def __getitem__(self, slices: Sequence[slice]) -> BlockRange:
        """The window of one slice (start:stop) per axis."""
        bounds = [each.indices(extent)[:2] for each, extent in zip(slices, self.shape, strict=True)]
        (top, bottom), (left, right) = bounds[::-1] if self.is_turned else bounds
        size = self.block_format.block_values
        skipped, end = (self.first + left) // size, -(-(self.first + right) // size)
        nbytes = self.block_format.block_bytes
        blocks = self.blocks[(slice(top, bottom), slice(skipped * nbytes, end * nbytes))]
        shift = skipped * size
        return replace(self, blocks=blocks, first=self.first + left - shift, stop=self.first + right - shift)

    def scratch_nbytes(self, dtype: np.dtype[Any]) -> int:
        """Scratch memory of `read`, in bytes: a batch of rows in stored form."""
        return self._rows_at_once * self.blocks.shape[1]

    @property
    def _rows_at_once(self) -> int:
        rows, row_bytes = self.blocks.shape
        return max(1, min(rows, PASS_NBYTES // row_bytes))

    def read(self, out: Array, scratch: Array | None = None) -> None:
        """Fill `out` with the decoded numbers, converted to its element type.

        Args:
            out: array of this range's shape.
            scratch: uint8 array of at least `scratch_nbytes` elements; None to allocate one.

        Raises:
            StorageError: the file cannot be read, or has changed.
        """
        rows, row_bytes = self.blocks.shape
        target, step = out.T if self.is_turned else out, max(1, _AT_ONCE // self.block_format.columns(row_bytes))
        for first in range(0, rows, self._rows_at_once):
            stop = min(first + self._rows_at_once, rows)
            stored = np.ndarray((stop - first, row_bytes), np.uint8, buffer=scratch)
            self.blocks[(slice(first, stop), slice(0, row_bytes))].read(stored)
            for row in range(0, stop - first, step):
                some = block_format.decode(stored[row : row + step], self.block_format)
                target[first + row : first + row + len(some)] = some[:, self.first : self.stop]


def turned(rows: Rows) -> Rows:
    """Return the transpose of a range.

    Raises:
        DataError: the range consists of groups of rows, which have no single stride.
    """
    if isinstance(rows, RowGroups):
        raise DataError(
            f"{rows.file.path} stores (in, out) matrices with rows grouped by head, which no known family does", "convert the model again"
        )
    return FileRange(rows.file, rows.dtype, rows.offset, rows.shape[::-1], rows.strides[::-1])
