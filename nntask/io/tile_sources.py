"""File sources of tiles: byte ranges from which tiles are read when a task first needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiles import BlockFormat, QuantisedTensor, TileTensor, block_format

from ..errors import DataError, StorageError
from .block_ranges import BlockRange
from .finite import first_not_finite
from .strided_ranges import Rows

Stored = Rows | BlockRange
"""A weight in a file, or a window of it."""


@dataclass(frozen=True, slots=True)
class TileSource:
    """A tile's byte range in a file, as a `scheduler.Source`.

    Args:
        range: byte range of the tile.
        name: name of the tensor in the file, for error messages.
        dtype: element type of the tile in memory.
        block_format: format of a tile that holds quantised blocks; None for a tile of numbers.
    """

    range: Stored
    name: str
    dtype: np.dtype[Any]
    block_format: BlockFormat | None = None

    @classmethod
    def of(cls, where: Stored, tensor: TileTensor, index: tuple[int, ...], name: str) -> TileSource:
        """Return the source of tile `index` of a tensor stored at `where`; a quantised tensor receives undecoded blocks."""
        if isinstance(tensor, QuantisedTensor):
            assert isinstance(where, BlockRange), f"{name} is not quantised in its file"  # checked by `ModelDirectory.quantise`
            return cls(where.blocks[tensor.stored_slices(index)], name, np.dtype(np.uint8), where.block_format)
        return cls(where[tensor.tiling.slices(index)], name, tensor.dtype)

    @property
    def scratch_nbytes(self) -> int:
        """Scratch memory of `read`, in bytes."""
        return self.range.scratch_nbytes(self.dtype)

    def read(self, out: npt.NDArray[Any], scratch: memoryview) -> None:
        """Fill a tile from the file.

        Args:
            out: array for the tile, of the range's shape and of element type `dtype`.
            scratch: buffer of at least `scratch_nbytes` bytes.

        Raises:
            StorageError: the file cannot be read, or has changed.
            DataError: a value is not finite.
        """
        try:
            self.range.read(out, np.frombuffer(scratch, np.uint8))
        except StorageError as error:
            raise StorageError(f"{self.name} was lost: {error}") from error
        if (bad := first_not_finite(out) if self.block_format is None else block_format.first_bad_scale(out, self.block_format)) is not None:
            raise DataError(
                f"{self.name} in {self.range.file.path} holds {bad}, as {out.dtype.name}, and weights must be finite",
                "use weights of a training that did not diverge, or --dtype fp32 if they are only too large",
            )
