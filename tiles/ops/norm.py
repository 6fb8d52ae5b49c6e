"""Normalisations over the last axis: one fused task if a row is one tile, else sums chained over the row's tiles.

Legend: x (..., C); mean, rstd (...,); gamma, beta (C,).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from scheduler import REDUX, SCRATCH, Access, R, W

from ..emission import emit, scratch
from ..kernels.cpu.norm import norm_scratch_nbytes
from ..tensor import TileTensor
from ..tiling import Index
from ..view import TileView
from .elementwise import add, fill
from .grid import chained, leading, same_axis, same_tiling, statistics


def layer_norm(x: TileTensor, gamma: TileTensor, beta: TileTensor, eps: float) -> tuple[TileTensor, TileTensor, TileTensor]:
    """y = (x - mean) * rstd * gamma + beta. Returns (y, mean, rstd)."""
    _, y, mean, rstd = _norm(x, None, gamma, beta, eps)
    return y, mean, rstd


def residual_layer_norm(
    x: TileTensor, r: TileTensor, gamma: TileTensor, beta: TileTensor, eps: float
) -> tuple[TileTensor, TileTensor, TileTensor, TileTensor]:
    """s = x + r; y = layer_norm(s). Returns (s, y, mean, rstd)."""
    s, y, mean, rstd = _norm(x, r, gamma, beta, eps)
    return s, y, mean, rstd


def rms_norm(x: TileTensor, gamma: TileTensor, eps: float, offset: float = 0.0) -> tuple[TileTensor, TileTensor]:
    """y = x * rstd * (gamma + offset). Returns (y, rstd)."""
    _, y, rstd = _norm(x, None, gamma, None, eps, offset)
    return y, rstd


def residual_rms_norm(x: TileTensor, r: TileTensor, gamma: TileTensor, eps: float, offset: float = 0.0) -> tuple[TileTensor, TileTensor, TileTensor]:
    """s = x + r; y = rms_norm(s). Returns (s, y, rstd)."""
    s, y, rstd = _norm(x, r, gamma, None, eps, offset)
    return s, y, rstd


def _norm(x: TileTensor, r: TileTensor | None, gamma: TileTensor, beta: TileTensor | None, eps: float, offset: float = 0.0) -> list[TileTensor]:
    """Normalise x, or x + r; without `beta` it is an RMS norm. Returns [s, y, mean, rstd], without the mean for an RMS norm."""
    op, vectors = ("rms_norm", [gamma]) if beta is None else ("layer_norm", [gamma, beta])
    _check(x, *vectors)
    if r is not None:
        same_tiling(x, r)
        if x.grid[-1] > 1:  # only whole rows have a kernel that adds and normalises
            x, r = add(x, r), None
    s, y = x if r is None else x.like(name="residual"), x.like(name=op)
    moments = [statistics(x, name) for name in (["rstd"] if beta is None else ["mean", "rstd"])]
    if x.grid[-1] > 1:
        zero = [fill(statistics(x, "zero"), 0.0)] if beta is None else []
        between = _between(x, "unused mean" if beta is None else "sums", "squares")
        for row in leading(x):
            _norm_row(x, gamma, beta, y, (*zero, *moments, *between), row, eps, offset)
        return [s, y, *moments]
    for row in leading(x):
        tile = (*row, 0)
        accesses: list[Access] = [(tensor[tile], R) for tensor in (x, r) if tensor is not None]
        accesses += [(vector[0,], R) for vector in vectors]
        accesses += [(tensor[tile], W) for tensor in (s, y) if tensor is not x]
        shift, constants = _shift(gamma, offset)
        emit(x.runtime, op if r is None else f"residual_{op}", [*accesses, *((moment[row], W) for moment in moments), *shift], eps=eps, **constants)
    return [s, y, *moments]


def head_norm(x: TileTensor, gamma: TileTensor, eps: float, offset: float = 0.0) -> tuple[TileTensor, TileTensor]:
    """y = x * rstd * (gamma + offset) within each head  # (..., H * D), (D,) -> (..., H * D), rstd (..., H)."""
    _check_heads(x, gamma)
    size = gamma.shape[0]
    y = x.like(name="head_norm")
    rstd = TileTensor(
        x.runtime,
        (*x.shape[:-1], x.shape[-1] // size),
        (*x.tile[:-1], x.tile[-1] // size),
        np.float64 if x.dtype == np.float64 else np.float32,
        name="rstd",
    )
    for index in x.tiling.indices():
        shift, constants = _shift(gamma, offset)
        emit(x.runtime, "head_norm", [(x[index], R), (gamma[0,], R), (y[index], W), (rstd[index], W), *shift], eps=eps, **constants)
    return y, rstd


def head_norm_backward(
    x: TileTensor,
    gamma: TileTensor,
    rstd: TileTensor,
    dy: TileTensor,
    dgamma: TileTensor | None,
    *,
    dresidual: TileTensor | None = None,
    offset: float = 0.0,
) -> TileTensor:
    """dx of `head_norm` (+ dresidual); dgamma, unless it is None, receives a contribution from each tile."""
    if dresidual is dy:  # a task reads a tile once
        return add(head_norm_backward(x, gamma, rstd, dy, dgamma, offset=offset), dy)
    _check_heads(x, gamma)
    same_tiling(x, dy, *([dresidual] if dresidual is not None else []))
    dx = x.like(name="d norm")
    for index in x.tiling.indices():
        accesses: list[Access] = [(x[index], R), (gamma[0,], R), (rstd[index], R), (dy[index], R)]
        if dresidual is not None:
            accesses.append((dresidual[index], R))
        shift, constants = _shift(gamma, offset)
        accesses += [(dx[index], W), _contribution(gamma, dgamma, 0), *shift]
        emit(x.runtime, "head_norm_backward", accesses, residual=dresidual is not None, accumulate=False, **constants)
    return dx


def _shift(gamma: TileTensor, offset: float) -> tuple[list[Access], dict[str, Any]]:
    """Return the extra accesses and constants of a task whose weights are gamma + offset: working memory as the last access, and the offset."""
    if not offset:
        return [], {}
    itemsize = 8 if gamma.dtype == np.float64 else 4
    return [(scratch(gamma.runtime, gamma.tile[0] * itemsize), SCRATCH)], {"offset": offset}


def _between(x: TileTensor, *names: str) -> list[TileTensor]:
    """Return tensors for the intermediate results of the tasks of a row; one set serves all rows, each of which uses its own tiles."""
    return [statistics(x, name) for name in names]


def _norm_row(
    x: TileTensor,
    gamma: TileTensor,
    beta: TileTensor | None,
    y: TileTensor,
    numbers: tuple[TileTensor, ...],
    row: Index,
    eps: float,
    offset: float = 0.0,
) -> None:
    """Emit the tasks of one row of tiles: sums, squared deviations, then the normalisation.

    Args:
        beta: shift of a layer norm; None for an RMS norm.
        numbers: mean and rstd, which are results; sums and squares, which pass between the tasks. In an RMS norm the mean is zero from the start,
            and the mean that `norm_finish` computes is written over the unused sums.
    """
    runtime, width = x.runtime, x.shape[-1]
    mean, rstd, first, squares = numbers
    sums, computed_mean = (mean, first) if beta is None else (first, mean)
    if beta is not None:
        for c in range(x.grid[-1]):
            emit(runtime, "row_sums", [(x[*row, c], R), (sums[row], chained(c))], accumulate=c > 0)
    for c in range(x.grid[-1]):
        accesses: list[Access] = [(x[*row, c], R), (sums[row], R), (squares[row], chained(c)), _scratch(x)]
        emit(runtime, "row_squares", accesses, width=width, accumulate=c > 0)
    emit(runtime, "norm_finish", [(sums[row], R), (squares[row], R), (computed_mean[row], W), (rstd[row], W)], width=width, eps=eps)
    for c in range(x.grid[-1]):
        accesses = [(x[*row, c], R), (mean[row], R), (rstd[row], R), (gamma[c,], R)]
        if beta is not None:
            accesses.append((beta[c,], R))
        shift, constants = _shift(gamma, offset)
        emit(runtime, "norm_apply", [*accesses, (y[*row, c], W), *shift], **constants)


def layer_norm_backward(
    x: TileTensor,
    gamma: TileTensor,
    mean: TileTensor,
    rstd: TileTensor,
    dy: TileTensor,
    dgamma: TileTensor | None,
    dbeta: TileTensor | None,
    *,
    dresidual: TileTensor | None = None,
) -> TileTensor:
    """dx of `layer_norm` (+ dresidual); dgamma and dbeta, unless they are None, receive contributions."""
    return _norm_backward(x, gamma, mean, rstd, dy, [dgamma, dbeta], dresidual)


def rms_norm_backward(
    x: TileTensor,
    gamma: TileTensor,
    rstd: TileTensor,
    dy: TileTensor,
    dgamma: TileTensor | None,
    *,
    dresidual: TileTensor | None = None,
    offset: float = 0.0,
) -> TileTensor:
    """dx of `rms_norm` (+ dresidual); dgamma, unless it is None, receives contributions."""
    return _norm_backward(x, gamma, None, rstd, dy, [dgamma], dresidual, offset)


def _norm_backward(
    x: TileTensor,
    gamma: TileTensor,
    mean: TileTensor | None,
    rstd: TileTensor,
    dy: TileTensor,
    sums: list[TileTensor | None],
    dresidual: TileTensor | None,
    offset: float = 0.0,
) -> TileTensor:
    if dresidual is dy:  # a task reads a tile once
        return add(_norm_backward(x, gamma, mean, rstd, dy, sums, None, offset), dy)
    _check(x, gamma, *(total for total in sums if total is not None))
    same_tiling(x, dy, *([dresidual] if dresidual is not None else []))
    dx = x.like(name="d norm")
    op = "rms_norm_backward" if mean is None else "layer_norm_backward"
    cut = x.grid[-1] > 1
    if cut and mean is None:
        mean = fill(statistics(x, "zero"), 0.0)
    between = _between(x, "sum g", "sum g xhat") if cut else []
    for row in leading(x):
        moments: list[Access] = [(m[row], R) for m in (mean, rstd) if m is not None]
        if cut:
            _norm_backward_row(x, gamma, moments, dy, sums, between, dresidual, dx, row, offset)
            continue
        tile = (*row, 0)
        accesses: list[Access] = [(x[tile], R), (gamma[0,], R), *moments, (dy[tile], R)]
        if dresidual is not None:
            accesses.append((dresidual[tile], R))
        shift, constants = _shift(gamma, offset)
        accesses += [(dx[tile], W), *(_contribution(gamma, total, 0) for total in sums), *shift]
        emit(x.runtime, op, accesses, residual=dresidual is not None, accumulate=False, **constants)
    return dx


def _norm_backward_row(
    x: TileTensor,
    gamma: TileTensor,
    moments: list[Access],
    dy: TileTensor,
    sums: list[TileTensor | None],
    between: list[TileTensor],
    dresidual: TileTensor | None,
    dx: TileTensor,
    row: Index,
    offset: float,
) -> None:
    runtime, width = x.runtime, x.shape[-1]
    plain, weighted = between
    for c in range(x.grid[-1]):
        mode = chained(c)
        accesses: list[Access] = [(x[*row, c], R), (gamma[c,], R), *moments, (dy[*row, c], R)]
        shift, constants = _shift(gamma, offset)
        accesses += [(plain[row], mode), (weighted[row], mode), _scratch(x), *shift]
        emit(runtime, "norm_backward_sums", accesses, accumulate=c > 0, **constants)
    for c in range(x.grid[-1]):
        accesses = [(x[*row, c], R), (gamma[c,], R), *moments, (dy[*row, c], R), (plain[row], R), (weighted[row], R)]
        if dresidual is not None:
            accesses.append((dresidual[*row, c], R))
        shift, constants = _shift(gamma, offset)
        accesses += [(dx[*row, c], W), *(_contribution(gamma, total, c) for total in sums), *shift]
        constants |= {"width": width, "center": len(sums) == 2, "residual": dresidual is not None, "accumulate": False}
        emit(runtime, "norm_backward_apply", accesses, **constants)


def _contribution(gamma: TileTensor, total: TileTensor | None, c: int) -> Access:
    """Return the access with which a task adds to the gradient of tile `c` of gamma or beta; working memory if the gradient is not wanted."""
    if total is not None:
        return total[c,], REDUX
    view = TileView((gamma.tiling.extents((c,))[0],), np.dtype(np.float64 if gamma.dtype == np.float64 else np.float32))
    return gamma.runtime.handle(view.nbytes, view, name="scratch", data_class="scratch"), SCRATCH


def _scratch(x: TileTensor) -> Access:
    """Return the access to working memory of one task over a tile of `x`."""
    itemsize = 8 if x.dtype == np.float64 else 4
    return scratch(x.runtime, norm_scratch_nbytes(prod(x.tile[:-1]), x.tile[-1], itemsize)), SCRATCH


def _check(x: TileTensor, *vectors: TileTensor) -> None:
    for vector in vectors:
        same_axis(x, len(x.shape) - 1, vector, 0)


def _check_heads(x: TileTensor, gamma: TileTensor) -> None:
    size = gamma.shape[0]
    if gamma.grid != (1,) or x.shape[-1] % size or x.tile[-1] % size:
        raise ValueError(f"tiles must hold whole heads, whose weights are one tile of one axis; got {x!r} and {gamma!r}")
