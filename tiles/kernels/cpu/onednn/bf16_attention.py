"""Attention over bf16 tiles: products by oneDNN, scores and sums in fp32, weights rounded to bf16 before their product with the values.

Blocks hold `QUERIES` queries of a group of heads. The output of a block is summed in fp32 and rounded once; so are a task's gradients of keys and
values, over all its blocks. Ladder (1024 positions, 12 heads of 64, causal, one core, forward / backward): on fp32 copies 26 / 54 ms; here one head
at a time, read in place, in blocks of 64 queries 20 / 42 ms, of 128 16 / 27 ms, of 256 17 / 28 ms; heads packed, in groups of 1 MiB of scores
14 / 25 ms, of 3 MiB 12 / 21 ms. On a later day 13.6 / 23 ms; weights in the compiled passes of fp32 tiles, one head at a time, 9.2 / 21 ms.
For 512 queries and the 512 keys before them, backward, alone / with a second worker: one head at a time 13.6 / 20 ms, in groups of 1 MiB
11.7 / 14 ms, of 6 MiB 10.8 / 13 ms; for a tile on the diagonal 11.5 / 31, 8.0 / 12 and 7.2 / 9.5 ms, since every call takes the interpreter lock,
which two workers share. The scale as a factor of the product costs more than a pass over scores; with accumulation it takes 7 s, since oneDNN has
only reference loops for that combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...reference.attention import OptionalTiles, Pair, optional_tiles
from ...registry import BF16, register_bf16
from ..attention import slopes, weigh, weigh_again
from ..attention_blocks import QUERIES, Block, drop, seen_keys
from ..attention_pattern import add_slopes, begin_floored, cap_slopes, change_scores, fill_empty
from ..elementwise import cut
from .operations import convert, gemm

Array = npt.NDArray[Any]
Views = Sequence[Any]
Constants = Mapping[str, Any]

GROUP_BYTES: Final = 3 << 20
"""Bytes of scores in a group of heads that go through every pass together, which saves calls."""


class _Block(NamedTuple):
    """Queries [first, last) of heads [h, g) of sequence `b`, with the keys [low, high) that some of them see.

    `num_heads` counts the heads of queries in the tile.
    """

    b: int
    h: int
    g: int
    first: int
    last: int
    low: int
    high: int
    num_heads: int

    def by_head(self) -> Iterator[tuple[int, Block]]:
        """Yield (position in the group, the same queries of one head)."""
        for h in range(self.h, self.g):
            yield h - self.h, Block(self.b, h, self.first, self.last, self.low, self.high, self.num_heads)

    @property
    def heads(self) -> slice:
        """Heads of the block."""
        return slice(self.h, self.g)

    @property
    def queries(self) -> slice:
        """Rows of the block in a tile of queries."""
        return slice(self.first, self.last)

    @property
    def keys(self) -> slice:
        """Rows of the seen keys in a tile of keys."""
        return slice(self.low, self.high)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the scores: heads, queries, keys."""
        return self.g - self.h, self.last - self.first, self.high - self.low


