"""Compiled loops with exponentials: GELU, attention weights, the loss; fp32 (see `compiled`).

exp is a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2] after Cody and Waite's reduction (1980), coefficients of Cephes' expf (Moshier 1989), within
2 ulp. Numba's own math.exp calls the C library once per element.

Letters: R rows, N columns.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from .compiled import EXACT, ONE, REASSOCIATE, THREE, TWO, ZERO, Array, compiled, f32, inlined, larger

_LOG2E, _LN2_HIGH, _LN2_LOW = f32(1.44269504088896341), f32(0.693359375), f32(-2.12194440e-4)
_ROUND: Final = f32(12582912.0)
"""1.5 * 2^23: adding it rounds to a whole number, which the low bits then hold."""
_LEAST, _MOST = f32(-86.0), f32(88.0)
_C5, _C4, _C3, _C2, _C1, _C0 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3), f32(4.1665795894e-2), f32(1.6666665459e-1), f32(0.5)


@inlined(EXACT)
def _bounded_exp(x: Any) -> Any:
    """Return exp(x) for one fp32 number between -86 and 88, beyond that exp of the nearer end; NaN stays NaN."""
    a = _LEAST if x < _LEAST else x  # with the operands in this order it is one instruction, which keeps NaN
    a = _MOST if a > _MOST else a
    shifted = a * _LOG2E + _ROUND
    n = shifted - _ROUND
    r = a - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    p = p * (r * r) + r + ONE
    bits = np.int32(np.float32(p).view(np.int32) + (np.float32(shifted).view(np.int32) << np.int32(23)))
    return bits.view(np.float32) if x == x else x


@inlined(EXACT)
def _exp(x: Any) -> Any:
    """Return exp(x) for one fp32 number, and 0 below -86."""
    return ZERO if x < _LEAST else _bounded_exp(x)


@compiled(REASSOCIATE)
def gelu_new(x: Array, y: Array, scale: Any, cubic: Any) -> None:
    """y = x sigmoid(2 u), u = scale (x + cubic x^3): 0.5 x (1 + tanh u) with one exponential  # (N,)."""
    for i in range(x.size):
        a = x[i]
        u = a * (scale + scale * cubic * (a * a))
        y[i] = a / (ONE + _bounded_exp(-TWO * u))


@compiled(REASSOCIATE)
def gelu_new_backward(x: Array, dy: Array, dx: Array, scale: Any, cubic: Any) -> None:
    """dx = dy (s + 2 x s (1 - s) u'), s = sigmoid(2 u)  # (N,)."""
    for i in range(x.size):
        a = x[i]
        square = a * a
        s = ONE / (ONE + _bounded_exp(-TWO * (a * (scale + scale * cubic * square))))
        slope = TWO * scale + TWO * THREE * scale * cubic * square
        dx[i] = dy[i] * (s + s * (ONE - s) * a * slope)


@compiled(EXACT)
def erf_of_all(x: Array) -> None:
    """x = erf(x) by the C library in fp64, rounded once  # (N,)."""
    for i in range(x.size):
        x[i] = f32(math.erf(np.float64(x[i])))


@inlined(EXACT)
def _silu(x: Any) -> Any:
    """Return x sigmoid(x) for one fp32 number."""
    return x / (ONE + _bounded_exp(-x))


@compiled(REASSOCIATE)
def silu_gate(gate: Array, up: Array, y: Array) -> None:
    """y = gate sigmoid(gate) up  # (N,)."""
    for i in range(gate.size):
        a = gate[i]
        y[i] = a / (ONE + _bounded_exp(-a)) * up[i]  # not `_silu`, whose quotient would be rounded by itself


@compiled(REASSOCIATE)
def silu_gate_backward(gate: Array, up: Array, dy: Array, dgate: Array, dup: Array) -> None:
    """dgate = dy up (s + a s (1 - s)), dup = dy a s; a = gate, s = sigmoid(a)  # (N,)."""
    for i in range(gate.size):
        a, g = gate[i], dy[i]
        s = ONE / (ONE + _bounded_exp(-a))
        dgate[i] = g * up[i] * (s + a * s * (ONE - s))
        dup[i] = g * (a * s)


@compiled(REASSOCIATE)
def gelu_new_gate(gates: Array, up: Array, y: Array, scale: Any, cubic: Any) -> None:
    """y = gelu_new(gates) up  # (N,)."""
    for i in range(gates.size):
        a = gates[i]
        u = a * (scale + scale * cubic * (a * a))
        y[i] = a / (ONE + _bounded_exp(-TWO * u)) * up[i]


