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

from .compiled import REASSOCIATE, Array, compiled

Decoded = tuple[Any, Any, Any]
"""(scale, first 16 values as floats, last 16) of a block."""

_LANES: Final = 16
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _INTS, _FLOATS = (ir.VectorType(kind, _LANES) for kind in (_I8, _I32, _F32))
_FUSED: Final = ("contract",)
_X_BYTES: Final = 128
"""32 floats."""


def _constant(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """What lies `offset` bytes behind an address, at any alignment."""
    found = builder.load(builder.inttoptr(builder.add(address, _constant(_I64, offset)), kind.as_pointer()))
    found.align = 1
    return found


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    builder.store(value, builder.inttoptr(builder.add(address, _constant(_I64, offset)), value.type.as_pointer()), align=1)


def _spread(builder: Any, value: Any) -> Any:
    """A number in all lanes."""
    nothing = ir.Constant(ir.VectorType(value.type, _LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _constant(_I32, 0)), nothing, _constant(_INTS, 0))


def _total(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, in halves."""
    count = _LANES
    while count > 1:
        count //= 2
        halves = (ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count))) for first in (0, count))
        nothing = ir.Constant(vector.type, ir.Undefined)
        low, high = (builder.shuffle_vector(vector, nothing, half) for half in halves)
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, _constant(_I32, 0))


def _scale(builder: Any, address: Any) -> Any:
    """The fp16 number at an address as fp32, in all lanes: its exponent and mantissa moved in place, times 2^112; exact for denormals too."""
    bits = builder.zext(_load(builder, address, 0, _I16), _I32)
    size = builder.shl(builder.and_(bits, _constant(_I32, 0x7FFF)), _constant(_I32, 13))
    sign = builder.shl(builder.and_(bits, _constant(_I32, 0x8000)), _constant(_I32, 16))
    return builder.fmul(builder.bitcast(_spread(builder, builder.or_(size, sign)), _FLOATS), _constant(_FLOATS, 2.0**112))


def _q8_0(builder: Any, address: Any) -> Decoded:
    low, high = (builder.sitofp(builder.sext(_load(builder, address, at, _BYTES), _INTS), _FLOATS) for at in (2, 18))
    return _scale(builder, address), low, high


def _q4_0(builder: Any, address: Any) -> Decoded:
    """A half byte q becomes the last bits of 2^23 + q, from which 2^23 + 8 is taken: exact, and quicker than a conversion."""
    both, begin = builder.zext(_load(builder, address, 2, _BYTES), _INTS), _constant(_INTS, 0x4B000000)
    halves = (builder.and_(both, _constant(_INTS, 15)), builder.lshr(both, _constant(_INTS, 4)))
    low, high = (builder.fsub(builder.bitcast(builder.or_(half, begin), _FLOATS), _constant(_FLOATS, 2.0**23 + 8)) for half in halves)
    return _scale(builder, address), low, high


def _dot(decode: Callable[[Any, Any], Decoded], size: int) -> Any:
    """(address of a row of blocks, address of a row of floats, number of blocks) -> their dot product.

    Every second block is added to a sum of its own, since each sum waits for itself.
    """

    def row_dot(context: Any, w: Any, x: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, numbers, blocks = arguments
            totals = [cgutils.alloca_once_value(builder, _constant(_FLOATS, 0.0)) for _ in range(2)]  # type: ignore[no-untyped-call]

            def add(index: Any, total: Any) -> None:
                scale, low, high = decode(builder, builder.add(row, builder.mul(index, _constant(_I64, size))))
                at = builder.add(numbers, builder.mul(index, _constant(_I64, _X_BYTES)))
                first, last = (_load(builder, at, offset, _FLOATS) for offset in (0, 64))
                block = builder.fadd(builder.fmul(first, low, _FUSED), builder.fmul(last, high, _FUSED), _FUSED)
                builder.store(builder.fadd(builder.fmul(block, scale, _FUSED), builder.load(total), _FUSED), total)

            one = _constant(_I64, 1)
            with cgutils.for_range(builder, builder.lshr(blocks, one)) as loop:
                even = builder.shl(loop.index, one)
                add(even, totals[0])
                add(builder.add(even, one), totals[1])
            with builder.if_then(builder.trunc(blocks, ir.IntType(1))):
                add(builder.sub(blocks, one), totals[0])
            return _total(builder, builder.fadd(*map(builder.load, totals)))

        return types.float32(types.int64, types.int64, types.int64), generate

    return cast(Any, intrinsic(row_dot))


def _decode(decode: Callable[[Any, Any], Decoded], size: int) -> Any:
    """(address of blocks, address of floats, number of blocks): overwrite the floats with the numbers, each product rounded once."""

    def decode_row(context: Any, w: Any, out: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, numbers, blocks = arguments
            with cgutils.for_range(builder, blocks) as loop:
                scale, *halves = decode(builder, builder.add(row, builder.mul(loop.index, _constant(_I64, size))))
                at = builder.add(numbers, builder.mul(loop.index, _constant(_I64, _X_BYTES)))
                for half, offset in zip(halves, (0, 64), strict=True):
                    _store(builder, builder.fmul(half, scale), at, offset)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return cast(Any, intrinsic(decode_row))


_dot_q8_0, _dot_q4_0 = _dot(_q8_0, 34), _dot(_q4_0, 18)
_decode_q8_0, _decode_q4_0 = _decode(_q8_0, 34), _decode(_q4_0, 18)


@compiled(REASSOCIATE)
def multiply_q8_0(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """y (+)= x @ w^T  # (R, K) @ (N, K)^T -> (R, N); x and w with contiguous rows that lie one behind the other."""
    numbers, blocks, size = x.ctypes.data, w.ctypes.data, w.shape[1]
    for i in range(x.shape[0]):
        for n in range(w.shape[0]):
            found = _dot_q8_0(blocks + n * size, numbers + i * x.shape[1] * 4, size // 34)
            y[i, n] = y[i, n] + found if accumulate else found


@compiled(REASSOCIATE)
def multiply_q4_0(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """The same."""
    numbers, blocks, size = x.ctypes.data, w.ctypes.data, w.shape[1]
    for i in range(x.shape[0]):
        for n in range(w.shape[0]):
            found = _dot_q4_0(blocks + n * size, numbers + i * x.shape[1] * 4, size // 18)
            y[i, n] = y[i, n] + found if accumulate else found


@compiled(REASSOCIATE)
def decode_q8_0(w: Array, out: Array) -> None:
    """out = the numbers of blocks  # (N, bytes) -> (N, K) fp32, both with contiguous rows."""
    for n in range(w.shape[0]):
        _decode_q8_0(w[n].ctypes.data, out[n].ctypes.data, w.shape[1] // 34)


@compiled(REASSOCIATE)
def decode_q4_0(w: Array, out: Array) -> None:
    """The same."""
    for n in range(w.shape[0]):
        _decode_q4_0(w[n].ctypes.data, out[n].ctypes.data, w.shape[1] // 18)
