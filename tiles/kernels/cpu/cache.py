"""Attention of a few new tokens over cached keys and values, on the CPU.

One token per sequence goes through a compiled loop that reads keys and values row by row, in memory order: reading them is the whole cost. More
tokens go through the blocks of `attention`, sequence by sequence. Ladder for the loop, 256 keys of 6 heads of 64 from memory, scores / values, one
core: slices of rows 12 GB/s; arrays with an axis of heads, four rows at a time 22 / 20, one at a time 23 / 22.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import NOTHING, PLAIN, Pair, Pattern
from ..registry import register, register_bf16
from . import attention as whole
from .attention_blocks import QUERIES, attention_scratch_nbytes
from .attention_pattern import begin_floored
from .elementwise import single

Array = npt.NDArray[Any]


def cache_scratch_nbytes(num_tokens: int, num_heads: int, num_keys: int, itemsize: int, *, has_bias: bool = False) -> int:
    """Return the working memory of one task: the scores of all heads of one token, or those of `attention`."""
    bias = 2 * (min(QUERIES, num_tokens) + num_keys) * itemsize if has_bias else 0
    return max(num_heads * num_keys * itemsize, attention_scratch_nbytes(num_tokens, num_keys, itemsize, bias=bias))


@register_bf16("append_to_cache", takes=lambda views, constants: True)
@register("append_to_cache", "cpu")
def append_to_cache(k: Array, v: Array, positions: Array, keys: Array, values: Array, *, start: int) -> None:
    """keys[b, positions[b, i] - start] = k[b, i] if the position lies in the tile, and the same for values; element types are equal."""
    num_tokens = positions.shape[1]
    for b in range(positions.shape[0]):
        at = int(positions[b, 0]) - start
        low, high = max(0, -at), min(num_tokens, keys.shape[1] - at)
        if low < high:
            keys[b, at + low : at + high] = k[b, low:high]
            values[b, at + low : at + high] = v[b, low:high]


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    (b, w, width), num_keys = views[0].shape, views[1].shape[1]
    return float(4.0 * b * w * num_keys * width)


@register("cached_attention", "cpu", flops=_flops)
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
    """Add one tile of the cache to the running attention of the new tokens; the last one normalises. The reference describes the arguments."""
    *table, scratch = rest
    batch, num_tokens, width = q.shape
    if first and pattern.may_blind:
        begin_floored(o, peak, total)
        first = False
    is_seen = not pattern.window or int(positions.max()) - pattern.window < start  # whether every token's window covers the tile's beginning
    if num_tokens == 1 and single(q, keys) and is_seen and not pattern.cap and not table:
        from .numba import exp_loops

        s = np.ndarray((width // head_size, keys.shape[1]), np.float32, buffer=scratch)
        query, out, k, v = (x.reshape(batch, x.shape[1], -1, head_size) for x in (q, o, keys, values))
        tops, sums = peak.reshape(batch, -1), total.reshape(batch, -1)
        scaled = np.float32(scale)
        exp_loops.cached_attention(query[:, 0], k, v, positions.reshape(-1), start, scaled, s, out[:, 0], tops, sums, bool(first), bool(last))
        return
    more = NOTHING._replace(table=table[0]) if table else NOTHING
    for b in range(batch):
        pair = Pair(head_size, scale, True, int(positions[b, 0]), start, 0, 0, 0, 0, pattern=pattern)
        one = slice(b, b + 1)
        whole.add_keys(q[one], keys[one], values[one], o[one], peak[one], total[one], more, scratch, pair, first)
    if last:
        whole.finish(o, total, head_size)
