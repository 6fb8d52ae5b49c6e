"""Compiled loops of AdamW on moments in 8 bits; fp32 (see `compiled`). `reference.moments` has the format.

The position of a number in a table grows linearly between two neighbouring values, and has one slope in a decade. The slopes fall from piece to
piece, so the position is the smallest that the line of any piece gives; only the last piece, up to 1, is steeper. Vector instructions compute all
lines faster than lookups find the piece.

Loops are short so that each becomes vector instructions: lookups apart from arithmetic, and integers cast back to 32 bits after each operation,
because Numba widens them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...reference.moments import SIGNED, UNSIGNED
from .compiled import EXACT, ONE, ZERO, Array, compiled, f32, inlined
from .loops import _scrambled

_BLOCK: Final = 256
_SMALLEST: Final = f32(2.0**-126)  # `reference.moments.SMALLEST`
_MAGNITUDE, _HALF, _LOWER = (np.uint32(number) for number in (0x7FFFFFFF, 16, 0xFFFF))
_ONE_BIT, _SIGN = np.uint32(1), np.uint32(31)


def _lines(values: Array) -> tuple[Array, Array]:
    """Return the intercept and the slope of each piece of the position in a table of values from 0 to 1, in units of 2^-16."""
    low, high = values[:-1].astype(np.float64), values[1:].astype(np.float64)
    slopes = 65536 / (high - low)
    intercepts = 65536 * np.arange(low.size) - slopes * low
    begins = np.append(True, np.abs(slopes[1:] / slopes[:-1] - 1) > 1e-3)  # the values are rounded
    return intercepts[begins].astype(np.float32), slopes[begins].astype(np.float32)


# Numba compiles the tables in, as constants
_SIGNED_AT_0, _SIGNED_SLOPES = _lines(SIGNED[127:])
_UNSIGNED_AT_0, _UNSIGNED_SLOPES = _lines(UNSIGNED)
_SIGNED_LAST, _UNSIGNED_LAST = _SIGNED_SLOPES.size - 1, _UNSIGNED_SLOPES.size - 1
_LOWEST, _SIGNED_TOP, _UNSIGNED_TOP = f32(65536), f32(128 * 65536), f32(255 * 65536)


@inlined(EXACT)
def _largest(bits: Array) -> Any:
    """Return the bits of the largest magnitude of some numbers, given theirs: of a NaN if there is one."""
    top = np.uint32(0)
    for j in range(bits.size):
        top = max(top, np.uint32(bits[j] & _MAGNITUDE))
    return top


@inlined(EXACT)
def _furthest(bits: Array) -> Any:
    """Return the bits of the number of the largest magnitude, given those of all: a positive one if there are two, a NaN if there is one."""
    top = _ONE_BIT
    for j in range(bits.size):
        top = max(top, np.uint32(np.uint32(bits[j] << _ONE_BIT) | np.uint32(np.uint32(bits[j] >> _SIGN) ^ _ONE_BIT)))
    return np.uint32(np.uint32(top >> _ONE_BIT) | np.uint32(np.uint32(np.uint32(top & _ONE_BIT) ^ _ONE_BIT) << _SIGN))


@inlined(EXACT)
def _draw(first: int, key: Any, random: Array) -> None:
    """Write `reference.moments.draws` of a block's elements, the first of which is element `first` of its tile."""
    begin = np.uint32(first)
    for j in range(_BLOCK):
        random[j] = _scrambled(np.uint32(np.uint32(begin + np.uint32(j)) ^ key))


@inlined(EXACT)
def _look_up(table: Array, codes: Array, values: Array) -> None:
    """Write the value of each code."""
    for j in range(codes.size):
        values[j] = table[codes[j]]


