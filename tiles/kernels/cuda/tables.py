"""Lookup, the loss of a linear head and random numbers on a GPU.

The program must refuse ids outside the vocabulary when it reads them, since GPU kernels cannot raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate as accumulate_sizes
from itertools import product as grid_of
from typing import Any, Final, NamedTuple

import numpy as np

from scheduler.machine import KernelChain, Link

from ..reference.loss import PLAIN, Backward, Head, backward_tiles, forward_tiles
from ..reference.random import mix, threshold
from ..registry import register, register_chain
from .array import DeviceArray
from .elementwise import add_float, arrivals, fill, start_with_sums
from .launch import SOURCES, THREADS, KernelSource, device
from .many import Task, pieces_of

_source = KernelSource("tables")
_FLOAT: Final = np.dtype(np.float32)
COLUMNS: Final = 8192
"""Number of logits per row, over all rows, for which there is memory."""
LEAST_ROWS: Final = 1024
"""Smallest number of rows whose logits are computed over all columns: with fewer, products take longer than the logits that they save."""
_ROWS: Final = 128
"""Divisor of the number of rows whose logits exist at a time, the rows of a block of large products."""
_TOKENS: Final = int(re.findall(r"#define TOKENS (\d+)", (SOURCES / "tables.cu").read_text())[0])
"""Number of tokens that a thread of `embedding_backward` compares at a time."""
_POSITION: Final = np.dtype([("extents", np.int32, 4), ("origin", np.int32, 4), ("strides", np.int64, 4)])


class Logits(NamedTuple):
    """Logits of some rows of the head.

    Attributes:
        rows: their numbers among all rows.
        columns: numbers of the columns among those of the tile.
        padded: (R, stride) fp32, of which the first numbers of each row are logits.
    """

    rows: slice
    columns: slice
    padded: DeviceArray

    @property
    def sizes(self) -> tuple[np.int32, np.int32]:
        """Width and stride of a row, as arguments of kernels."""
        return np.int32(self.columns.stop - self.columns.start), np.int32(self.padded.shape[1])


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
    shared = 4 * (THREADS + 32 + _TOKENS * THREADS)
    _source.start("embedding_backward", dy.dtype, tokens, dy, dtable, *numbers, grid=(tokens.size, 1, 1), threads=THREADS, shared=shared)


def head_scratch_nbytes(num_rows: int, num_columns: int, width: int) -> int:
    """Return the working memory of a task of the head: `COLUMNS` logits for each row, and in a backward pass of bf16 tiles dx in fp32.

    Args:
        num_rows: number of tokens.
        num_columns: number of rows of the vocabulary tile.
        width: number of features of all tiles of dx; 0 if no dx has to be summed.
    """
    return 4 * num_rows * (min(COLUMNS, _stride_of(num_columns)) + width)


def _stride_of(num_columns: int) -> int:
    """Return the distance of rows of logits: a multiple of 32 bytes, so that kernels and cuBLAS can read 16 bytes at a time."""
    return -(-num_columns // 8) * 8


def _rows_at_once(num_rows: int, num_columns: int) -> int:
    """Return the number of rows whose logits fit the memory of `COLUMNS` logits for every row; 0 if they are too few for large products."""
    if num_columns <= COLUMNS:
        return num_rows
    count = num_rows * COLUMNS // _stride_of(num_columns)
    return count - count % _ROWS if count >= LEAST_ROWS else 0


def _logits(xs: Sequence[DeviceArray], ws: Sequence[DeviceArray], bias: DeviceArray | None, cap: float, scratch: DeviceArray) -> Iterator[Logits]:
    """Yield the logits of pieces of rows over all columns of the tile, or of `COLUMNS` columns of all rows, if pieces would have few rows."""
    (num_rows, _), num_columns = xs[0].shape, ws[0].shape[0]
    at_once = _rows_at_once(num_rows, num_columns)
    steps = (at_once, num_columns) if at_once else (num_rows, COLUMNS)
    for first_row, first in grid_of(range(0, num_rows, steps[0]), range(0, num_columns, steps[1])):
        rows, columns = slice(first_row, min(first_row + steps[0], num_rows)), slice(first, min(first + steps[1], num_columns))
        count, width = rows.stop - rows.start, columns.stop - columns.start
        padded = scratch.at(_FLOAT, count, _stride_of(width))
        for number, (x, w) in enumerate(zip(xs, ws, strict=True)):
            s, stride = padded.at(_FLOAT, count, width), padded.shape[1]
            device().gemm(x[rows], w[columns], s, trans_a=False, trans_b=True, alpha=1.0, accumulate=number > 0, stride_out=stride)
        logits = Logits(rows, columns, padded)
        if bias is not None or cap:
            piece = None if bias is None else bias[columns]
            _source.each("shape_logits", xs[0].dtype, padded.size, padded, piece, np.float32(cap), *logits.sizes)
        yield logits


def _add_to_statistics(logits: Logits, statistics: Sequence[DeviceArray], v_start: int, first: bool) -> None:
    """Add logits to the running statistics of their rows: targets, peak, total, picked."""
    tiles = [tile.reshape(-1)[logits.rows] for tile in statistics]
    numbers = (np.int32(v_start + logits.columns.start), *logits.sizes, np.int32(first and logits.columns.start == 0))
    _start_rows("add_logits", _FLOAT, logits, logits.padded, *tiles, *numbers)


def _start_rows(kernel: str, element: np.dtype[Any], logits: Logits, *arguments: Any) -> None:
    """Start a kernel with a block for each row, of as many threads as its width has use for.

    A thousand threads read a row, so that the rows that are read at a time, of the vocabulary of GPT-2 0.2 MB each, fit the cache of a GPU together.
    """
    num_rows, width = logits.padded.shape
    threads = 32
    while threads < min(1024, width // 8):
        threads *= 2
    _source.start(kernel, element, *arguments, grid=(num_rows, 1, 1), threads=threads, shared=4 * threads)


@register("head_forward", "cuda")
def head_forward(*tiles: DeviceArray, num_c: int, v_start: int, vocab: int, first: bool, how: Head = PLAIN) -> None:
    """Add one vocabulary tile to the running statistics; `tiles` are those of `forward_tiles`."""
    given = forward_tiles(tiles, num_c, how)
    for logits in _logits([x.rows() for x in given.xs], given.ws, given.bias, how.cap, given.scratch):
        _add_to_statistics(logits, given.statistics, v_start, first)


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
    short, shape = given.xs[0].dtype, (given.ws[0].shape[0], given.xs[0].rows().shape[0])
    is_summed = short != _FLOAT and not _rows_at_once(shape[1], shape[0])
    sums = _sums_after_logits(given.scratch, given.dxs, shape[0]) if is_summed else [dx.rows() for dx in given.dxs]
    for logits in _logits([x.rows() for x in given.xs], given.ws, given.bias, how.cap, given.scratch):
        goes_on = logits.columns.start > 0 or not (first or is_summed)
        _gradients(logits, given, sums, v_start=v_start, scale=scale, cap=how.cap, goes_on=goes_on, accumulate=accumulate)
    if is_summed:
        for dx, dx_sum in zip(given.dxs, sums, strict=True):
            add_float(dx_sum, dx, accumulate=not first)


def _sums_after_logits(scratch: DeviceArray, dxs: Sequence[DeviceArray], num_columns: int) -> list[DeviceArray]:
    """Return arrays in fp32 for the sums of dx over blocks of columns, which are rounded once at the end."""
    dxs = [dx.rows() for dx in dxs]
    ends = accumulate_sizes([head_scratch_nbytes(dxs[0].shape[0], num_columns, 0), *(4 * dx.size for dx in dxs)])
    return [DeviceArray(scratch.address + end, dx.shape, _FLOAT) for end, dx in zip(ends, dxs, strict=False)]


def _gradients(
    logits: Logits, given: Backward, dxs: Sequence[DeviceArray], *, v_start: int, scale: float, cap: float, goes_on: bool, accumulate: bool
) -> None:
    """Turn logits into their gradients in place, and multiply by these."""
    short, (rows, columns, padded) = given.xs[0].dtype, logits
    numbers = (np.int32(v_start + columns.start), *logits.sizes, np.float32(scale), np.float32(cap))
    arrays = (padded, given.targets.reshape(-1)[rows], given.lse.reshape(-1)[rows], given.factor)
    _source.start("logit_gradients", short, *arrays, *numbers, grid=(padded.shape[0], 1, 1))
    _multiply(logits, given, dxs, goes_on=goes_on, accumulate=accumulate)


def _multiply(logits: Logits, given: Backward, dxs: Sequence[DeviceArray], *, goes_on: bool, accumulate: bool) -> None:
    """Multiply by the gradients of logits: rows of dx, which are added to if it `goes_on`, and contributions to dw and dbias."""
    short, (rows, columns, padded), has_rows_before = given.xs[0].dtype, logits, logits.rows.start > 0
    stride = padded.shape[1] * _FLOAT.itemsize // short.itemsize
    p = padded.at(short, padded.shape[0], columns.stop - columns.start)
    if given.dbias is not None:
        _gradient_columns(p, given.dbias[columns], stride, accumulate=has_rows_before)
    for w, dx in zip(given.ws, dxs, strict=True):
        device().gemm(p, w[columns], dx[rows], trans_a=False, trans_b=False, alpha=1.0, accumulate=goes_on, stride_a=stride)
    for x, dw in zip(given.xs, given.dws, strict=bool(given.dws)):
        adds = accumulate or has_rows_before
        device().gemm(p, x.rows()[rows], dw[columns], trans_a=True, trans_b=False, alpha=1.0, accumulate=adds, stride_a=stride)


def _head(tasks: Sequence[Task]) -> None:
    """Forward pass, loss and gradients of a head of one vocabulary tile: logits are computed once, and become gradients while they exist."""
    (forward, constants), (ends, finish), (backward, how) = tasks
    head, given = forward_tiles(forward, 1, constants.get("how", PLAIN)), backward_tiles(backward, 1, how.get("how", PLAIN))
    num_at_once = _rows_at_once(given.xs[0].rows().shape[0], given.ws[0].shape[0])
    if not num_at_once or [*head.xs, *head.ws] != [*given.xs, *given.ws]:
        head_forward(*forward, **constants)
        head_finish(*ends, **finish)
        head_backward(*backward, **how)
        return
    cap = how.get("how", PLAIN).cap
    numbers = (np.int32(constants["first"]), np.float32(how["scale"]), np.float32(cap))
    for logits in _logits([x.rows() for x in given.xs], given.ws, None, cap, given.scratch):
        rows = [tile.reshape(-1)[logits.rows] for tile in (*head.statistics, given.lse)]
        arrays = (logits.padded, *rows, given.factor, np.int32(how["v_start"]), *logits.sizes, *numbers)
        _start_rows("logits_and_gradients", given.xs[0].dtype, logits, *arrays)
        _multiply(logits, given, [dx.rows() for dx in given.dxs], goes_on=not how["first"], accumulate=how["accumulate"])
    head_finish(*ends, **finish)


register_chain(
    KernelChain(
        (head_forward, head_finish, head_backward),
        (*(Link(0, index - 5, 1, index, is_private=True) for index in (1, 2, 3)), Link(1, -2, 2, 3)),
        _head,
    )
)


def _gradient_columns(p: DeviceArray, dbias: DeviceArray, stride: int, *, accumulate: bool) -> None:
    """dbias (+)= sums of the columns of p, whose rows begin `stride` elements apart."""
    num_rows, width = p.shape
    pieces, groups = pieces_of(num_rows, width), -(-width // 32)
    arrays = (p, device().partials.at(_FLOAT, pieces, width), dbias, arrivals(groups))
    sizes = (np.int32(num_rows), np.int32(width), np.int32(stride), np.int32(accumulate))
    _source.start("gradient_columns", p.dtype, *arrays, *sizes, grid=(groups, pieces, 1), shared=4 * THREADS)


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
) -> None:
    """y = x / (1 - p) for elements that survive, else 0; `key` holds (seed, step)."""
    numbers = (np.float32(p), np.uint32(threshold(p)), np.int32(stream), _position(shape, origin, x.shape))
    _source.each("dropout", x.dtype, x.size, x, key, y, *numbers, is_wide=True)


def dropout_sums(
    x: DeviceArray,
    key: DeviceArray,
    y: DeviceArray,
    total: DeviceArray,
    *,
    p: float,
    stream: int,
    shape: tuple[int, ...],
    origin: tuple[int, ...],
    accumulate: bool,
) -> None:
    """y as by `dropout`; total (+)= sums of its rows, as by `column_sums`."""
    numbers = (np.float32(p), np.uint32(threshold(p)), np.int32(stream), _position(shape, origin, x.shape))
    start_with_sums(_source, "dropout_sums", (x, key, y), y, total, numbers, accumulate=accumulate)


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
