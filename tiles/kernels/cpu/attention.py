"""Attention on the CPU: per head, blocks of 128 queries whose scores stay in cache; keys after a block's last query are never computed.

Heads are strided columns of the (t, h * D) matrices, which BLAS reads in place. Ladder (1024 positions, 12 heads of 64, causal,
fp32, one core, forward / backward): all scores of a head at once 46 / 89 ms; blocks of 256 queries with masked keys cut off 28 / 56 ms, of 128
26 / 52 ms, of 64 27 / 53 ms. Weights in one compiled pass over each row, masked keys never touched, 23 / 50 ms, with the running
maximum in vector lanes, too, 20 / 46 ms (torch 26 / 65 ms).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..reference.attention import Pair, heads
from ..reference.random import mix
from ..registry import register
from .blas import gemm
from .elementwise import PIECE_BYTES, WORK_BYTES, cells, row_blocks, single
from .random import survivors, thin, thin_rows

Array = npt.NDArray[Any]

QUERIES: Final = 128
"""Queries per block of scores."""


def attention_scratch_nbytes(num_queries: int, num_keys: int, itemsize: int, p: float = 0.0) -> int:
    """Working memory of one attention task: two blocks of scores, and with dropout a buffer of random bits."""
    return 2 * min(QUERIES, num_queries) * num_keys * itemsize + (_DRAW_BYTES if p else 0)


_DRAW_BYTES: Final = 2 * PIECE_BYTES
"""Buffer of random bits, the last bytes of the scratch."""


def lse_scratch_nbytes(num_rows: int, num_keys: int, itemsize: int) -> int:
    """Working memory of one task that sums kept scores: a block of rows."""
    return min(num_rows, max(1, PIECE_BYTES // (num_keys * itemsize))) * num_keys * itemsize


class Block(NamedTuple):
    """A block of queries of one head: its place in the running statistics, number of keys any of them sees, and heads of queries in the tile."""

    b: int
    h: int
    first: int
    last: int
    num_keys: int
    num_heads: int


def _blocks(batch: int, num_heads: int, tq: int, tk: int, at: Pair) -> Iterator[Block]:
    for b in range(batch):
        for h in range(num_heads):
            for first in range(0, tq, QUERIES):
                last = min(first + QUERIES, tq)
                seen = min(tk, at.q_start + last - at.k_start) if at.causal else tk
                if seen > 0:
                    yield Block(b, h, first, last, seen, num_heads)


def _work_arrays(scratch: Array, dtype: np.dtype[Any], block: Block) -> tuple[Array, Array]:
    """Two matrices (queries, keys) in the scratch memory."""
    shape = (block.last - block.first, block.num_keys)
    size = shape[0] * shape[1] * dtype.itemsize
    return np.ndarray(shape, dtype, buffer=scratch), np.ndarray(shape, dtype, buffer=scratch, offset=size)


def _columns(x: Array, block: Block, size: int, rows: slice) -> Array:
    """One head's rows of a (b, t, h * D) tile, a strided view; where `x` has fewer heads than the queries, the head that the block's shares."""
    head = block.h * (x.shape[2] // size) // block.num_heads
    return x[block.b, rows, head * size : (head + 1) * size]


def _scores(q: Array, k: Array, s: Array, block: Block, at: Pair) -> None:
    """s = scores of a block, those of later keys too."""
    size = at.head_size
    queries, keys = slice(block.first, block.last), slice(0, block.num_keys)
    gemm(_columns(q, block, size, queries), _columns(k, block, size, keys), s, trans_b=True, alpha=at.scale)


def _seen(block: Block, at: Pair) -> int:
    """Keys that the first query of a block sees; each query after it sees one more. At most all of them count."""
    return at.q_start + block.first + 1 - at.k_start if at.causal else block.num_keys


def _mask(s: Array, block: Block, at: Pair) -> None:
    """-inf where the key is later than the query; only the last columns can be."""
    if not at.causal:
        return
    start = max(0, at.q_start + block.first + 1 - at.k_start)
    if start < block.num_keys:
        keys = at.k_start + np.arange(start, block.num_keys)
        queries = at.q_start + np.arange(block.first, block.last)
        for piece, columns in cells(queries.size, keys.size, 1, WORK_BYTES // 2):
            np.copyto(s[piece, start:][:, columns], -np.inf, where=keys[None, columns] > queries[piece, None])


def _bases(block: Block, at: Pair) -> Array:
    """Global index of each row's first weight  # -> (queries,), uint64."""
    row = ((at.b_start + block.b) * at.num_heads + at.h_start + block.h) * at.length + at.q_start
    bases: Array = (row + np.arange(block.first, block.last, dtype=np.uint64)) * np.uint64(at.length) + np.uint64(at.k_start)
    return bases


