"""Compiled products of fp32 rows with fp32 weights, where each row has the bits that it would have alone.

A BLAS chooses its loops by the number of rows, so the bits of a row depend on the number of other rows. Here every sum of a row and a column has one
order, which follows from the number of features alone, not from the numbers of rows and columns that are computed together. So the scores of a text
do not depend on the other texts of a batch (`matmul.are_tokens`). The body is written in LLVM's vector types, as in `block_loops`.

Ladder, R x 576 @ (1536, 576)^T from memory, one core with AVX-512, for R = 1, 4, 16, 64: BLAS 0.87 / 0.92 / 1.08 / 1.53 ms, here 0.28 / 0.40 / 0.71 /
1.28 ms; with weights (576, 1536) BLAS 0.28 / 0.67 / 0.81 / 1.29 ms, here 0.26 / 0.47 / 0.76 / 1.3 ms. Weights (1024, 4096) without pieces of 64
features, R = 16: 5.6 ms, as each of their rows lies on another page of memory. Weights (N, K) fetched 8 KiB ahead, one row, from memory, on a shared
core: (512, 256) 10.0 -> 17.5 GB/s, (1024, 512) 13.8 -> 18.7, (2048, 1024) 20.3 -> 23.0; 32 KiB ahead 14.4 / 16.8 / 21.2.
"""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import EXACT, Array, compiled
from .exp_loops import _silu
from .vectors import F32, FLOATS, IS_WIDE, LANES, add_product, addresses, group_begins, in_groups, int64, load, prefetch, spread, store, total, zeros

_NUMBER: Final = 4
_VECTOR: Final = LANES * _NUMBER
_ROWS: Final = (4, 2, 1) if IS_WIDE else (2, 1)
"""Numbers of rows that are computed together, largest first."""
_COLUMNS: Final = (4, 1) if IS_WIDE else (2, 1)
"""Numbers of columns of weights (N, K) that are computed together: their sums and those of `_ROWS` fit the registers."""
_WIDTHS: Final = (4 * LANES, LANES, 1) if IS_WIDE else (2 * LANES, LANES, 1)
"""Numbers of columns of weights (K, N) that are computed together."""
_AHEAD: Final = 8 << 10
"""Least number of bytes, in whole rows, between the weights (N, K) that are computed and those that are fetched, which the processor does late."""
_PIECE: Final = 64
"""Number of features of weights (K, N) that are computed at a time, since each may lie on another page of memory."""


def _dots(builder: Any, ws: list[Any], xs: list[Any], features: Any, ahead: Any) -> list[list[Any]]:
    """Return the dot products of rows of floats at `xs` and at `ws`: sums of every 16th feature, their total, then the remaining features.

    The data `ahead` bytes after `ws` is fetched at the same time.
    """
    totals = zeros(builder, FLOATS, len(xs), len(ws))
    whole = builder.udiv(features, int64(LANES))
    with cgutils.for_range(builder, whole) as loop:
        offset = builder.mul(loop.index, int64(_VECTOR))
        weights = [load(builder, builder.add(w, offset), 0, FLOATS) for w in ws]
        for w in ws:
            prefetch(builder, builder.add(builder.add(w, ahead), offset))
        for x, slots in zip(xs, totals, strict=True):
            numbers = load(builder, builder.add(x, offset), 0, FLOATS)
            for weight, slot in zip(weights, slots, strict=True):
                add_product(builder, numbers, weight, slot)
    sums = zeros(builder, F32, len(xs), len(ws))
    for slots, row_sums in zip(totals, sums, strict=True):
        for slot, row_sum in zip(slots, row_sums, strict=True):
            builder.store(total(builder, builder.load(slot)), row_sum)
    begin = builder.mul(whole, int64(LANES))
    with cgutils.for_range(builder, builder.sub(features, begin)) as loop:
        offset = builder.mul(builder.add(begin, loop.index), int64(_NUMBER))
        for x, row_sums in zip(xs, sums, strict=True):
            for w, row_sum in zip(ws, row_sums, strict=True):
                add_product(builder, load(builder, builder.add(x, offset), 0, F32), load(builder, builder.add(w, offset), 0, F32), row_sum)
    return [[builder.load(row_sum) for row_sum in row_sums] for row_sums in sums]


