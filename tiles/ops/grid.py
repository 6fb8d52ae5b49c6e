"""Shape rules shared by operations: checks that tilings fit together, and iteration over leading axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from scheduler import RW, Mode, W

from ..tensor import TileTensor
from ..tiling import Index


def same_axis(a: TileTensor, axis_a: int, b: TileTensor, axis_b: int) -> None:
    """Check that two axes have the same extent and are cut alike.

    Raises:
        ValueError: extents or tile sizes differ.
    """
    if a.shape[axis_a] != b.shape[axis_b] or a.tile[axis_a] != b.tile[axis_b]:
        raise ValueError(
            f"axis {axis_a} of {a!r} and axis {axis_b} of {b!r} must have the same extent and tile, "
            f"got {a.shape[axis_a]} by {a.tile[axis_a]} and {b.shape[axis_b]} by {b.tile[axis_b]}"
        )


def same_tiling(a: TileTensor, *others: TileTensor) -> None:
    """Check that tensors have the same shape and tiling.

    Raises:
        ValueError: shapes or tilings differ.
    """
    for other in others:
        if a.tiling != other.tiling:
            raise ValueError(f"tensors must have the same shape and tiling, got {a!r} and {other!r}")


def chained(step: int) -> Mode:
    """Return how task number `step` of a chain accesses the accumulated result: the first task writes without reading."""
    return RW if step else W


def leading(tensor: TileTensor, trailing: int = 1) -> Iterator[Index]:
    """Return the grid indices of all axes except the last `trailing`."""
    return itertools.product(*map(range, tensor.grid[: len(tensor.grid) - trailing]))


def statistics(x: TileTensor, name: str) -> TileTensor:
    """Return a new tensor with one number per row of `x`: fp64 for fp64 rows, else fp32."""
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    return TileTensor(x.runtime, x.shape[:-1], x.tile[:-1], dtype, name=name)


def with_last(x: TileTensor, shape: Sequence[int], tile: Sequence[int], name: str) -> TileTensor:
    """Return a new tensor with the leading axes of `x` and the last axes `shape` in tiles `tile`."""
    keep = len(x.shape) - len(shape)
    return TileTensor(x.runtime, (*x.shape[:keep], *shape), (*x.tile[:keep], *tile), x.dtype, name=name)
