"""Normalisations on a GPU: a block of threads for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..registry import register
from .array import DeviceArray
from .launch import PARTIALS_NBYTES, THREADS, KernelSource, device
from .many import LANES, groups_of, pieces_of

_source = KernelSource("norm")
_FLOAT: Final = np.dtype(np.float32)

SHARED_SUMS_NBYTES: Final = 64 << 10
"""Largest sums of columns that gradients of norms keep in shared memory, of which each GPU supported has more; wider ones are slower."""

Sums = tuple[DeviceArray, bool]
"""An array for sums of columns, and whether they are added to its numbers."""


def _width(x: DeviceArray) -> np.int32:
    return np.int32(x.shape[-1])


@register("layer_norm", "cuda")
def layer_norm(x: DeviceArray, gamma: DeviceArray, beta: DeviceArray, y: DeviceArray, mean: DeviceArray, rstd: DeviceArray, *, eps: float) -> None:
    """y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var + eps)."""
    _normalise(x, None, gamma, beta, None, y, mean, rstd, eps)


@register("residual_layer_norm", "cuda")
def residual_layer_norm(
    x: DeviceArray,
    r: DeviceArray,
    gamma: DeviceArray,
    beta: DeviceArray,
    s: DeviceArray,
    y: DeviceArray,
    mean: DeviceArray,
    rstd: DeviceArray,
    *,
    eps: float,
) -> None:
    """s = x + r, rounded; y = layer_norm(s)."""
    _normalise(x, r, gamma, beta, s, y, mean, rstd, eps)


@register("rms_norm", "cuda")
def rms_norm(x: DeviceArray, gamma: DeviceArray, y: DeviceArray, rstd: DeviceArray, *scratch: DeviceArray, eps: float, offset: float = 0.0) -> None:
    """y = x * rstd * (gamma + offset), rstd = 1 / sqrt(mean(x^2) + eps)."""
    _normalise(x, None, gamma, None, None, y, None, rstd, eps, offset)


@register("residual_rms_norm", "cuda")
def residual_rms_norm(
    x: DeviceArray,
    r: DeviceArray,
    gamma: DeviceArray,
    s: DeviceArray,
    y: DeviceArray,
    rstd: DeviceArray,
    *scratch: DeviceArray,
    eps: float,
    offset: float = 0.0,
) -> None:
    """s = x + r, rounded; y = rms_norm(s)."""
    _normalise(x, r, gamma, None, s, y, None, rstd, eps, offset)


def _normalise(
    x: DeviceArray,
    r: DeviceArray | None,
    gamma: DeviceArray,
    beta: DeviceArray | None,
    s: DeviceArray | None,
    y: DeviceArray,
    mean: DeviceArray | None,
    rstd: DeviceArray,
    eps: float,
    offset: float = 0.0,
) -> None:
    """[s = x + r, rounded;] y = norm of s, or of x: a layer norm if there is a `beta`, else an RMS norm."""
    _source.by_row("normalise", x, x, r, gamma, beta, s, y, mean, rstd, np.float32(eps), np.float32(offset), _width(x))


@register("head_norm", "cuda")
def head_norm(x: DeviceArray, gamma: DeviceArray, y: DeviceArray, rstd: DeviceArray, *scratch: DeviceArray, eps: float, offset: float = 0.0) -> None:
    """RMS norm of each head with weights that all heads share  # x, y (.., h * D); gamma (D,); rstd (.., h)."""
    rms_norm(_heads(x, gamma), gamma, _heads(y, gamma), rstd, eps=eps, offset=offset)


def _heads(x: DeviceArray, gamma: DeviceArray) -> DeviceArray:
    """Return heads as rows  # (.., h * D) -> (.. * h, D)."""
    return x.reshape(-1, gamma.size)


@register("layer_norm_backward", "cuda")
def layer_norm_backward(
    x: DeviceArray,
    gamma: DeviceArray,
    mean: DeviceArray,
    rstd: DeviceArray,
    dy: DeviceArray,
    *rest: DeviceArray,
    accumulate: bool,
    residual: bool,
    more: Sequence[DeviceArray] = (),
    sums: Sums | None = None,
) -> None:
    """dx, dgamma and dbeta of `layer_norm`; `rest` is [dresidual,] dx, dgamma, dbeta. `more` is added to dy, with a rounding each time.

    The array of `sums` becomes what `column_sums` of dx would give.
    """
    *extra, dx, dgamma, dbeta = rest
    _norm_backward(x, gamma, mean, rstd, [dy, *more], extra[0] if residual else None, dx, dgamma, dbeta, accumulate=accumulate, sums=sums)


