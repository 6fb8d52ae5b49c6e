"""Views of tiles: the conversion of bytes in a node's memory into the array that a kernel gets."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from scheduler.storage import DeviceMemory

from .kernels.cuda.array import DeviceArray


@dataclass(frozen=True, slots=True)
class TileView:
    """Shape and dtype of one tile. A driver calls it to get the array over a node's memory: NumPy's on the CPU, `DeviceArray` on a GPU."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __call__(self, memory: Any, offset: int) -> Any:
        """Return the tile at `offset` bytes of `memory`, without a copy."""
        if isinstance(memory, DeviceMemory):
            return DeviceArray(memory.address + offset, self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, buffer=memory, offset=offset)

    @property
    def nbytes(self) -> int:
        """Exact size of the tile."""
        return prod(self.shape) * self.dtype.itemsize
