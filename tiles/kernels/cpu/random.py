"""Random kernels on the CPU: the reference's arithmetic in pieces that stay in cache, with 32-bit counters.

Ladder for dropout over 1024 x 768, one core: 64-bit indices for every element 4.3 ns per element; 32-bit counters from a row's base, in place,
3.5 ns. On a later day: pieces with 144 KiB of temporaries 2.1 ns, drawn in the unwritten rest of the output 2.3 ns. A compiled hash in place, fp32:
0.9 ns, with indices computed for 512 rows at a time 0.58 ns. Uniform initial values: row by row 22 ms, in pieces 5.3 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference.random import mix, threshold
from ..registry import register
from .elementwise import MOST_ROWS, PIECE_BYTES, WORK_BYTES, cells, cut, row_blocks, single
from .matmul import rows

Array = npt.NDArray[Any]

_ROUND: Final = ((np.uint32(16), np.uint32(0x7FEB352D)), (np.uint32(15), np.uint32(0x846CA68B)))
_LAST_SHIFT: Final = np.uint32(16)
_HIGH_FACTOR: Final = np.uint32(0x9E3779B9)


def row_bits(key: tuple[int, int], base: Array, width: int, buffer: Array | None = None) -> Array:
    """Return random bits for rows of consecutive indices: row r has indices base[r], base[r] + 1, ... (uint64)  # (R,) -> (R, width).

    Args:
        buffer: uint8 working memory, 8 bytes for each element; its first half becomes the result.
    """
    size = base.size * width
    x, work = (np.empty(8 * size, np.uint8) if buffer is None else buffer[: 8 * size]).view(np.uint32).reshape(2, base.size, width)
    low = base.astype(np.uint32)
    for columns in cut(width, 4096):
        np.add(low[:, None], np.arange(columns.start, columns.stop, dtype=np.uint32), out=x[:, columns])
    if int(base.max()) + width > 2**32:
        _mix_high(x, low, (base >> np.uint64(32)).astype(np.uint32))
    np.bitwise_xor(x, np.uint32(key[0]), out=x)
    for salt in (key[1], 0):
        for shift, factor in _ROUND:
            np.right_shift(x, shift, out=work)
            np.bitwise_xor(x, work, out=x)
            np.multiply(x, factor, out=x)
        np.right_shift(x, _LAST_SHIFT, out=work)
        np.bitwise_xor(x, work, out=x)
        if salt:
            np.add(x, np.uint32(salt), out=x)
    return x


def _mix_high(x: Array, low: Array, high: Array) -> None:
    """x ^= a multiple of the upper half of each element's index; `x` holds the lower halves, which begin with `low` in each row."""
    width = x.shape[1]
    if high.any():
        np.bitwise_xor(x, (high * _HIGH_FACTOR)[:, None], out=x)
    for row in np.flatnonzero(low > 2**32 - width):  # in these rows the lower half wraps around to 0
        first = 2**32 - int(low[row])
        x[row, first:] ^= (high[row : row + 1] * _HIGH_FACTOR) ^ ((high[row : row + 1] + np.uint32(1)) * _HIGH_FACTOR)


def _keep(key: tuple[int, int], base: Array, width: int, least: np.uint32, buffer: Array) -> Array:
    """Return the mask of surviving elements in rows of consecutive indices; it lies in `buffer`, 8 bytes per element  # -> (R, width)."""
    random_bits = row_bits(key, base, width, buffer)
    keep: Array = buffer[4 * random_bits.size : 5 * random_bits.size].view(np.bool_).reshape(random_bits.shape)
    return np.greater_equal(random_bits, least, out=keep)


