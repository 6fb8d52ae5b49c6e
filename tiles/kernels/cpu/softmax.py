"""Softmax on the CPU: a block of rows goes through every pass before the next block, as in `norm`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register
from .elementwise import MOST_ROWS, cut, single
from .matmul import rows
from .norm import boxes, dot_rows, row_blocks

Array = npt.NDArray[Any]


@register("softmax", "cpu")
def softmax(x: Array, y: Array) -> None:
    """y = exp(x - max) / sum, over the last axis."""
    x, y = rows(x), rows(y)
    if single(x, y):
        from .numba import exp_loops

        exp_loops.softmax(x, y)
        return
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        out = y[block]
        np.subtract(x[block], np.maximum.reduce(x[block], axis=1, keepdims=True), out=out)
        np.exp(out, out=out)
        out /= np.add.reduce(out, axis=1, keepdims=True)


@register("softmax_backward", "cpu")
def softmax_backward(y: Array, dy: Array, dx: Array) -> None:
    """dx = y * (dy - sum(y * dy))."""
    y, dy, dx = rows(y), rows(dy), rows(dx)
    if single(y, dy, dx):
        from .numba import exp_loops

        exp_loops.softmax_backward(y, dy, dx)
        return
    for block in row_blocks(y.shape[0], y.shape[1] * y.itemsize):
        np.subtract(dy[block], dot_rows(y[block], dy[block])[:, None], out=dx[block])
        dx[block] *= y[block]


@register("softmax_sums", "cpu")
def softmax_sums(x: Array, peak: Array, total: Array, scratch: Array, *, accumulate: bool) -> None:
    """Online softmax (Milakov and Gimelshein 2018): running row maximum, and sum of exponentials relative to it."""
    x, peak, total = rows(x), peak.reshape(-1), total.reshape(-1)
    work = scratch.view(x.dtype)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        top = np.maximum.reduce(x[block], axis=1)
        if accumulate:
            np.maximum(top, peak[block], out=top)
            total[block] *= np.exp(peak[block] - top)
        else:
            total[block] = 0
        for piece, columns, e in boxes(x[block], work):
            np.subtract(x[block][piece, columns], top[piece, None], out=e)
            np.exp(e, out=e)
            total[block][piece] += np.add.reduce(e, axis=1)
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
    a, b, dots = rows(a), rows(b), dots.reshape(-1)
    for block in cut(a.shape[0], MOST_ROWS):
        products = dot_rows(a[block], b[block])
        dots[block] = dots[block] + products if accumulate else products


@register("softmax_backward_apply", "cpu")
def softmax_backward_apply(y: Array, dy: Array, dots: Array, dx: Array) -> None:
    """dx = y * (dy - dots)."""
    np.subtract(dy, dots[..., None], out=dx)
    dx *= y
