"""Counter-based random numbers: a function of (key, element index) alone, so results do not depend on tiling, workers or order.

The generator hashes the index with the 32-bit mixer of Wellons ("lowbias32", 2018; bias 0.17) twice, using one half of the key before each round; the
key is mixed from (seed, step, stream) by the 64-bit finaliser of Steele, Lea and Flood (2014, SplitMix). It is for initial weights and dropout
masks, not for cryptography.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]

_MASK: Final = (1 << 64) - 1


def mix(*numbers: int) -> tuple[int, int]:
    """Return a 64-bit key, as two 32-bit halves, from any integers."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state & 0xFFFFFFFF, state >> 32


def scrambled(x: Array) -> Array:
    """Return 32 bits for each 32-bit number, by one round of the mixer."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> np.uint32(16)))


def bits(key: tuple[int, int], index: Array) -> Array:
    """Return 32 random bits for each 64-bit element index."""
    x = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32) ^ np.uint32(key[0])
    x ^= (index >> np.uint64(32)).astype(np.uint32) * np.uint32(0x9E3779B9)
    return scrambled(scrambled(x) + np.uint32(key[1]))


def threshold(p: float) -> int:
    """Return the number below which an element's bits drop it, an event of probability p."""
    return min(round(p * 2**32), 2**32 - 1)


def indices(shape: tuple[int, ...], origin: tuple[int, ...], extents: tuple[int, ...]) -> Array:
    """Return the global row-major index of every element of a tile."""
    index = np.zeros(extents, np.uint64)
    stride = 1
    for axis in reversed(range(len(shape))):
        positions = (np.arange(extents[axis], dtype=np.uint64) + np.uint64(origin[axis])) * np.uint64(stride)
        index += positions.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        stride *= shape[axis]
    return index


def uniforms(key: tuple[int, int], index: Array) -> Array:
    """Return a number in (0, 1) for each element index, fp64."""
    return (bits(key, index) + 0.5) / 2.0**32


@register("dropout", "reference")
def dropout(x: Array, key: Array, y: Array, *, p: float, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """y = x / (1 - p) for elements that survive, else 0; `key` holds (seed, step)."""
    random_bits = bits(mix(int(key[0]), int(key[1]), stream), indices(shape, origin, x.shape))
    y[...] = np.where(random_bits >= threshold(p), x / x.dtype.type(1.0 - p), 0)


@register("keyed_uniform", "reference")
def keyed_uniform(key: Array, out: Array, *, stream: int) -> None:
    """out ~ U[0, 1) in steps of 2^-24, which fp32 represents exactly, by element index; `key` holds (seed, step)."""
    random_bits = bits(mix(int(key[0]), int(key[1]), stream), np.arange(out.size, dtype=np.uint64))
    out[...] = (random_bits >> np.uint32(8)).reshape(out.shape) * 2.0**-24


@register("random_normal", "reference")
def random_normal(out: Array, *, std: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ N(0, std^2) by Box and Muller (1958); each element uses two uniforms of its own index."""
    index = indices(shape, origin, out.shape)
    radius = np.sqrt(-2.0 * np.log(uniforms(mix(seed, 0, stream), index)))
    out[...] = std * radius * np.cos(2.0 * np.pi * uniforms(mix(seed, 1, stream), index))


@register("random_uniform", "reference")
def random_uniform(out: Array, *, low: float, high: float, seed: int, stream: int, shape: tuple[int, ...], origin: tuple[int, ...]) -> None:
    """out ~ U(low, high)."""
    out[...] = low + (high - low) * uniforms(mix(seed, 0, stream), indices(shape, origin, out.shape))