def _survivors(key: Array, block: Block, at: Pair, scratch: Array) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """(rows and columns of the block, which of their weights survive dropout), piece by piece; drawn in the end of the scratch."""
    for piece, columns, keep in survivors(_mixed(key, at), _bases(block, at), block.num_keys, at.p, scratch[-_DRAW_BYTES:]):
        yield (piece, columns), keep


def _mixed(key: Array, at: Pair) -> tuple[int, int]:
    return mix(int(key[0]), int(key[1]), at.stream)


def drop(s: Array, key: Array, scratch: Array, block: Block, at: Pair) -> None:
    """s = dropout(s) of a block of weights."""
    if single(s):
        thin_rows(s, _bases(block, at), _mixed(key, at), at.p)
        return
    for piece, keep in _survivors(key, block, at, scratch):
        thin(s[piece], keep, at.p, s[piece])


def _flops(factor: float) -> Any:
    def count(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
        (b, tq, width), tk, at = views[0].shape, views[1].shape[1], constants["at"]
        seen = tk - tq / 2 if at.causal and at.q_start == at.k_start else tk
        return float(factor * 2.0 * b * tq * seen * width)

    return count


def _apply_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Of stored weights (B, H, Tq, Tk) by values of H heads."""
    b, h, tq, tk = views[0].shape
    return float(2.0 * b * h * tq * tk * constants["at"].head_size)


@register("attention", "cpu", flops=_flops(2.0))
def attention(q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, *rest: Array, at: Pair, first: bool, last: bool) -> None:
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest` is [lse if last,] [key if p,] scratch."""
    *extra, scratch = rest
    add_keys(q, k, v, o, peak, total, extra[-1] if at.p else None, scratch, at, first)
    if last:
        finish(o, total, at.head_size)
        lse = extra[0]
        np.log(total, out=lse)
        lse += peak


def add_keys(q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, key: Array | None, scratch: Array, at: Pair, first: bool) -> None:
    """Add one key tile to the running attention of a query tile, not normalised; `key` of the dropout, if any."""
    size = at.head_size
    for block in _blocks(q.shape[0], q.shape[2] // size, q.shape[1], k.shape[1], at):
        rows = slice(block.first, block.last)
        s, _ = _work_arrays(scratch, q.dtype, block)
        out = _columns(o, block, size, rows)
        _scores(q, k, s, block, at)
        weigh(s, out, peak[block.b, block.h, rows], total[block.b, block.h, rows], block, at, first)
        if key is not None:
            drop(s, key, scratch, block, at)
        gemm(s, _columns(v, block, size, slice(0, block.num_keys)), out, beta=float(not first))


def weigh(s: Array, out: Array, peak: Array, total: Array, block: Block, at: Pair, first: bool) -> None:
    """s = exp(s - running maximum) for the scores of a block, 0 where the key is later than the query.

    Older sums and outputs shrink to the new maximum (Milakov and Gimelshein 2018).
    """
    if single(s, peak, total):
        from .numba import exp_loops

        shrink = np.empty(len(s), s.dtype)
        exp_loops.attention_weights(s, _seen(block, at), peak, total, shrink, bool(first))
        if not first:
            out *= shrink[:, None]
        return
    _mask(s, block, at)
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


@register("attention_backward", "cpu", flops=_flops(5.0))
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
) -> None:
    """One pair's share of dq, dk, dv. `kept` is lse, or with `stored` the weights; `first_k`: first to write dq, `first_q`: dk and dv.

    `rest` is [key,] scratch.
    """
    *keys, scratch = rest
    _clear(dq, dk, dv, first_k, first_q)
    for block in _blocks(q.shape[0], q.shape[2] // at.head_size, q.shape[1], k.shape[1], at):
        s, ds = _work_arrays(scratch, q.dtype, block)
        queries = slice(block.first, block.last)
        if stored:
            s[...] = kept[block.b, block.h, queries, : block.num_keys]
        else:
            _scores(q, k, s, block, at)
            weigh_again(s, kept[block.b, block.h, queries], block, at)
        _pair_backward(q, k, v, do, s, ds, delta, dq, dk, dv, keys[0] if keys else None, scratch, block, at)


def weigh_again(s: Array, lse: Array, block: Block, at: Pair) -> None:
    """s = the weights of a block, from its scores and the log-sum-exp of its rows."""
    if single(s, lse):
        from .numba import exp_loops

        exp_loops.attention_weights_again(s, _seen(block, at), lse)
        return
    _mask(s, block, at)
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
    key: Array | None,
    scratch: Array,
    block: Block,
    at: Pair,
) -> None:
    """Gradients of one block from its weights `s`, which it overwrites; `ds` is working memory of the same shape."""
    size = at.head_size
    rows, keys = slice(block.first, block.last), slice(0, block.num_keys)
    tdo, tv = _columns(do, block, size, rows), _columns(v, block, size, keys)
    gemm(tdo, tv, ds, trans_b=True)  # (queries, D) @ (D, keys)
    slopes(s, ds, delta[block.b, block.h, rows], key, scratch, block, at)
    gemm(s, tdo, _columns(dv, block, size, keys), trans_a=True, beta=1.0)
    gemm(ds, _columns(k, block, size, keys), _columns(dq, block, size, rows), alpha=at.scale, beta=1.0)
    gemm(ds, _columns(q, block, size, rows), _columns(dk, block, size, keys), trans_a=True, alpha=at.scale, beta=1.0)


def slopes(s: Array, ds: Array, delta: Array, key: Array | None, scratch: Array, block: Block, at: Pair) -> None:
    """From weights s and their gradients ds: ds = gradients of the scores, s = what of the weights dropout has kept."""
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


@register("attention_scores", "cpu", flops=_flops(1.0))
def attention_scores(q: Array, k: Array, s: Array, *, at: Pair) -> None:
    """s = masked scores of a pair of tiles, to be kept."""
    if at.causal:
        s.fill(-np.inf)
    for block in _blocks(q.shape[0], q.shape[2] // at.head_size, q.shape[1], k.shape[1], at):
        scores = s[block.b, block.h, block.first : block.last, : block.num_keys]
        _scores(q, k, scores, block, at)
        _mask(scores, block, at)


@register("attention_lse", "cpu")
def attention_lse(s: Array, peak: Array, total: Array, *rest: Array, first: bool) -> None:
    """Add one tile of scores to the running row maximum and sum; the last task also gets lse; `rest` is [lse,] scratch."""
    *lse, scratch = rest
    flat, run_peak, run_total = s.reshape(-1, s.shape[-1]), peak.reshape(-1), total.reshape(-1)
    work = scratch.view(s.dtype)
    for piece in row_blocks(flat.shape[0], flat.shape[1] * flat.itemsize):
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
        np.log(total, out=lse[0])
        lse[0][...] += peak


@register("attention_apply", "cpu", flops=_apply_flops)
def attention_apply(s: Array, lse: Array, v: Array, o: Array, *rest: Array, at: Pair, accumulate: bool) -> None:
    """s becomes the weights exp(s - lse); o (+)= dropout(weights) @ v; `rest` is [key, scratch]."""
    size = at.head_size
    for block in _blocks(s.shape[0], s.shape[1], s.shape[2], s.shape[3], at):
        rows = slice(block.first, block.last)
        s[block.b, block.h, rows, block.num_keys :] = 0
        weights = s[block.b, block.h, rows, : block.num_keys]
        weights -= lse[block.b, block.h, rows, None]
        np.exp(weights, out=weights)
        out, values = _columns(o, block, size, rows), _columns(v, block, size, slice(0, block.num_keys))
        if not rest:
            gemm(weights, values, out, beta=float(accumulate))
            continue
        key, scratch = rest
        thinned, _ = _work_arrays(scratch, s.dtype, block)  # the kept weights stay whole, so the product takes a thinned copy
        for piece, keep in _survivors(key, block, at, scratch):
            queries, columns = piece
            thin(weights[piece], keep, at.p, thinned[piece])
            gemm(thinned[piece], values[columns], out[queries], beta=float(accumulate or columns.start > 0))