@compiled(REASSOCIATE)
def gelu_new_gate_backward(gates: Array, up: Array, dy: Array, dgates: Array, dup: Array, scale: Any, cubic: Any) -> None:
    """dgates = dy up (s + 2 a s (1 - s) u'), dup = dy a s; a = gates, s = sigmoid(2 u)  # (N,)."""
    for i in range(gates.size):
        a, g = gates[i], dy[i]
        square = a * a
        s = ONE / (ONE + _bounded_exp(-TWO * (a * (scale + scale * cubic * square))))
        slope = TWO * scale + TWO * THREE * scale * cubic * square
        dgates[i] = g * up[i] * (s + s * (ONE - s) * a * slope)
        dup[i] = g * (a * s)


@inlined(REASSOCIATE)
def _top(row: Array, count: int, top: Any) -> Any:
    """Return the largest of `top` and the first `count` numbers of a row."""
    for j in range(count):
        top = larger(top, row[j])
    return top


@inlined(REASSOCIATE)
def _exp_row(row: Array, count: int, shift: Any) -> Any:
    """row = exp(row - shift) for the first `count` numbers, 0 for the others; return their sum."""
    total = ZERO
    for j in range(count):
        e = _exp(row[j] - shift)
        row[j] = e
        total += e
    for j in range(count, row.size):
        row[j] = ZERO
    return total


@compiled(REASSOCIATE)
def attention_weights(s: Array, seen: int, peak: Array, total: Array, shrink: Array, first: bool) -> None:
    """Online softmax (Milakov and Gimelshein 2018) of a block of scores in place: s = exp(s - peak), 0 for masked keys  # (R, N).

    Row i sees `seen + i` keys. `peak` and `total` are the running maximum and sum, unused if `first`; `shrink` receives the factor of older sums.
    """
    width = s.shape[1]
    for i in range(s.shape[0]):
        row, count = s[i], max(0, min(width, seen + i))
        before = -f32(np.inf) if first else peak[i]
        top = _top(row, count, before)
        shrink[i] = ZERO if first else _exp(before - top)
        weight_sum = _exp_row(row, count, top)
        total[i] = weight_sum if first else total[i] * shrink[i] + weight_sum
        peak[i] = top


@compiled(REASSOCIATE)
def attention_weights_again(s: Array, seen: int, lse: Array) -> None:
    """s = exp(s - lse), 0 for masked keys; row i sees `seen + i` keys  # (R, N)."""
    for i in range(s.shape[0]):
        _exp_row(s[i], max(0, min(s.shape[1], seen + i)), lse[i])


@inlined(EXACT)
def _tanh(x: Any) -> Any:
    """Return tanh(x) for one fp32 number, within 2^-23; NaN stays NaN."""
    return ONE - TWO / (ONE + _bounded_exp(TWO * x))


@compiled(EXACT)
def capped(s: Array, cap: Any) -> None:
    """s = cap tanh(s / cap)  # (R, N)."""
    factor = ONE / cap
    for i in range(s.shape[0]):
        row = s[i]
        for j in range(row.size):
            row[j] = cap * _tanh(row[j] * factor)


@compiled(EXACT)
def capped_backward(ds: Array, s: Array, cap: Any) -> None:
    """ds *= 1 - tanh(s / cap)^2  # (R, N)."""
    factor = ONE / cap
    for i in range(s.shape[0]):
        row, slopes = s[i], ds[i]
        for j in range(row.size):
            t = _tanh(row[j] * factor)
            slopes[j] *= ONE - t * t


@compiled(REASSOCIATE)
def add_to_lse(s: Array, peak: Array, total: Array) -> None:
    """Add a block of logits to the running maximum and sum of exponentials, without changing the logits  # (R, N)."""
    for i in range(s.shape[0]):
        row = s[i]
        top, found = _top(row, row.size, peak[i]), ZERO
        for j in range(row.size):
            found += _exp(row[j] - top)
        total[i] = total[i] * _exp(peak[i] - top) + found
        peak[i] = top


@compiled(REASSOCIATE)
def scaled_exp(s: Array, lse: Array, scale: Any) -> None:
    """s = scale exp(s - lse)  # (R, N), (R,)."""
    for i in range(s.shape[0]):
        row, shift = s[i], lse[i]
        for j in range(row.size):
            row[j] = scale * _exp(row[j] - shift)


@inlined(REASSOCIATE)
def _cached_scores(q: Array, keys: Array, r: int, count: int, scale: Any, s: Array) -> None:
    """s = scale q k^T for one sequence's query and its first `count` keys  # (H, N)."""
    group = q.shape[1] // keys.shape[2]
    for j in range(count):
        for h in range(q.shape[1]):
            g, total = h // group, ZERO
            for i in range(q.shape[2]):
                total += q[r, h, i] * keys[r, j, g, i]
            s[h, j] = total * scale


