"""Tile tensors whose tiles are blocks of quantised weights (`block_format`): matrices of numbers to operations, bytes to the scheduler.

Shape, tiling and dtype are those of the numbers, so that shape rules hold as for any matrix. The view of a handle is the stored array, uint8
(rows, bytes of a row): budgets, file sources and copies count these bytes, and they are never converted to 16-bit floats. A matrix (in, out) is
stored transposed: blocks lie along the input features, so that a product reads whole rows. Only operations that name block formats accept such
tiles (`ops.matmul`, `ops.embedding`, and `ops.loss`, which decodes them first). Quantised weights are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from scheduler import DataClass, Handle, Kind, TaskRuntime

from .block_format import BlockFormat, decode, encode
from .tensor import TileTensor
from .tiling import Tiling
from .view import TileView

T = TypeVar("T")


class QuantisedTensor(TileTensor):
    """A matrix of quantised weights, cut into tiles of whole blocks.

    Args:
        shape: extents of the numbers.
        tile: extents of a tile, -1 for a whole axis.
        dtype: element type of computations with the decoded numbers.
        block_format: storage format of a block.
        is_turned: whether the stored array is the transpose of the matrix, so that blocks lie along axis 0.
        kind, data_class, name: the parameters of `TileTensor`.

    Raises:
        ValueError: the shape is not that of a matrix, or a row or a tile does not consist of whole blocks.
    """

    __slots__ = ("block_format", "is_turned")

    def __init__(
        self,
        runtime: TaskRuntime,
        shape: Sequence[int],
        tile: Sequence[int],
        dtype: npt.DTypeLike,
        block_format: BlockFormat,
        *,
        is_turned: bool = False,
        kind: Kind = "persistent",
        data_class: DataClass = "parameters",
        name: str = "",
    ) -> None:
        self.block_format, self.is_turned = block_format, is_turned
        cut, along, size = Tiling(tuple(shape), tuple(tile)), 0 if is_turned else 1, block_format.block_values
        if len(cut.shape) != 2 or cut.shape[along] % size or cut.tile[along] % size:
            raise ValueError(
                f"{name or 'a quantised tensor'} must be a matrix whose rows and tiles along axis {along} are whole blocks of {size} weights, got "
                f"shape {cut.shape} in tiles {cut.tile}; use tile sizes that are multiples of {size}, or keep it as floats"
            )
        super().__init__(runtime, shape, tile, dtype, kind=kind, data_class=data_class, name=name)

    @staticmethod
    def gains(matrix: TileTensor, block_format: BlockFormat, *, is_turned: bool) -> bool:
        """Return whether operations on a matrix gain from 16-bit blocks: CPU kernels widen them to fp32 as they read, GPUs decode whole tiles.

        Args:
            matrix: the matrix as floats, in its tiling; without whole blocks in each tile the result is False.
            block_format, is_turned: the parameters of the constructor.
        """
        is_whole = matrix.tile[0 if is_turned else 1] % block_format.block_values == 0
        return is_whole and matrix.dtype == np.float32 and not matrix.runtime.has_gpus

    def _handle(self, index: tuple[int, ...]) -> Handle:
        rows, columns = self._stored(self.tiling.extents(index))
        view, name = TileView((rows, self.block_format.row_bytes(columns)), np.dtype(np.uint8)), f"{self.name}{list(index)}"
        return self.runtime.handle(view.nbytes, view, name=name, kind=self.kind, data_class=self.data_class)

    @property
    def nbytes(self) -> int:
        """Exact size of all tiles."""
        rows, columns = self._stored(self.shape)
        return rows * self.block_format.row_bytes(columns)

    def _stored(self, pair: Sequence[T]) -> tuple[T, T]:
        """Return `pair`, which has an item for each axis of the matrix, in the order of the axes of the stored array."""
        first, second = pair
        return (second, first) if self.is_turned else (first, second)

    def stored_slices(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of the whole matrix's bytes (rows, bytes of a row) that tile `index` occupies."""
        rows, columns = self._stored(self.tiling.slices(index))
        return rows, slice(self.block_format.row_bytes(columns.start), self.block_format.row_bytes(columns.stop))

    def _shown(self, view: npt.NDArray[Any]) -> npt.NDArray[Any]:
        values = decode(view, self.block_format)
        return values.T if self.is_turned else values

    def _held(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return encode(values.T if self.is_turned else values, self.block_format)

    def __repr__(self) -> str:
        return f"QuantisedTensor({self.name!r}, shape={self.shape}, tile={self.tile}, {self.block_format.name})"
