"""Tilings of tensors: a regular grid of tiles whose last tiles along each axis may be smaller.

This module knows shapes only, no data and no runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

Index = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """A shape and the tile size that cuts it.

    Args:
        shape: extents of the tensor.
        tile: extents of a tile, one per axis; -1 means the whole axis. Any size is legal; a size larger than the axis means the whole axis.

    Raises:
        ValueError: the lengths differ, an extent is not positive, or a tile extent is zero or below -1.
    """

    shape: Shape
    tile: Shape
    grid: Shape = field(init=False)

    def __post_init__(self) -> None:
        shape, tile = tuple(self.shape), tuple(self.tile)
        if len(shape) != len(tile):
            raise ValueError(f"a tile needs one extent per axis: shape {shape} has {len(shape)}, tile {tile} has {len(tile)}")
        if any(n < 1 for n in shape):
            raise ValueError(f"extents must be positive, got shape {shape}")
        if any(n == 0 or n < -1 for n in tile):
            raise ValueError(f"tile extents must be positive, or -1 for the whole axis, got {tile}")
        tile = tuple(n if t == -1 else min(t, n) for n, t in zip(shape, tile, strict=True))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "grid", tuple(-(-n // t) for n, t in zip(shape, tile, strict=True)))

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return prod(self.grid)

    def indices(self) -> Iterator[Index]:
        """Return all grid indices, last axis fastest."""
        return itertools.product(*map(range, self.grid))

    def flat(self, index: Sequence[int]) -> int:
        """Return the position of tile `index` in the order of `indices`."""
        position = 0
        for i, n in zip(index, self.grid, strict=True):
            if not 0 <= i < n:
                raise IndexError(f"tile {tuple(index)} is outside the grid {self.grid}")
            position = position * n + i
        return position

    def origin(self, index: Sequence[int]) -> Shape:
        """Return the global position of the first element of tile `index`."""
        return tuple(i * t for i, t in zip(index, self.tile, strict=True))

    def extents(self, index: Sequence[int]) -> Shape:
        """Return the extents of tile `index`, which are smaller than `tile` at a ragged edge."""
        return tuple(min(t, n - i * t) for i, t, n in zip(index, self.tile, self.shape, strict=True))

    def slices(self, index: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of the whole tensor that tile `index` occupies."""
        return tuple(slice(o, o + e) for o, e in zip(self.origin(index), self.extents(index), strict=True))
