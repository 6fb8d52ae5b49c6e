"""Selection of one token of each sequence, at positions known only when the task runs."""

from __future__ import annotations

from scheduler import Access, R

from ..emission import emit
from ..tensor import TileTensor
from .grid import chained, same_axis


def select_rows(x: TileTensor, positions: TileTensor) -> TileTensor:
    """out[b, 0] = x[b, positions[b]]  # (B, T, C), (B,) int32 -> (B, 1, C).

    Args:
        x: (B, T, C) tokens.
        positions: (B,) int32, cut like the sequences of `x`. A position outside 0 .. T - 1 fails the task with IndexError.
    """
    same_axis(x, 0, positions, 0)
    out = TileTensor(x.runtime, (x.shape[0], 1, x.shape[2]), (x.tile[0], 1, x.tile[2]), x.dtype, name="select_rows")
    for b, t, c in x.tiling.indices():
        accesses: list[Access] = [(x[b, t, c], R), (positions[b,], R), (out[b, 0, c], chained(t))]
        emit(x.runtime, "select_rows", accesses, start=t * x.tile[1], length=x.shape[1])
    return out