def _by_dots(context: Any, w: Any, w_step: Any, columns: Any, features: Any, x: Any, rows: Any, y: Any, accumulate: Any) -> Any:
    """Generate the product with weights (N, K).

    Arguments: address of the weights, bytes from row to row, N, K, address of x (R, K), R, address of y (R, N), whether to add to y.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w, w_step, columns, features, x, rows, y, accumulate = arguments
        x_step, y_step = (builder.mul(size, int64(_NUMBER)) for size in (features, columns))
        num_ahead, least = builder.udiv(int64(_AHEAD), w_step), int64(_COLUMNS[0])
        ahead = builder.mul(w_step, builder.select(builder.icmp_unsigned("<", num_ahead, least), least, num_ahead))
        for width, left in group_begins(builder, columns, _COLUMNS):
            with in_groups(builder, columns, width, left) as column:
                ws = addresses(builder, builder.add(w, builder.mul(column, w_step)), w_step, width)
                for count, top in group_begins(builder, rows, _ROWS):
                    with in_groups(builder, rows, count, top) as row:
                        xs = addresses(builder, builder.add(x, builder.mul(row, x_step)), x_step, count)
                        out = builder.add(builder.add(y, builder.mul(row, y_step)), builder.mul(column, int64(_NUMBER)))
                        for at, sums in zip(addresses(builder, out, y_step, count), _dots(builder, ws, xs, features, ahead), strict=True):
                            for n, each in enumerate(sums):
                                before = load(builder, at, n * _NUMBER, F32)
                                store(builder, builder.select(accumulate, builder.fadd(before, each), each), at, n * _NUMBER)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.boolean), generate


def _add_piece(builder: Any, width: int, w: Any, w_step: Any, xs: list[Any], outs: list[Any], count: Any, adds: Any) -> None:
    """Compute sums over `count` features for the `width` columns at `w`, and write them to `outs`; if `adds`, the sums continue those in `outs`."""
    kind, lanes = (FLOATS, LANES) if width >= LANES else (F32, 1)
    offsets = [n * lanes * _NUMBER for n in range(width // lanes)]
    totals = zeros(builder, kind, len(xs), len(offsets))
    with builder.if_then(adds):
        for out, slots in zip(outs, totals, strict=True):
            for offset, slot in zip(offsets, slots, strict=True):
                builder.store(load(builder, out, offset, kind), slot)
    with cgutils.for_range(builder, count) as loop:
        address = builder.add(w, builder.mul(loop.index, w_step))
        weights = [load(builder, address, offset, kind) for offset in offsets]
        for x, slots in zip(xs, totals, strict=True):
            number = load(builder, builder.add(x, builder.mul(loop.index, int64(_NUMBER))), 0, F32)
            for weight, slot in zip(weights, slots, strict=True):
                add_product(builder, spread(builder, number) if kind == FLOATS else number, weight, slot)
    for out, slots in zip(outs, totals, strict=True):
        for offset, slot in zip(offsets, slots, strict=True):
            store(builder, builder.load(slot), out, offset)


def _by_sums(context: Any, w: Any, w_step: Any, columns: Any, features: Any, x: Any, rows: Any, y: Any, accumulate: Any) -> Any:
    """Generate the product with weights (K, N); the arguments are those of `_by_dots`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w, w_step, columns, features, x, rows, y, accumulate = arguments
        x_step, y_step = (builder.mul(size, int64(_NUMBER)) for size in (features, columns))
        pieces = builder.udiv(builder.add(features, int64(_PIECE - 1)), int64(_PIECE))
        with cgutils.for_range(builder, pieces) as piece:
            first = builder.mul(piece.index, int64(_PIECE))
            rest = builder.sub(features, first)
            num_features = builder.select(builder.icmp_unsigned("<", rest, int64(_PIECE)), rest, int64(_PIECE))
            adds = builder.or_(accumulate, builder.icmp_unsigned(">", first, int64(0)))
            w_first, x_first = builder.add(w, builder.mul(first, w_step)), builder.add(x, builder.mul(first, int64(_NUMBER)))
            for width, left in group_begins(builder, columns, _WIDTHS):
                with in_groups(builder, columns, width, left) as column:
                    offset = builder.mul(column, int64(_NUMBER))
                    for count, top in group_begins(builder, rows, _ROWS):
                        with in_groups(builder, rows, count, top) as row:
                            xs = addresses(builder, builder.add(x_first, builder.mul(row, x_step)), x_step, count)
                            outs = addresses(builder, builder.add(builder.add(y, offset), builder.mul(row, y_step)), y_step, count)
                            _add_piece(builder, width, builder.add(w_first, offset), w_step, xs, outs, num_features, adds)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.boolean), generate


