"""Normalisations on the CPU: a block of rows of about 128 KiB goes through every pass before the next block.

Ladder for layer_norm, 1024 x 768 fp32, one core, forward / backward: whole arrays 1.0 / 1.6 ms; blocks of 32 KiB 1.5 / 2.5 ms (NumPy's cost per
call shows), of 64 KiB 1.0 / 1.8 ms, of 128 KiB 0.83 / 1.4 ms, of 512 KiB 0.69 / 1.2 ms (torch's forward 0.36 ms).
Blocks of 128 KiB with NumPy's broadcasting buffers limited to 1024 elements (`registry.BUFFER_ELEMENTS`) and no temporaries: 0.64 / 1.24 ms. Here
xhat is in dx, and its products are in the following blocks of dx, or in declared scratch. Compiled loops row by row, arrays in no cache:
0.25 / 0.40 ms (torch 0.20 / 0.31 ms, a copy of the same size 0.17 / 0.25 ms); forward, the next row is summed while one is written. Tried without
gain for the backward pass: sums over four rows at a time (0.46 against 0.42 ms), one loop for dx and both sums (0.50 ms, not vectorised),
prefetching the next rows (no difference). For rms_norm, 1024 x 2048: blocks of 128 KiB 1.0 / 2.6 ms, compiled 0.25 / 0.74 ms (a copy 0.18 ms).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..registry import register
from .elementwise import MOST_ROWS, PIECE_BYTES, WORK_BYTES, cells, cut, single
from .elementwise import row_blocks as small_blocks
from .matmul import add_column_sums, rows

Array = npt.NDArray[Any]


BLOCK_BYTES: Final = 2 * PIECE_BYTES
"""Bytes of rows that go through all passes together."""


def row_blocks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of rows that hold about `BLOCK_BYTES` each."""
    return small_blocks(num_rows, row_bytes, BLOCK_BYTES)


def norm_scratch_nbytes(num_rows: int, width: int, itemsize: int) -> int:
    """Return the working memory of operations without a large output to work in: a block of rows, or a part of a long row."""
    return min(BLOCK_BYTES, num_rows * width * itemsize)


