"""Strided ranges of files: arrays whose elements are in a file, and transfers of rectangular windows of them.

A range has a file, the offset of its first element, a shape, and a stride in bytes for each axis, like an array over a memory map, but without the
map. One part of a fused weight is such a range; so are a transposed weight and a tile of either. Bytes outside the requested window are not retained.

A file that changes after it was opened is refused. A file that was removed, or replaced by another of the same name, is read with its old content.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import StorageError
from .regular_file import open_regular

Array = npt.NDArray[Any]
PASS_NBYTES: Final = 1 << 18
"""Scratch memory in bytes of a transfer between different layouts or element types, unless one row of the file is longer."""

_SHORT_GAP: Final = 1 << 12
"""Largest gap in bytes between two rows that is read along with them: one page of memory."""
_ROWS_A_CALL: Final = 256
"""Number of rows read by one system call, which takes at most 1,024 buffers."""


class ByteFile(Protocol):
    """Interface of a file that ranges read and write: bytes at offsets. Implemented by `OpenFile` and the classes of `translated_files`."""

    @property
    def path(self) -> Path:
        """Path of the file on disk, for error messages."""

    def read_at(self, out: memoryview, offset: int) -> int:
        """Read bytes at `offset` into `out`; return the number of bytes read, 0 at the end of the file."""

    def write_at(self, values: memoryview, offset: int) -> int:
        """Write `values` at `offset`; return the number of bytes written."""

    def check(self) -> None:
        """Check that the file is unchanged since it was opened."""


class OpenFile:
    """A file descriptor that is closed when this object is collected.

    Args:
        path: the file.
        flags: flags of `os.open`.
        fd: open descriptor to take ownership of; -1 to open `path`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY, fd: int = -1) -> None:
        self.fd = fd
        self.path = path
        if fd < 0:
            self.fd = open_regular(path, flags)
        self._found = self._stamp()

    def read_at(self, out: memoryview, offset: int) -> int:
        """Read bytes at `offset` into `out`; return the number of bytes read, 0 at the end of the file.

        Raises:
            StorageError: the file cannot be read.
        """
        try:
            return os.preadv(self.fd, [out], offset)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}", "copy it to another disk and start anew") from None

    def scatter_at(self, outs: Sequence[memoryview | bytearray], offset: int) -> int:
        """Read bytes at `offset` into several buffers in turn; return the number of bytes read.

        Raises:
            StorageError: the file cannot be read.
        """
        try:
            return os.preadv(self.fd, outs, offset)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}", "copy it to another disk and start anew") from None

    def write_at(self, values: memoryview, offset: int) -> int:
        """Write `values` at `offset`; return the number of bytes written.

        Raises:
            OSError: the disk is full or failed.
        """
        return os.pwritev(self.fd, [values], offset)

    def close(self) -> None:
        """Close the descriptor; closing twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def check(self) -> None:
        """Check that the file is unchanged since it was opened.

        Raises:
            StorageError: the file's size or modification time has changed.
        """
        if self._stamp() != self._found:
            raise StorageError(f"{self.path} must not change while it is in use, and has changed since it was opened", "copy it again and start anew")

    def _stamp(self) -> tuple[int, int]:
        found = os.fstat(self.fd)
        return found.st_size, found.st_mtime_ns

    def __del__(self) -> None:
        self.close()


def read_all(file: ByteFile, out: memoryview, offset: int) -> None:
    """Fill all of `out` with bytes of the file, starting at `offset`.

    Raises:
        StorageError: the file cannot be read, or ends too early.
    """
    _transfer_all(file.read_at, out, offset, file.path)


def write_all(file: ByteFile, values: memoryview, offset: int) -> None:
    """Write all of `values` to the file, starting at `offset`.

    Raises:
        OSError: the disk is full or failed.
    """
    _transfer_all(file.write_at, values, offset, file.path)


def _transfer_all(call: Callable[[memoryview, int], int], raw: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(raw):
        count = call(raw[done:], offset + done)
        if count == 0:
            raise StorageError(f"{path} has become shorter since it was opened", "copy it again and start anew")
        done += count


def strides_of(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in bytes."""
    return tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def windows(shape: Sequence[int], itemsize: int, nbytes: int = 8 << 20, axis: int = 0) -> Iterator[tuple[slice, ...]]:
    """Yield windows that cover an array in order, each of whole rows and at most `nbytes` bytes.

    Args:
        shape: shape of the array; no extent is zero.
        itemsize: size of an element in bytes.
        nbytes: largest size of a window in bytes; exceeded only by a window of one row.
        axis: axis along which rows are counted.
    """
    rows = max(1, nbytes // (prod(shape) // shape[axis] * itemsize))
    for first in range(0, shape[axis], rows):
        window = [slice(0, extent) for extent in shape]
        window[axis] = slice(first, min(first + rows, shape[axis]))
        yield tuple(window)


@dataclass(frozen=True, slots=True)
class FileRange:
    """An array in a file.

    Args:
        file: the open file.
        dtype: element type in the file.
        offset: offset of the first element, in bytes.
        shape: extents per axis, in elements.
        strides: distance between neighbours along each axis, in bytes; not negative.
    """

    file: ByteFile
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __getitem__(self, slices: Sequence[slice]) -> FileRange:
        """The window of one slice (start:stop) per axis."""
        bounds = [each.indices(extent) for each, extent in zip(slices, self.shape, strict=True)]
        offset = self.offset + sum(start * stride for (start, _, _), stride in zip(bounds, self.strides, strict=True))
        return FileRange(self.file, self.dtype, offset, tuple(stop - start for start, stop, _ in bounds), self.strides)

    @property
    def order(self) -> tuple[int, ...]:
        """Axes by decreasing stride, which is the order of the elements in the file."""
        return tuple(sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], axis)))

    def scratch_nbytes(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes of scratch memory that `read` needs for element type `dtype`; 0 if it reads straight into the array."""
        if self._is_plain(dtype):
            return 0
        row = prod(self.shape[axis] for axis in self.order[1:]) * self.dtype.itemsize
        return row * self._rows_at_once()

    def read(self, out: Array, scratch: Array | None = None) -> None:
        """Fill `out` from the file, converting to its element type.

        Args:
            out: C-contiguous array of this range's shape.
            scratch: uint8 array of at least `scratch_nbytes` elements; None to allocate one.

        Raises:
            StorageError: the file cannot be read, or has changed.
        """
        if self._is_plain(out.dtype):
            done = self._read_rows(out)
            if done == 0:
                self._transfer(self.file.read_at, out)
            elif done < len(out):
                self[slice(done, None), slice(None)]._transfer(self.file.read_at, out[done:])
            self.file.check()
            return
        for window, stored in self._passes():
            raw = np.ndarray(stored.shape, self.dtype, buffer=scratch)
            stored._transfer(self.file.read_at, raw)
            out[window] = raw.transpose(np.argsort(self.order))
        self.file.check()

    def write(self, values: Array) -> None:
        """Overwrite the range in the file with an array of its shape, converted to its element type.

        Raises:
            OSError: the disk is full or failed.
        """
        for window, stored in self._passes():
            stored._transfer(self.file.write_at, np.ascontiguousarray(values[window].transpose(self.order), self.dtype))

    def _read_rows(self, out: Array) -> int:
        """Fill rows that have short gaps between them, many per system call; return the number of rows filled.

        A system call costs more than reading a short gap.
        """
        if not isinstance(self.file, OpenFile) or len(self.shape) != 2 or self.strides[1] != self.dtype.itemsize:
            return 0
        step, nbytes = self.strides[0], self.shape[1] * self.dtype.itemsize
        if not 0 < step - nbytes <= _SHORT_GAP:
            return 0
        raw, gap = out.reshape(-1).view(np.uint8).data, bytearray(step - nbytes)
        for first in range(0, len(out), _ROWS_A_CALL):
            stop = min(first + _ROWS_A_CALL, len(out))
            buffers = [each for row in range(first, stop) for each in (raw[row * nbytes : (row + 1) * nbytes], gap)][:-1]
            if self.file.scatter_at(buffers, self.offset + first * step) < (stop - first - 1) * step + nbytes:
                return first
        return len(out)

    def _is_plain(self, dtype: np.dtype[Any]) -> bool:
        return dtype == self.dtype and self.order == tuple(range(len(self.shape)))

    def _rows_at_once(self) -> int:
        axis = self.order[0]
        row = prod(self.shape) // self.shape[axis] * self.dtype.itemsize
        return max(1, min(self.shape[axis], PASS_NBYTES // row))

    def _passes(self) -> Iterator[tuple[tuple[slice, ...], FileRange]]:
        """Yield windows of at most `PASS_NBYTES` bytes or one row, and their ranges with the axes in the order of the file."""
        order = self.order
        for window in windows(self.shape, self.dtype.itemsize, PASS_NBYTES, order[0]):
            box = self[window]
            shape, strides = tuple(box.shape[axis] for axis in order), tuple(self.strides[axis] for axis in order)
            yield window, FileRange(self.file, self.dtype, box.offset, shape, strides)

    def _transfer(self, call: Callable[[memoryview, int], int], array: Array) -> None:
        """Transfer all bytes between the range and a C-contiguous array of its shape and type, one contiguous run of the file after another."""
        raw, end = array.reshape(-1).view(np.uint8).data, 0
        for offset, nbytes in self._runs():
            begin, end = end, end + nbytes
            count = call(raw[begin:end], offset)
            if count < nbytes:
                _transfer_all(call, raw[begin + count : end], offset + count, self.file.path)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, size) in bytes of each contiguous run, in the order of the axes."""
        nbytes, axes = self.dtype.itemsize, list(range(len(self.shape)))
        while axes and (self.strides[axes[-1]] == nbytes or self.shape[axes[-1]] == 1):
            nbytes *= self.shape[axes.pop()]
        for index in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            yield self.offset + sum(i * self.strides[axis] for i, axis in zip(index, axes, strict=True)), nbytes


def is_equal(one: FileRange, other: FileRange) -> bool:
    """Return whether two ranges of equal shape hold equal values; a few MiB are read at a time."""
    for window in windows(one.shape, max(one.dtype.itemsize, other.dtype.itemsize)):
        left, right = one[window], other[window]
        ours, theirs = np.empty(left.shape, left.dtype), np.empty(right.shape, right.dtype)
        left.read(ours)
        right.read(theirs)
        if not np.array_equal(ours, theirs):
            return False
    return True


@dataclass(frozen=True, slots=True)
class RowGroups:
    """A range (G, D, ...) of G groups of D rows, seen as an array (G * D, ...), or a window of its rows.

    The rows have no single stride. An example is the weight of one layer in a file that interleaves several layers group by group.

    Args:
        whole: range of the groups, of shape (G, D, ...).
        first, stop: rows of the window, out of G * D.
    """

    whole: FileRange
    first: int
    stop: int

    @classmethod
    def of(cls, whole: FileRange) -> RowGroups:
        """Return the window of all rows of a range of groups."""
        return cls(whole, 0, whole.shape[0] * whole.shape[1])

    @property
    def file(self) -> ByteFile:
        """The open file."""
        return self.whole.file

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type in the file."""
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents per axis, in elements."""
        return (self.stop - self.first, *self.whole.shape[2:])

    def __getitem__(self, slices: Sequence[slice]) -> RowGroups:
        """The window of one slice (start:stop) per axis."""
        start, stop, _ = slices[0].indices(self.stop - self.first)
        whole = self.whole[(slice(None), slice(None), *slices[1:])]
        return RowGroups(whole, self.first + start, self.first + stop)

    def scratch_nbytes(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes of scratch memory that `read` needs for element type `dtype`."""
        return max((piece.scratch_nbytes(dtype) for piece, _ in self._pieces()), default=0)

    def read(self, out: Array, scratch: Array | None = None) -> None:
        """Fill `out` from the file; see `FileRange.read`."""
        for piece, rows in self._pieces():
            piece.read(out[rows].reshape(piece.shape), scratch)

    def write(self, values: Array) -> None:
        """Overwrite the rows in the file; see `FileRange.write`."""
        for piece, rows in self._pieces():
            piece.write(values[rows].reshape(piece.shape))

    def _pieces(self) -> Iterator[tuple[FileRange, slice]]:
        """Yield (range, rows of the window) of up to three pieces: the end of a group, whole groups, the beginning of a group."""
        size, rest, row = self.whole.shape[1], [slice(None)] * (len(self.whole.shape) - 2), self.first
        while row < self.stop:
            group, begin = divmod(row, size)
            groups = max(1, (self.stop - row) // size) if begin == 0 else 1
            end = min(size, begin + self.stop - row)
            piece = self.whole[(slice(group, group + groups), slice(begin, end), *rest)]
            count = groups * (end - begin)
            yield piece, slice(row - self.first, row - self.first + count)
            row += count


Rows = FileRange | RowGroups
"""A weight in a file, or a window of it."""
