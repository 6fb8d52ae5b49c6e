"""Elementwise CPU kernels: compiled loops if fp32 needs several passes, else pieces of 64 KiB that stay in cache, with `WORK_BYTES` of temporaries.

Ladder for rotary, 1024 x 768 in heads of 64: position by position 6.6 ms, in boxes of 24 KiB 1.1 to 1.6 ms, compiled 0.08 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]

_BF16: Final = np.dtype(ml_dtypes.bfloat16)

PIECE_BYTES: Final = 64 << 10
"""Bytes of a piece whose passes need no temporaries."""

WORK_BYTES: Final = 48 << 10
"""Bytes of all arrays that a kernel allocates at a time; the rest of 64 KiB is for numbers per row and NumPy's buffers."""

MOST_ROWS: Final = 512
"""Largest number of rows in a block, even of short ones, since kernels keep a few numbers per row."""


def single(*arrays: Array) -> bool:
    """Return whether all arrays are fp32, the type of the compiled `loops`; NumPy computes other types."""
    return all(array.dtype == np.float32 for array in arrays)


def cut(extent: int, step: int) -> Iterator[slice]:
    """Yield slices of at most `step`, and at least 1, elements."""
    step = max(1, step)
    for start in range(0, extent, step):
        yield slice(start, min(start + step, extent))


def row_blocks(num_rows: int, row_bytes: int, nbytes: int = PIECE_BYTES) -> Iterator[slice]:
    """Yield slices of rows that hold about `nbytes` each: at least one row, at most `MOST_ROWS`."""
    return cut(num_rows, min(MOST_ROWS, nbytes // max(1, row_bytes)))


def cells(num_rows: int, width: int, itemsize: int, nbytes: int = WORK_BYTES) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) of boxes of at most `nbytes`, row by row of boxes: whole rows if one fits."""
    for piece in row_blocks(num_rows, width * itemsize, nbytes):
        for columns in cut(width, nbytes // itemsize):
            yield piece, columns


def pieces(*arrays: Array, nbytes: int = PIECE_BYTES) -> Iterator[tuple[Array, ...]]:
    """Yield the arrays, flattened, in pieces of `nbytes`."""
    flat = [array.reshape(-1) for array in arrays]
    for piece in cut(flat[0].size, nbytes // arrays[0].itemsize):
        yield tuple(array[piece] for array in flat)


def pieces_with_work(*arrays: Array, num_work: int, nbytes: int = WORK_BYTES) -> Iterator[tuple[Array, ...]]:
    """Yield pieces of the arrays, each followed by `num_work` temporaries of its size, mostly without allocating them.

    The temporaries lie in the rest of the last array, which must be a pure output that overlaps no other: its elements after the piece are not yet
    computed. Near the end, where too little of it is left, pieces are small and use `nbytes` of their own memory.
    """
    flat = [array.reshape(-1) for array in arrays]
    out, own, start = flat[-1], None, 0
    while start < out.size:
        count = PIECE_BYTES // out.itemsize
        borrowed = start + (1 + num_work) * count <= out.size
        if not borrowed:
            step = min(nbytes // (num_work * out.itemsize), out.size - start) if own is None else own.shape[1]
            own = np.empty((num_work, step), out.dtype) if own is None else own
            count = min(step, out.size - start)
        stop = start + count
        work = [out[stop + i * count : stop + (i + 1) * count] if own is None else own[i, :count] for i in range(num_work)]
        yield (*(array[start:stop] for array in flat), *work)
        start = stop


@register("accumulate", "cpu")
def accumulate(total: Array, addend: Array) -> None:
    """total += addend."""
    np.add(total, addend, out=total)


@register("add", "cpu")
def add(a: Array, b: Array, out: Array) -> None:
    """out = a + b."""
    np.add(a, b, out=out)


@register("scale", "cpu")
def scale(x: Array, out: Array, *, alpha: float) -> None:
    """out = alpha * x."""
    np.multiply(x, x.dtype.type(alpha), out=out)


@register("copy", "cpu")
def copy(x: Array, out: Array) -> None:
    """out = x, converted to out's dtype."""
    convert(x, out)


def convert(x: Array, out: Array) -> None:
    """out = x: contiguous arrays between bf16 and fp32 in one compiled pass, since ml_dtypes converts number by number; all others by NumPy."""
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
    """out[b] = x[b] + p[:t]  # (mb, t, c) + (at least t, c)."""
    np.add(x, p[: x.shape[1]], out=out)


@register("add_rows_backward", "cpu")
def add_rows_backward(dy: Array, dp: Array, *, accumulate: bool) -> None:
    """dp[:t] (+)= sum of dy over b; rows beyond t get no contribution."""
    target = dp[: dy.shape[1]]
    if not accumulate:
        target[...] = dy[0]
        dp[dy.shape[1] :] = 0
    for piece in dy if accumulate else dy[1:]:
        target += piece


@register("rotary", "cpu")
def rotary(x: Array, cos: Array, sin: Array, y: Array, *, head_size: int, inverse: bool) -> None:
    """Rotate pairs (i, i + R/2) of the first R features of each head by the position's angles.

    Shapes: x, y (mb, t, h * D); cos, sin ([mb,] t, R / 2).
    """
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
    most = WORK_BYTES // (2 * x.itemsize * half)  # number of half heads at a time
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
    """total (+)= addend."""
    if accumulate:
        np.add(total, addend, out=total)
    else:
        np.copyto(total, addend, casting="unsafe")


@register("rotary_angles", "cpu")
def rotary_angles(frequencies: Array, cos: Array, sin: Array, *, start: int) -> None:
    """cos and sin of position * frequency  # (D / 2,) -> (t, D / 2) each, positions from `start`; `sin` holds the angles in between."""
    for rows in cut(cos.shape[0], MOST_ROWS):
        positions = np.arange(start + rows.start, start + rows.stop, dtype=cos.dtype)
        np.multiply(positions[:, None], frequencies, out=sin[rows])
        np.cos(sin[rows], out=cos[rows])
        np.sin(sin[rows], out=sin[rows])


@register("rotary_angles_at", "cpu")
def rotary_angles_at(frequencies: Array, positions: Array, cos: Array, sin: Array) -> None:
    """cos and sin of position * frequency  # (D / 2,), (b, t) -> (b, t, D / 2) each; `sin` holds the angles in between."""
    for b in range(cos.shape[0]):
        for rows in cut(cos.shape[1], MOST_ROWS):
            np.multiply(positions[b, rows, None].astype(cos.dtype), frequencies, out=sin[b, rows])
            np.cos(sin[b, rows], out=cos[b, rows])
            np.sin(sin[b, rows], out=sin[b, rows])


@register("row_gate", "cpu")
def row_gate(gate: Array, x: Array, y: Array) -> None:
    """y = sigmoid(gate) * x, one gate for each row  # (.., 1), (.., c) -> (.., c)."""
    from .numba import routing_loops

    routing_loops.row_gate(gate.reshape(-1), x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1]))


@register("row_gate_backward", "cpu")
def row_gate_backward(gate: Array, x: Array, dy: Array, dx: Array, dgate: Array, *, first: bool) -> None:
    """Gradients of `row_gate`; that of the gate is a sum over tiles of the row, of which this is the first or not."""
    from .numba import routing_loops

    width = x.shape[-1]
    x, dy, dx = x.reshape(-1, width), dy.reshape(-1, width), dx.reshape(-1, width)
    routing_loops.row_gate_backward(gate.reshape(-1), x, dy, dx, dgate.reshape(-1), first)
