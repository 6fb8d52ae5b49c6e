"""Compiled loops over blocks of quantised weights (`tiles.block_format`): dot products with fp32 rows, and decoding to fp32.

The body of a loop is written in LLVM's vector types, because Numba makes 14 GB/s of scalar code here: 16 numbers at a time are widened in registers
from bytes or half bytes, so nothing decoded is ever stored. LLVM splits the vectors where the processor's are shorter; the order of sums is written
down, so bits are the same with AVX2 and AVX-512. A scale is made of its bits, exactly, and must be finite. What is generated stands here, since Numba
notices a change of this file alone.

Ladder for one row x (1, 1024) @ (4096, 1024)^T, one core with AVX-512: fp32 weights from memory by BLAS 0.63 ms; q8_0 / q4_0 in scalar code
1.9 / 1.5 ms, with vectors 0.11 / 0.13 ms. On a later day, q4_0 in GB of blocks a second, from the cache / from memory: with conversions of integers
and one sum 18.2 / 17.9, with bits of floats and two sums 20.5 / 20.1; two cores from memory 20 and 31, of the 33 that they read at most. Four rows of
weights side by side: no quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import EXACT, Array, compiled
from .vectors import (
    BYTES,
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    IS_WIDE,
    add_product,
    addresses,
    constant,
    fused,
    group_begins,
    in_groups,
    load,
    spread,
    store,
    total,
    zeros,
)

Decoded = tuple[Any, Any, Any]
"""(scale, first 16 values as floats, last 16) of a block."""

_X_BYTES: Final = 128
"""32 floats."""
_ROWS: Final = (8, 4, 2, 1) if IS_WIDE else (2, 1)
"""Rows that are taken together: as many as have their sums in registers."""
_PANEL: Final = 64
"""Rows of blocks that go with all rows of floats, a few at a time, while they are in the cache."""


def _scale(builder: Any, address: Any) -> Any:
    """The fp16 number at an address as fp32, in all lanes: its exponent and mantissa moved in place, times 2^112; exact for denormals too."""
    bits = builder.zext(load(builder, address, 0, I16), I32)
    size = builder.shl(builder.and_(bits, constant(I32, 0x7FFF)), constant(I32, 13))
    sign = builder.shl(builder.and_(bits, constant(I32, 0x8000)), constant(I32, 16))
    return builder.fmul(builder.bitcast(spread(builder, builder.or_(size, sign)), FLOATS), constant(FLOATS, 2.0**112))


def _q8_0(builder: Any, address: Any) -> Decoded:
    low, high = (builder.sitofp(builder.sext(load(builder, address, at, BYTES), INTS), FLOATS) for at in (2, 18))
    return _scale(builder, address), low, high


def _q4_0(builder: Any, address: Any) -> Decoded:
    """A half byte q becomes the last bits of 2^23 + q, from which 2^23 + 8 is taken: exact, and quicker than a conversion."""
    both, begin = builder.zext(load(builder, address, 2, BYTES), INTS), constant(INTS, 0x4B000000)
    halves = (builder.and_(both, constant(INTS, 15)), builder.lshr(both, constant(INTS, 4)))
    low, high = (builder.fsub(builder.bitcast(builder.or_(half, begin), FLOATS), constant(FLOATS, 2.0**23 + 8)) for half in halves)
    return _scale(builder, address), low, high


def _products(decode: Callable[[Any, Any], Decoded], size: int, *, ends_fused: bool) -> Any:
    """(address of blocks, their number in a row, rows of blocks, address of floats, their rows, address of the products, whether to add to them).

    A row of floats takes the same sums whatever rows there are beside it. A block is decoded once for all rows that are taken together. Every second
    block is added to a sum of its own, since each sum waits for itself.
    """

    def multiply(context: Any, w: Any, blocks: Any, columns: Any, x: Any, rows: Any, y: Any, accumulate: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            w, blocks, columns, x, rows, y, accumulate = arguments
            w_step, x_step, y_step = (builder.mul(*pair) for pair in ((blocks, _of(size)), (blocks, _of(_X_BYTES)), (columns, _of(4))))
            panels = builder.udiv(builder.add(columns, _of(_PANEL - 1)), _of(_PANEL))
            with cgutils.for_range(builder, panels) as panel:
                begin = builder.mul(panel.index, _of(_PANEL))
                rest = builder.sub(columns, begin)
                num_columns = builder.select(builder.icmp_unsigned("<", rest, _of(_PANEL)), rest, _of(_PANEL))
                for count, first in group_begins(builder, rows, _ROWS):
                    with in_groups(builder, rows, count, first) as row, cgutils.for_range(builder, num_columns) as loop:
                        column = builder.add(begin, loop.index)
                        numbers = addresses(builder, builder.add(x, builder.mul(row, x_step)), x_step, count)
                        sums = _dots(builder, decode, size, ends_fused, builder.add(w, builder.mul(column, w_step)), numbers, blocks)
                        out = builder.add(builder.add(y, builder.mul(row, y_step)), builder.mul(column, _of(4)))
                        for at, found in zip(addresses(builder, out, y_step, count), sums, strict=True):
                            store(builder, builder.select(accumulate, builder.fadd(load(builder, at, 0, F32), found), found), at, 0)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, types.boolean), generate

    return cast(Any, intrinsic(multiply))


def _of(value: int) -> Any:
    """A number of addresses and counts."""
    return constant(I64, value)


def _dots(builder: Any, decode: Callable[[Any, Any], Decoded], size: int, ends_fused: bool, row: Any, numbers: list[Any], blocks: Any) -> list[Any]:
    """Dot products of a row of blocks with rows of floats that begin at `numbers`.

    Args:
        ends_fused: whether the last 16 products of a block are added before they are rounded, or the first 16.
    """
    totals = zeros(builder, FLOATS, len(numbers), 2)

    def add(index: Any, which: int) -> None:
        scale, low, high = decode(builder, builder.add(row, builder.mul(index, _of(size))))
        offset = builder.mul(index, _of(_X_BYTES))
        for begin, slots in zip(numbers, totals, strict=True):
            first, last = (load(builder, builder.add(begin, offset), at, FLOATS) for at in (0, 64))
            block = fused(builder, last, high, builder.fmul(first, low)) if ends_fused else fused(builder, first, low, builder.fmul(last, high))
            add_product(builder, block, scale, slots[which])

    with cgutils.for_range(builder, builder.lshr(blocks, _of(1))) as loop:
        even = builder.shl(loop.index, _of(1))
        add(even, 0)
        add(builder.add(even, _of(1)), 1)
    with builder.if_then(builder.trunc(blocks, ir.IntType(1))):
        add(builder.sub(blocks, _of(1)), 0)
    return [total(builder, builder.fadd(*map(builder.load, slots))) for slots in totals]


def _decode(decode: Callable[[Any, Any], Decoded], size: int) -> Any:
    """(address of blocks, address of floats, number of blocks): overwrite the floats with the numbers, each product rounded once."""

    def decode_row(context: Any, w: Any, out: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, numbers, blocks = arguments
            with cgutils.for_range(builder, blocks) as loop:
                scale, *halves = decode(builder, builder.add(row, builder.mul(loop.index, constant(I64, size))))
                at = builder.add(numbers, builder.mul(loop.index, constant(I64, _X_BYTES)))
                for half, offset in zip(halves, (0, 64), strict=True):
                    store(builder, builder.fmul(half, scale), at, offset)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return cast(Any, intrinsic(decode_row))


_products_q8_0, _products_q4_0 = _products(_q8_0, 34, ends_fused=True), _products(_q4_0, 18, ends_fused=False)
_decode_q8_0, _decode_q4_0 = _decode(_q8_0, 34), _decode(_q4_0, 18)


@compiled(EXACT)
def multiply_q8_0(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """y (+)= x @ w^T  # (R, K) @ (N, K)^T -> (R, N); all with contiguous rows that lie one behind the other."""
    _products_q8_0(w.ctypes.data, w.shape[1] // 34, w.shape[0], x.ctypes.data, x.shape[0], y.ctypes.data, accumulate)


@compiled(EXACT)
def multiply_q4_0(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """The same."""
    _products_q4_0(w.ctypes.data, w.shape[1] // 18, w.shape[0], x.ctypes.data, x.shape[0], y.ctypes.data, accumulate)


@compiled(EXACT)
def decode_q8_0(w: Array, out: Array) -> None:
    """out = the numbers of blocks  # (N, bytes) -> (N, K) fp32, both with contiguous rows."""
    for n in range(w.shape[0]):
        _decode_q8_0(w[n].ctypes.data, out[n].ctypes.data, w.shape[1] // 34)


@compiled(EXACT)
def decode_q4_0(w: Array, out: Array) -> None:
    """The same."""
    for n in range(w.shape[0]):
        _decode_q4_0(w[n].ctypes.data, out[n].ctypes.data, w.shape[1] // 18)
