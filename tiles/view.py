"""Views of tiles: what turns bytes of a node's memory into the array that a kernel gets."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from scheduler.storage import DeviceMemory

from .kernels.cuda.array import DeviceArray


@dataclass(frozen=True, slots=True)
class TileView:
    """Shape and dtype of one tile; called by a driver, the array over a node's memory: NumPy's, or a kernel's over that of a GPU."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __call__(self, memory: Any, offset: int) -> Any:
        """The tile at `offset` bytes of `memory`, without a copy."""
        if isinstance(memory, DeviceMemory):
            return DeviceArray(memory.address + offset, self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, buffer=memory, offset=offset)

    @property
    def nbytes(self) -> int:
        """Exact size of the tile."""
        return prod(self.shape) * self.dtype.itemsize
