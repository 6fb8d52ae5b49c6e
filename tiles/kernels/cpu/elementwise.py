"""Elementwise CPU kernels: compiled loops where fp32 needs several passes, else pieces of 64 KiB that stay in cache, `WORK_BYTES` of temporaries.

Ladder for gelu_new, 1024 x 3072 fp32, one core, forward / backward: whole arrays and x**3 150 / 160 ms; in place in pieces of 32 KiB
3.5 / 6.9 ms, of 64 KiB 2.5 / 5.1 ms, of 128 KiB 2.1 / 4.1 ms (torch's forward 3.7 ms). 64 KiB
with temporaries in the unwritten rest of the output, 4.9 to 5.0 ms backward. On a later day, arrays in no cache: one compiled loop 0.69 / 1.04 ms
(torch 3.7 / 3.7 ms, a copy of as many bytes 0.63 / 0.94 ms); tanh as a sigmoid, so one exponential and one division. "gelu" calls math.erf per
element and is some thirty times slower. Ladder for rotary, 1024 x 768 in heads of 64: position by position 6.6 ms, in boxes of 24 KiB 1.1 to 1.6
ms, compiled 0.08 ms. For silu_gate, 1024 x 3072, forward / backward: in pieces 3.5 / 6.0 ms, compiled 0.72 / 1.4 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..reference.elementwise import GELU_CUBIC, GELU_SCALE, erf
from ..registry import activations, own_activation, register

Array = npt.NDArray[Any]

_BF16: Final = np.dtype(ml_dtypes.bfloat16)

PIECE_BYTES: Final = 64 << 10
"""Bytes of a piece whose passes need no memory of their own."""

WORK_BYTES: Final = 48 << 10
"""Bytes of all arrays a kernel makes for itself, at a time; the rest of 64 KiB is for numbers per row and NumPy's buffers."""

MOST_ROWS: Final = 512
"""Rows of a block, however short: kernels keep a few numbers per row."""


def single(*arrays: Array) -> bool:
    """Whether all are fp32, the type that compiled `loops` are made for; NumPy computes the rest."""
    return all(array.dtype == np.float32 for array in arrays)


def cut(extent: int, step: int) -> Iterator[slice]:
    """Slices of at most `step`, at least 1."""
    step = max(1, step)
    for start in range(0, extent, step):
        yield slice(start, min(start + step, extent))