def survivors(key: tuple[int, int], base: Array, width: int, p: float, buffer: Array) -> Iterator[tuple[slice, slice, Array]]:
    """Yield (rows, columns, mask of surviving elements) for rows of consecutive indices, piece by piece.

    Args:
        buffer: uint8 working memory; a piece has one element for each 8 bytes of it, and a mask is valid until the next piece.
    """
    least = np.uint32(threshold(p))
    for piece, columns in cells(base.size, width, 1, buffer.size // 8):
        yield piece, columns, _keep(key, base[piece] + np.uint64(columns.start), columns.stop - columns.start, least, buffer)


def thin(x: Array, keep: Array, p: float, out: Array) -> None:
    """out = x / (1 - p) for elements in `keep`, else 0; `out` may be `x`."""
    np.multiply(x, x.dtype.type(1.0 / (1.0 - p)), out=out)
    np.multiply(out, keep, out=out)


def thin_rows(x: Array, base: Array, key: tuple[int, int], p: float) -> None:
    """Apply dropout to fp32 rows of consecutive indices in place and in one pass, drawing the mask as it goes  # (R, N), (R,)."""
    from .numba import loops

    loops.thin(x, base, np.uint32(key[0]), np.uint32(key[1]), np.uint32(threshold(p)), np.float32(1.0 / (1.0 - p)))


def row_bases(shape: tuple[int, ...], origin: tuple[int, ...], extents: tuple[int, ...], piece: slice) -> Array:
    """Return the global index of the first element of some rows of a tile  # -> (rows,), uint64."""
    row = np.arange(piece.start, piece.stop, dtype=np.uint64)
    base = np.full(row.size, origin[-1], np.uint64)
    stride = shape[-1]
    for axis in reversed(range(len(shape) - 1)):
        row, position = np.divmod(row, np.uint64(extents[axis]))
        base += (position + np.uint64(origin[axis])) * np.uint64(stride)
        stride *= shape[axis]
    return base


Draw = tuple[Array, Array, slice, slice, Array]
"""(buffer, first indices of rows, rows, columns, tile's cell)."""


def _draws(out: Array, shape: tuple[int, ...], origin: tuple[int, ...], count: int, each: int) -> Iterator[Draw]:
    """Yield cells of at most `count` elements of a pure output, with a buffer of `each` bytes per element.

    The buffer is the part of `out` after the cell, which is not yet computed; near the end, cells are small and use `WORK_BYTES` of their own.
    """
    flat, memory = rows(out), out.reshape(-1).view(np.uint8)
    width, own = flat.shape[1], None
    for block in cut(flat.shape[0], MOST_ROWS):
        bases = row_bases(shape, origin, out.shape, block)
        for some, span in cells(bases.size, width, 1, count):
            stop = -(-((block.start + some.stop - 1) * width + span.stop) * out.itemsize // 64) * 64
            need = each * (some.stop - some.start) * (span.stop - span.start)
            buffer = memory[stop : stop + need]
            if buffer.size == need:
                whole = slice(block.start + some.start, block.start + some.stop)
                yield buffer, bases[some] + np.uint64(span.start), whole, span, flat[whole, span]
                continue
            own = np.empty(WORK_BYTES // 2, np.uint8) if own is None else own
            for less, columns in cells(some.stop - some.start, span.stop - span.start, 1, own.size // each):
                piece = slice(block.start + some.start + less.start, block.start + some.start + less.stop)
                columns = slice(span.start + columns.start, span.start + columns.stop)
                yield own, bases[some][less] + np.uint64(columns.start), piece, columns, flat[piece, columns]


@register("dropout", "cpu")
def dropout(x: Array, key: Array, y: Array, *, p: float, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """y = x / (1 - p) for elements that survive, else 0; `key` holds (seed, step)."""
    mixed, least, source = mix(int(key[0]), int(key[1]), stream), np.uint32(threshold(p)), rows(x)
    if single(x, y):
        out = rows(y)
        for whole in cut(out.shape[0], MOST_ROWS):
            bases = row_bases(shape, origin, y.shape, whole)
            for stripe in row_blocks(bases.size, out.shape[1] * out.itemsize):
                block = slice(whole.start + stripe.start, whole.start + stripe.stop)
                np.copyto(out[block], source[block])
                thin_rows(out[block], bases[stripe], mixed, p)
        return
    for buffer, base, piece, columns, target in _draws(y, shape, origin, PIECE_BYTES // 2, 8):
        thin(source[piece, columns], _keep(mixed, base, target.shape[1], least, buffer), p, target)


def _uniform(key: tuple[int, int], base: Array, buffer: Array, u: Array) -> None:
    """u = numbers in (0, 1) for rows of consecutive indices, fp64."""
    np.add(row_bits(key, base, u.shape[1], buffer), 0.5, out=u)
    u /= 2.0**32


@register("keyed_uniform", "cpu")
def keyed_uniform(key: Array, out: Array, *, stream: int) -> None:
    """out ~ U[0, 1) in steps of 2^-24, which fp32 represents exactly, by element index; `key` holds (seed, step)."""
    mixed, origin = mix(int(key[0]), int(key[1]), stream), (0,) * out.ndim
    for buffer, base, _, _, target in _draws(out, out.shape, origin, 4096, 8):
        random_bits = row_bits(mixed, base, target.shape[1], buffer)
        np.right_shift(random_bits, np.uint32(8), out=random_bits)
        np.multiply(random_bits, 2.0**-24, out=target, casting="unsafe")


@register("random_normal", "cpu")
def random_normal(out: Array, *, std: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ N(0, std^2) by Box and Muller (1958); each element uses two uniforms of its own index."""
    keys = mix(seed, 0, stream), mix(seed, 1, stream)
    for buffer, base, _, _, target in _draws(out, shape, origin, 4096, 24):
        radius, turn = buffer[: 16 * target.size].view(np.float64).reshape(2, *target.shape)
        for key, u in zip(keys, (radius, turn), strict=True):
            _uniform(key, base, buffer[16 * target.size :], u)
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        radius *= std
        turn *= 2.0 * np.pi
        np.cos(turn, out=turn)
        radius *= turn
        target[...] = radius


@register("random_uniform", "cpu")
def random_uniform(out: Array, *, low: float, high: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ U(low, high)."""
    for buffer, base, _, _, target in _draws(out, shape, origin, 4096, 16):
        u = buffer[: 8 * target.size].view(np.float64).reshape(target.shape)
        _uniform(mix(seed, 0, stream), base, buffer[8 * target.size :], u)
        u *= high - low
        u += low
        target[...] = u
