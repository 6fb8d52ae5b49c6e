"""Compiled loops of AdamW on moments in 8 bits; fp32 (see `compiled`). `reference.moments` has the format.

Loops are short so that each becomes vector instructions: lookups apart from arithmetic, and integers cast back to 32 bits after each operation,
because Numba widens them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .compiled import EXACT, ONE, ZERO, Array, compiled, inlined

_BLOCK: Final = 256
_FIRST, _ZERO_CELL, _LAST_CELL = (np.uint32(number) for number in (0x3400, 0x33FF, 0x3F80 - 0x33FF))  # as `cpu.moments`
_NOUGHT, _HALF, _LOWER, _MAGNITUDE, _SIGN = (np.uint32(number) for number in (0, 16, 0xFFFF, 0x7FFFFFFF, 31))


@inlined(EXACT)
def _largest(bits: Array) -> Any:
    """Return the bits of the largest magnitude of some numbers, given theirs: of a NaN if there is one."""
    top = np.uint32(0)
    for j in range(bits.size):
        top = max(top, np.uint32(bits[j] & np.uint32(0x7FFFFFFF)))
    return top


@inlined(EXACT)
def _look_up(table: Array, codes: Array, values: Array) -> None:
    """Write the value of each code."""
    for j in range(codes.size):
        values[j] = table[codes[j]]


@inlined(EXACT)
def _encode(x: Array, bits: Array, scale: Any, cells: Array, codes: Array, size: int) -> None:
    """Write the code whose value is nearest to the magnitude of x / scale, which overwrites x. `bits` are those of x as integers."""
    divisor = scale if scale > ZERO else ONE
    for j in range(size):
        x[j] = x[j] / divisor
    for j in range(size):
        magnitude = np.uint32(bits[j] & _MAGNITUDE)
        cell = np.uint32(min(np.uint32(max(np.uint32(magnitude >> _HALF), _FIRST) - _ZERO_CELL), _LAST_CELL))
        codes[j] = cell if magnitude > _NOUGHT else _NOUGHT
    for j in range(size):
        codes[j] = np.uint32(cells[codes[j]] + np.uint32(bits[j] & _LOWER)) >> _HALF


@compiled(EXACT)
def adam8bit(
    p: Array,
    grad: Array,
    m: Array,
    m_scales: Array,
    v: Array,
    v_scales: Array,
    signed: Array,
    signed_cells: Array,
    unsigned: Array,
    unsigned_cells: Array,
    work: Array,
    bits: Array,
    numbers: Array,
) -> None:
    """Decode m and v, update them and p as `loops.adam` does, encode m and v: block by block  # (N,), scales (N / 256,), work (4, 256).

    Args:
        signed, unsigned: values of the codes (256,).
        signed_cells, unsigned_cells: `cpu.moments._cells` of both tables.
        work: memory of the loop; `bits` is the same memory as uint32.
        numbers: those of `loops.adam` from beta1 to factor (9,).
    """
    beta1, beta2, rest1, rest2, eps = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    step, shrink, keep, factor = numbers[5], numbers[6], numbers[7], numbers[8]
    for first in range(0, p.size, _BLOCK):
        block, last = first // _BLOCK, min(first + _BLOCK, p.size)
        weights, slopes, m_codes, v_codes = p[first:last], grad[first:last], m[first:last], v[first:last]
        means, squares, mean_bits, square_bits, codes = work[0], work[1], bits[0], bits[1], bits[3]
        size = weights.size
        m_scale, v_scale = m_scales[block], v_scales[block]
        _look_up(signed, m_codes, means)
        _look_up(unsigned, v_codes, squares)
        for j in range(size):
            g = slopes[j] * factor
            mean = means[j] * m_scale * beta1 + g * rest1
            square = squares[j] * v_scale * beta2 + g * g * rest2
            means[j] = mean
            squares[j] = square
            weights[j] = weights[j] * keep - step * mean / (np.sqrt(square) * shrink + eps)
        bits[2, 0], bits[2, 1] = _largest(mean_bits[:size]), _largest(square_bits[:size])
        m_scale, v_scale = work[2, 0], work[2, 1]
        m_scales[block], v_scales[block] = m_scale, v_scale
        _encode(means, mean_bits, m_scale, signed_cells, codes, size)
        for j in range(size):
            code = np.int32(codes[j])
            m_codes[j] = np.uint8(np.int32(127) + (max(-code, np.int32(-127)) if mean_bits[j] >> _SIGN else code))
        _encode(squares, square_bits, v_scale, unsigned_cells, codes, size)
        for j in range(size):
            v_codes[j] = np.uint8(codes[j])