@register("rms_norm_backward", "cuda")
def rms_norm_backward(
    x: DeviceArray,
    gamma: DeviceArray,
    rstd: DeviceArray,
    dy: DeviceArray,
    *rest: DeviceArray,
    accumulate: bool,
    residual: bool,
    offset: float = 0.0,
    more: Sequence[DeviceArray] = (),
) -> None:
    """dx and dgamma of `rms_norm`; `rest` is [dresidual,] dx, dgamma[, scratch with an offset]. `more` is that of `layer_norm_backward`."""
    *extra, dx, dgamma = rest[:-1] if offset else rest
    _norm_backward(x, gamma, None, rstd, [dy, *more], extra[0] if residual else None, dx, dgamma, None, accumulate=accumulate, offset=offset)


def _norm_backward(
    x: DeviceArray,
    gamma: DeviceArray,
    mean: DeviceArray | None,
    rstd: DeviceArray,
    slopes: Sequence[DeviceArray],
    extra: DeviceArray | None,
    dx: DeviceArray,
    dgamma: DeviceArray,
    dbeta: DeviceArray | None,
    *,
    accumulate: bool,
    offset: float = 0.0,
    sums: Sums | None = None,
) -> None:
    """dx, dgamma and dbeta of a norm whose dy is the sum of up to three arrays, added in order, and the sums of the columns of dx."""
    num_rows, width = x.size // x.shape[-1], x.shape[-1]
    threads = min(1024, -(-width * x.dtype.itemsize // (16 * 32)) * 32)
    pieces, num_sums = pieces_of(num_rows, width), 2 if sums is None else 3
    if 4 * pieces * LANES * num_sums * width > PARTIALS_NBYTES:
        most = PARTIALS_NBYTES // (4 * LANES * num_sums)
        raise ValueError(f"the gradient of a norm takes tiles of {most:,} columns at most, got {width}; use smaller tiles")
    partial = device().partials.at(_FLOAT, pieces, LANES, num_sums, width)
    dy, second, third = [*slopes, None, None][:3]
    is_shared = 4 * num_sums * width <= SHARED_SUMS_NBYTES
    numbers = (np.float32(offset), np.int32(num_rows), np.int32(width), np.int32(num_sums), np.int32(is_shared))
    arrays = (x, gamma, mean, rstd, dy, second, third, extra, dx, partial)
    shared = 4 * (32 + is_shared * num_sums * width)
    _source.start("norm_backward", x.dtype, *arrays, *numbers, grid=(pieces * LANES, 1, 1), threads=threads, shared=shared)
    _add_partial_sums(partial, dgamma, dbeta, accumulate, sums)


@register("head_norm_backward", "cuda")
def head_norm_backward(
    x: DeviceArray, gamma: DeviceArray, rstd: DeviceArray, dy: DeviceArray, *rest: DeviceArray, offset: float = 0.0, **constants: Any
) -> None:
    """Gradients of `head_norm`; `rest` and the constants are those of `rms_norm_backward`."""
    *arrays, dgamma = rest[:-1] if offset else rest
    arrays = [_heads(array, gamma) for array in arrays]
    last = [dgamma, dgamma] if offset else [dgamma]  # the second one replaces the scratch
    rms_norm_backward(_heads(x, gamma), gamma, rstd, _heads(dy, gamma), *arrays, *last, offset=offset, **constants)


def _gradients(
    x: DeviceArray, mean: DeviceArray | None, rstd: DeviceArray, dy: DeviceArray, dgamma: DeviceArray, dbeta: DeviceArray | None, accumulate: bool
) -> None:
    """dgamma (+)= dy * xhat, dbeta (+)= dy, over rows."""
    num_rows, width = x.size // x.shape[-1], x.shape[-1]
    pieces, (groups, is_wide) = pieces_of(num_rows, width), groups_of(width, x, dy)
    partial = device().partials.at(np.float32, pieces, 2, width)
    numbers = (np.int32(num_rows), np.int32(width), np.int32(accumulate), np.int32(is_wide))
    arrays = (x, mean, rstd, dy, partial, dgamma, dbeta)
    _source.start("norm_gradients", x.dtype, *arrays, *numbers, grid=(groups, pieces, 1), shared=4 * 4 * THREADS)
    if pieces > 1:
        _add_partial_sums(partial.reshape(pieces, 1, 2, width), dgamma, dbeta, accumulate)


def _add_partial_sums(partial: DeviceArray, dgamma: DeviceArray, dbeta: DeviceArray | None, accumulate: bool, sums: Sums | None = None) -> None:
    """dgamma, dbeta and the array of `sums` (+)= their sums over pieces of rows  # partial (pieces, lanes, 2 or 3, width)."""
    pieces, lanes, num_sums, width = partial.shape
    columns, onto = (None, False) if sums is None else sums
    sizes = (np.int32(pieces), np.int32(lanes), np.int32(num_sums), np.int32(width), np.int32(accumulate), np.int32(onto))
    grid = (-(-width // 32), num_sums, 1)
    _source.start("norm_sums", _FLOAT, partial, dgamma, dbeta, columns, *sizes, grid=grid, shared=4 * THREADS)


@register("row_sums", "cuda")
def row_sums(x: DeviceArray, sums: DeviceArray, *, accumulate: bool) -> None:
    """sums (+)= sum of x over the tile's width."""
    _source.by_row("row_sums", x, x, sums, _width(x), np.int32(accumulate))


@register("row_squares", "cuda")
def row_squares(x: DeviceArray, center: DeviceArray, squares: DeviceArray, scratch: DeviceArray, *, width: int, accumulate: bool) -> None:
    """squares (+)= sum of (x - center / width)^2 over the tile's width; `center` holds row sums."""
    _source.by_row("row_squares", x, x, center, squares, _width(x), np.int32(width), np.int32(accumulate))


@register("norm_finish", "cuda")
def norm_finish(sums: DeviceArray, squares: DeviceArray, mean: DeviceArray, rstd: DeviceArray, *, width: int, eps: float) -> None:
    """mean = sums / width; rstd = 1 / sqrt(squares / width + eps)."""
    _source.each("norm_finish", sums.dtype, sums.size, sums, squares, mean, rstd, np.int32(width), np.float32(eps))


@register("norm_apply", "cuda")
def norm_apply(x: DeviceArray, mean: DeviceArray, rstd: DeviceArray, gamma: DeviceArray, *rest: DeviceArray, offset: float = 0.0) -> None:
    """y = (x - mean) * rstd * (gamma + offset) [+ beta]; `rest` is [beta,] y[, scratch with an offset]."""
    *beta, y = rest[:-1] if offset else rest
    _source.each("norm_apply", x.dtype, x.size, x, mean, rstd, gamma, beta[0] if beta else None, y, np.float32(offset), _width(x))


@register("norm_backward_sums", "cuda")
def norm_backward_sums(
    x: DeviceArray,
    gamma: DeviceArray,
    mean: DeviceArray,
    rstd: DeviceArray,
    dy: DeviceArray,
    plain: DeviceArray,
    weighted: DeviceArray,
    *scratch: DeviceArray,
    accumulate: bool,
    offset: float = 0.0,
) -> None:
    """plain (+)= sum of g, weighted (+)= sum of g * xhat over the tile's width, g = dy * (gamma + offset)."""
    _source.by_row("norm_backward_sums", x, x, gamma, mean, rstd, dy, plain, weighted, np.float32(offset), _width(x), np.int32(accumulate))


@register("norm_backward_apply", "cuda")
def norm_backward_apply(
    x: DeviceArray,
    gamma: DeviceArray,
    mean: DeviceArray,
    rstd: DeviceArray,
    dy: DeviceArray,
    plain: DeviceArray,
    weighted: DeviceArray,
    *rest: Any,
    width: int,
    center: bool,
    residual: bool,
    accumulate: bool,
    offset: float = 0.0,
) -> None:
    """Finish the backward pass from the row sums; `rest` is [dresidual,] dx, dgamma[, dbeta if center][, scratch with an offset]."""
    arrays = list(rest[:-1] if offset else rest)
    extra = arrays.pop(0) if residual else None
    dx, dgamma, *dbeta = arrays
    sums = (plain, weighted, extra, dx, np.float32(offset), _width(x), np.int32(width), np.int32(center))
    _source.each("norm_backward_apply", x.dtype, x.size, x, gamma, mean, rstd, dy, *sums)
    _gradients(x, mean, rstd, dy, dgamma, dbeta[0] if center else None, accumulate)
