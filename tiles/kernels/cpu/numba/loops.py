"""Compiled loops without exponentials: normalisations, sums, optimizer, tables, conversions, dropout; fp32 (see `compiled`).

fp64, the type of tests, is left to NumPy.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .compiled import EXACT, ONE, REASSOCIATE, ZERO, Array, compiled, f32, inlined

_HIGH_FACTOR: Final = np.uint32(0x9E3779B9)
_LOW_MASK: Final = np.uint64(0xFFFFFFFF)


@inlined(REASSOCIATE)
def _sum(x: Array) -> Any:
    """Return the sum of a row."""
    total = ZERO
    for j in range(x.size):
        total += x[j]
    return total


@inlined(REASSOCIATE)
def _deviation(x: Array, mean: Any, eps: Any) -> Any:
    """Return 1 / sqrt(variance + eps) of a row."""
    squares = ZERO
    for j in range(x.size):
        away = x[j] - mean
        squares += away * away
    return ONE / np.sqrt(squares / f32(x.size) + eps)


@inlined(REASSOCIATE)
def _normalise_and_sum(x: Array, mean: Any, rstd: Any, gamma: Array, beta: Array, y: Array, following: Array) -> Any:
    """Normalise one row and return the sum of the following one, so that memory is read while it is written."""
    total = ZERO
    for j in range(x.size):
        y[j] = (x[j] - mean) * rstd * gamma[j] + beta[j]
        total += following[j]
    return total


@compiled(REASSOCIATE)
def layer_norm(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, eps: Any) -> None:
    """y = (x - mean) rstd gamma + beta  # (R, N)."""
    last = x.shape[0] - 1
    total = _sum(x[0])
    for i in range(x.shape[0]):
        m = total / f32(x.shape[1])
        s = _deviation(x[i], m, eps)
        mean[i], rstd[i] = m, s
        total = _normalise_and_sum(x[i], m, s, gamma, beta, y[i], x[min(i + 1, last)])


@inlined(REASSOCIATE)
def _add_and_sum(x: Array, r: Array, s: Array) -> Any:
    """s = x + r for a row; return its sum."""
    total = ZERO
    for j in range(x.size):
        both = x[j] + r[j]
        s[j] = both
        total += both
    return total


@compiled(REASSOCIATE)
def residual_layer_norm(x: Array, r: Array, gamma: Array, beta: Array, s: Array, y: Array, mean: Array, rstd: Array, eps: Any) -> None:
    """s = x + r; y = layer_norm(s)  # (R, N)."""
    for i in range(x.shape[0]):
        row, out = s[i], y[i]
        m = _add_and_sum(x[i], r[i], row) / f32(x.shape[1])
        factor = _deviation(row, m, eps)
        mean[i], rstd[i] = m, factor
        for j in range(row.size):
            out[j] = (row[j] - m) * factor * gamma[j] + beta[j]


@compiled(REASSOCIATE)
def layer_norm_backward(
    x: Array, gamma: Array, mean: Array, rstd: Array, dy: Array, extra: Array, dx: Array, dgamma: Array, dbeta: Array, residual: bool
) -> None:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ extra], g = dy gamma; dgamma += dy xhat; dbeta += dy  # (R, N)."""
    width = x.shape[1]
    for i in range(x.shape[0]):
        m, s = mean[i], rstd[i]
        plain, weighted = ZERO, ZERO
        for j in range(width):
            scaled = dy[i, j] * gamma[j]
            plain += scaled
            weighted += scaled * (x[i, j] - m)
        plain, weighted = plain / f32(width), weighted * s * s / f32(width)
        for j in range(width):
            dgamma[j] += dy[i, j] * ((x[i, j] - m) * s)
        for j in range(width):
            dbeta[j] += dy[i, j]
        if residual:
            for j in range(width):
                dx[i, j] = s * (dy[i, j] * gamma[j] - plain - (x[i, j] - m) * weighted) + extra[i, j]
        else:
            for j in range(width):
                dx[i, j] = s * (dy[i, j] * gamma[j] - plain - (x[i, j] - m) * weighted)


@compiled(REASSOCIATE)
def rms_norm(x: Array, gamma: Array, y: Array, rstd: Array, eps: Any) -> None:
    """y = x rstd gamma, rstd = 1 / sqrt(mean(x^2) + eps)  # (R, N)."""
    for i in range(x.shape[0]):
        s = _deviation(x[i], ZERO, eps)
        rstd[i] = s
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * s * gamma[j]


