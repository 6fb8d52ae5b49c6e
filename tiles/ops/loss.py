"""Cross-entropy of a linear head, vocabulary tile by vocabulary tile; the whole logits never exist.

Legend: x (B, T, C), head w (V, C), targets (B, T) int32 with -1 for ignored tokens.
"""

from __future__ import annotations

import itertools

import numpy as np

from scheduler import REDUX, SCRATCH, Access, R, W

from ..emission import emit, scratch
from ..kernels.cpu.loss import loss_scratch_nbytes
from ..tensor import TileTensor
from .grid import chained, same_axis, statistics
from .optimizer import sum_scalars


def linear_cross_entropy(x: TileTensor, w: TileTensor, targets: TileTensor, *, scale: float) -> tuple[TileTensor, TileTensor]:
    """loss = scale * sum of -log softmax(x w^T)[target]. Returns (loss (1,) fp64, lse (B, T))."""
    _check(x, w, targets)
    lse, peak, total, picked = (statistics(x, name) for name in ("lse", "row maximum", "row sum", "target logit"))
    partials = TileTensor(x.runtime, (targets.tiling.num_tiles,), (1,), np.float64, name="loss parts")
    num_c = x.grid[2]
    for number, (b, t) in enumerate(itertools.product(*map(range, targets.grid))):
        rows: list[Access] = [(x[b, t, c], R) for c in range(num_c)]
        for v in range(w.grid[0]):
            mode = chained(v)
            accesses = [*rows, *((w[v, c], R) for c in range(num_c)), (targets[b, t], R)]
            accesses += [(peak[b, t], mode), (total[b, t], mode), (picked[b, t], mode), _scratch(x, w)]
            emit(x.runtime, "head_forward", accesses, num_c=num_c, v_start=v * w.tile[0], vocab=w.shape[0], first=v == 0)
        ends: list[Access] = [(targets[b, t], R), (peak[b, t], R), (total[b, t], R), (picked[b, t], R)]
        emit(x.runtime, "head_finish", [*ends, (lse[b, t], W), (partials[number,], W)], scale=scale)
    return sum_scalars(partials, "loss"), lse


def linear_cross_entropy_backward(
    x: TileTensor, w: TileTensor, targets: TileTensor, lse: TileTensor, dw: TileTensor | None, *, scale: float
) -> TileTensor:
    """dx of `linear_cross_entropy`, recomputing the logits; dw receives contributions, unless None."""
    _check(x, w, targets)
    dx = x.like(name="d head")
    num_c = x.grid[2]
    for b, t in itertools.product(*map(range, targets.grid)):
        for v in range(w.grid[0]):
            accesses: list[Access] = [(x[b, t, c], R) for c in range(num_c)]
            accesses += [(w[v, c], R) for c in range(num_c)]
            accesses += [(targets[b, t], R), (lse[b, t], R)]
            accesses += [(dx[b, t, c], chained(v)) for c in range(num_c)]
            accesses += [(dw[v, c], REDUX) for c in range(num_c)] if dw is not None else []
            accesses.append(_scratch(x, w))
            emit(x.runtime, "head_backward", accesses, num_c=num_c, v_start=v * w.tile[0], scale=scale, first=v == 0, accumulate=False)
    return dx


def _check(x: TileTensor, w: TileTensor, targets: TileTensor) -> None:
    same_axis(x, 2, w, 1)
    for axis in (0, 1):
        same_axis(x, axis, targets, axis)


def _scratch(x: TileTensor, w: TileTensor) -> Access:
    itemsize = 8 if x.dtype == np.float64 else 4
    return scratch(x.runtime, loss_scratch_nbytes(x.tile[0] * x.tile[1], w.tile[0], itemsize)), SCRATCH
