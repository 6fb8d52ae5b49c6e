"""Normalisations and softmax on the CPU: a block of rows of about 128 KiB goes through every pass before the next one is touched.

Ladder for layer_norm, 1024 x 768 fp32, one core, forward / backward: whole arrays 1.0 / 1.6 ms; blocks of 32 KiB 1.5 / 2.5 ms (NumPy's cost per
call shows), of 64 KiB 1.0 / 1.8 ms, of 128 KiB 0.83 / 1.4 ms, of 512 KiB 0.69 / 1.2 ms (torch's forward 0.36 ms).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..registry import register
from .elementwise import PIECE_BYTES
from .elementwise import row_blocks as small_blocks
from .matmul import rows

Array = npt.NDArray[Any]


BLOCK_BYTES: Final = 2 * PIECE_BYTES
"""Bytes of rows that go through all passes together."""


def row_blocks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of rows that hold about `BLOCK_BYTES` each."""
    return small_blocks(num_rows, row_bytes * PIECE_BYTES // BLOCK_BYTES)


def _work(x: Array) -> Array:
    """Room for one block of rows of `x`."""
    width = x.shape[-1]
    return np.empty((max(1, PIECE_BYTES // max(1, width * x.itemsize * PIECE_BYTES // BLOCK_BYTES)), width), x.dtype)


def _dots(a: Array, b: Array) -> Array:
    """Row by row sum of a * b  # (R, c), (R, c) -> (R,)."""
    result: Array = np.einsum("rc,rc->r", a, b)
    return result


def _layer_norm_block(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, eps: float) -> None:
    width = x.shape[1]
    np.add.reduce(x, axis=1, out=mean)
    mean /= width
    np.subtract(x, mean[:, None], out=y)
    rstd[...] = 1.0 / np.sqrt(_dots(y, y) / width + eps)
    y *= rstd[:, None]
    y *= gamma
    y += beta


@register("layer_norm", "cpu")
def layer_norm(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var + eps)."""
    x, y, mean, rstd = rows(x), rows(y), mean.reshape(-1), rstd.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        _layer_norm_block(x[block], gamma, beta, y[block], mean[block], rstd[block], eps)


@register("residual_layer_norm", "cpu")
def residual_layer_norm(x: Array, r: Array, gamma: Array, beta: Array, s: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """s = x + r; y = layer_norm(s)."""
    x, r, s, y, mean, rstd = rows(x), rows(r), rows(s), rows(y), mean.reshape(-1), rstd.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        np.add(x[block], r[block], out=s[block])
        _layer_norm_block(s[block], gamma, beta, y[block], mean[block], rstd[block], eps)


@register("rms_norm", "cpu")
def rms_norm(x: Array, gamma: Array, y: Array, rstd: Array, *, eps: float) -> None:
    """y = x * rstd * gamma, rstd = 1 / sqrt(mean(x^2) + eps)."""
    x, y, rstd = rows(x), rows(y), rstd.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        a = x[block]
        rstd[block] = 1.0 / np.sqrt(_dots(a, a) / x.shape[1] + eps)
        np.multiply(a, rstd[block][:, None], out=y[block])
        y[block] *= gamma


def _backward_block(x: Array, scale: Array, dy: Array, gamma: Array, dx: Array, xhat: Array, center: bool) -> Array:
    """dx of a block of whole rows from its xhat; returns dy * xhat summed over rows."""
    width = x.shape[1]
    np.multiply(dy, gamma, out=dx)
    weighted = _dots(dx, xhat) / width
    plain = np.add.reduce(dx, axis=1) / width if center else None
    contribution: Array = np.einsum("rc,rc->c", dy, xhat)
    xhat *= weighted[:, None]
    dx -= xhat
    if plain is not None:
        dx -= plain[:, None]
    dx *= scale[:, None]
    return contribution


@register("layer_norm_backward", "cpu")
def layer_norm_backward(x: Array, gamma: Array, mean: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool) -> None:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) [+ dresidual]; dgamma (+)= dy * xhat; dbeta (+)= dy; see the reference."""
    *extra, dx, dgamma, dbeta = rest
    x, dy, dx, mean, rstd = rows(x), rows(dy), rows(dx), mean.reshape(-1), rstd.reshape(-1)
    work = _work(x)
    if not accumulate:
        dgamma[...] = 0
        dbeta[...] = 0
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        a, g = x[block], dy[block]
        xhat = work[: a.shape[0]]
        np.subtract(a, mean[block][:, None], out=xhat)
        xhat *= rstd[block][:, None]
        dgamma += _backward_block(a, rstd[block], g, gamma, dx[block], xhat, True)
        dbeta += np.add.reduce(g, axis=0)
        if residual:
            dx[block] += rows(extra[0])[block]


@register("rms_norm_backward", "cpu")
def rms_norm_backward(x: Array, gamma: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool) -> None:
    """dx = rstd * (g - xhat * mean(g * xhat)) [+ dresidual]; dgamma (+)= dy * xhat; see the reference."""
    *extra, dx, dgamma = rest
    x, dy, dx, rstd = rows(x), rows(dy), rows(dx), rstd.reshape(-1)
    work = _work(x)
    if not accumulate:
        dgamma[...] = 0
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        a = x[block]
        xhat = work[: a.shape[0]]
        np.multiply(a, rstd[block][:, None], out=xhat)
        dgamma += _backward_block(a, rstd[block], dy[block], gamma, dx[block], xhat, False)
        if residual:
            dx[block] += rows(extra[0])[block]


@register("row_sums", "cpu")
def row_sums(x: Array, sums: Array, *, accumulate: bool) -> None:
    """sums (+)= sum of x over the tile's width."""
    if accumulate:
        sums += np.add.reduce(x, axis=-1)
    else:
        np.add.reduce(x, axis=-1, out=sums)


@register("row_squares", "cpu")
def row_squares(x: Array, center: Array, squares: Array, *, width: int, accumulate: bool) -> None:
    """squares (+)= sum of (x - center / width)^2 over the tile's width; `center` holds row sums."""
    x, center, squares = rows(x), center.reshape(-1), squares.reshape(-1)
    if not accumulate:
        squares[...] = 0
    work = _work(x)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        away = work[: x[block].shape[0]]
        np.subtract(x[block], (center[block] / width)[:, None], out=away)
        squares[block] += _dots(away, away)


@register("norm_finish", "cpu")
def norm_finish(sums: Array, squares: Array, mean: Array, rstd: Array, *, width: int, eps: float) -> None:
    """mean = sums / width; rstd = 1 / sqrt(squares / width + eps)."""
    np.divide(sums, width, out=mean)
    np.divide(squares, width, out=rstd)
    rstd += eps
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)


@register("norm_apply", "cpu")
def norm_apply(x: Array, mean: Array, rstd: Array, gamma: Array, *rest: Array) -> None:
    """y = (x - mean) * rstd * gamma [+ beta]; `rest` is [beta,] y."""
    *beta, y = rest
    x, y, mean, rstd = rows(x), rows(y), mean.reshape(-1), rstd.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        out = y[block]
        np.subtract(x[block], mean[block][:, None], out=out)
        out *= rstd[block][:, None]
        out *= gamma
        if beta:
            out += beta[0]


@register("norm_backward_sums", "cpu")
def norm_backward_sums(x: Array, gamma: Array, mean: Array, rstd: Array, dy: Array, plain: Array, weighted: Array, *, accumulate: bool) -> None:
    """plain (+)= sum of g, weighted (+)= sum of g * xhat over the tile's width, g = dy * gamma."""
    x, dy, mean, rstd = rows(x), rows(dy), mean.reshape(-1), rstd.reshape(-1)
    plain, weighted = plain.reshape(-1), weighted.reshape(-1)
    if not accumulate:
        plain[...] = 0
        weighted[...] = 0
    work = _work(x)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        g = work[: x[block].shape[0]]
        np.multiply(dy[block], gamma, out=g)
        total = np.add.reduce(g, axis=1)
        plain[block] += total
        # sum g * (x - mean) * rstd without another temporary
        weighted[block] += (_dots(g, x[block]) - mean[block] * total) * rstd[block]


@register("norm_backward_apply", "cpu")
def norm_backward_apply(
    x: Array,
    gamma: Array,
    mean: Array,
    rstd: Array,
    dy: Array,
    plain: Array,
    weighted: Array,
    *rest: Array,
    width: int,
    center: bool,
    residual: bool,
    accumulate: bool,
) -> None:
    """The rest of the backward pass from the row sums; `rest` is [dresidual,] dx, dgamma[, dbeta if center]."""
    parts = [rows(part) if part.ndim > 1 else part for part in rest]
    extra = parts.pop(0) if residual else None
    dx, *sums = parts
    x, dy, mean, rstd = rows(x), rows(dy), mean.reshape(-1), rstd.reshape(-1)
    plain, weighted = plain.reshape(-1), weighted.reshape(-1)
    if not accumulate:
        for total in sums:
            total[...] = 0
    work = _work(x)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        xhat, out, g = work[: x[block].shape[0]], dx[block], dy[block]
        np.subtract(x[block], mean[block][:, None], out=xhat)
        xhat *= rstd[block][:, None]
        sums[0] += np.einsum("rc,rc->c", g, xhat)
        if center:
            sums[1] += np.add.reduce(g, axis=0)
        np.multiply(g, gamma, out=out)
        xhat *= (weighted[block] / width)[:, None]
        out -= xhat
        if center:
            out -= (plain[block] / width)[:, None]
        out *= rstd[block][:, None]
        if extra is not None:
            out += extra[block]


@register("softmax", "cpu")
def softmax(x: Array, y: Array) -> None:
    """y = exp(x - max) / sum, over the last axis."""
    x, y = rows(x), rows(y)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        out = y[block]
        np.subtract(x[block], np.maximum.reduce(x[block], axis=1, keepdims=True), out=out)
        np.exp(out, out=out)
        out /= np.add.reduce(out, axis=1, keepdims=True)


@register("softmax_backward", "cpu")
def softmax_backward(y: Array, dy: Array, dx: Array) -> None:
    """dx = y * (dy - sum(y * dy))."""
    y, dy, dx = rows(y), rows(dy), rows(dx)
    for block in row_blocks(y.shape[0], y.shape[1] * y.itemsize):
        np.subtract(dy[block], _dots(y[block], dy[block])[:, None], out=dx[block])
        dx[block] *= y[block]


@register("softmax_sums", "cpu")
def softmax_sums(x: Array, peak: Array, total: Array, *, accumulate: bool) -> None:
    """Online softmax (Milakov and Gimelshein 2018): running row maximum and sum of exponentials relative to it."""
    x, peak, total = rows(x), peak.reshape(-1), total.reshape(-1)
    work = _work(x)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        top = np.maximum.reduce(x[block], axis=1)
        if accumulate:
            np.maximum(top, peak[block], out=top)
            total[block] *= np.exp(peak[block] - top)
        else:
            total[block] = 0
        e = work[: top.size]
        np.subtract(x[block], top[:, None], out=e)
        np.exp(e, out=e)
        total[block] += np.add.reduce(e, axis=1)
        peak[block] = top


@register("softmax_apply", "cpu")
def softmax_apply(x: Array, peak: Array, total: Array, y: Array) -> None:
    """y = exp(x - peak) / total."""
    x, y, peak, total = rows(x), rows(y), peak.reshape(-1), total.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        np.subtract(x[block], peak[block][:, None], out=y[block])
        np.exp(y[block], out=y[block])
        y[block] /= total[block][:, None]


@register("row_dots", "cpu")
def row_dots(a: Array, b: Array, dots: Array, *, accumulate: bool) -> None:
    """dots (+)= sum of a * b over the tile's width."""
    found = _dots(rows(a), rows(b)).reshape(dots.shape)
    dots[...] = dots + found if accumulate else found


@register("softmax_backward_apply", "cpu")
def softmax_backward_apply(y: Array, dy: Array, dots: Array, dx: Array) -> None:
    """dx = y * (dy - dots)."""
    np.subtract(dy, dots[..., None], out=dx)
    dx *= y
