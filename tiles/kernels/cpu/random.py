"""Random kernels on the CPU: the reference's arithmetic in pieces that stay in cache, with 32-bit counters.

Ladder for dropout over 1024 x 768, one core: 64-bit indices for every element 4.3 ns per element; 32-bit counters from a row's base, in
place, 3.5 ns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference.random import bits as wide_bits
from ..reference.random import indices, mix, threshold, uniforms
from ..registry import register
from .elementwise import row_blocks
from .matmul import rows

Array = npt.NDArray[Any]

_ROUND: Final = ((np.uint32(16), np.uint32(0x7FEB352D)), (np.uint32(15), np.uint32(0x846CA68B)))
_LAST_SHIFT: Final = np.uint32(16)


def row_bits(key: tuple[int, int], base: Array, width: int) -> Array:
    """Random bits of rows of consecutive indices: row r holds base[r], base[r] + 1, ... (uint64)  # (R,) -> (R, width)."""
    if int(base.max()) + width > 2**32:
        return wide_bits(key, base[:, None] + np.arange(width, dtype=np.uint64))
    x = np.add(base.astype(np.uint32)[:, None], np.arange(width, dtype=np.uint32))
    np.bitwise_xor(x, np.uint32(key[0]), out=x)
    work = np.empty_like(x)
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


def survivors(key: tuple[int, int], base: Array, width: int, p: float) -> Iterator[tuple[slice, Array]]:
    """(rows, which of their elements survive) for rows of consecutive indices, a piece of rows at a time."""
    least = np.uint32(threshold(p))
    for piece in row_blocks(base.size, width * 4):
        yield piece, row_bits(key, base[piece], width) >= least


def thin(x: Array, keep: Array, p: float, out: Array) -> None:
    """out = x / (1 - p) where `keep`, else 0; `out` may be `x`."""
    np.multiply(x, x.dtype.type(1.0 / (1.0 - p)), out=out)
    np.multiply(out, keep, out=out)


def drop(x: Array, y: Array, key: tuple[int, int], base: Array, p: float) -> None:
    """y = x / (1 - p) where the element survives, else 0, for rows of consecutive indices; `y` may be `x`."""
    for piece, keep in survivors(key, base, x.shape[1], p):
        thin(x[piece], keep, p, y[piece])


def row_bases(shape: tuple[int, ...], origin: tuple[int, ...], extents: tuple[int, ...]) -> Array:
    """Global index of the first element of every row of a tile  # -> (rows,), uint64."""
    if len(shape) == 1:
        return np.array([origin[0]], np.uint64)
    first = indices(shape[:-1], origin[:-1], extents[:-1]).reshape(-1)
    return first * np.uint64(shape[-1]) + np.uint64(origin[-1])


@register("dropout", "cpu")
def dropout(x: Array, key: Array, y: Array, *, p: float, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """y = x / (1 - p) where the element survives, else 0; `key` holds (seed, step)."""
    mixed = mix(int(key[0]), int(key[1]), stream)
    base = row_bases(shape, origin, x.shape)
    drop(rows(x), rows(y), mixed, base, p)


@register("random_normal", "cpu")
def random_normal(out: Array, *, std: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ N(0, std^2) by Box and Muller (1958); each element uses two uniforms of its own index."""
    base = row_bases(shape, origin, out.shape)
    flat = out.reshape(-1, out.shape[-1])
    step = max(1, 4096 // out.shape[-1])
    for start in range(0, flat.shape[0], step):
        index = base[start : start + step, None] + np.arange(out.shape[-1], dtype=np.uint64)
        radius = np.sqrt(-2.0 * np.log(uniforms(mix(seed, 0, stream), index)))
        flat[start : start + step] = std * radius * np.cos(2.0 * np.pi * uniforms(mix(seed, 1, stream), index))


@register("random_uniform", "cpu")
def random_uniform(out: Array, *, low: float, high: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ U(low, high)."""
    base = row_bases(shape, origin, out.shape)
    flat = out.reshape(-1, out.shape[-1])
    for row in range(prod(out.shape[:-1])):
        index = base[row] + np.arange(out.shape[-1], dtype=np.uint64)
        flat[row] = low + (high - low) * uniforms(mix(seed, 0, stream), index)
