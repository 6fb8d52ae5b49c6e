"""Compiled loops over blocks of weights (`tiles.block_format`): dot products with fp32 rows, and decoding to fp32.

The body of a loop is written in LLVM's vector types, because Numba reaches only 14 GB/s with scalar code here: 16 numbers at a time are widened in
registers from bytes or bits, so decoded weights are never stored. LLVM splits the vectors if the processor's are shorter; the order of sums is
explicit, so bits are the same with AVX2 and AVX-512. A scale is converted exactly and must be finite. The element type of the blocks names their
format, and Numba compiles a loop for each. Ladder, q4_0 in GB of blocks a second, from the cache / from memory: with conversions of integers and one
sum 18.2 / 17.9, with bits of floats and two sums 20.5 / 20.1. Four rows of weights at a time: no faster. All formats: `cpu.quantised`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ....block_format import BLOCK_FORMATS
from .block_decoders import DECODERS, Decoder, ScaledGroup
from .compiled import EXACT, Array, compiled
from .vectors import (
    F32,
    FLOATS,
    IS_WIDE,
    add_product,
    addresses,
    fused,
    group_begins,
    in_groups,
    int64,
    load,
    store,
    total,
    zeros,
)

ELEMENTS: Final[Mapping[str, Any]] = {name: np.dtype([(name, np.uint8, (each.block_bytes,))]) for name, each in BLOCK_FORMATS.items()}
"""Name of a format -> element type of arrays of its blocks, which the loops expect."""

_VECTOR_BYTES: Final = 64
_PANEL: Final = 64
"""Number of rows of blocks that are multiplied by all rows of floats, a few at a time, while they are in the cache."""


def _decoder(blocks: Any) -> tuple[Decoder, int, int]:
    """Return the decoder for an array type of blocks, the bytes of a block, and the bytes of its numbers as floats."""
    (name,) = blocks.dtype.fields
    kind = BLOCK_FORMATS[name]
    return DECODERS[name], kind.block_bytes, 4 * kind.block_values


def _add(builder: Any, group: ScaledGroup, numbers: Sequence[Any], slot: Any) -> None:
    """Add the products of a group and its floats, 16 for each of its vectors, to a sum."""
    if group.least is not None:
        for vector, x in zip(group.numbers, numbers, strict=True):
            add_product(builder, x, fused(builder, vector, group.scale, group.least), slot)
        return
    products = builder.fmul(numbers[0], group.numbers[0])
    for vector, x in zip(group.numbers[1:], numbers[1:], strict=True):
        products = fused(builder, x, vector, products)
    if group.scale is not None:
        add_product(builder, products, group.scale, slot)
    else:
        builder.store(builder.fadd(products, builder.load(slot)), slot)


def _multiply(context: Any, w: Any, blocks: Any, num_blocks: Any, columns: Any, x: Any, rows: Any, y: Any, accumulate: Any) -> Any:
    """Generate the product; a block is decoded once for all rows that are computed together, and a row's sums do not depend on other rows.

    Arguments: array of blocks, their address, blocks in a row, their rows, address of floats, their rows, address of the products, whether to add.
    """
    decode, size, x_size = _decoder(w)
    together = (8, 4, 2, 1) if IS_WIDE and x_size <= 2 * _VECTOR_BYTES else (4, 2, 1) if IS_WIDE else (2, 1)  # their sums fit the registers

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, w, num_blocks, columns, x, rows, y, accumulate = arguments
        w_step, x_step, y_step = (builder.mul(*pair) for pair in ((num_blocks, int64(size)), (num_blocks, int64(x_size)), (columns, int64(4))))
        panels = builder.udiv(builder.add(columns, int64(_PANEL - 1)), int64(_PANEL))
        with cgutils.for_range(builder, panels) as panel:
            begin = builder.mul(panel.index, int64(_PANEL))
            rest = builder.sub(columns, begin)
            num_columns = builder.select(builder.icmp_unsigned("<", rest, int64(_PANEL)), rest, int64(_PANEL))
            for count, first in group_begins(builder, rows, together):
                with in_groups(builder, rows, count, first) as row, cgutils.for_range(builder, num_columns) as loop:
                    column = builder.add(begin, loop.index)
                    numbers = addresses(builder, builder.add(x, builder.mul(row, x_step)), x_step, count)
                    sums = _dots(builder, decode, size, x_size, builder.add(w, builder.mul(column, w_step)), numbers, num_blocks)
                    out = builder.add(builder.add(y, builder.mul(row, y_step)), builder.mul(column, int64(4)))
                    for at, dot in zip(addresses(builder, out, y_step, count), sums, strict=True):
                        store(builder, builder.select(accumulate, builder.fadd(load(builder, at, 0, F32), dot), dot), at, 0)
        return context.get_dummy_value()

    return types.void(w, *[types.int64] * 6, types.boolean), generate


def _dots(builder: Any, decode: Decoder, size: int, x_size: int, row: Any, numbers: Sequence[Any], num_blocks: Any) -> list[Any]:
    """Return dot products of a row of blocks with the rows of floats at `numbers`; groups alternate between two sums, which shortens the chain."""
    totals = zeros(builder, FLOATS, len(numbers), 2)

    def add(index: Any, turn: int) -> None:
        begin, offset = builder.mul(index, int64(x_size)), 0
        for number, group in enumerate(decode(builder, builder.add(row, builder.mul(index, int64(size)))), turn):
            for address, slots in zip(numbers, totals, strict=True):
                block_address = builder.add(address, begin)
                floats = [load(builder, block_address, offset + _VECTOR_BYTES * vector, FLOATS) for vector in range(len(group.numbers))]
                _add(builder, group, floats, slots[number % 2])
            offset += _VECTOR_BYTES * len(group.numbers)

    if x_size > 2 * _VECTOR_BYTES:  # several groups
        with cgutils.for_range(builder, num_blocks) as loop:
            add(loop.index, 0)
    else:
        with cgutils.for_range(builder, builder.lshr(num_blocks, int64(1))) as loop:
            even = builder.shl(loop.index, int64(1))
            add(even, 0)
            add(builder.add(even, int64(1)), 1)
        with builder.if_then(builder.trunc(num_blocks, ir.IntType(1))):
            add(builder.sub(num_blocks, int64(1)), 0)
    return [total(builder, builder.fadd(*map(builder.load, slots))) for slots in totals]


def _decode(context: Any, w: Any, row: Any, out: Any, count: Any) -> Any:
    """Generate the decoding of blocks, with each operation rounded once.

    Arguments: array of blocks, address of the first block, address of the floats to overwrite, number of blocks.
    """
    decode, size, x_size = _decoder(w)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, row, numbers, blocks = arguments
        with cgutils.for_range(builder, blocks) as loop:
            address, offset = builder.add(numbers, builder.mul(loop.index, int64(x_size))), 0
            for group in decode(builder, builder.add(row, builder.mul(loop.index, int64(size)))):
                for vector in group.numbers:
                    value = vector if group.scale is None else builder.fmul(vector, group.scale)
                    store(builder, value if group.least is None else builder.fadd(value, group.least), address, offset)
                    offset += _VECTOR_BYTES
        return context.get_dummy_value()

    return types.void(w, types.int64, types.int64, types.int64), generate


_products, _decode_row = cast(Any, intrinsic(_multiply)), cast(Any, intrinsic(_decode))


@compiled(EXACT)
def multiply(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """y (+)= x @ w^T  # (R, K) @ (N, K)^T -> (R, N); w (N, blocks) of `ELEMENTS`; all arrays are C-contiguous."""
    _products(w, w.ctypes.data, w.shape[1], w.shape[0], x.ctypes.data, x.shape[0], y.ctypes.data, accumulate)


@compiled(EXACT)
def decode(w: Array, out: Array) -> None:
    """out = the numbers of blocks  # (N, blocks) of `ELEMENTS` -> (N, K) fp32, both with contiguous rows."""
    for n in range(w.shape[0]):
        _decode_row(w, w.ctypes.data + n * w.strides[0], out.ctypes.data + n * out.strides[0], w.shape[1])
