"""Attention on the CPU: per head, blocks of 128 queries whose scores stay in cache; keys after a block's last query are never computed.

Heads are strided columns of the (t, h * D) matrices, which BLAS reads in place. Ladder (1024 positions, 12 heads of 64, causal,
fp32, one core, forward / backward): all scores of a head at once 46 / 89 ms; blocks of 256 queries with masked keys cut off 28 / 56 ms, of 128
26 / 52 ms, of 64 27 / 53 ms; weights in one compiled pass over each row, which skips masked keys, 23 / 50 ms; with the running
maximum in vector lanes, too, 20 / 46 ms (torch 26 / 65 ms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import OptionalTiles, Pair, heads, optional_tiles
from ..registry import register
from .attention_blocks import Block, blocks, columns, drop, first_seen, mask_later, products, work_arrays
from .attention_pattern import add_slopes, begin_floored, cap_slopes, change_scores, fill_empty
from .blas import gemm
from .elementwise import single

Array = npt.NDArray[Any]


def attention_flops(factor: float) -> Any:
    """Return a function that counts the operations of `factor` products of a pair of tiles."""

    def count(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
        (b, tq, width), tk, at = views[0].shape, views[1].shape[1], constants["at"]
        seen = tk - tq / 2 if at.causal and at.q_start == at.k_start else tk
        return float(factor * 2.0 * b * tq * seen * width)

    return count


@register("attention", "cpu", flops=attention_flops(2.0))
def attention(q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, *rest: Array, at: Pair, first: bool, last: bool) -> None:
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest` is `OptionalTiles`, lse if last, then scratch."""
    *extra, scratch = rest
    more = optional_tiles(extra, at, has_lse=last)
    add_keys(q, k, v, o, peak, total, more, scratch, at, first)
    if more.lse is not None:
        if at.pattern.may_blind:
            fill_empty(total)
        finish(o, total, at.head_size)
        np.log(total, out=more.lse)
        more.lse[...] += peak


