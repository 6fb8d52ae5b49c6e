"""Strided ranges of files: arrays whose elements are in a file, and transfers of rectangular windows of them.

A range has a file, the offset of its first element, a shape, and a stride in bytes for each axis, like an array over a memory map, but without the
map. One part of a fused weight is such a range, so is a transposed weight, and so is a tile of either. Bytes outside the range are not read. A file
that changes after it was opened is refused; a file that was removed, or replaced by another of its name, is read with its old content.
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


class ByteFile(Protocol):
    """A file as ranges see it: bytes at offsets. `OpenFile` conforms, and `translated_files` has others."""

    @property
    def path(self) -> Path:
        """Of the file on disk, for messages."""

    def read_at(self, out: memoryview, offset: int) -> int:
        """Fill bytes from an offset on; returns how many were filled, 0 at the end of the file."""

    def write_at(self, values: memoryview, offset: int) -> int:
        """Overwrite bytes from an offset on; returns how many were written."""

    def check(self) -> None:
        """Check that the file is unchanged since it was opened."""


class OpenFile:
    """A file descriptor that is closed when the last reference to this object goes.

    Args:
        path: the file.
        flags: flags of `os.open`.
        fd: an open descriptor to take ownership of; -1 to open `path`.

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
        """As of `ByteFile`.

        Raises:
            StorageError: the file cannot be read.
        """
        try:
            return os.preadv(self.fd, [out], offset)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}; copy it to another disk and start anew") from None

    def write_at(self, values: memoryview, offset: int) -> int:
        """As of `ByteFile`.

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
            raise StorageError(f"{self.path} has changed since it was opened, and must not while it is used; copy it again and start anew")

    def _stamp(self) -> tuple[int, int]:
        found = os.fstat(self.fd)
        return found.st_size, found.st_mtime_ns

    def __del__(self) -> None:
        self.close()


def strides_of(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in bytes."""
    return tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def windows(shape: Sequence[int], itemsize: int, nbytes: int = 8 << 20) -> Iterator[tuple[slice, ...]]:
    """Windows that cover an array in order, each of whole rows and about `nbytes` bytes.

    Args:
        shape: shape of the array; no extent is zero.
        itemsize: bytes of an element.
        nbytes: bytes of a window; a window has at least one row.
    """
    rows = max(1, nbytes // (prod(shape[1:]) * itemsize))
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0])), *(slice(0, extent) for extent in shape[1:])


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
        """The axes by falling stride: the order in which the elements follow each other in the file."""
        return tuple(sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], axis)))

    def scratch_nbytes(self, dtype: np.dtype[Any]) -> int:
        """Scratch memory of `read` into an array of element type `dtype`, in bytes; 0 where `read` writes straight into the array."""
        if self._is_plain(dtype):
            return 0
        row = prod(self.shape[axis] for axis in self.order[1:]) * self.dtype.itemsize
        return row * self._rows_at_once()

    def read(self, out: Array, scratch: Array | None = None) -> None:
        """Fill `out`, with conversion to its element type.

        Args:
            out: C-contiguous array of this shape.
            scratch: uint8 array of at least `scratch_nbytes` elements; None to allocate.

        Raises:
            StorageError: the file cannot be read, or has changed.
        """
        if self._is_plain(out.dtype):
            self._transfer(self.file.read_at, out)
            self.file.check()
            return
        for box, window in self._passes():
            shape = tuple(box.shape[axis] for axis in self.order)
            raw = np.ndarray(shape, self.dtype, buffer=scratch)
            FileRange(self.file, self.dtype, box.offset, shape, tuple(self.strides[axis] for axis in self.order))._transfer(self.file.read_at, raw)
            out[window] = raw.transpose(np.argsort(self.order))
        self.file.check()

    def write(self, values: Array) -> None:
        """Overwrite the range in the file with an array of its shape, converted to its element type.

        Raises:
            OSError: the disk is full or failed.
        """
        for box, window in self._passes():
            shape = tuple(box.shape[axis] for axis in self.order)
            raw = np.ascontiguousarray(values[window].transpose(self.order), self.dtype)
            FileRange(self.file, self.dtype, box.offset, shape, tuple(self.strides[axis] for axis in self.order))._transfer(self.file.write_at, raw)

    def _is_plain(self, dtype: np.dtype[Any]) -> bool:
        return dtype == self.dtype and self.order == tuple(range(len(self.shape)))

    def _rows_at_once(self) -> int:
        axis = self.order[0]
        row = prod(self.shape) // self.shape[axis] * self.dtype.itemsize
        return max(1, min(self.shape[axis], PASS_NBYTES // row))

    def _passes(self) -> Iterator[tuple[FileRange, tuple[slice, ...]]]:
        """(range, window of the whole) of pieces of at most `PASS_NBYTES` bytes or one row, along the axis with the largest stride."""
        axis, rows = self.order[0], self._rows_at_once()
        for first in range(0, self.shape[axis], rows):
            window = [slice(0, extent) for extent in self.shape]
            window[axis] = slice(first, min(first + rows, self.shape[axis]))
            yield self[window], tuple(window)

    def _transfer(self, call: Callable[[memoryview, int], int], array: Array) -> None:
        """Move all bytes between the range and a C-contiguous array of its shape and type, one contiguous run of the file after another."""
        raw = array.reshape(-1).view(np.uint8).data
        done = 0
        for offset, nbytes in self._runs():
            end = done + nbytes
            while done < end:
                count = call(raw[done:end], offset + nbytes - (end - done))
                if count == 0:
                    raise StorageError(f"{self.file.path} has become shorter since it was opened; copy it again and start anew")
                done += count

    def _runs(self) -> Iterator[tuple[int, int]]:
        """(offset, size), both in bytes, of the contiguous runs, in the order of the axes."""
        nbytes, axes = self.dtype.itemsize, list(range(len(self.shape)))
        while axes and (self.strides[axes[-1]] == nbytes or self.shape[axes[-1]] == 1):
            nbytes *= self.shape[axes.pop()]
        for index in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            yield self.offset + sum(i * self.strides[axis] for i, axis in zip(index, axes, strict=True)), nbytes


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows of a range (G, D, ..) of G groups of D rows each, seen as an array (G * D, ..) of which it is a window.

    Its rows have no one stride, as those of one of several layers that lie group by group beside each other.

    Args:
        whole: the groups.
        first, stop: the window's rows, of all G * D.
    """

    whole: FileRange
    first: int
    stop: int

    @classmethod
    def of(cls, whole: FileRange) -> RowGroups:
        """All rows of a range of groups."""
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
        """As of `FileRange`."""
        return max((piece.scratch_nbytes(dtype) for piece, _ in self._pieces()), default=0)

    def read(self, out: Array, scratch: Array | None = None) -> None:
        """As of `FileRange`."""
        for piece, rows in self._pieces():
            piece.read(out[rows].reshape(piece.shape), scratch)

    def write(self, values: Array) -> None:
        """As of `FileRange`."""
        for piece, rows in self._pieces():
            piece.write(values[rows].reshape(piece.shape))

    def _pieces(self) -> Iterator[tuple[FileRange, slice]]:
        """(range of groups, rows of the window) of the end of a group, whole groups, and the beginning of a group, where there are such."""
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
