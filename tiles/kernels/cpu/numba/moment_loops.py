"""Compiled loops of AdamW on moments in 8 bits; fp32 (see `compiled`). `reference.moments` has the format.

Codes become floats, and floats codes, by shifts and additions of their bits, in vector instructions. Integers are cast back to 32 bits after each
operation, because Numba widens them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...reference.moments import DROPPED, FIRST, SECOND, least_bits
from .compiled import EXACT, ONE, ZERO, Array, compiled, f32, inlined
from .loops import _scrambled

_BLOCK: Final = 256
_SMALLEST: Final = f32(2.0**-126)  # `reference.moments.SMALLEST`
_FIRST_AT_0, _SECOND_AT_0 = np.uint32(least_bits(FIRST)), np.uint32(least_bits(SECOND))
_FIRST_LEAST, _SECOND_LEAST = _FIRST_AT_0.view(f32), _SECOND_AT_0.view(f32)
_FIRST_RANGE, _SECOND_RANGE = ONE - _FIRST_LEAST, ONE - _SECOND_LEAST
_DROPPED: Final = np.uint32(DROPPED)
_CODE, _SIGN, _TO_SIGN = np.uint32(FIRST), np.uint32(FIRST + 1), np.uint32(24)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
# The random bits of a rounding are the upper ones of those that a code lacks
_UPPER, _TO_UPPER = np.uint32(0xFFFF0000), np.uint32(32 - DROPPED)
_LOWER, _TO_LOWER = np.uint32(0xFFFF), np.uint32(DROPPED - 16)


@inlined(EXACT)
def _bits(x: Any) -> Any:
    """Return the bits of a number (uint32)."""
    return f32(x).view(np.uint32)


@inlined(EXACT)
def _first_of(code: Any) -> Any:
    """Return the first moment of a code, in units of the scale over `_FIRST_RANGE`."""
    code = np.uint32(code)
    magnitude = np.uint32(np.uint32(np.uint32(code & _CODE) << _DROPPED) + _FIRST_AT_0).view(f32) - _FIRST_LEAST
    return np.uint32(_bits(magnitude) | np.uint32(np.uint32(code & _SIGN) << _TO_SIGN)).view(f32)


@inlined(EXACT)
def _second_of(code: Any) -> Any:
    """Return the second moment of a code, in units of the scale over `_SECOND_RANGE`."""
    return np.uint32(np.uint32(np.uint32(code) << _DROPPED) + _SECOND_AT_0).view(f32) - _SECOND_LEAST


@inlined(EXACT)
def _largest(bits: Array) -> Any:
    """Return the largest magnitude of some numbers, given their bits: a NaN if there is one."""
    top = np.uint32(0)
    for j in range(bits.size):
        top = max(top, np.uint32(bits[j] & _MAGNITUDE))
    return np.uint32(top).view(f32)


@inlined(EXACT)
def _first_code(x: Any, inverse: Any, random: Any) -> Any:
    """Return the code of a first moment, rounded by the upper half of the random bits."""
    position = np.uint32(_bits(abs(x) * inverse + _FIRST_LEAST) - _FIRST_AT_0)
    code = np.uint32(np.uint32(position + np.uint32(np.uint32(random & _UPPER) >> _TO_UPPER)) >> _DROPPED)
    return np.uint8(np.uint32(code | np.uint32(np.uint32(_bits(x) >> _TO_SIGN) & _SIGN)))


@inlined(EXACT)
def _second_code(x: Any, inverse: Any, random: Any) -> Any:
    """Return the code of a second moment, rounded by the lower half of the random bits; code 0 is for 0 alone."""
    position = np.uint32(_bits(x * inverse + _SECOND_LEAST) - _SECOND_AT_0)
    code = np.uint32(np.uint32(position + np.uint32(np.uint32(random & _LOWER) << _TO_LOWER)) >> _DROPPED)
    return np.uint8(max(code, np.uint32(x > ZERO)))


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
    """Decode m and v, update them and p as `loops.adam` does, encode m and v: block by block  # (N,), scales (N / 256,), work (2, 256).

    Args:
        work: memory of the loop; `bits` is the same memory as uint32.
        numbers: those of `loops.adam` from beta1 to factor (9,).
        key: key of the tile's random bits in this step (uint32).
    """
    beta1, beta2, rest1, rest2, eps = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    step, shrink, keep, factor = numbers[5], numbers[6], numbers[7], numbers[8]
    means, squares = work[0], work[1]
    for first in range(0, p.size, _BLOCK):
        block, last = first // _BLOCK, min(first + _BLOCK, p.size)
        weights, slopes, m_codes, v_codes = p[first:last], grad[first:last], m[first:last], v[first:last]
        size, begin = weights.size, np.uint32(first)
        m_unit, v_unit = m_scales[block] / _FIRST_RANGE * beta1, v_scales[block] / _SECOND_RANGE * beta2
        for j in range(size):
            g = slopes[j] * factor
            mean = _first_of(m_codes[j]) * m_unit + g * rest1
            square = _second_of(v_codes[j]) * v_unit + g * g * rest2
            means[j] = mean
            squares[j] = square
            weights[j] = weights[j] * keep - step * mean / (np.sqrt(square) * shrink + eps)
        m_scale, v_scale = _largest(bits[0, :size]), _largest(bits[1, :size])
        m_scales[block], v_scales[block] = m_scale, v_scale
        m_inverse, v_inverse = _FIRST_RANGE / max(m_scale, _SMALLEST), _SECOND_RANGE / max(v_scale, _SMALLEST)
        for j in range(size):
            random = _scrambled(np.uint32(np.uint32(begin + np.uint32(j)) ^ key))  # `reference.moments.draws`
            m_codes[j] = _first_code(means[j], m_inverse, random)
            v_codes[j] = _second_code(squares[j], v_inverse, random)
