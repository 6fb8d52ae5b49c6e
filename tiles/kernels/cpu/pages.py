"""Attention of tokens over cached keys and values in pages, on the CPU; the reference has the legend.

fp32 goes through compiled loops that read keys and values page by page, in memory order; other types go through the blocks of `attention`, row by
row and page by page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import NOTHING, PLAIN, Pair, Pattern
from ..reference.pages import append_to_pages
from ..registry import register, register_bf16
from . import attention as whole
from .elementwise import single

Array = npt.NDArray[Any]

register("append_to_pages", "cpu")(append_to_pages)  # copies of single rows
register_bf16("append_to_pages", takes=lambda views, constants: True)(append_to_pages)


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    (rows, _, width), (num_pages, length, _) = views[0].shape, views[1].shape
    return float(4.0 * min(rows, num_pages) * length * width)


@register("paged_attention", "cpu", flops=_flops)
def paged_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    table: Array,
    partial: Array,
    peaks: Array,
    totals: Array,
    scratch: Array,
    *,
    head_size: int,
    scale: float,
    first_page: int,
    pattern: Pattern = PLAIN,
) -> None:
    """Compute the attention of each row to the pages of the tile that hold positions up to its own, one result per page."""
    rows, most = table.shape
    num_pages, length, _ = keys.shape
    if single(q, keys):
        from .numba import exp_loops

        s = np.ndarray((q.shape[2] // head_size, length), np.float32, buffer=scratch)
        query, k, v = q.reshape(rows, -1, head_size), keys.reshape(num_pages, length, -1, head_size), values.reshape(num_pages, length, -1, head_size)
        out, scaled, cap = partial.reshape(rows, most, -1, head_size), np.float32(scale), np.float32(pattern.cap)
        exp_loops.paged_attention(query, k, v, positions[:, 0], table, first_page, scaled, cap, pattern.window, s, out, peaks, totals)
        return
    for r in range(rows):
        position = int(positions[r, 0])
        for i in range(position // length + 1):
            page = int(table[r, i]) - first_page
            if 0 <= page < num_pages:
                row, this_page = slice(r, r + 1), slice(page, page + 1)
                pair = Pair(head_size, scale, True, position, i * length, 0, 0, 0, 0, pattern=pattern)
                sums = partial[row, i : i + 1], peaks[row, i, :, None], totals[row, i, :, None]
                whole.add_keys(q[row], keys[this_page], values[this_page], *sums, NOTHING, scratch, pair, True)


@register("combine_pages", "cpu")
def combine_pages(partial: Array, peaks: Array, totals: Array, positions: Array, table: Array, o: Array, *, length: int) -> None:
    """Add the attention of each row over its pages in the order of the text; rows without pages become 0."""
    rows, most, num_heads = peaks.shape
    parted, out = partial.reshape(rows, most, num_heads, -1), o.reshape(rows, num_heads, -1)
    if single(partial, o):
        from .numba import exp_loops

        exp_loops.combine_pages(parted, peaks, totals, positions[:, 0], table, length, out)
        return
    for r in range(rows):
        seen = [i for i in range(int(positions[r, 0]) // length + 1) if table[r, i] >= 0]
        out[r] = 0
        top = np.max(peaks[r, seen], axis=0) if seen else None
        total = np.zeros(num_heads, peaks.dtype)
        for i in seen:
            factors = np.exp(peaks[r, i] - top)
            total += totals[r, i] * factors
            for h in range(num_heads):
                out[r, h] += parted[r, i, h] * factors[h]
        if seen:
            out[r] /= total[:, None]
