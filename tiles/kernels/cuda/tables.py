"""Lookup, the loss of a linear head and random numbers on a GPU.

The program must refuse ids outside the vocabulary when it reads them, since GPU kernels cannot raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate as accumulate_sizes
from typing import Any, Final

import numpy as np

from ..reference.loss import PLAIN, Head, backward_tiles, forward_tiles
from ..reference.random import mix, threshold
from ..registry import register
from .array import DeviceArray
from .elementwise import add_float, fill
from .launch import THREADS, KernelSource, device
from .many import pieces_of

_source = KernelSource("tables")
_FLOAT: Final = np.dtype(np.float32)
COLUMNS: Final = 8192
"""Number of logits per row that exist at a time."""
_POSITION: Final = np.dtype([("extents", np.int32, 4), ("origin", np.int32, 4), ("strides", np.int64, 4)])


@register("embedding", "cuda")
def embedding(tokens: DeviceArray, table: DeviceArray, x: DeviceArray, *, v_start: int, vocab: int, accumulate: bool) -> None:
    """x[b, t] = table[tokens[b, t]] for the rows in this tile; the first tile's task zeroes the rest."""
    numbers = (np.int32(v_start), np.int32(table.shape[0]), np.int32(table.shape[1]), np.int32(accumulate))
    _source.each("embedding", table.dtype, x.size, tokens, table, x, *numbers, is_wide=True)


@register("embedding_backward", "cuda")
def embedding_backward(tokens: DeviceArray, dy: DeviceArray, dtable: DeviceArray, *, v_start: int, accumulate: bool) -> None:
    """dtable[tokens[b, t]] += dy[b, t] for rows of this tile, in the order of positions."""
    if not accumulate:
        fill(dtable, value=0.0)
    numbers = (np.int32(v_start), np.int32(dtable.shape[0]), np.int32(dtable.shape[1]), np.int32(tokens.size))
    _source.start("embedding_backward", dy.dtype, tokens, dy, dtable, *numbers, grid=(tokens.size, 1, 1), shared=8 * THREADS)


def head_scratch_nbytes(num_rows: int, num_columns: int, width: int) -> int:
    """Return the working memory of a task of the head: one block of logits, and in a backward pass of bf16 tiles dx in fp32.

    Args:
        num_rows: number of tokens.
        num_columns: number of rows of the vocabulary tile.
        width: number of features of all tiles of dx; 0 if no dx has to be summed.
    """
    return 4 * num_rows * (min(COLUMNS, num_columns) + width)


