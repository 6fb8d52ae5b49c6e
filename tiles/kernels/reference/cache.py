"""Attention of a few new tokens over cached keys and values, readable.

Legend: q, o (b, w, h * D) and new k, v (b, w, g * D) of w tokens in a row; keys, values (b, t, g * D) a tile of the cache, which holds the positions
start .. start + t; positions (b, w) of the new tokens, consecutive within a sequence; peak, total (b, h, w) as in `attention`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register
from .attention import FLOOR, PLAIN, Pattern, capped, heads, shared

Array = npt.NDArray[Any]


@register("append_to_cache", "reference")
def append_to_cache(k: Array, v: Array, positions: Array, keys: Array, values: Array, *, start: int) -> None:
    """keys[b, positions[b, i] - start] = k[b, i] if the position lies in the tile, and the same for values."""
    for b, i in np.ndindex(positions.shape):
        at = int(positions[b, i]) - start
        if 0 <= at < keys.shape[1]:
            keys[b, at], values[b, at] = k[b, i], v[b, i]


@register("cached_attention", "reference")
def cached_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    o: Array,
    peak: Array,
    total: Array,
    *rest: Array,
    head_size: int,
    scale: float,
    start: int,
    first: bool,
    last: bool,
    pattern: Pattern = PLAIN,
) -> None:
    """Add one tile of the cache to the running attention of the new tokens, which see positions up to their own; the last task normalises.

    `rest` is [table of the bias,] scratch.
    """
    num_heads = q.shape[2] // head_size
    s = scale * (heads(q, head_size) @ shared(keys, num_heads, head_size).swapaxes(-1, -2))  # (b, h, w, t)
    distances = (start + np.arange(keys.shape[1])) - positions[:, :, None]  # (b, w, t)
    s = capped(s, pattern.cap)
    if pattern.buckets:
        s = s + np.moveaxis(rest[0].astype(s.dtype)[pattern.buckets.of(distances)], 3, 1)
    hidden = (distances > 0) | (distances <= -pattern.window if pattern.window else False)
    s = np.where(hidden[:, None], -np.inf, s)
    target, top = heads(o, head_size), s.max(axis=-1)
    if first:
        total[...] = 0
        target[...] = 0
        if pattern.may_blind:
            top = np.maximum(top, FLOOR)
    else:
        top = np.maximum(top, peak)
        shrink = np.exp(peak - top)
        total *= shrink
        target[...] = target * shrink[..., None]
    weights = np.exp(s - top[..., None])
    total += weights.sum(axis=-1)
    target += weights @ shared(values, num_heads, head_size)
    peak[...] = top
    if last:
        target[...] = target / total[..., None]
