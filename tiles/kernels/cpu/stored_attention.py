"""Attention that keeps its weights for the backward pass, on the CPU: tasks for scores, their log-sum-exp, and the product of weights and values.

The backward pass is that of `attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import FLOOR, Pair, optional_tiles
from ..registry import register
from .attention import attention_flops
from .attention_blocks import QUERIES, block_survivors, blocks, columns, mask_later, products, seen_keys, work_arrays
from .attention_pattern import change_scores, fill_empty
from .blas import gemm
from .elementwise import PIECE_BYTES, cut, row_blocks
from .random import thin

Array = npt.NDArray[Any]


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of a product of stored weights (B, H, Tq, Tk) and the values of H heads."""
    b, h, tq, tk = views[0].shape
    return float(2.0 * b * h * tq * tk * constants["at"].head_size)


@register("attention_scores", "cpu", flops=attention_flops(1.0))
def attention_scores(q: Array, k: Array, s: Array, *rest: Array, at: Pair) -> None:
    """s = masked scores of a pair of tiles, which are kept. `rest` is `OptionalTiles` and scratch, if the pattern needs any."""
    if at.causal or at.pattern.window:
        s.fill(-np.inf)
    pair = replace(at, p=0.0)
    more, scratch = optional_tiles(rest, pair), rest[-1] if rest else s
    for block in blocks(q.shape[0], q.shape[2] // pair.head_size, q.shape[1], k.shape[1], pair):
        scores = s[block.b, block.h, block.queries, block.keys]
        products(q, k, scores, block, pair)
        change_scores(scores, more, scratch, block, pair)
        mask_later(scores, block, pair)


@register("attention_lse", "cpu")
def attention_lse(s: Array, peak: Array, total: Array, *rest: Array, first: bool, may_blind: bool = False) -> None:
    """Add one tile of scores to the running row maximum and sum; the last task also gets lse; `rest` is [lse,] scratch.

    With `may_blind`, rows may see no key at all.
    """
    *lse, scratch = rest
    if first and may_blind:
        peak.fill(FLOOR)
        total.fill(0)
        first = False
    flat, run_peak, run_total = s.reshape(-1, s.shape[-1]), peak.reshape(-1), total.reshape(-1)
    work = scratch.view(s.dtype)
    for piece in row_blocks(flat.shape[0], flat.shape[1] * flat.itemsize, min(PIECE_BYTES, scratch.nbytes)):
        top = np.maximum.reduce(flat[piece], axis=1)
        if not first:
            np.maximum(top, run_peak[piece], out=top)
        weights = work[: top.size * flat.shape[1]].reshape(top.size, -1)
        np.subtract(flat[piece], top[:, None], out=weights)
        np.exp(weights, out=weights)
        sums = np.add.reduce(weights, axis=1)
        if not first:
            sums += run_total[piece] * np.exp(run_peak[piece] - top)
        run_total[piece] = sums
        run_peak[piece] = top
    if lse:
        if may_blind:
            fill_empty(total)
        np.log(total, out=lse[0])
        lse[0][...] += peak


def _clear_unseen(s: Array, at: Pair) -> None:
    """Set the weights of blocks of queries that see no key to 0; only a window leaves such blocks."""
    for queries in cut(s.shape[2], QUERIES) if at.pattern.window else ():
        low, high = seen_keys(queries.start, queries.stop, s.shape[3], at)
        if high <= low:
            s[:, :, queries] = 0


@register("attention_apply", "cpu", flops=_flops)
def attention_apply(s: Array, lse: Array, v: Array, o: Array, *rest: Array, at: Pair, accumulate: bool) -> None:
    """s becomes the weights exp(s - lse); o (+)= dropout(weights) @ v; `rest` is [key, scratch]."""
    size = at.head_size
    if at.pattern.window and not accumulate:
        o.fill(0)  # for rows of blocks that see none of these keys
        accumulate = True
    _clear_unseen(s, at)
    for block in blocks(s.shape[0], s.shape[1], s.shape[2], s.shape[3], at):
        rows = block.queries
        s[block.b, block.h, rows, : block.low] = 0
        s[block.b, block.h, rows, block.high :] = 0
        weights = s[block.b, block.h, rows, block.keys]
        weights -= lse[block.b, block.h, rows, None]
        np.exp(weights, out=weights)
        out, values = columns(o, block, size, rows), columns(v, block, size, block.keys)
        if not rest:
            gemm(weights, values, out, beta=float(accumulate))
            continue
        key, scratch = rest
        thinned, _ = work_arrays(scratch, s.dtype, block)  # the kept weights stay without dropout, so the product uses a copy
        for piece, keep in block_survivors(key, block, at, scratch):
            queries, some = piece
            thin(weights[piece], keep, at.p, thinned[piece])
            gemm(thinned[piece], values[some], out[queries], beta=float(accumulate or some.start > 0))