def _blocks(num_columns: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of blocks of columns: rows of logits are multiples of 16 bytes but for a block of the last few columns."""
    whole = num_columns - num_columns % 8
    for first in range(0, whole, COLUMNS):
        yield first, min(first + COLUMNS, whole)
    if whole < num_columns:
        yield whole, num_columns


def _logits(xs: Sequence[DeviceArray], ws: Sequence[DeviceArray], bias: DeviceArray | None, cap: float, scratch: DeviceArray) -> Any:
    """Yield (first column, last column, logits in fp32) for each block of columns."""
    for first, last in _blocks(ws[0].shape[0]):
        s = scratch.at(_FLOAT, xs[0].shape[0], last - first)
        for number, (x, w) in enumerate(zip(xs, ws, strict=True)):
            device().gemm(x, w[first:last], s, trans_a=False, trans_b=True, alpha=1.0, accumulate=number > 0)
        if bias is not None or cap:
            piece = None if bias is None else bias[first:last]
            _source.each("shape_logits", xs[0].dtype, s.size, s, piece, np.float32(cap), np.int32(last - first))
        yield first, last, s


@register("head_forward", "cuda")
def head_forward(*tiles: DeviceArray, num_c: int, v_start: int, vocab: int, first: bool, how: Head = PLAIN) -> None:
    """Add one vocabulary tile to the running statistics; `tiles` are those of `forward_tiles`."""
    given = forward_tiles(tiles, num_c, how)
    for start, _, s in _logits([x.rows() for x in given.xs], given.ws, given.bias, how.cap, given.scratch):
        begins = np.int32(first and start == 0)
        _source.by_row("add_logits", s, s, *given.statistics, np.int32(v_start + start), np.int32(s.shape[1]), begins)


@register("head_finish", "cuda")
def head_finish(targets: DeviceArray, peak: DeviceArray, total: DeviceArray, picked: DeviceArray, *rest: DeviceArray, scale: float) -> None:
    """lse = peak + log total; loss[0] = scale * [factor *] sum over tokens of (lse - picked), in fp64; `rest` is [factor,] lse, loss."""
    *factor, lse, loss = rest
    numbers = (np.float64(scale), np.int32(targets.size))
    arrays = (targets, peak, total, picked, factor[0] if factor else None, lse, loss)
    _source.start("head_finish", _FLOAT, *arrays, *numbers, grid=(1, 1, 1), shared=8 * THREADS)


@register("head_backward", "cuda")
def head_backward(*tiles: DeviceArray, num_c: int, v_start: int, scale: float, first: bool, accumulate: bool, how: Head = PLAIN) -> None:
    """Compute the contribution of one vocabulary tile to dx and dw, and overwrite dbias; `tiles` are those of `backward_tiles`."""
    given = backward_tiles(tiles, num_c, how)
    xs, dxs, short = [x.rows() for x in given.xs], [dx.rows() for dx in given.dxs], given.xs[0].dtype
    sums = dxs if short == _FLOAT else _sums_behind_logits(given.scratch, dxs, given.ws[0].shape[0])
    for start, end, s in _logits(xs, given.ws, given.bias, how.cap, given.scratch):
        numbers = (np.int32(v_start + start), np.int32(s.shape[1]), np.float32(scale), np.float32(how.cap))
        arrays = (s, given.targets, given.lse, given.factor)
        _source.start("logit_gradients", short, *arrays, *numbers, grid=(s.shape[0], 1, 1))
        stride = s.shape[1] * s.dtype.itemsize // short.itemsize
        p = s.at(short, *s.shape)
        if given.dbias is not None:
            _gradient_columns(p, given.dbias[start:end], stride)
        for w, dx in zip(given.ws, sums, strict=True):
            onto = start > 0 or (sums is dxs and not first)
            device().gemm(p, w[start:end], dx, trans_a=False, trans_b=False, alpha=1.0, accumulate=onto, stride_a=stride)
        for x, dw in zip(xs, given.dws, strict=bool(given.dws)):
            device().gemm(p, x, dw[start:end], trans_a=True, trans_b=False, alpha=1.0, accumulate=accumulate, stride_a=stride)
    if sums is not dxs:
        for dx, dx_sum in zip(dxs, sums, strict=True):
            add_float(dx_sum, dx, accumulate=not first)


def _sums_behind_logits(scratch: DeviceArray, dxs: Sequence[DeviceArray], num_columns: int) -> list[DeviceArray]:
    """Return arrays in fp32 for the sums of dx over blocks of columns, which are rounded once at the end."""
    ends = accumulate_sizes([head_scratch_nbytes(dxs[0].shape[0], num_columns, 0), *(4 * dx.size for dx in dxs)])
    return [DeviceArray(scratch.address + end, dx.shape, _FLOAT) for end, dx in zip(ends, dxs, strict=False)]


def _gradient_columns(p: DeviceArray, dbias: DeviceArray, stride: int) -> None:
    """dbias = sums of the columns of p, whose rows begin `stride` elements apart."""
    num_rows, width = p.shape
    pieces = pieces_of(num_rows, width)
    out = device().partials.at(_FLOAT, pieces, width) if pieces > 1 else dbias
    grid = (-(-width // 32), pieces, 1)
    _source.start("gradient_columns", p.dtype, p, out, np.int32(num_rows), np.int32(width), np.int32(stride), grid=grid, shared=4 * THREADS)
    if pieces > 1:
        _source.start("gradient_columns_of_pieces", p.dtype, out, dbias, np.int32(pieces), np.int32(width), grid=(grid[0], 1, 1), shared=4 * THREADS)


def _position(shape: tuple[int, ...], origin: tuple[int, ...], extents: tuple[int, ...]) -> Any:
    """Return a tile's position in its tensor of up to 4 axes."""
    position, stride = np.zeros((), _POSITION), 1
    position["extents"] = 1
    for axis in range(1, len(shape) + 1):
        position["extents"][4 - axis], position["origin"][4 - axis], position["strides"][4 - axis] = extents[-axis], origin[-axis], stride
        stride *= shape[-axis]
    return position[()]


@register("dropout", "cuda")
def dropout(
    x: DeviceArray,
    key: DeviceArray,
    y: DeviceArray,
    *,
    p: float,
    stream: int,
    shape: tuple[int, ...],
    origin: tuple[int, ...],
    bias: DeviceArray | None = None,
) -> None:
    """y = (x [+ bias, rounded]) / (1 - p) for elements that survive, else 0; `key` holds (seed, step)."""
    numbers = (np.float32(p), np.uint32(threshold(p)), np.int32(stream), _position(shape, origin, x.shape), np.int32(x.shape[-1]))
    _source.each("dropout", x.dtype, x.size, x, bias, key, y, *numbers, is_wide=True)


@register("keyed_uniform", "cuda")
def keyed_uniform(key: DeviceArray, out: DeviceArray, *, stream: int) -> None:
    """out ~ U[0, 1) in steps of 2^-24 by element index; `key` holds (seed, step)."""
    _source.each("keyed_uniform", out.dtype, out.size, key, out, np.int64(stream))


def _key(*numbers: int) -> np.uint64:
    low, high = mix(*numbers)
    return np.uint64(low | high << 32)


@register("random_normal", "cuda")
def random_normal(out: DeviceArray, *, std: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ N(0, std^2)."""
    keys = (_key(seed, 0, stream), _key(seed, 1, stream))
    _source.each("random_normal", out.dtype, out.size, out, np.float64(std), *keys, _position(shape, origin, out.shape))


@register("random_uniform", "cuda")
def random_uniform(out: DeviceArray, *, low: float, high: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ U(low, high)."""
    numbers = (np.float64(low), np.float64(high), _key(seed, 0, stream), _position(shape, origin, out.shape))
    _source.each("random_uniform", out.dtype, out.size, out, *numbers)
