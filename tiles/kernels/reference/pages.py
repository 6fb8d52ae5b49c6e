"""Attention over a cache of keys and values in pages, readable (Kwon et al., PagedAttention, 2023).

Legend: q (r, 1, h * D) and new k, v (r, 1, g * D), each row a token of some text; positions (r, 1) of the tokens; table (r, m) int32: the page with
positions i t to (i + 1) t of the row's text, below 0 for none; keys, values (n, t, g * D) a tile of the cache, which holds the pages `first_page` to
`first_page` + n. Results are stored per page that a row sees: partial (r, m, h * D), not normalised, peaks and totals (r, m, h) as in `attention`.
Adding them in the order of the text gives the same bits regardless of the places of its pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register
from .attention import FLOOR, PLAIN, Pattern, capped

Array = npt.NDArray[Any]


@register("append_to_pages", "reference")
def append_to_pages(k: Array, v: Array, positions: Array, table: Array, keys: Array, values: Array, *, first_page: int) -> None:
    """keys[table[r, p / t] - first_page, p % t] = k[r] for position p of each row whose page lies in the tile, and values likewise."""
    length = keys.shape[1]
    for r, (at,) in enumerate(positions):
        page = table[r, at // length] - first_page
        if 0 <= page < len(keys):
            keys[page, at % length], values[page, at % length] = k[r, 0], v[r, 0]


@register("paged_attention", "reference")
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
    """Compute the attention of each row to the pages of the tile that hold positions up to the row's own."""
    length, num_heads = keys.shape[1], q.shape[2] // head_size
    group = num_heads // (keys.shape[2] // head_size)
    for r, i in np.ndindex(table.shape):
        position, page = int(positions[r, 0]), int(table[r, i]) - first_page
        if not 0 <= page < len(keys) or i * length > position:
            continue
        distances = i * length + np.arange(length) - position
        hidden = (distances > 0) | (distances <= -pattern.window if pattern.window else False)
        for h in range(num_heads):
            mine, shared = slice(h * head_size, (h + 1) * head_size), slice(h // group * head_size, (h // group + 1) * head_size)
            s = np.where(hidden, -np.inf, capped(scale * (keys[page, :, shared] @ q[r, 0, mine]), pattern.cap))  # (t,)
            top = max(s.max(), FLOOR) if pattern.may_blind else s.max()
            weights = np.exp(s - top)
            peaks[r, i, h], totals[r, i, h] = top, weights.sum()
            partial[r, i, mine] = weights @ values[page, :, shared]


@register("combine_pages", "reference")
def combine_pages(partial: Array, peaks: Array, totals: Array, positions: Array, table: Array, o: Array, *, length: int) -> None:
    """o (r, 1, h * D): the attention of each row over all its pages, of `length` positions each; 0 for a row without pages."""
    size = partial.shape[2] // peaks.shape[2]
    for r, (at,) in enumerate(positions):
        seen = [i for i in range(at // length + 1) if table[r, i] >= 0]
        if not seen:
            o[r] = 0
            continue
        factors = np.exp(peaks[r, seen] - peaks[r, seen].max(axis=0))  # (m, h)
        total = (totals[r, seen] * factors).sum(axis=0)
        o[r, 0] = (partial[r, seen] * np.repeat(factors, size, axis=1)).sum(axis=0) / np.repeat(total, size)
