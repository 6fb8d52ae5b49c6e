"""Attention over pairs of query and key tiles, readable: online softmax forward (Dao 2023, algorithm 1), recomputation backward (algorithm 2).

Legend: q (b, tq, h * D) with k, v (b, tk, g * D): tiles of whole heads; h / g consecutive heads of queries share each head of keys and values
(Ainslie et al. 2023); o like q; peak, total, lse, delta (b, h, tq): running row maximum, sum of exponentials, their log-sum-exp, and the row sum of
do * o. Scores are scale * q k^T, masked if the key is later than the query; a `Pattern` changes and masks more of them. Dropout acts on the
normalised weights; its counter is the element's index in (B, H, T, S).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..registry import register
from .buckets import Buckets
from .random import bits, mix, threshold

Array = npt.NDArray[Any]
A = TypeVar("A")

FLOOR: Final = -1e30
"""Initial running maximum if a row may see no key at all: its weights, and so its output, are then 0."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Changes of the scores besides the causal mask, applied in this order: the cap, the bias, the masks.

    Args:
        cap: limit of the scores s, which become cap * tanh(s / cap) (Gemma 2); 0 for none.
        buckets: rule that assigns distances to rows of the bias table; None for no bias.
        window: number of keys that a query sees at most, its own position included; 0 for all.
        documents: number of tiles of document numbers that a task gets: 0; 2, for queries and keys; or 1, if both are the same. A query sees only
            keys of its own document.
    """

    cap: float = 0.0
    buckets: Buckets | None = None
    window: int = 0
    documents: int = 0

    @property
    def may_blind(self) -> bool:
        """Whether a query may see no key of a tile, or none at all."""
        return bool(self.window or self.documents)


PLAIN: Final = Pattern()


@dataclass(frozen=True, slots=True)
class Pair:
    """Position of a pair of tiles, and the parameters of the attention that it belongs to.

    Args:
        head_size: number of features D of a head.
        scale: factor of the scores.
        causal: whether later keys are masked.
        q_start, k_start: position of the first query and key of the tiles.
        b_start, h_start: first sequence and head of the tiles.
        num_heads, length: H and T of the whole tensor.
        p: dropout probability.
        stream: dropout stream.
        pattern: changes of the scores.
        num_keys: number of keys S of the whole tensor; 0 if it is the number of queries.
    """

    head_size: int
    scale: float
    causal: bool
    q_start: int
    k_start: int
    b_start: int
    h_start: int
    num_heads: int
    length: int
    p: float = 0.0
    stream: int = 0
    pattern: Pattern = PLAIN
    num_keys: int = 0

    @property
    def row(self) -> int:
        """Number of elements S in a row of all weights."""
        return self.num_keys or self.length


class OptionalTiles(NamedTuple, Generic[A]):
    """Optional tiles of a task, in the order in which they follow the tiles that every task has; working memory follows.

    Args:
        lse: log-sum-exp, in the last task of a chain.
        key: key of the dropout.
        of_queries, of_keys: document numbers (b, tq) and (b, tk).
        table: table of the bias, (buckets, h).
        dtable: gradient of the table, if wanted.
    """

    lse: A | None
    key: A | None
    of_queries: A | None
    of_keys: A | None
    table: A | None
    dtable: A | None


NOTHING: Final[OptionalTiles[Any]] = OptionalTiles(None, None, None, None, None, None)


def optional_tiles(rest: Sequence[A], at: Pair, *, has_lse: bool = False, has_dtable: bool = False) -> OptionalTiles[A]:
    """Return the arguments `rest` of a task by name."""
    left, pattern = iter(rest), at.pattern
    lse = next(left) if has_lse else None
    key = next(left) if at.p else None
    of_queries = next(left) if pattern.documents else None
    of_keys = next(left) if pattern.documents == 2 else of_queries
    table = next(left) if pattern.buckets else None
    return OptionalTiles(lse, key, of_queries, of_keys, table, next(left) if has_dtable else None)


def heads(x: Array, head_size: int) -> Array:
    """(b, t, h * D) -> (b, h, t, D), a view."""
    return x.reshape(*x.shape[:2], -1, head_size).transpose(0, 2, 1, 3)


def shared(x: Array, num_heads: int, head_size: int) -> Array:
    """(b, t, g * D) -> (b, h, t, D): repeat each head of keys or values for every head of queries that shares it."""
    return np.repeat(heads(x, head_size), num_heads * head_size // x.shape[2], axis=1)


def over_groups(x: Array, num_heads: int) -> Array:
    """(b, h, t, D) -> (b, g, t, D): sum over the heads of queries that share a head."""
    b, h, t, d = x.shape
    result: Array = x.reshape(b, num_heads, h // num_heads, t, d).sum(axis=2)
    return result


def scores(q: Array, k: Array, at: Pair, more: OptionalTiles[Array]) -> Array:
    """Return the masked scores of a pair of tiles  # (b, h, tq, tk)."""
    s = capped(products(q, k, at), at.pattern.cap)
    distances = (at.k_start + np.arange(s.shape[3]))[None, :] - (at.q_start + np.arange(s.shape[2]))[:, None]
    if at.pattern.buckets and more.table is not None:
        s = s + np.moveaxis(more.table.astype(s.dtype)[at.pattern.buckets.of(distances)], 2, 0)
    if at.causal:
        s[..., distances > 0] = -np.inf
    if at.pattern.window:
        s[..., distances <= -at.pattern.window] = -np.inf
    if more.of_queries is not None and more.of_keys is not None:
        s = np.where((more.of_queries[:, :, None] == more.of_keys[:, None, :])[:, None], s, -np.inf)
    return s