def row_blocks(num_rows: int, row_bytes: int, nbytes: int = PIECE_BYTES) -> Iterator[slice]:
    """Slices of rows that hold about `nbytes` each; one row at least, `MOST_ROWS` at most."""
    return cut(num_rows, min(MOST_ROWS, nbytes // max(1, row_bytes)))


def cells(num_rows: int, width: int, itemsize: int, nbytes: int = WORK_BYTES) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of boxes that never exceed `nbytes`, row by row of boxes: whole rows if one fits."""
    for piece in row_blocks(num_rows, width * itemsize, nbytes):
        for columns in cut(width, nbytes // itemsize):
            yield piece, columns


def pieces(*arrays: Array, nbytes: int = PIECE_BYTES) -> Iterator[tuple[Array, ...]]:
    """The arrays, flattened, in pieces of `nbytes`."""
    flat = [array.reshape(-1) for array in arrays]
    for piece in cut(flat[0].size, nbytes // arrays[0].itemsize):
        yield tuple(array[piece] for array in flat)


def pieces_with_work(*arrays: Array, num_work: int, nbytes: int = WORK_BYTES) -> Iterator[tuple[Array, ...]]:
    """Pieces of the arrays, each followed by `num_work` arrays of its size to work in, without allocating for most of them.

    They lie in the rest of the last array, which must be a pure output that overlaps no other: what lies behind the piece is garbage until its turn
    comes. Only near the end, where too little of it is left, pieces are small and work in `nbytes` of their own.
    """
    flat = [array.reshape(-1) for array in arrays]
    out, own, start = flat[-1], None, 0
    while start < out.size:
        count = PIECE_BYTES // out.itemsize
        borrowed = start + (1 + num_work) * count <= out.size
        if not borrowed:
            step = nbytes // (num_work * out.itemsize)
            own = np.empty((num_work, step), out.dtype) if own is None else own
            count = min(step, out.size - start)
        stop = start + count
        work = [out[stop + i * count : stop + (i + 1) * count] if own is None else own[i, :count] for i in range(num_work)]
        yield (*(array[start:stop] for array in flat), *work)
        start = stop


@register("accumulate", "cpu")
def accumulate(total: Array, addend: Array) -> None:
    """total += part."""
    np.add(total, addend, out=total)


@register("add", "cpu")
def add(a: Array, b: Array, out: Array) -> None:
    """out = a + b."""
    np.add(a, b, out=out)


@register("multiply", "cpu")
def multiply(a: Array, b: Array, out: Array) -> None:
    """out = a * b."""
    np.multiply(a, b, out=out)


@register("scale", "cpu")
def scale(x: Array, out: Array, *, alpha: float) -> None:
    """out = alpha * x."""
    np.multiply(x, x.dtype.type(alpha), out=out)


@register("copy", "cpu")
def copy(x: Array, out: Array) -> None:
    """out = x, converted to out's dtype."""
    convert(x, out)


def convert(x: Array, out: Array) -> None:
    """out = x: between bf16 and fp32 in one compiled pass (ml_dtypes converts number by number), all else, and what is strided, by NumPy."""
    flat = x.flags.c_contiguous and out.flags.c_contiguous
    if flat and x.dtype == _BF16 and out.dtype == np.float32:
        from .numba import loops

        loops.widen(x.reshape(-1).view(np.uint16), out.reshape(-1).view(np.uint32))
    elif flat and x.dtype == np.float32 and out.dtype == _BF16:
        from .numba import loops

        loops.narrow(x.reshape(-1).view(np.uint32), out.reshape(-1).view(np.uint16))
    else:
        np.copyto(out, x, casting="unsafe")


@register("fill", "cpu")
def fill(out: Array, *, value: float) -> None:
    """out = value everywhere."""
    out.fill(value)


@register("add_rows", "cpu")
def add_rows(x: Array, p: Array, out: Array) -> None:
    """out[b] = x[b] + p[:t]  # (mb, t, c) + (>= t, c)."""
    np.add(x, p[: x.shape[1]], out=out)


@register("add_rows_backward", "cpu")
def add_rows_backward(dy: Array, dp: Array, *, accumulate: bool) -> None:
    """dp[:t] (+)= sum of dy over b; rows beyond t receive nothing."""
    target = dp[: dy.shape[1]]
    if not accumulate:
        target[...] = dy[0]
        dp[dy.shape[1] :] = 0
    for piece in dy if accumulate else dy[1:]:
        target += piece


_GELU: Final = (np.float32(GELU_SCALE), np.float32(GELU_CUBIC))


def _gelu_tanh(x: Array, t: Array) -> None:
    """t = tanh(scale * (x + cubic * x^3)) in four passes."""
    np.multiply(x, x, out=t)
    t *= x.dtype.type(GELU_SCALE * GELU_CUBIC)
    t += x.dtype.type(GELU_SCALE)
    t *= x
    np.tanh(t, out=t)


def _sigmoid(x: Array, out: Array) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += 1
    np.reciprocal(out, out=out)


def _erf(x: Array) -> None:
    """x = erf(x), few at a time: each is a Python float on the way."""
    for piece in cut(x.size, 800):
        x[piece] = erf(x[piece])


def activate_into(x: Array, y: Array, kind: str) -> None:
    """y = activation(x): the program's own, if it has registered one."""
    own = own_activation(kind)
    if own is None:
        _activate_into(x, y, kind)
    else:
        own.forward(x, y)


def _activate_into(x: Array, y: Array, kind: str) -> None:
    """y = built-in activation(x), piece by piece."""
    if kind == "gelu_new" and single(x, y):
        from .numba import exp_loops

        exp_loops.gelu_new(x.reshape(-1), y.reshape(-1), *_GELU)
        return
    half = x.dtype.type(0.5)
    for a, b in pieces(x, y):
        if kind == "gelu_new":
            _gelu_tanh(a, b)
            b += 1
            b *= a
            b *= half
        elif kind == "relu":
            np.maximum(a, 0, out=b)
        elif kind == "silu":
            with np.errstate(over="ignore"):  # exp(-x) = inf gives the right 0
                _sigmoid(a, b)
            b *= a
        elif kind == "gelu":
            np.multiply(a, x.dtype.type(math.sqrt(0.5)), out=b)
            _erf(b)
            b += 1
            b *= a
            b *= half
        else:
            raise ValueError(f"unknown activation {kind!r}; there are {', '.join(activations())}")


@register("activation", "cpu")
def activation(x: Array, y: Array, *, kind: str) -> None:
    """y = activation(x)."""
    activate_into(x, y, kind)


@register("activation_backward", "cpu")
def activation_backward(x: Array, dy: Array, dx: Array, *, kind: str) -> None:
    """dx = dy * activation'(x)."""
    own = own_activation(kind)
    if own is not None and own.backward is not None:
        own.backward(x, dy, dx)
        return
    if kind == "gelu_new" and single(x, dy, dx):
        from .numba import exp_loops

        exp_loops.gelu_new_backward(x.reshape(-1), dy.reshape(-1), dx.reshape(-1), *_GELU)
        return
    if kind == "relu":
        for a, g, d, t in pieces_with_work(x, dy, dx, num_work=1):
            np.multiply(g, np.greater(a, 0, out=t.view(np.bool_)[: a.size]), out=d)
        return
    nbytes = WORK_BYTES // 4 if kind == "gelu" else WORK_BYTES  # erf takes memory too
    for a, g, d, t, *more in pieces_with_work(x, dy, dx, num_work=2 if kind == "gelu_new" else 1, nbytes=nbytes):
        if kind == "gelu_new":
            _gelu_new_slope(a, t, more[0], d)
            d *= g
        elif kind == "silu":
            with np.errstate(over="ignore"):
                _sigmoid(a, t)
            np.subtract(1, t, out=d)
            d *= a
            d += 1
            d *= t
            d *= g
        elif kind == "gelu":
            np.multiply(a, a, out=t)
            t *= a.dtype.type(-0.5)
            np.exp(t, out=t)
            t *= a
            t *= a.dtype.type(1.0 / math.sqrt(2.0 * math.pi))
            np.multiply(a, a.dtype.type(math.sqrt(0.5)), out=d)
            _erf(d)
            d += 1
            d *= a.dtype.type(0.5)
            d += t
            d *= g
        else:
            raise ValueError(f"unknown activation {kind!r}; there are {', '.join(activations())}")


def _gelu_new_slope(x: Array, t: Array, work: Array, out: Array) -> None:
    """out = 0.5 (1 + t) (1 + x (1 - t) u), u = scale (1 + 3 cubic x^2), t = tanh(...): the slope with 1 - t^2 = (1 - t)(1 + t)."""
    _gelu_tanh(x, t)
    np.multiply(x, x, out=out)
    out *= x.dtype.type(3.0 * GELU_CUBIC * GELU_SCALE)
    out += x.dtype.type(GELU_SCALE)
    out *= x
    t += 1
    # x (1 - t) u with t now 1 + t: 1 - t = 2 - (1 + t)
    np.subtract(2, t, out=work)
    out *= work
    out += 1
    out *= t
    out *= x.dtype.type(0.5)


@register("silu_gate", "cpu")
def silu_gate(gate: Array, up: Array, y: Array) -> None:
    """y = silu(gate) * up (SwiGLU of Shazeer 2020, without the products)."""
    if single(gate, up, y):
        from .numba import exp_loops

        exp_loops.silu_gate(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return
    _activate_into(gate, y, "silu")
    y *= up


@register("silu_gate_backward", "cpu")
def silu_gate_backward(gate: Array, up: Array, dy: Array, dgate: Array, dup: Array) -> None:
    """Gradients of `silu_gate`."""
    if single(gate, up, dy, dgate, dup):
        from .numba import exp_loops

        exp_loops.silu_gate_backward(*(tile.reshape(-1) for tile in (gate, up, dy, dgate, dup)))
        return
    for a, u, g, da, du, s in pieces_with_work(gate, up, dy, dgate, dup, num_work=1):
        with np.errstate(over="ignore"):
            _sigmoid(a, s)
        np.multiply(a, s, out=du)  # silu
        np.subtract(1, s, out=da)
        da *= a
        da += 1
        da *= s
        da *= u
        da *= g
        du *= g


@register("rotary", "cpu")
def rotary(x: Array, cos: Array, sin: Array, y: Array, *, head_size: int, inverse: bool) -> None:
    """Rotate pairs (i, i + R/2) of the first R features of each head by the position's angles; see the reference."""
    half = cos.shape[-1]
    source = x.reshape(*x.shape[:-1], -1, head_size)
    target = y.reshape(source.shape)
    if 2 * half < head_size:
        target[..., 2 * half :] = source[..., 2 * half :]
    if single(x, cos, sin, y):
        from .numba import loops

        c, s = (angles if angles.ndim == 3 else angles[None] for angles in (cos, sin))
        loops.rotary(source, c, s, target, np.float32(-1 if inverse else 1))
        return
    turn = np.subtract if inverse else np.add
    back = np.add if inverse else np.subtract
    batch, length, num_heads, _ = source.shape
    most = WORK_BYTES // (2 * x.itemsize * half)  # pairs of half heads at a time
    work = np.empty(most * half, x.dtype)
    for h in cut(num_heads, most):
        for t in cut(length, most // (h.stop - h.start)):
            for b in cut(batch, most // ((h.stop - h.start) * (t.stop - t.start))):
                c, s = (angles[t, None] if angles.ndim == 2 else angles[b, t, None] for angles in (cos, sin))
                first, second = source[b, t, h, :half], source[b, t, h, half : 2 * half]
                other = work[: first.size].reshape(first.shape)
                turned = (target[b, t, h, :half], first, second, back), (target[b, t, h, half : 2 * half], second, first, turn)
                for out, one, two, combine in turned:
                    np.multiply(one, c, out=out)
                    np.multiply(two, s, out=other)
                    combine(out, other, out=out)


@register("add_into", "cpu")
def add_into(addend: Array, total: Array, *, accumulate: bool) -> None:
    """total (+)= part."""
    if accumulate:
        np.add(total, addend, out=total)
    else:
        np.copyto(total, addend, casting="unsafe")


@register("rotary_angles", "cpu")
def rotary_angles(frequencies: Array, cos: Array, sin: Array, *, start: int) -> None:
    """cos and sin of position * frequency  # (D / 2,) -> (t, D / 2) each, positions from `start`; the angles lie in `sin` until their turn."""
    for rows in cut(cos.shape[0], MOST_ROWS):
        positions = np.arange(start + rows.start, start + rows.stop, dtype=cos.dtype)
        np.multiply(positions[:, None], frequencies, out=sin[rows])
        np.cos(sin[rows], out=cos[rows])
        np.sin(sin[rows], out=sin[rows])


@register("rotary_angles_at", "cpu")
def rotary_angles_at(frequencies: Array, positions: Array, cos: Array, sin: Array) -> None:
    """cos and sin of position * frequency  # (D / 2,), (b, t) -> (b, t, D / 2) each; the angles lie in `sin` until their turn."""
    for b in range(cos.shape[0]):
        for rows in cut(cos.shape[1], MOST_ROWS):
            np.multiply(positions[b, rows, None].astype(cos.dtype), frequencies, out=sin[b, rows])
            np.cos(sin[b, rows], out=cos[b, rows])
            np.sin(sin[b, rows], out=sin[b, rows])
