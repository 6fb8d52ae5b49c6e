"""Arrays in device memory for the kernels here: an address, a shape and a type. They are contiguous, have no arithmetic and own nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous array.

    Args:
        address: address of the first element in device memory.
        shape: extents.
        dtype: element type.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, *shape: int) -> DeviceArray:
        """Return the same elements in another shape; one extent may be -1."""
        known = -prod(shape)
        if known > 0:
            shape = tuple(self.size // known if extent == -1 else extent for extent in shape)
        return DeviceArray(self.address, shape, self.dtype)

    def rows(self) -> DeviceArray:
        """Return the array with all axes but the last merged into rows."""
        return DeviceArray(self.address, (prod(self.shape[:-1]), self.shape[-1]), self.dtype)

    def __getitem__(self, piece: slice) -> DeviceArray:
        """Return rows [start, stop) of the first axis."""
        start, stop, _ = piece.indices(self.shape[0])
        offset = start * prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceArray(self.address + offset, (stop - start, *self.shape[1:]), self.dtype)

    def at(self, dtype: Any, *shape: int) -> DeviceArray:
        """Return the beginning of this memory as another array."""
        return DeviceArray(self.address, shape, np.dtype(dtype))