@inlined(EXACT)
def _encode_signed(x: Array, scale: Any, random: Array, codes: Array) -> None:
    """Write the codes of first moments, rounded by the upper halves of the random bits."""
    inverse = ONE / max(abs(scale), _SMALLEST)
    inverse = -inverse if scale < ZERO else inverse
    for j in range(codes.size):
        ratio = abs(x[j] * inverse)
        position = _SIGNED_SLOPES[0] * ratio
        for k in range(1, _SIGNED_LAST):
            line = _SIGNED_AT_0[k] + _SIGNED_SLOPES[k] * ratio
            position = line if line < position else position
        line = _SIGNED_AT_0[_SIGNED_LAST] + _SIGNED_SLOPES[_SIGNED_LAST] * ratio
        position = line if line > position else position
        position = position if position < _SIGNED_TOP else _SIGNED_TOP
        number = np.int32(np.uint32(np.uint32(np.int32(position)) + np.uint32(random[j] >> _HALF)) >> _HALF)
        codes[j] = np.uint8(np.int32(127) + (max(-number, np.int32(-127)) if x[j] * inverse < ZERO else number))


@inlined(EXACT)
def _encode_unsigned(x: Array, scale: Any, random: Array, codes: Array) -> None:
    """Write the codes of second moments, rounded by the lower halves of the random bits; code 0 is for 0 alone."""
    inverse = ONE / max(scale, _SMALLEST)
    for j in range(codes.size):
        ratio = x[j] * inverse
        position = _UNSIGNED_AT_0[1] + _UNSIGNED_SLOPES[1] * ratio
        for k in range(2, _UNSIGNED_LAST):
            line = _UNSIGNED_AT_0[k] + _UNSIGNED_SLOPES[k] * ratio
            position = line if line < position else position
        line = _UNSIGNED_AT_0[_UNSIGNED_LAST] + _UNSIGNED_SLOPES[_UNSIGNED_LAST] * ratio
        position = line if line > position else position
        position = position if position > _LOWEST else _LOWEST
        position = position if position < _UNSIGNED_TOP else _UNSIGNED_TOP
        number = np.int32(np.uint32(np.uint32(np.int32(position)) + np.uint32(random[j] & _LOWER)) >> _HALF)
        codes[j] = np.uint8(number if x[j] > ZERO else np.int32(0))


@compiled(EXACT)
def adam8bit(
    p: Array,
    grad: Array,
    m: Array,
    m_scales: Array,
    v: Array,
    v_scales: Array,
    work: Array,
    bits: Array,
    numbers: Array,
    key: Any,
) -> None:
    """Decode m and v, update them and p as `loops.adam` does, encode m and v: block by block  # (N,), scales (N / 256,), work (4, 256).

    Args:
        work: memory of the loop; `bits` is the same memory as uint32.
        numbers: those of `loops.adam` from beta1 to factor (9,).
        key: key of the tile's random bits in this step (uint32).
    """
    beta1, beta2, rest1, rest2, eps = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    step, shrink, keep, factor = numbers[5], numbers[6], numbers[7], numbers[8]
    means, squares, mean_bits, square_bits, random = work[0], work[1], bits[0], bits[1], bits[3]
    for first in range(0, p.size, _BLOCK):
        block, last = first // _BLOCK, min(first + _BLOCK, p.size)
        weights, slopes, m_codes, v_codes = p[first:last], grad[first:last], m[first:last], v[first:last]
        size = weights.size
        m_scale, v_scale = m_scales[block], v_scales[block]
        _look_up(SIGNED, m_codes, means)
        _look_up(UNSIGNED, v_codes, squares)
        for j in range(size):
            g = slopes[j] * factor
            mean = means[j] * m_scale * beta1 + g * rest1
            square = squares[j] * v_scale * beta2 + g * g * rest2
            means[j] = mean
            squares[j] = square
            weights[j] = weights[j] * keep - step * mean / (np.sqrt(square) * shrink + eps)
        bits[2, 0], bits[2, 1] = _furthest(mean_bits[:size]), _largest(square_bits[:size])
        m_scale, v_scale = work[2, 0], work[2, 1]
        m_scales[block], v_scales[block] = m_scale, v_scale
        _draw(first, key, random)
        _encode_signed(means, m_scale, random, m_codes)
        _encode_unsigned(squares, v_scale, random, v_codes)
