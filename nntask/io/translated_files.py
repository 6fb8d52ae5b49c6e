"""Files seen in another order or form: rows moved, blocks of quantised weights as fp32, values shifted. Each is a `ByteFile` over another one.

They are read and written at offsets like any file, as little or as much at once as they like, so that ranges, windows and tiles of them need to know
nothing of the translation. No value is translated before it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import StorageError
from .strided_ranges import ByteFile

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_VALUES_AT_ONCE: Final = 1 << 14
"""Values that are decoded or encoded at once."""
_ITEM: Final = 4


def read_all(file: ByteFile, out: memoryview, offset: int) -> None:
    """Fill all of `out`.

    Raises:
        StorageError: the file cannot be read, or ends before.
    """
    done = 0
    while done < len(out):
        count = file.read_at(out[done:], offset + done)
        if count == 0:
            raise StorageError(f"{file.path} has become shorter since it was opened; copy it again and start anew")
        done += count


def write_all(file: ByteFile, values: memoryview, offset: int) -> None:
    """Write all of `values`.

    Raises:
        OSError: the disk is full or failed.
    """
    done = 0
    while done < len(values):
        done += file.write_at(values[done:], offset + done)


@dataclass(frozen=True, slots=True)
class PairedRows:
    """A matrix whose rows lie in another order: those of each head in pairs (0, D/2), (1, D/2 + 1), ..., as rotary positions turn them in ggml.

    Here row 0 is followed by row 1, as transformers has them. Offsets count from the beginning of the matrix.

    Args:
        file: the file.
        offset: of the matrix in it.
        row_nbytes: bytes of a row.
        head_rows: D, rows of a head; even.
    """

    file: ByteFile
    offset: int
    row_nbytes: int
    head_rows: int

    @property
    def path(self) -> Path:
        """Of the file on disk."""
        return self.file.path

    def read_at(self, out: memoryview, offset: int) -> int:
        """Fill bytes of one row."""
        where, count = self._where(offset)
        return self.file.read_at(out[:count], where)

    def write_at(self, values: memoryview, offset: int) -> int:
        """Overwrite bytes of one row."""
        where, count = self._where(offset)
        return self.file.write_at(values[:count], where)

    def check(self) -> None:
        """As of `ByteFile`."""
        self.file.check()

    def _where(self, offset: int) -> tuple[int, int]:
        """(offset in the file, bytes that follow in the same row)."""
        row, begin = divmod(offset, self.row_nbytes)
        head, inner = divmod(row, self.head_rows)
        half, number = divmod(inner, self.head_rows // 2)
        stored = head * self.head_rows + 2 * number + half
        return self.offset + stored * self.row_nbytes + begin, self.row_nbytes - begin


@dataclass(frozen=True, slots=True)
class DecodedBlocks:
    """Quantised values as fp32, in the order of their blocks. Offsets count from the first value, in bytes of fp32.

    Args:
        file: the file.
        offset: of the first block in it.
        block_values, block_nbytes: values of a block, and its bytes.
        decode: blocks (N, block_nbytes) -> values (N, block_values).
        encode: the other way; None where nothing is written.
    """

    file: ByteFile
    offset: int
    block_values: int
    block_nbytes: int
    decode: Callable[[Bytes], Floats]
    encode: Callable[[Floats], Bytes] | None = None

    @property
    def path(self) -> Path:
        """Of the file on disk."""
        return self.file.path

    def read_at(self, out: memoryview, offset: int) -> int:
        """Decode the blocks that some of the bytes lie in."""
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

    def check(self) -> None:
        """As of `ByteFile`."""
        self.file.check()


@dataclass(frozen=True, slots=True)
class ShiftedValues:
    """Values of fp32 less a number that is added to them in the file. Offsets count from the first value and are those of whole values.

    Args:
        file: the file.
        offset: of the first value in it.
        shift: what the file has more.
    """

    file: ByteFile
    offset: int
    shift: float

    @property
    def path(self) -> Path:
        """Of the file on disk."""
        return self.file.path

    def read_at(self, out: memoryview, offset: int) -> int:
        """Fill bytes of whole values."""
        read_all(self.file, out, self.offset + offset)
        values: npt.NDArray[Any] = np.frombuffer(out, "<f4")
        values -= np.float32(self.shift)
        return len(out)

    def write_at(self, values: memoryview, offset: int) -> int:
        """Overwrite bytes of whole values."""
        write_all(self.file, (np.frombuffer(values, "<f4") + np.float32(self.shift)).view(np.uint8).data, self.offset + offset)
        return len(values)

    def check(self) -> None:
        """As of `ByteFile`."""
        self.file.check()
