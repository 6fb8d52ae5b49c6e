"""Compiled loops of AdamW on moments in 8 bits; fp32 (see `compiled`). `reference.moments` has the format."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .compiled import EXACT, ONE, ZERO, Array, compiled, inlined

_BLOCK: Final = 256


@inlined(EXACT)
def _largest(bits: Array) -> Any:
    """Return the bits of the largest magnitude of some numbers, given theirs: of a NaN if there is one."""
    top = np.uint32(0)
    for j in range(bits.size):
        top = max(top, np.uint32(bits[j] & np.uint32(0x7FFFFFFF)))
    return top


@inlined(EXACT)
def _encode(x: Array, bits: Array, scale: Any, cells: Array, limits: Array, least: Any, codes: Array) -> None:
    """Write the code whose value is nearest to x / scale, which overwrites x; at least `least` for x above 0. `bits` are those of x as integers."""
    divisor = scale if scale > ZERO else ONE
    for j in range(x.size):
        is_positive = x[j] > ZERO
        ratio = x[j] / divisor
        x[j] = ratio
        codes[j] = np.uint8(least if is_positive else 0)
    for j in range(x.size):
        code = np.int32(cells[bits[j] >> np.uint32(16)])
        code += np.int32(x[j] > limits[code])
        codes[j] = np.uint8(max(code, np.int32(codes[j])))


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
    signed_limits: Array,
    unsigned: Array,
    unsigned_cells: Array,
    unsigned_limits: Array,
    work: Array,
    bits: Array,
    numbers: Array,
) -> None:
    """Decode m and v, update them and p as `loops.adam` does, encode m and v: block by block  # (N,), scales (N / 256,), work (3, 256).

    Args:
        signed, unsigned: values of the codes (256,).
        signed_cells, unsigned_cells: code of the least number with the given upper 16 bits (65536,).
        signed_limits, unsigned_limits: largest number of each code; the last one is infinite (256,).
        work: memory of the loop; `bits` is the same memory as uint32.
        numbers: those of `loops.adam` from beta1 to factor (9,).
    """
    beta1, beta2, rest1, rest2, eps = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    step, shrink, keep, factor = numbers[5], numbers[6], numbers[7], numbers[8]
    for first in range(0, p.size, _BLOCK):
        block, last = first // _BLOCK, min(first + _BLOCK, p.size)
        means, squares = work[0, : last - first], work[1, : last - first]
        m_scale, v_scale = m_scales[block], v_scales[block]
        for j in range(last - first):
            g = grad[first + j] * factor
            mean = signed[m[first + j]] * m_scale * beta1 + g * rest1
            square = unsigned[v[first + j]] * v_scale * beta2 + g * g * rest2
            means[j] = mean
            squares[j] = square
            p[first + j] = p[first + j] * keep - step * mean / (np.sqrt(square) * shrink + eps)
        bits[2, 0], bits[2, 1] = _largest(bits[0, : last - first]), _largest(bits[1, : last - first])
        m_scale, v_scale = work[2, 0], work[2, 1]
        m_scales[block], v_scales[block] = m_scale, v_scale
        _encode(means, bits[0], m_scale, signed_cells, signed_limits, 0, m[first:last])
        _encode(squares, bits[1], v_scale, unsigned_cells, unsigned_limits, 1, v[first:last])
