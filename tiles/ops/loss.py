"""Cross-entropy of a linear head, one vocabulary tile at a time, so that the full logits are never stored.

Legend: x (B, T, C), head w (V, C), targets (B, T) int32 with -1 for ignored tokens, bias (V,), factor (1,) fp32. A quantised head is decoded, tile by
tile, for each pass.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from scheduler import REDUX, SCRATCH, Access, Mode, R, W

from ..emission import emit, scratch
from ..kernels.cpu.loss import loss_scratch_nbytes
from ..kernels.reference.loss import PLAIN, Head
from ..kernels.registry import BF16
from ..quantised import QuantisedTensor
from ..tensor import TileTensor
from .grid import chained, same_axis, statistics
from .matmul import decoded
from .optimizer import sum_scalars


def linear_cross_entropy(
    x: TileTensor,
    w: TileTensor,
    targets: TileTensor,
    *,
    scale: float,
    bias: TileTensor | None = None,
    factor: TileTensor | None = None,
    cap: float | None = None,
) -> tuple[TileTensor, TileTensor]:
    """loss = scale [* factor] * sum of -log softmax(logits)[target]. Returns (loss (1,) fp64, lse (B, T)).

    Args:
        bias: (V,) added to the logits; None for none.
        factor: (1,) factor of the loss, known only when the task runs; None for 1.
        cap: limit c of the logits, which become c tanh(logits / c) after the bias; None for no limit.
    """
    _check(x, w, targets, bias, factor, cap)
    w = _as_floats(w)
    how = Head(has_bias=bias is not None, cap=cap or 0.0)
    lse, peak, total, picked = (statistics(x, name) for name in ("lse", "row maximum", "row sum", "target logit"))
    partials = TileTensor(x.runtime, (targets.tiling.num_tiles,), (1,), np.float64, name="loss parts")
    num_c = x.grid[2]
    for number, (b, t) in enumerate(itertools.product(*map(range, targets.grid))):
        rows: list[Access] = [(x[b, t, c], R) for c in range(num_c)]
        for v in range(w.grid[0]):
            mode = chained(v)
            accesses = [*rows, *((w[v, c], R) for c in range(num_c)), *_tile(bias, v), (targets[b, t], R)]
            accesses += [(peak[b, t], mode), (total[b, t], mode), (picked[b, t], mode), _scratch(x, w, is_backward=False)]
            emit(x.runtime, "head_forward", accesses, num_c=num_c, v_start=v * w.tile[0], vocab=w.shape[0], first=v == 0, **_constants(how))
        ends: list[Access] = [(targets[b, t], R), (peak[b, t], R), (total[b, t], R), (picked[b, t], R), *_tile(factor, 0)]
        emit(x.runtime, "head_finish", [*ends, (lse[b, t], W), (partials[number,], W)], scale=scale)
    return sum_scalars(partials, "loss"), lse


def linear_cross_entropy_backward(
    x: TileTensor,
    w: TileTensor,
    targets: TileTensor,
    lse: TileTensor,
    dw: TileTensor | None,
    *,
    scale: float,
    bias: TileTensor | None = None,
    dbias: TileTensor | None = None,
    factor: TileTensor | None = None,
    cap: float | None = None,
) -> TileTensor:
    """dx of `linear_cross_entropy`, recomputing the logits; dw and dbias, unless they are None, receive contributions."""
    _check(x, w, targets, bias, factor, cap)
    w = _as_floats(w)
    if dbias is not None:
        same_axis(dbias, 0, w, 0)
    how = Head(bias is not None, factor is not None, dbias is not None, cap or 0.0)
    dx = x.like(name="d head")
    num_c = x.grid[2]
    for b, t in itertools.product(*map(range, targets.grid)):
        for v in range(w.grid[0]):
            accesses: list[Access] = [(x[b, t, c], R) for c in range(num_c)]
            accesses += [*((w[v, c], R) for c in range(num_c)), *_tile(bias, v)]
            accesses += [(targets[b, t], R), (lse[b, t], R), *_tile(factor, 0)]
            accesses += [(dx[b, t, c], chained(v)) for c in range(num_c)]
            accesses += [(dw[v, c], REDUX) for c in range(num_c)] if dw is not None else []
            sums = None if dbias is None else _row_sums(dbias, v)
            accesses += [*_tile(sums, 0, W), _scratch(x, w, is_backward=True)]
            constants: dict[str, Any] = {"num_c": num_c, "v_start": v * w.tile[0], "scale": scale, "first": v == 0, "accumulate": False}
            emit(x.runtime, "head_backward", accesses, **constants, **_constants(how))
            if dbias is not None and sums is not None:  # a separate task, since dw may have had contributions that dbias has not
                emit(x.runtime, "add_into", [(sums[0,], R), (dbias[v,], REDUX)])
    return dx


def _as_floats(w: TileTensor) -> TileTensor:
    return decoded(w) if isinstance(w, QuantisedTensor) else w


def _constants(how: Head) -> dict[str, Any]:
    """Return the constant of the head's tasks; a plain head has none."""
    return {} if how == PLAIN else {"how": how}


def _tile(vector: TileTensor | None, number: int, mode: Mode = R) -> list[Access]:
    return [] if vector is None else [(vector[number,], mode)]


def _row_sums(dbias: TileTensor, v: int) -> TileTensor:
    """Return a new tensor for one task's sums of the logits' gradients over rows."""
    extents = dbias.tiling.extents((v,))
    return TileTensor(dbias.runtime, extents, extents, dbias.dtype, name="d bias sums")


def _check(x: TileTensor, w: TileTensor, targets: TileTensor, bias: TileTensor | None, factor: TileTensor | None, cap: float | None) -> None:
    same_axis(x, 2, w, 1)
    for axis in (0, 1):
        same_axis(x, axis, targets, axis)
    if bias is not None:
        same_axis(bias, 0, w, 0)
    if factor is not None and factor.shape != (1,):
        raise ValueError(f"the factor of a loss must be one number, of shape (1,), got {factor!r}")
    if cap is not None and not cap > 0:
        raise ValueError(f"the cap of logits must be positive, got {cap}; leave it out for none")


def _scratch(x: TileTensor, w: TileTensor, *, is_backward: bool) -> Access:
    num_rows, num_columns = x.tile[0] * x.tile[1], w.tile[0]
    nbytes = loss_scratch_nbytes(num_rows, num_columns, 8 if x.dtype == np.float64 else 4)
    if x.runtime.has_gpus:
        from ..kernels.cuda.tables import head_scratch_nbytes

        nbytes = max(nbytes, head_scratch_nbytes(num_rows, num_columns, x.shape[2] if is_backward and x.dtype == BF16 else 0))
    return scratch(x.runtime, nbytes), SCRATCH