def products(q: Array, k: Array, at: Pair) -> Array:
    """Return scale * q k^T of a pair of tiles  # (b, h, tq, tk)."""
    s: Array = at.scale * (heads(q, at.head_size) @ shared(k, q.shape[2] // at.head_size, at.head_size).swapaxes(-1, -2))
    return s


def capped(s: Array, cap: float) -> Array:
    """Return cap * tanh(s / cap), or `s` if `cap` is 0."""
    return cap * np.tanh(s / cap) if cap else s


def survivors(key: Array | None, shape: tuple[int, ...], at: Pair) -> Array:
    """Return the dropout factors of a pair of tiles: 0 or 1 / (1 - p)  # (b, h, tq, tk)."""
    if key is None:
        return np.ones(shape)
    b, h, i, j = (np.arange(n, dtype=np.uint64) for n in shape)
    row = (b[:, None, None] + np.uint64(at.b_start)) * np.uint64(at.num_heads) + h[None, :, None] + np.uint64(at.h_start)
    row = row * np.uint64(at.length) + i[None, None, :] + np.uint64(at.q_start)
    index = row[..., None] * np.uint64(at.row) + j + np.uint64(at.k_start)
    return (bits(mix(int(key[0]), int(key[1]), at.stream), index) >= threshold(at.p)) / (1.0 - at.p)


@register("attention", "reference")
def attention(q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, *rest: Array, at: Pair, first: bool, last: bool) -> None:
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest` is `OptionalTiles`, lse if last, then scratch."""
    more = optional_tiles(rest, at, has_lse=last)
    s = scores(q, k, at, more)
    target = heads(o, at.head_size)
    top = s.max(axis=-1)
    if first:
        total[...] = 0
        target[...] = 0
        if at.pattern.may_blind:
            top = np.maximum(top, FLOOR)
    else:
        top = np.maximum(top, peak)
        shrink = np.exp(peak - top)
        total *= shrink
        target[...] = target * shrink[..., None]
    weights = np.exp(s - top[..., None])
    total += weights.sum(axis=-1)
    target += (weights * survivors(more.key, s.shape, at)) @ shared(v, s.shape[1], at.head_size)
    peak[...] = top
    if more.lse is not None:
        if at.pattern.may_blind:
            total[total == 0] = 1
        target[...] = target / total[..., None]
        more.lse[...] = peak + np.log(total)


@register("attention_delta", "reference")
def attention_delta(o: Array, do: Array, delta: Array, *, head_size: int) -> None:
    """delta = row sums of do * o per head  # (b, h, t)."""
    delta[...] = (heads(o, head_size) * heads(do, head_size)).sum(axis=-1)


@register("attention_backward", "reference")
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
    """Compute the contribution of one pair to dq, dk, dv, and to the gradient of a bias.

    Args:
        kept: lse, or with `stored` the weights.
        rest: `OptionalTiles`, dtable if `accumulate` is not None, then scratch.
        first_k: whether this task is the first to write dq.
        first_q: whether this task is the first to write dk and dv.
        accumulate: whether to add to dtable; None without dtable.
    """
    more = optional_tiles(rest, at, has_dtable=accumulate is not None)
    for gradient, is_first in ((dq, first_k), (dk, first_q), (dv, first_q)):
        if is_first:
            gradient[...] = 0
    weights = kept if stored else np.exp(scores(q, k, at, more) - kept[..., None])
    mask = survivors(more.key, weights.shape, at)
    tq, tdo = (heads(x, at.head_size) for x in (q, do))
    tk, tv = (shared(x, tq.shape[1], at.head_size) for x in (k, v))
    gq, gk, gv = (heads(x, at.head_size) for x in (dq, dk, dv))
    gv += over_groups((weights * mask).swapaxes(-1, -2) @ tdo, gv.shape[1])
    slopes = weights * ((tdo @ tv.swapaxes(-1, -2)) * mask - delta[..., None])
    if more.dtable is not None:
        _add_slopes(slopes, more.dtable, at, bool(accumulate))
    if at.pattern.cap:
        slopes = slopes * (1 - np.tanh(products(q, k, at) / at.pattern.cap) ** 2)
    ds = at.scale * slopes
    gq += ds @ tk
    gk += over_groups(ds.swapaxes(-1, -2) @ tq, gk.shape[1])


def _add_slopes(slopes: Array, dtable: Array, at: Pair, accumulate: bool) -> None:
    """dtable[bucket, h] (+)= sum of the gradients `slopes` of the scores (b, h, tq, tk) at the distances of the bucket."""
    assert at.pattern.buckets is not None
    distances = (at.k_start + np.arange(slopes.shape[3]))[None, :] - (at.q_start + np.arange(slopes.shape[2]))[:, None]
    buckets = at.pattern.buckets.of(distances)
    if not accumulate:
        dtable[...] = 0
    for bucket in range(len(dtable)):
        dtable[bucket] += slopes[..., buckets == bucket].sum(axis=(0, 2))


@register("whole_attention", "reference")
def whole_attention(q: Array, k: Array, v: Array, o: Array, lse: Array, scratch: Array, *, at: Pair) -> None:
    """Compute o and lse of whole sequences in one pair of tiles, without dropout or pattern."""
    s = scores(q, k, at, NOTHING)
    top = s.max(axis=-1)
    lse[...] = top + np.log(np.exp(s - top[..., None]).sum(axis=-1))
    heads(o, at.head_size)[...] = np.exp(s - lse[..., None]) @ shared(v, s.shape[1], at.head_size)


@register("whole_attention_backward", "reference")
def whole_attention_backward(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dq: Array, dk: Array, dv: Array, scratch: Array, *, at: Pair
) -> None:
    """Compute dq, dk and dv of `whole_attention` from its results o and lse."""
    delta = np.empty_like(lse)
    attention_delta(o, do, delta, head_size=at.head_size)
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, scratch, at=at, stored=False, first_k=True, first_q=True)


@register("attention_scores", "reference")
def attention_scores(q: Array, k: Array, s: Array, *rest: Array, at: Pair) -> None:
    """s = masked scores of a pair of tiles, which are kept. `rest` is `OptionalTiles` and scratch, if the pattern needs any."""
    s[...] = scores(q, k, at, optional_tiles(rest, replace(at, p=0.0)))


@register("attention_apply", "reference")
def attention_apply(s: Array, lse: Array, v: Array, o: Array, *rest: Array, at: Pair, accumulate: bool) -> None:
    """s becomes the weights exp(s - lse); o (+)= dropout(weights) @ v; `rest` is [key, scratch]."""
    s[...] = np.exp(s - lse[..., None])
    target = heads(o, at.head_size)
    product = (s * survivors(rest[0] if rest else None, s.shape, at)) @ shared(v, s.shape[1], at.head_size)
    target[...] = target + product if accumulate else product


@register("attention_lse", "reference")
def attention_lse(s: Array, peak: Array, total: Array, *rest: Array, first: bool, may_blind: bool = False) -> None:
    """Add one tile of scores to the running row maximum and sum; the last task also gets lse; `rest` is [lse,] scratch.

    With `may_blind`, rows may see no key at all.
    """
    *lse, _ = rest
    top = np.maximum(s.max(axis=-1), FLOOR if may_blind else -np.inf) if first else np.maximum(s.max(axis=-1), peak)
    total[...] = np.exp(s - top[..., None]).sum(axis=-1) + (0 if first else total * np.exp(peak - top))
    peak[...] = top
    if lse:
        if may_blind:
            total[total == 0] = 1
        lse[0][...] = peak + np.log(total)
