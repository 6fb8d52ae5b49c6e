"""Tile tensors whose tiles are blocks of quantised weights (`block_format`): a matrix of numbers to operations, bytes to the scheduler.

Shape, tiling and dtype are those of the numbers, so that shape rules hold as for any matrix. The view of a handle is what is stored, uint8 (rows, bytes
of a row): budgets, files as sources and movement count these bytes, and 16-bit copies never touch them. Only operations that name block formats take
such tiles (`ops.matmul`, `ops.embedding`). Nothing trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import DataClass, Handle, Kind, TaskRuntime

from .block_format import BlockFormat, decode, encode
from .tensor import TileTensor
from .tiling import Tiling
from .view import TileView


class QuantisedTensor(TileTensor):
    """A matrix (R, C) of quantised weights, cut into tiles of whole blocks.

    Args:
        shape: (R, C).
        tile: extents of a tile, -1 for a whole axis.
        dtype: element type that its numbers are computed with.
        block_format: how they are stored.
        kind, data_class, name: as of `TileTensor`.

    Raises:
        ValueError: it is no matrix, or a row or a tile is not whole blocks.
    """

    __slots__ = ("block_format",)

    def __init__(
        self,
        runtime: TaskRuntime,
        shape: Sequence[int],
        tile: Sequence[int],
        dtype: npt.DTypeLike,
        block_format: BlockFormat,
        *,
        kind: Kind = "persistent",
        data_class: DataClass = "parameters",
        name: str = "",
    ) -> None:
        self.block_format = block_format
        cut = Tiling(tuple(shape), tuple(tile))
        if len(cut.shape) != 2 or cut.shape[1] % block_format.block_values or cut.tile[1] % block_format.block_values:
            raise ValueError(
                f"{name or 'a quantised tensor'} must be a matrix whose rows and tiles are whole blocks of {block_format.block_values} weights, got "
                f"shape {cut.shape} in tiles {cut.tile}; use tile sizes that are multiples of {block_format.block_values}, or keep it as floats"
            )
        super().__init__(runtime, shape, tile, dtype, kind=kind, data_class=data_class, name=name)

    def _handle(self, index: tuple[int, ...]) -> Handle:
        rows, columns = self.tiling.extents(index)
        view, name = TileView((rows, self.block_format.row_bytes(columns)), np.dtype(np.uint8)), f"{self.name}{list(index)}"
        return self.runtime.handle(view.nbytes, view, name=name, kind=self.kind, data_class=self.data_class)

    @property
    def nbytes(self) -> int:
        """Exact size of all tiles."""
        return self.shape[0] * self.block_format.row_bytes(self.shape[1])

    def stored_slices(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """Where tile `index` lies among the bytes (R, bytes of a row) of the whole matrix."""
        rows, columns = self.tiling.slices(index)
        return rows, slice(self.block_format.row_bytes(columns.start), self.block_format.row_bytes(columns.stop))

    def gather(self, borrow: Callable[[Handle], AbstractContextManager[npt.NDArray[Any]]]) -> npt.NDArray[Any]:
        """The numbers (R, C), tile by tile through `borrow`, a handle's context manager."""
        out = np.empty(self.shape, self.dtype)
        for index, handle in zip(self.tiling.indices(), self.handles, strict=True):
            with borrow(handle) as view:
                out[self.tiling.slices(index)] = decode(view, self.block_format)
        return out

    def write(self, values: npt.ArrayLike) -> None:
        """Overwrite the whole tensor with numbers, quantised; waits for the tasks that still use it.

        Raises:
            ValueError: the shape differs.
        """
        array = np.asarray(values)
        if array.shape != self.shape:
            raise ValueError(f"{self.name or 'tensor'} has shape {self.shape}, got values of shape {array.shape}")
        for index, handle in zip(self.tiling.indices(), self.handles, strict=True):
            with self.runtime.acquire(handle, "W") as view:
                view[...] = encode(array[self.tiling.slices(index)], self.block_format)

    def __repr__(self) -> str:
        return f"QuantisedTensor({self.name!r}, shape={self.shape}, tile={self.tile}, {self.block_format.name})"