@compiled(REASSOCIATE)
def rms_norm_backward(x: Array, gamma: Array, rstd: Array, dy: Array, extra: Array, dx: Array, dgamma: Array, residual: bool) -> None:
    """dx = rstd (g - xhat mean(g xhat)) [+ extra], g = dy gamma; dgamma += dy xhat  # (R, N)."""
    width = x.shape[1]
    for i in range(x.shape[0]):
        s, weighted = rstd[i], ZERO
        for j in range(width):
            weighted += dy[i, j] * gamma[j] * x[i, j]
        weighted = weighted * s * s / f32(width)
        for j in range(width):
            dgamma[j] += dy[i, j] * (x[i, j] * s)
        if residual:
            for j in range(width):
                dx[i, j] = s * (dy[i, j] * gamma[j] - x[i, j] * weighted) + extra[i, j]
        else:
            for j in range(width):
                dx[i, j] = s * (dy[i, j] * gamma[j] - x[i, j] * weighted)


@compiled(EXACT)
def rotary(x: Array, cos: Array, sin: Array, y: Array, sign: Any) -> None:
    """Rotate pairs (i, i + R/2) of each head's first R features by the angles of its position  # x, y (B, T, H, D); cos, sin (B or 1, T, R/2)."""
    half = cos.shape[2]
    for b in range(x.shape[0]):
        own = b if cos.shape[0] > 1 else 0
        for t in range(x.shape[1]):
            for h in range(x.shape[2]):
                for i in range(half):
                    first, second, c, s = x[b, t, h, i], x[b, t, h, half + i], cos[own, t, i], sign * sin[own, t, i]
                    y[b, t, h, i] = first * c - second * s
                    y[b, t, h, half + i] = second * c + first * s


@compiled(REASSOCIATE)
def sum_squares(x: Array) -> Any:
    """Return the sum of squares, in fp64 over pieces of 16384 numbers  # (N,)."""
    total = 0.0
    for start in range(0, x.size, 16384):
        piece, subtotal = x[start : start + 16384], ZERO
        for j in range(piece.size):
            subtotal += piece[j] * piece[j]
        total += np.float64(subtotal)
    return total


@inlined(REASSOCIATE)
def _add_four(a: Array, b: Array, c: Array, d: Array, total: Array) -> None:
    """total += a + b + c + d for four rows  # (N,)."""
    for j in range(total.size):
        total[j] += (a[j] + b[j]) + (c[j] + d[j])


@compiled(REASSOCIATE)
def column_sums(x: Array, total: Array) -> None:
    """total += sum over rows, four at a time  # (R, N) -> (N,)."""
    whole = x.shape[0] // 4 * 4
    for i in range(0, whole, 4):
        _add_four(x[i], x[i + 1], x[i + 2], x[i + 3], total)
    for i in range(whole, x.shape[0]):
        a = x[i]
        for j in range(total.size):
            total[j] += a[j]


@compiled(REASSOCIATE)
def scaled_difference(ds: Array, s: Array, delta: Array) -> None:
    """ds = (ds - delta) s  # (R, N), (R,)."""
    for i in range(s.shape[0]):
        out, weights, shift = ds[i], s[i], delta[i]
        for j in range(out.size):
            out[j] = (out[j] - shift) * weights[j]


@compiled(REASSOCIATE)
def head_dots(a: Array, b: Array, dots: Array, size: int) -> None:
    """Row sums of a * b per head  # (t, H * D), (t, H * D) -> (H, t)."""
    for i in range(a.shape[0]):
        for h in range(dots.shape[0]):
            x, y, total = a[i, h * size : (h + 1) * size], b[i, h * size : (h + 1) * size], ZERO
            for j in range(x.size):
                total += x[j] * y[j]
            dots[h, i] = total