def add_keys(
    q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, more: OptionalTiles[Array], scratch: Array, at: Pair, first: bool
) -> None:
    """Add one key tile to the running attention of a query tile, without normalising it."""
    size = at.head_size
    if first and at.pattern.may_blind:
        begin_floored(o, peak, total)
        first = False
    for block in blocks(q.shape[0], q.shape[2] // size, q.shape[1], k.shape[1], at):
        rows = block.queries
        s, _ = work_arrays(scratch, q.dtype, block)
        out = columns(o, block, size, rows)
        products(q, k, s, block, at)
        change_scores(s, more, scratch, block, at)
        weigh(s, out, peak[block.b, block.h, rows], total[block.b, block.h, rows], block, at, first)
        if more.key is not None:
            drop(s, more.key, scratch, block, at)
        gemm(s, columns(v, block, size, block.keys), out, beta=float(not first))


def weigh(s: Array, out: Array, peak: Array, total: Array, block: Block, at: Pair, first: bool) -> None:
    """s = exp(s - running maximum) for the scores of a block, 0 if the key is later than the query.

    Older sums and outputs are scaled down to the new maximum (Milakov and Gimelshein 2018).
    """
    if single(s, peak, total):
        from .numba import exp_loops

        shrink = np.empty(len(s), s.dtype)
        exp_loops.attention_weights(s, first_seen(block, at), peak, total, shrink, bool(first))
        if not first:
            out *= shrink[:, None]
        return
    mask_later(s, block, at)
    top = np.maximum.reduce(s, axis=1)
    if not first:
        np.maximum(top, peak, out=top)
        shrink = np.exp(peak - top)
        total *= shrink
        out *= shrink[:, None]
    s -= top[:, None]
    np.exp(s, out=s)
    if first:
        np.add.reduce(s, axis=1, out=total)
    else:
        total += np.add.reduce(s, axis=1)
    peak[...] = top


def finish(o: Array, total: Array, size: int) -> None:
    """Divide the outputs by the sums of their weights."""
    if not single(o, total):
        heads(o, size)[...] /= total[..., None]
        return
    from .numba import loops

    for matrix, sums in zip(o, total, strict=True):
        loops.normalise_heads(matrix, sums, size)


@register("attention_delta", "cpu")
def attention_delta(o: Array, do: Array, delta: Array, *, head_size: int) -> None:
    """delta = row sums of do * o per head  # (b, h, t)."""
    if not single(o, do, delta):
        np.einsum("bhtd,bhtd->bht", heads(o, head_size), heads(do, head_size), out=delta)
        return
    from .numba import loops

    for a, b, dots in zip(o, do, delta, strict=True):
        loops.head_dots(a, b, dots, head_size)


@register("attention_backward", "cpu", flops=attention_flops(5.0))
def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    kept: Array,
    delta: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *rest: Array,
    at: Pair,
    stored: bool,
    first_k: bool,
    first_q: bool,
    accumulate: bool | None = None,
) -> None:
    """Compute the contribution of one pair to dq, dk, dv, and to the gradient of a bias. The reference describes the arguments."""
    *extra, scratch = rest
    more = optional_tiles(extra, at, has_dtable=accumulate is not None)
    _clear(dq, dk, dv, first_k, first_q)
    if accumulate is False and more.dtable is not None:
        more.dtable[...] = 0
    for block in blocks(q.shape[0], q.shape[2] // at.head_size, q.shape[1], k.shape[1], at):
        s, ds = work_arrays(scratch, q.dtype, block)
        if stored:
            s[...] = kept[block.b, block.h, block.queries, block.keys]
        else:
            products(q, k, s, block, at)
            change_scores(s, more, scratch, block, at)
            weigh_again(s, kept[block.b, block.h, block.queries], block, at)
        _pair_backward(q, k, v, do, s, ds, delta, dq, dk, dv, more, scratch, block, at)


def weigh_again(s: Array, lse: Array, block: Block, at: Pair) -> None:
    """Recompute s = the weights of a block, from its scores and the log-sum-exp of its rows."""
    if single(s, lse):
        from .numba import exp_loops

        exp_loops.attention_weights_again(s, first_seen(block, at), lse)
        return
    mask_later(s, block, at)
    s -= lse[:, None]
    np.exp(s, out=s)


def _clear(dq: Array, dk: Array, dv: Array, first_k: bool, first_q: bool) -> None:
    if first_k:
        dq[...] = 0
    if first_q:
        dk[...] = 0
        dv[...] = 0


def _pair_backward(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    s: Array,
    ds: Array,
    delta: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    more: OptionalTiles[Array],
    scratch: Array,
    block: Block,
    at: Pair,
) -> None:
    """Add the gradients of one block, given its weights `s`, which are overwritten; `ds` is working memory of the same shape."""
    size = at.head_size
    rows, keys = block.queries, block.keys
    tdo, tv = columns(do, block, size, rows), columns(v, block, size, keys)
    gemm(tdo, tv, ds, trans_b=True)  # (queries, D) @ (D, keys)
    slopes(s, ds, delta[block.b, block.h, rows], more.key, scratch, block, at)
    gemm(s, tdo, columns(dv, block, size, keys), trans_a=True, beta=1.0)
    if more.dtable is not None:
        add_slopes(ds, more, scratch, block, at)
    if at.pattern.cap:
        products(q, k, s, block, at)
        cap_slopes(ds, s, at.pattern.cap)
    gemm(ds, columns(k, block, size, keys), columns(dq, block, size, rows), alpha=at.scale, beta=1.0)
    gemm(ds, columns(q, block, size, rows), columns(dk, block, size, keys), trans_a=True, alpha=at.scale, beta=1.0)


def slopes(s: Array, ds: Array, delta: Array, key: Array | None, scratch: Array, block: Block, at: Pair) -> None:
    """Turn the gradients `ds` of the weights `s` into those of the scores, and `s` into the weights after dropout."""
    if key is not None:
        drop(ds, key, scratch, block, at)
    if single(ds, s, delta):
        from .numba import loops

        loops.scaled_difference(ds, s, delta)
    else:
        ds -= delta[:, None]
        ds *= s
    if key is not None:
        drop(s, key, scratch, block, at)