def _blocks(b: int, num_heads: int, tq: int, tk: int, at: Pair) -> Iterator[_Block]:
    for first in range(0, tq, QUERIES):
        last = min(first + QUERIES, tq)
        low, high = seen_keys(first, last, tk, at)
        if high > low:
            for heads in cut(num_heads, max(1, min(num_heads, GROUP_BYTES // (4 * (last - first) * (high - low))))):
                yield _Block(b, heads.start, heads.stop, first, last, low, high, num_heads)


class _WorkArrays:
    """Uninitialised arrays, cut from one task's scratch memory in order."""

    def __init__(self, scratch: Array) -> None:
        self._scratch, self._used = scratch, 0

    def take(self, dtype: Any, *shape: int) -> Array:
        array: Array = np.ndarray(shape, dtype, buffer=self._scratch, offset=self._used)
        self._used += array.nbytes
        return array


def _heads(x: Array, size: int) -> Array:
    """Return a (t, H * D) matrix as heads  # (H, t, D), a view."""
    return x.reshape(x.shape[0], -1, size).transpose(1, 0, 2)


def _packed(x: Array, size: int, buffer: Array) -> Array:
    """Copy a (t, G * D) matrix into `buffer` (H, t, D), with the rows of each head together and repeated for each head of queries that shares it.

    Products read the copy faster, and one call computes those of all heads.
    """
    heads = _heads(x.view(np.uint16), size)
    _groups(buffer.view(np.uint16), len(heads))[...] = heads[:, None]
    return buffer


def _groups(x: Array, num_heads: int) -> Array:
    """Return (H, t, D) as groups of heads that share one of G  # (G, H / G, t, D), a view."""
    return x.reshape(num_heads, -1, *x.shape[1:])


def _scores(q: Array, k: Array, s: Array, block: _Block, at: Pair) -> None:
    """s = scores of packed heads, including those of later keys."""
    gemm(q[block.heads, block.queries], k[block.heads, block.keys], s, trans_b=True)
    s *= np.float32(at.scale)


def _sizes(views: Views, at: Pair) -> tuple[int, int, int, int]:
    """Return (query rows, key rows, elements of a row, largest number of scores in a block)."""
    (_, tq, width), (_, tk, _) = views[0].shape, views[1].shape
    most = min(QUERIES, tq)
    return tq, tk, width, max(most * tk, min(GROUP_BYTES // 4, most * tk * (width // at.head_size)))


def _takes_forward(views: Views, constants: Constants) -> bool:
    return all(view.dtype == BF16 for view in views[:4])


def _forward_scratch(views: Views, constants: Constants) -> int:
    """Return the bytes of packed q, k and v, a block of scores in fp32 and of weights in bf16, and a block of the output in fp32."""
    tq, tk, width, scores = _sizes(views, constants["at"])
    return int(2 * width * (tq + 2 * tk) + 6 * scores + 4 * min(QUERIES, tq) * width)


@register_bf16("attention", takes=_takes_forward, scratch_nbytes=_forward_scratch)
def attention(q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, *rest: Array, at: Pair, first: bool, last: bool) -> None:
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest`: `OptionalTiles`, scratch, scratch."""
    *extra, scratch, own = rest
    more = optional_tiles(extra, at, has_lse=last)
    if first and at.pattern.may_blind:
        begin_floored(o, peak, total)
        first = False
    size = at.head_size
    tq, tk, width, most = _sizes((q, k), at)
    work, num_heads = _WorkArrays(own), width // size
    buffer_s, buffer_out = work.take(np.float32, most), work.take(np.float32, min(QUERIES, tq) * width)
    packed, buffer_short = [work.take(BF16, num_heads, t, size) for t in (tq, tk, tk)], work.take(BF16, most)
    for b in range(q.shape[0]):
        hq, hk, hv = (_packed(x[b], size, buffer) for x, buffer in zip((q, k, v), packed, strict=True))
        for block in _blocks(b, num_heads, tq, tk, at):
            window = (block.heads, block.queries)
            s, short = _cut(buffer_s, block.shape), _cut(buffer_short, block.shape)
            target = _heads(o[b], size)[window]
            out = _cut(buffer_out, target.shape)
            _scores(hq, hk, s, block, at)
            if not first:
                convert(target, out)
            for n, head in block.by_head():
                change_scores(s[n], more, scratch, head, at)
                weigh(s[n], out[n], peak[b, head.h, block.queries], total[b, head.h, block.queries], head, at, first)
                if more.key is not None:
                    drop(s[n], more.key, scratch, head, at)
            convert(s, short)
            gemm(short, hv[block.heads, block.keys], out, accumulate=not first)
            if last:
                out /= _divisors(total[b][window], at)[..., None]
            convert(out, target)
    if more.lse is not None:
        if at.pattern.may_blind:
            fill_empty(total)
        np.log(total, out=more.lse)
        more.lse[...] += peak


def _divisors(sums: Array, at: Pair) -> Array:
    """Return the divisors of the outputs: the sums of their weights, or 1 for rows that saw no key."""
    return np.where(sums == 0, np.float32(1), sums) if at.pattern.may_blind else sums


def _cut(buffer: Array, shape: tuple[int, ...]) -> Array:
    """Return the beginning of a flat array in another shape."""
    return buffer[: prod(shape)].reshape(shape)


def _takes_backward(views: Views, constants: Constants) -> bool:
    return not constants["stored"] and all(view.dtype == BF16 for view in (*views[:4], *views[6:9]))


def _backward_scratch(views: Views, constants: Constants) -> int:
    """Return the bytes of packed q, k, v and do, gradients of keys and values in fp32, and two blocks of scores in fp32 and in bf16."""
    tq, tk, width, scores = _sizes(views, constants["at"])
    return int(4 * width * (tq + tk) + 8 * width * tk + 12 * scores)


def _begin_sums(total: Array, heads: Array, first: bool) -> None:
    """total (H, tk, D) = the gradients heads (G, tk, D) so far, each at the first of the heads of queries that share it; 0 everywhere if `first`."""
    if first or len(heads) < len(total):
        total.fill(0)
    if not first:
        convert(heads, _groups(total, len(heads))[:, 0])


def _weights_and_slopes(s: Array, ds: Array, lse: Array, delta: Array, more: OptionalTiles[Array], scratch: Array, block: _Block, at: Pair) -> None:
    """Turn the scores `s` of a block into weights after dropout, and the gradients `ds` of the weights into those of the scores."""
    for n, head in block.by_head():
        change_scores(s[n], more, scratch, head, at)
        weigh_again(s[n], lse[head.b, head.h, block.queries], head, at)
        slopes(s[n], ds[n], delta[head.b, head.h, block.queries], more.key, scratch, head, at)
        if more.dtable is not None:
            add_slopes(ds[n], more, scratch, head, at)


def _add_groups(total: Array, heads: Array) -> None:
    """heads (G, tk, D) = sums of total (H, tk, D) over the heads of queries that share each of them, in their order."""
    groups = _groups(total, len(heads))
    for member in range(1, groups.shape[1]):
        groups[:, 0] += groups[:, member]
    convert(groups[:, 0], heads)


@register_bf16("attention_backward", takes=_takes_backward, scratch_nbytes=_backward_scratch)
def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
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
    """Compute the contribution of one pair to dq, dk, dv, and to the gradient of a bias, as in the reference; `rest` ends with two scratches."""
    *extra, scratch, own = rest
    more = optional_tiles(extra, at, has_dtable=accumulate is not None)
    if accumulate is False and more.dtable is not None:
        more.dtable[...] = 0
    size, (tq, tk, width, most) = at.head_size, _sizes((q, k), at)
    work, num_heads = _WorkArrays(own), width // size
    buffers_s, sums = work.take(np.float32, 2, most), work.take(np.float32, 2, num_heads, tk, size)
    packed = [work.take(BF16, num_heads, t, size) for t in (tq, tk, tk, tq)]
    buffers_short = work.take(BF16, 2, most)
    if first_k:
        dq.view(np.uint16).fill(0)  # for queries that see none of these keys
    for b in range(q.shape[0]):
        hq, hk, hv, hdo = (_packed(x[b], size, buffer) for x, buffer in zip((q, k, v, do), packed, strict=True))
        for total, target in zip(sums, (dk, dv), strict=True):
            _begin_sums(total, _heads(target[b], size), first_q)
        for block in _blocks(b, num_heads, tq, tk, at):
            window, seen = (block.heads, block.queries), (block.heads, block.keys)
            s, ds, short, dshort = (_cut(buffer, block.shape) for buffer in (*buffers_s, *buffers_short))
            _scores(hq, hk, s, block, at)
            gemm(hdo[window], hv[seen], ds, trans_b=True)  # (heads, queries, D) @ (heads, D, keys)
            _weights_and_slopes(s, ds, lse, delta, more, scratch, block, at)
            convert(s, short)
            if at.pattern.cap:
                _scores(hq, hk, s, block, at)
                cap_slopes(ds.reshape(-1, ds.shape[-1]), s.reshape(-1, s.shape[-1]), at.pattern.cap)
            ds *= np.float32(at.scale)
            convert(ds, dshort)
            gemm(short, hdo[window], sums[1][seen], trans_a=True, accumulate=True)
            gemm(dshort, hk[seen], _heads(dq[b], size)[window], accumulate=not first_k)
            gemm(dshort, hq[window], sums[0][seen], trans_a=True, accumulate=True)
        for total, target in zip(sums, (dk, dv), strict=True):
            _add_groups(total, _heads(target[b], size))
