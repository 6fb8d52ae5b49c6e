"""Shape rules shared by operations: which tilings fit together, and walking over leading axes."""

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
        ValueError: they are not.
    """
    if a.shape[axis_a] != b.shape[axis_b] or a.tile[axis_a] != b.tile[axis_b]:
        raise ValueError(
            f"axis {axis_a} of {a!r} and axis {axis_b} of {b!r} must have the same extent and tile, "
            f"got {a.shape[axis_a]} by {a.tile[axis_a]} and {b.shape[axis_b]} by {b.tile[axis_b]}"
        )


def same_tiling(a: TileTensor, *others: TileTensor) -> None:
    """Check that tensors have the same shape and tiling.

    Raises:
        ValueError: they do not.
    """
    for other in others:
        if a.tiling != other.tiling:
            raise ValueError(f"tensors must have the same shape and tiling, got {a!r} and {other!r}")


def chained(step: int) -> Mode:
    """How the task number `step` of a chain accesses what the chain accumulates: the first one writes without reading."""
    return RW if step else W


def leading(tensor: TileTensor, trailing: int = 1) -> Iterator[Index]:
    """Grid indices of all axes but the last `trailing`."""
    return itertools.product(*map(range, tensor.grid[: len(tensor.grid) - trailing]))


def statistics(x: TileTensor, name: str) -> TileTensor:
    """A tensor with one number per row of `x`: fp64 for fp64 rows, else fp32."""
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    return TileTensor(x.runtime, x.shape[:-1], x.tile[:-1], dtype, name=name)


def with_last(x: TileTensor, shape: Sequence[int], tile: Sequence[int], name: str) -> TileTensor:
    """A new tensor with the leading axes of `x` and other last axes."""
    keep = len(x.shape) - len(shape)
    return TileTensor(x.runtime, (*x.shape[:keep], *shape), (*x.tile[:keep], *tile), x.dtype, name=name)
