"""Tiles whose data lie in files: where they are read from when a task first wants them."""

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
        block_format: of a tile of blocks.
    """

    range: Stored
    name: str
    dtype: np.dtype[Any]
    block_format: BlockFormat | None = None

    @classmethod
    def of(cls, where: Stored, tensor: TileTensor, index: tuple[int, ...], name: str) -> TileSource:
        """The source of a tile of a tensor that lies at `where`; blocks stay blocks where the tensor holds such."""
        if isinstance(tensor, QuantisedTensor):
            assert isinstance(where, BlockRange), f"{name} is not quantised in its file"  # as `ModelDirectory.quantise` has found it
            return cls(where.blocks[tensor.stored_slices(index)], name, np.dtype(np.uint8), where.block_format)
        return cls(where[tensor.tiling.slices(index)], name, tensor.dtype)

    @property
    def scratch_nbytes(self) -> int:
        """Scratch memory of `read`, in bytes."""
        return self.range.scratch_nbytes(self.dtype)

    def read(self, out: npt.NDArray[Any], scratch: memoryview) -> None:
        """Fill a tile from the file.

        Args:
            out: the tile, of the range's shape and this element type.
            scratch: at least `scratch_nbytes` bytes.

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
                f"{self.name} in {self.range.file.path} holds {bad}, as {out.dtype.name}, and weights must be finite; "
                "use weights of a training that did not diverge, or --dtype fp32 if they are only too large"
            )
