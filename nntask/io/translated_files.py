"""Translating views of files: rows reordered, quantised blocks decoded to fp32, values shifted. Each is a `ByteFile` over another one.

The views are read and written at offsets like any file, and a call may transfer fewer bytes than requested. Ranges, windows and tiles therefore need
to know nothing of the translation. Values are translated only when they are read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiles import ENCODED_FORMATS, BlockFormat, block_format

from .strided_ranges import ByteFile, read_all, write_all

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_VALUES_AT_ONCE: Final = 1 << 14
"""Number of values that are decoded or encoded at a time."""
_ITEM: Final = 4


@dataclass(frozen=True, slots=True)
class _FileView:
    """Base of the views.

    Args:
        file: file that contains the values.
        offset: offset of the first value in the file.
    """

    file: ByteFile
    offset: int

    @property
    def path(self) -> Path:
        """Path of the file on disk, for error messages."""
        return self.file.path

    def check(self) -> None:
        """Check that the file is unchanged since it was opened."""
        self.file.check()


@dataclass(frozen=True, slots=True)
class PairedRows(_FileView):
    """View of a matrix whose file has the rows of each head in ggml's order for rotary positions: 0, D/2, 1, D/2 + 1, ...

    The view has them in the order of transformers: 0, 1, 2, ... Offsets count from the beginning of the matrix.

    Args:
        row_nbytes: size of a row in bytes.
        head_rows: number of rows of a head, D; even.
    """

    row_nbytes: int
    head_rows: int

    def read_at(self, out: memoryview, offset: int) -> int:
        """Read bytes of one row, at most up to its end."""
        where, count = self._where(offset)
        return self.file.read_at(out[:count], where)

    def write_at(self, values: memoryview, offset: int) -> int:
        """Write bytes of one row, at most up to its end."""
        where, count = self._where(offset)
        return self.file.write_at(values[:count], where)

    def _where(self, offset: int) -> tuple[int, int]:
        """Return (offset in the file, number of bytes up to the end of the row)."""
        row, begin = divmod(offset, self.row_nbytes)
        head, inner = divmod(row, self.head_rows)
        half, number = divmod(inner, self.head_rows // 2)
        stored = head * self.head_rows + 2 * number + half
        return self.offset + stored * self.row_nbytes + begin, self.row_nbytes - begin


@dataclass(frozen=True, slots=True)
class DecodedBlocks(_FileView):
    """View of quantised blocks as fp32 values, in the order of the blocks. Offsets count from the first value, in bytes of fp32.

    Args:
        block_values: number of values in a block.
        block_nbytes: size of a block in bytes.
        decode: function from blocks (N, block_nbytes) to values (N, block_values).
        encode: inverse of `decode`; None for a view that is only read.
    """

    block_values: int
    block_nbytes: int
    decode: Callable[[Bytes], Floats]
    encode: Callable[[Floats], Bytes] | None = None

    @classmethod
    def of(cls, file: ByteFile, offset: int, known: BlockFormat) -> DecodedBlocks:
        """Return the view of blocks of a known format."""
        encode = (lambda values: block_format.encode(values, known)) if known.name in ENCODED_FORMATS else None
        return cls(file, offset, known.block_values, known.block_bytes, lambda raw: block_format.decode(raw, known), encode)

    def read_at(self, out: memoryview, offset: int) -> int:
        """Decode the blocks that contain the requested bytes."""
        size = self.block_values * _ITEM
        first, begin = divmod(offset, size)
        count = min(-(-(begin + len(out)) // size), max(1, _VALUES_AT_ONCE // self.block_values))
        raw = np.empty((count, self.block_nbytes), np.uint8)
        read_all(self.file, raw.reshape(-1).data, self.offset + first * self.block_nbytes)
        values = np.ascontiguousarray(self.decode(raw), "<f4").reshape(-1).view(np.uint8)[begin : begin + len(out)]
        out[: len(values)] = values.data
        return len(values)

    def write_at(self, values: memoryview, offset: int) -> int:
        """Encode whole blocks."""
        size = self.block_values * _ITEM
        assert self.encode is not None, "a file of blocks is written with their encoder"
        assert offset % size == 0 and len(values) % size == 0, "blocks are written whole"  # noqa: PT018
        count = min(len(values) // size, max(1, _VALUES_AT_ONCE // self.block_values))
        raw = self.encode(np.frombuffer(values[: count * size], "<f4").reshape(count, self.block_values))
        write_all(self.file, np.ascontiguousarray(raw).reshape(-1).data, self.offset + offset // size * self.block_nbytes)
        return count * size


@dataclass(frozen=True, slots=True)
class ShiftedValues(_FileView):
    """View of fp32 values that the file stores with a constant added. Offsets count from the first value and are multiples of 4 bytes.

    Args:
        shift: constant that is subtracted on reading and added on writing.
    """

    shift: float

    def read_at(self, out: memoryview, offset: int) -> int:
        """Read whole values, less `shift`."""
        read_all(self.file, out, self.offset + offset)
        values: npt.NDArray[Any] = np.frombuffer(out, "<f4")
        values -= np.float32(self.shift)
        return len(out)

    def write_at(self, values: memoryview, offset: int) -> int:
        """Write whole values, plus `shift`."""
        write_all(self.file, (np.frombuffer(values, "<f4") + np.float32(self.shift)).view(np.uint8).data, self.offset + offset)
        return len(values)