def _work_beside(dx: Array, block: slice) -> Array:
    """Return flat working memory for a block of the pure output `dx`: the following block, which is not computed yet; after the last, a new array."""
    rest = dx[block.stop : 2 * block.stop - block.start]
    if len(rest) == block.stop - block.start:
        return rest.reshape(-1)
    return np.empty(min(dx[block].size, WORK_BYTES * 3 // 4 // dx.itemsize), dx.dtype)


def boxes(x: Array, work: Array) -> Iterator[tuple[slice, slice, Array]]:
    """Yield (rows, columns, working memory of that shape): boxes of whole rows, or of a piece of one row if a row exceeds `work`."""
    for piece, columns in cells(x.shape[0], x.shape[1], x.itemsize, work.nbytes):
        shape = (piece.stop - piece.start, columns.stop - columns.start)
        yield piece, columns, work[: shape[0] * shape[1]].reshape(shape)


def _add_column_dots(a: Array, b: Array, total: Array) -> None:
    """total += sum over rows of a * b  # (R, c), (R, c) -> (c,)."""
    for columns in cut(total.size, WORK_BYTES // (3 * total.itemsize)):
        total[columns] += np.einsum("rc,rc->c", a[:, columns], b[:, columns])


def dot_rows(a: Array, b: Array) -> Array:
    """Return the sum of a * b over each row  # (R, c), (R, c) -> (R,)."""
    result: Array = np.einsum("rc,rc->r", a, b)
    return result


def _layer_norm_block(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, eps: float) -> None:
    width = x.shape[1]
    np.add.reduce(x, axis=1, out=mean)
    mean /= width
    np.subtract(x, mean[:, None], out=y)
    rstd[...] = 1.0 / np.sqrt(dot_rows(y, y) / width + eps)
    y *= rstd[:, None]
    y *= gamma
    y += beta


def _rms_norm_block(x: Array, gamma: Array, y: Array, rstd: Array, eps: float) -> None:
    rstd[...] = 1.0 / np.sqrt(dot_rows(x, x) / x.shape[1] + eps)
    np.multiply(x, rstd[:, None], out=y)
    y *= gamma


def _weights(gamma: Array, offset: float, rest: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
    """Return gamma + offset, stored in the scratch at the end of `rest`, and `rest` without the scratch; without an offset, both arguments."""
    if not offset:
        return gamma, rest
    shifted = rest[-1].view(gamma.dtype)[: gamma.size]
    np.add(gamma, gamma.dtype.type(offset), out=shifted)
    return shifted, rest[:-1]


@register("layer_norm", "cpu")
def layer_norm(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var + eps)."""
    x, y, mean, rstd = rows(x), rows(y), mean.reshape(-1), rstd.reshape(-1)
    if single(x, gamma, beta, y, mean, rstd):
        from .numba import loops

        loops.layer_norm(x, gamma, beta, y, mean, rstd, np.float32(eps))
        return
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        _layer_norm_block(x[block], gamma, beta, y[block], mean[block], rstd[block], eps)


@register("residual_layer_norm", "cpu")
def residual_layer_norm(x: Array, r: Array, gamma: Array, beta: Array, s: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """s = x + r; y = layer_norm(s)."""
    x, r, s, y, mean, rstd = rows(x), rows(r), rows(s), rows(y), mean.reshape(-1), rstd.reshape(-1)
    if single(x, r, gamma, beta, s, y, mean, rstd):
        from .numba import loops

        loops.residual_layer_norm(x, r, gamma, beta, s, y, mean, rstd, np.float32(eps))
        return
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        np.add(x[block], r[block], out=s[block])
        _layer_norm_block(s[block], gamma, beta, y[block], mean[block], rstd[block], eps)


@register("rms_norm", "cpu")
def rms_norm(x: Array, gamma: Array, y: Array, rstd: Array, *scratch: Array, eps: float, offset: float = 0.0) -> None:
    """y = x * rstd * (gamma + offset), rstd = 1 / sqrt(mean(x^2) + eps)."""
    gamma, _ = _weights(gamma, offset, scratch)
    x, y, rstd = rows(x), rows(y), rstd.reshape(-1)
    if single(x, gamma, y, rstd):
        from .numba import loops

        loops.rms_norm(x, gamma, y, rstd, np.float32(eps))
        return
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        _rms_norm_block(x[block], gamma, y[block], rstd[block], eps)


def _backward_block(scale: Array, dy: Array, gamma: Array, dx: Array, dgamma: Array, work: Array, center: bool) -> None:
    """Turn xhat, which `dx` holds for a block of whole rows, into dx; dgamma += dy * xhat summed over rows."""
    _add_column_dots(dy, dx, dgamma)
    num_rows, width = dx.shape
    whole = width <= work.size
    weighted, plain = np.zeros((2, num_rows), dx.dtype)
    for piece, columns, g in boxes(dx, work):
        np.multiply(dy[piece, columns], gamma[columns], out=g)
        weighted[piece] += dot_rows(g, dx[piece, columns])
        if center:
            plain[piece] += np.add.reduce(g, axis=1)
        if whole:
            _subtract_moments(g, weighted[piece], plain[piece], dx[piece], width, center)
    if not whole:
        for piece, columns, g in boxes(dx, work):
            np.multiply(dy[piece, columns], gamma[columns], out=g)
            _subtract_moments(g, weighted[piece], plain[piece], dx[piece, columns], width, center)
    dx *= scale[:, None]


def _subtract_moments(g: Array, weighted: Array, plain: Array, dx: Array, width: int, center: bool) -> None:
    """dx = g - xhat * mean(g * xhat) - mean(g) of a cell, from xhat in `dx` and the sums."""
    dx *= (weighted / width)[:, None]
    np.subtract(g, dx, out=dx)
    if center:
        dx -= (plain / width)[:, None]


def _subtract_from_scaled(g: Array, gamma: Array, out: Array, work: Array) -> None:
    """out = g * gamma - out."""
    for piece, columns, scaled in boxes(out, work):
        np.multiply(g[piece, columns], gamma[columns], out=scaled)
        np.subtract(scaled, out[piece, columns], out=out[piece, columns])


@register("layer_norm_backward", "cpu")
def layer_norm_backward(x: Array, gamma: Array, mean: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool) -> None:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) [+ dresidual]; g = dy * gamma; dgamma (+)= dy * xhat; dbeta (+)= dy."""
    *extra, dx, dgamma, dbeta = rest
    x, dy, dx, mean, rstd = rows(x), rows(dy), rows(dx), mean.reshape(-1), rstd.reshape(-1)
    if not accumulate:
        dgamma[...] = 0
        dbeta[...] = 0
    if single(x, gamma, mean, rstd, dy, *rest):
        from .numba import loops

        loops.layer_norm_backward(x, gamma, mean, rstd, dy, rows(extra[0]) if residual else dy, dx, dgamma, dbeta, residual)
        return
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        g, out = dy[block], dx[block]
        np.subtract(x[block], mean[block][:, None], out=out)
        out *= rstd[block][:, None]
        _backward_block(rstd[block], g, gamma, out, dgamma, _work_beside(dx, block), True)
        add_column_sums(g, dbeta)
        if residual:
            dx[block] += rows(extra[0])[block]


@register("rms_norm_backward", "cpu")
def rms_norm_backward(x: Array, gamma: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool, offset: float = 0.0) -> None:
    """dx = rstd * (g - xhat * mean(g * xhat)) [+ dresidual]; g = dy * (gamma + offset); dgamma (+)= dy * xhat."""
    gamma, tiles = _weights(gamma, offset, rest)
    *extra, dx, dgamma = tiles
    x, dy, dx, rstd = rows(x), rows(dy), rows(dx), rstd.reshape(-1)
    if not accumulate:
        dgamma[...] = 0
    if single(x, gamma, rstd, dy, *tiles):
        from .numba import loops

        loops.rms_norm_backward(x, gamma, rstd, dy, rows(extra[0]) if residual else dy, dx, dgamma, residual)
        return
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        np.multiply(x[block], rstd[block][:, None], out=dx[block])
        _backward_block(rstd[block], dy[block], gamma, dx[block], dgamma, _work_beside(dx, block), False)
        if residual:
            dx[block] += rows(extra[0])[block]


@register("head_norm", "cpu")
def head_norm(x: Array, gamma: Array, y: Array, rstd: Array, *scratch: Array, eps: float, offset: float = 0.0) -> None:
    """RMS norm of each head with weights that all heads share  # x, y (.., h * D); gamma (D,); rstd (.., h)."""
    heads = (-1, gamma.size)
    rms_norm(x.reshape(heads), gamma, y.reshape(heads), rstd, *scratch, eps=eps, offset=offset)


@register("head_norm_backward", "cpu")
def head_norm_backward(x: Array, gamma: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool, offset: float = 0.0) -> None:
    """Gradients of `head_norm`, which are those of `rms_norm` over (.., h, D)."""
    heads = (-1, gamma.size)
    given = [array.reshape(heads) if array.ndim > 1 else array for array in rest]
    rms_norm_backward(x.reshape(heads), gamma, rstd, dy.reshape(heads), *given, accumulate=accumulate, residual=residual, offset=offset)


@register("row_sums", "cpu")
def row_sums(x: Array, sums: Array, *, accumulate: bool) -> None:
    """sums (+)= sum of x over the tile's width."""
    if not accumulate:
        np.add.reduce(x, axis=-1, out=sums)
        return
    x, sums = rows(x), sums.reshape(-1)
    for block in cut(x.shape[0], MOST_ROWS):
        sums[block] += np.add.reduce(x[block], axis=1)


@register("row_squares", "cpu")
def row_squares(x: Array, center: Array, squares: Array, scratch: Array, *, width: int, accumulate: bool) -> None:
    """squares (+)= sum of (x - center / width)^2 over the tile's width; `center` holds row sums."""
    x, center, squares = rows(x), center.reshape(-1), squares.reshape(-1)
    if not accumulate:
        squares[...] = 0
    for piece, columns, away in boxes(x, scratch.view(x.dtype)):
        np.subtract(x[piece, columns], (center[piece] / width)[:, None], out=away)
        squares[piece] += dot_rows(away, away)


@register("norm_finish", "cpu")
def norm_finish(sums: Array, squares: Array, mean: Array, rstd: Array, *, width: int, eps: float) -> None:
    """mean = sums / width; rstd = 1 / sqrt(squares / width + eps)."""
    np.divide(sums, width, out=mean)
    np.divide(squares, width, out=rstd)
    rstd += eps
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)


@register("norm_apply", "cpu")
def norm_apply(x: Array, mean: Array, rstd: Array, gamma: Array, *rest: Array, offset: float = 0.0) -> None:
    """y = (x - mean) * rstd * (gamma + offset) [+ beta]; `rest` is [beta,] y[, scratch with an offset]."""
    gamma, tiles = _weights(gamma, offset, rest)
    *beta, y = tiles
    x, y, mean, rstd = rows(x), rows(y), mean.reshape(-1), rstd.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        out = y[block]
        np.subtract(x[block], mean[block][:, None], out=out)
        out *= rstd[block][:, None]
        out *= gamma
        if beta:
            out += beta[0]


@register("norm_backward_sums", "cpu")
def norm_backward_sums(
    x: Array,
    gamma: Array,
    mean: Array,
    rstd: Array,
    dy: Array,
    plain: Array,
    weighted: Array,
    scratch: Array,
    *rest: Array,
    accumulate: bool,
    offset: float = 0.0,
) -> None:
    """plain (+)= sum of g, weighted (+)= sum of g * xhat over the tile's width, g = dy * (gamma + offset)."""
    gamma, _ = _weights(gamma, offset, rest)
    x, dy, mean, rstd = rows(x), rows(dy), mean.reshape(-1), rstd.reshape(-1)
    plain, weighted = plain.reshape(-1), weighted.reshape(-1)
    if not accumulate:
        plain[...] = 0
        weighted[...] = 0
    for piece, columns, g in boxes(x, scratch.view(x.dtype)):
        np.multiply(dy[piece, columns], gamma[columns], out=g)
        total = np.add.reduce(g, axis=1)
        plain[piece] += total
        # sum g * (x - mean) * rstd without another temporary
        weighted[piece] += (dot_rows(g, x[piece, columns]) - mean[piece] * total) * rstd[piece]


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
    offset: float = 0.0,
) -> None:
    """Finish the backward pass from the row sums; `rest` is [dresidual,] dx, dgamma[, dbeta if center][, scratch with an offset]."""
    gamma, tiles = _weights(gamma, offset, rest)
    arrays = [rows(array) if array.ndim > 1 else array for array in tiles]
    extra = arrays.pop(0) if residual else None
    dx, *sums = arrays
    x, dy, mean, rstd = rows(x), rows(dy), mean.reshape(-1), rstd.reshape(-1)
    plain, weighted = plain.reshape(-1), weighted.reshape(-1)
    if not accumulate:
        for total in sums:
            total[...] = 0
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        out, g = dx[block], dy[block]
        np.subtract(x[block], mean[block][:, None], out=out)  # xhat, which becomes dx in place
        out *= rstd[block][:, None]
        _add_column_dots(g, out, sums[0])
        if center:
            add_column_sums(g, sums[1])
        out *= (weighted[block] / width)[:, None]
        _subtract_from_scaled(g, gamma, out, _work_beside(dx, block))
        if center:
            out -= (plain[block] / width)[:, None]
        out *= rstd[block][:, None]
        if extra is not None:
            out += extra[block]


@register("residual_rms_norm", "cpu")
def residual_rms_norm(x: Array, r: Array, gamma: Array, s: Array, y: Array, rstd: Array, *scratch: Array, eps: float, offset: float = 0.0) -> None:
    """s = x + r; y = rms_norm(s)."""
    gamma, _ = _weights(gamma, offset, scratch)
    x, r, s, y, rstd = rows(x), rows(r), rows(s), rows(y), rstd.reshape(-1)
    for block in row_blocks(x.shape[0], x.shape[1] * x.itemsize):
        np.add(x[block], r[block], out=s[block])
        _rms_norm_block(s[block], gamma, y[block], rstd[block], eps)