@inlined(REASSOCIATE)
def _add_cached_values(s: Array, values: Array, r: int, count: int, o: Array) -> None:
    """o += weights s (H, N) times the first `count` values of one sequence."""
    group = o.shape[1] // values.shape[2]
    for j in range(count):
        for h in range(o.shape[1]):
            g, weight = h // group, s[h, j]
            for i in range(o.shape[2]):
                o[r, h, i] += weight * values[r, j, g, i]


@compiled(REASSOCIATE)
def cached_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    start: int,
    scale: Any,
    s: Array,
    o: Array,
    peak: Array,
    total: Array,
    first: bool,
    last: bool,
) -> None:
    """Add a tile of cached keys to the running attention of one query per sequence.

    Shapes: q, o (R, H, D); keys, values (R, N, G, D), positions start to start + N; positions (R,): sequence r sees keys up to its own; peak,
    total (R, H) as in `attention_weights`; s (H, N) is working memory. The last tile divides by the sums.
    """
    for r in range(q.shape[0]):
        count = min(keys.shape[1], positions[r] + 1 - start)
        if count > 0:
            _cached_scores(q, keys, r, count, scale, s)
            for h in range(q.shape[1]):
                before = -f32(np.inf) if first else peak[r, h]
                top = _top(s[h], count, before)
                shrink = ZERO if first else _exp(before - top)
                weight_sum = _exp_row(s[h, :count], count, top)
                total[r, h] = weight_sum if first else total[r, h] * shrink + weight_sum
                peak[r, h] = top
                for i in range(q.shape[2]):
                    o[r, h, i] = ZERO if first else o[r, h, i] * shrink
            _add_cached_values(s, values, r, count, o)
        if last:
            for h in range(q.shape[1]):
                for i in range(q.shape[2]):
                    o[r, h, i] /= total[r, h]


@compiled(REASSOCIATE)
def paged_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    table: Array,
    first_page: int,
    scale: Any,
    cap: Any,
    window: int,
    s: Array,
    partial: Array,
    peaks: Array,
    totals: Array,
) -> None:
    """Compute the attention of one query a row to each of its pages in a tile, one result per page, not normalised.

    Shapes: q (R, H, D); keys, values (P, T, G, D), pages first_page to first_page + P of T positions; positions (R,); table (R, M); partial
    (R, M, H, D); peaks, totals (R, M, H); s (H, T) is working memory. A row sees keys up to its position, the last `window` of them if that is not 0.
    """
    length, group, factor = keys.shape[1], q.shape[1] // keys.shape[2], ZERO if cap == ZERO else ONE / cap
    for r in range(q.shape[0]):
        position = positions[r]
        for m in range(position // length + 1):
            page = table[r, m] - first_page
            if page < 0 or page >= keys.shape[0]:
                continue
            stop = min(length, position + 1 - m * length)
            low = max(0, position + 1 - window - m * length) if window else 0
            count = max(0, stop - low)
            for j in range(count):
                for h in range(q.shape[1]):
                    g, total = h // group, ZERO
                    for i in range(q.shape[2]):
                        total += q[r, h, i] * keys[page, low + j, g, i]
                    s[h, j] = total * scale if cap == ZERO else cap * _tanh(total * scale * factor)
            for h in range(q.shape[1]):
                top = _top(s[h], count, -f32(1e30))
                totals[r, m, h] = _exp_row(s[h, :count], count, top)
                peaks[r, m, h] = top
                for i in range(q.shape[2]):
                    partial[r, m, h, i] = ZERO
            for j in range(count):
                for h in range(q.shape[1]):
                    g, weight = h // group, s[h, j]
                    for i in range(q.shape[2]):
                        partial[r, m, h, i] += weight * values[page, low + j, g, i]


@compiled(REASSOCIATE)
def combine_pages(partial: Array, peaks: Array, totals: Array, positions: Array, table: Array, length: int, o: Array) -> None:
    """o (R, H, D): sum of the results of `paged_attention` in the order of the pages, normalised."""
    for r in range(o.shape[0]):
        count = positions[r] // length + 1
        for h in range(o.shape[1]):
            top, total = -f32(np.inf), ZERO
            for m in range(count):
                if table[r, m] >= 0:
                    top = larger(top, peaks[r, m, h])
            for i in range(o.shape[2]):
                o[r, h, i] = ZERO
            for m in range(count):
                if table[r, m] >= 0:
                    factor = _exp(peaks[r, m, h] - top)
                    total += totals[r, m, h] * factor
                    for i in range(o.shape[2]):
                        o[r, h, i] += partial[r, m, h, i] * factor
            if total > ZERO:
                for i in range(o.shape[2]):
                    o[r, h, i] /= total