_products_turned, _products = cast(Any, intrinsic(_by_dots)), cast(Any, intrinsic(_by_sums))


@compiled(EXACT)
def multiply_turned(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """y (+)= x @ w^T  # (R, K) @ (N, K)^T -> (R, N); x and y are C-contiguous, w has contiguous rows."""
    _products_turned(w.ctypes.data, w.strides[0], w.shape[0], w.shape[1], x.ctypes.data, x.shape[0], y.ctypes.data, accumulate)


@compiled(EXACT)
def multiply(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """y (+)= x @ w  # (R, K) @ (K, N) -> (R, N); x and y are C-contiguous, w has contiguous rows."""
    _products(w.ctypes.data, w.strides[0], w.shape[1], w.shape[0], x.ctypes.data, x.shape[0], y.ctypes.data, accumulate)


@compiled(EXACT)
def add_expert(x: Array, gate: Array, up: Array, down: Array, choices: Array, weights: Array, y: Array, scratch: Array, expert: int) -> None:
    """y += weight * (silu(x gate^T) * (x up^T)) down^T for the rows that chose the expert; everything is C-contiguous.

    Args:
        x: (R, C).
        gate, up: (I, C).
        down: (C, I).
        choices, weights: (R, K).
        y: (R, C).
        scratch: bytes for two numbers of 4 bytes a row, and 2 (R, I) and (R, C) fp32.
    """
    num_rows, width, inner = x.shape[0], x.shape[1], gate.shape[0]
    numbers, memory = scratch[: 8 * num_rows].view(np.int32), scratch[8 * num_rows :].view(np.float32)
    block, hidden, ups = memory[: num_rows * width], memory[num_rows * width :], memory[num_rows * (width + inner) :]
    count = 0
    for i in range(num_rows):
        for k in range(choices.shape[1]):
            if choices[i, k] == expert:
                numbers[2 * count], numbers[2 * count + 1] = i, k
                for c in range(width):
                    block[count * width + c] = x[i, c]
                count += 1
    _products_turned(gate.ctypes.data, gate.strides[0], inner, width, block.ctypes.data, count, hidden.ctypes.data, False)
    _products_turned(up.ctypes.data, up.strides[0], inner, width, block.ctypes.data, count, ups.ctypes.data, False)
    for i in range(count):
        for j in range(i * inner, (i + 1) * inner):
            hidden[j] = _silu(hidden[j]) * ups[j]
    _products_turned(down.ctypes.data, down.strides[0], width, inner, hidden.ctypes.data, count, block.ctypes.data, False)
    for n in range(count):
        i, k = numbers[2 * n], numbers[2 * n + 1]
        for c in range(width):
            y[i, c] += weights[i, k] * block[n * width + c]