@compiled(REASSOCIATE)
def adam(
    p: Array,
    grad: Array,
    m: Array,
    v: Array,
    beta1: Any,
    beta2: Any,
    rest1: Any,
    rest2: Any,
    eps: Any,
    step: Any,
    shrink: Any,
    keep: Any,
    factor: Any,
    penalty: Any,
) -> None:
    """m = beta1 m + rest1 g, v = beta2 v + rest2 g^2, p = keep p - step m / (sqrt(v) shrink + eps), g = factor grad + penalty p  # (N,)."""
    for i in range(p.size):
        g = grad[i] * factor + penalty * p[i]
        mean = m[i] * beta1 + g * rest1
        square = v[i] * beta2 + g * g * rest2
        m[i] = mean
        v[i] = square
        p[i] = p[i] * keep - step * mean / (np.sqrt(square) * shrink + eps)


@compiled(EXACT)
def widen(x: Array, y: Array) -> None:
    """Convert bf16 to fp32, both as their bits  # (N,) uint16 -> (N,) uint32."""
    for i in range(x.size):
        y[i] = np.uint32(x[i]) << np.uint32(16)


@compiled(EXACT)
def narrow(x: Array, y: Array) -> None:
    """Convert fp32 to bf16, both as their bits: to nearest, ties to even; NaN to a quiet NaN of its sign  # (N,) uint32 -> (N,) uint16."""
    for i in range(x.size):
        bits = x[i]
        rounded = np.uint32(bits + np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1)))
        upper = np.uint32(rounded >> np.uint32(16))
        quiet = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
        y[i] = np.uint16(quiet if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else upper)


@compiled(REASSOCIATE)
def normalise_heads(o: Array, total: Array, size: int) -> None:
    """Divide each head's row by its sum  # (t, H * D), (H, t)."""
    for i in range(o.shape[0]):
        for h in range(total.shape[0]):
            row, factor = o[i, h * size : (h + 1) * size], ONE / total[h, i]
            for j in range(row.size):
                row[j] *= factor


@compiled(REASSOCIATE)
def take_rows(table: Array, ids: Array, start: int, out: Array, accumulate: bool) -> None:
    """out = table[ids - start] for ids in the table; other rows become 0, or stay with `accumulate`  # (V, N), (R,) -> (R, N)."""
    for i in range(ids.size):
        row, target = ids[i] - start, out[i]
        if 0 <= row < table.shape[0]:
            source = table[row]
            for j in range(target.size):
                target[j] = source[j]
        elif not accumulate:
            for j in range(target.size):
                target[j] = ZERO


@compiled(REASSOCIATE)
def add_rows_at(rows: Array, ids: Array, start: int, table: Array) -> None:
    """table[ids - start] += rows for ids in the table, in the order of rows  # (R, N), (R,) -> (V, N)."""
    for i in range(ids.size):
        at = ids[i] - start
        if 0 <= at < table.shape[0]:
            source, target = rows[i], table[at]
            for j in range(target.size):
                target[j] += source[j]


@inlined(EXACT)
def _scrambled(x: Any) -> Any:
    """Return `reference.random.scrambled` of one number (uint32)."""
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@inlined(EXACT)
def _mixed(x: Any, key0: Any, key1: Any) -> Any:
    """Return the hash of the reference (`reference.random`), 32 bits."""
    return _scrambled(np.uint32(_scrambled(np.uint32(x ^ key0)) + key1))


@inlined(EXACT)
def _thin_piece(x: Array, low: Any, high: Any, key0: Any, key1: Any, least: Any, factor: Any) -> None:
    """Apply `thin` to consecutive elements, the first with index low + 2^32 high, whose lower halves do not wrap around."""
    key = np.uint32(key0 ^ np.uint32(high * _HIGH_FACTOR))
    for j in range(x.size):
        x[j] = x[j] * factor if _mixed(np.uint32(low + j), key, key1) >= least else ZERO


@compiled(EXACT)
def thin(x: Array, bases: Array, key0: Any, key1: Any, least: Any, factor: Any) -> None:
    """x = factor x if the hash of the element's index is at least `least`, else 0  # (R, N); bases (R,), uint64: each row's first index."""
    for i in range(x.shape[0]):
        low, high = np.int64(bases[i] & _LOW_MASK), np.uint32(bases[i] >> np.uint64(32))
        edge = min(x.shape[1], 4294967296 - low)
        _thin_piece(x[i, :edge], low, high, key0, key1, least, factor)
        if edge < x.shape[1]:
            _thin_piece(x[i, edge:], np.int64(0), np.uint32(high + np.uint32(1)), key0, key1, least, factor)
