"""Tile tensors: a shape, a tiling, a dtype, and one scheduler handle per tile.

A tile tensor is storage without history: gradients and tapes belong to `nntask`. Creating one takes no memory; the first task that writes a tile
allocates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import DataClass, Handle, Kind, TaskRuntime

from .emission import codelet
from .tiling import Tiling
from .view import TileView


class TileTensor:
    """A tensor cut into tiles.

    Args:
        runtime: owner of the data.
        shape: extents; a scalar is shape (1,).
        tile: extents of a tile, -1 for a whole axis.
        dtype: element type.
        kind: "persistent" (parameters, optimizer state), "input" (written by the program before a step) or "temporary".
        data_class: category under which the memory ledger counts the bytes.
        name: name in reports, traces and errors.
    """

    __slots__ = ("__weakref__", "data_class", "dtype", "handles", "kind", "name", "runtime", "tiling")

    def __init__(
        self,
        runtime: TaskRuntime,
        shape: Sequence[int],
        tile: Sequence[int],
        dtype: npt.DTypeLike,
        *,
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        name: str = "",
    ) -> None:
        self.runtime = runtime
        self.tiling = Tiling(tuple(shape), tuple(tile))
        self.dtype = np.dtype(dtype)
        self.kind: Kind = kind
        self.data_class: DataClass = data_class
        self.name = name
        self.handles: list[Handle] = [self._handle(index) for index in self.tiling.indices()]

    def _handle(self, index: tuple[int, ...]) -> Handle:
        view, combine = TileView(self.tiling.extents(index), self.dtype), codelet("accumulate")
        name = f"{self.name}{list(index)}"
        return self.runtime.handle(view.nbytes, view, name=name, kind=self.kind, data_class=self.data_class, combine=combine)

    def forget(self, axis: int, number: int) -> None:
        """Replace the tiles with index `number` along `axis` by new ones without data; the tasks that use the old ones keep them until they end."""
        for flat, index in enumerate(self.tiling.indices()):
            if index[axis] == number:
                self.handles[flat] = self._handle(index)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor."""
        return self.tiling.shape

    @property
    def tile(self) -> tuple[int, ...]:
        """Extents of a tile."""
        return self.tiling.tile

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of tiles per axis."""
        return self.tiling.grid

    @property
    def nbytes(self) -> int:
        """Exact size of all tiles."""
        return prod(self.shape) * self.dtype.itemsize

    def stored_slices(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of the whole stored tensor that tile `index` occupies."""
        return self.tiling.slices(index)

    def __getitem__(self, index: tuple[int, ...]) -> Handle:
        """Return the handle of the tile at a grid index (one integer per axis)."""
        return self.handles[self.tiling.flat(index)]

    def read(self) -> npt.NDArray[Any]:
        """Return the whole tensor as an array, after the tasks that write it."""
        return self.gather(lambda handle: self.runtime.acquire(handle, "R"))

    def gather(self, borrow: Callable[[Handle], AbstractContextManager[npt.NDArray[Any]]]) -> npt.NDArray[Any]:
        """Return the whole tensor as an array, reading each tile through `borrow`, which returns a context manager for a handle."""
        out = np.empty(self.shape, self.dtype)
        for index, handle in zip(self.tiling.indices(), self.handles, strict=True):
            with borrow(handle) as view:
                out[self.tiling.slices(index)] = self._shown(view)
        return out

    def write(self, values: npt.ArrayLike) -> None:
        """Overwrite the whole tensor, after the tasks that still use it.

        Raises:
            ValueError: the shape differs.
        """
        array = np.asarray(values)
        if array.shape != self.shape:
            raise ValueError(f"{self.name or 'tensor'} has shape {self.shape}, got values of shape {array.shape}")
        for index, handle in zip(self.tiling.indices(), self.handles, strict=True):
            with self.runtime.acquire(handle, "W") as view:
                view[...] = self._held(array[self.tiling.slices(index)])

    def _shown(self, view: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers of a tile, given the array that its handle stores."""
        return view

    def _held(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the array that the handle of a tile stores, given the tile's numbers."""
        return values

    def like(
        self,
        *,
        dtype: npt.DTypeLike | None = None,
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        name: str = "",
    ) -> TileTensor:
        """Return a new tensor of the same shape and tiling, without data."""
        return TileTensor(self.runtime, self.shape, self.tile, dtype or self.dtype, kind=kind, data_class=data_class, name=name)

    def __repr__(self) -> str:
        return f"TileTensor({self.name!r}, shape={self.shape}, tile={self.tile}, {self.dtype})"
