"""Attention of tokens over cached keys and values in pages, on a GPU; the kernels are in `source/pages.cu`."""

from __future__ import annotations

import numpy as np

from ..reference.attention import PLAIN, Pattern
from ..registry import register
from .array import DeviceArray
from .launch import KernelSource

_source = KernelSource("pages")


@register("append_to_pages", "cuda")
def append_to_pages(
    k: DeviceArray, v: DeviceArray, positions: DeviceArray, table: DeviceArray, keys: DeviceArray, values: DeviceArray, *, first_page: int
) -> None:
    """keys[table[r, p / t] - first_page, p % t] = k[r] for position p of each row, and the same for values."""
    numbers = (np.int32(number) for number in (first_page, keys.shape[0], keys.shape[1], table.shape[1], k.shape[2]))
    _source.each("append_to_pages", k.dtype, k.size, k, v, positions, table, keys, values, *numbers)


@register("paged_attention", "cuda")
def paged_attention(
    q: DeviceArray,
    keys: DeviceArray,
    values: DeviceArray,
    positions: DeviceArray,
    table: DeviceArray,
    partial: DeviceArray,
    peaks: DeviceArray,
    totals: DeviceArray,
    scratch: DeviceArray,
    *,
    head_size: int,
    scale: float,
    first_page: int,
    pattern: Pattern = PLAIN,
) -> None:
    """Compute the attention of each row to the pages of the tile that hold positions up to its own, one result per page."""
    num_pages, length, heads = keys.shape[0], keys.shape[1], q.shape[2] // head_size
    numbers = (np.float32(scale), *(np.int32(number) for number in (first_page, num_pages, length, head_size, keys.shape[2] // head_size)))
    rules, grid, shared = (np.int32(pattern.window), np.float32(pattern.cap)), (table.shape[1], heads, table.shape[0]), 4 * (128 + head_size + length)
    tiles = (q, keys, values, positions, table, partial, peaks, totals)
    _source.start("paged_attention", q.dtype, *tiles, *numbers, *rules, grid=grid, threads=128, shared=shared)


@register("combine_pages", "cuda")
def combine_pages(
    partial: DeviceArray, peaks: DeviceArray, totals: DeviceArray, positions: DeviceArray, table: DeviceArray, o: DeviceArray, *, length: int
) -> None:
    """Add the attention of each row over its pages in the order of the text; rows without pages become 0."""
    heads = peaks.shape[2]
    numbers = (np.int32(number) for number in (table.shape[1], heads, o.shape[2] // heads, length))
    _source.each("combine_pages", o.dtype, o.size, partial, peaks, totals, positions, table, o, *numbers)
