"""Attention of new tokens over a cache of keys and values, on a GPU; the kernels are in `source/cache.cu`."""

from __future__ import annotations

import numpy as np

from ..reference.attention import PLAIN, Pattern
from ..registry import register
from .array import DeviceArray
from .attention import runs_of
from .launch import KernelSource

_source = KernelSource("cache")


@register("append_to_cache", "cuda")
def append_to_cache(k: DeviceArray, v: DeviceArray, positions: DeviceArray, keys: DeviceArray, values: DeviceArray, *, start: int) -> None:
    """keys[b, positions[b, i] - start] = k[b, i] if the position lies in the tile, and the same for values."""
    numbers = (np.int32(start), np.int32(k.shape[1]), np.int32(keys.shape[1]), np.int32(k.shape[2]))
    _source.each("append_to_cache", k.dtype, k.size, k, v, positions, keys, values, *numbers)


@register("cached_attention", "cuda")
def cached_attention(
    q: DeviceArray,
    keys: DeviceArray,
    values: DeviceArray,
    positions: DeviceArray,
    o: DeviceArray,
    peak: DeviceArray,
    total: DeviceArray,
    *rest: DeviceArray,
    head_size: int,
    scale: float,
    start: int,
    first: bool,
    last: bool,
    pattern: Pattern = PLAIN,
) -> None:
    """Add one tile of the cache to the running attention of the new tokens, which see positions up to their own; the last task normalises."""
    length, heads, groups = keys.shape[1], q.shape[2] // head_size, keys.shape[2] // head_size
    numbers = (np.float32(scale), *(np.int32(number) for number in (start, length, head_size, heads, groups, first, last)))
    rules = (rest[0] if pattern.buckets else None, runs_of(pattern.buckets), np.int32(pattern.window), np.float32(pattern.cap))
    shared = 4 * (128 + head_size + length)
    grid = (q.shape[1], heads, q.shape[0])
    _source.start("cached_attention", q.dtype, q, keys, values, positions, o, peak, total, *numbers, *rules, grid=grid, threads=128, shared=shared)
