"""Attention over pairs of query and key tiles, readable: online softmax forward (Dao 2023, algorithm 1), recomputation backward (algorithm 2).

Legend: q (b, tq, h * D) with k, v (b, tk, g * D): tiles of whole heads, g divides h and h / g heads of queries in a row share each head of keys and
values (Ainslie et al. 2023); o like q; peak, total, lse, delta (b, h, tq): running row maximum, sum of
exponentials, their log-sum-exp, and the row sum of do * o. Scores are scale * q k^T, masked where the key is later than the query. Dropout acts
on the normalised weights; its counter is the element's index in (B, H, T, T).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register
from .random import bits, mix, threshold

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a pair of tiles lies, and what attention it is part of.

    Args:
        head_size: D.
        scale: factor of the scores.
        causal: whether later keys are masked.
        q_start, k_start: position of the first query and key of the tiles.
        b_start, h_start: first sequence and head of the tiles.
        num_heads, length: H and T of the whole tensor.
        p: dropout probability.
        stream: dropout stream.
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


def heads(x: Array, head_size: int) -> Array:
    """(b, t, h * D) -> (b, h, t, D), a view."""
    return x.reshape(*x.shape[:2], -1, head_size).transpose(0, 2, 1, 3)


def shared(x: Array, num_heads: int, head_size: int) -> Array:
    """(b, t, g * D) -> (b, h, t, D): each head of keys or values as often as heads of queries share it."""
    return np.repeat(heads(x, head_size), num_heads * head_size // x.shape[2], axis=1)


def over_groups(x: Array, num_heads: int) -> Array:
    """(b, h, t, D) -> (b, g, t, D): sums over the heads of queries that share a head."""
    b, h, t, d = x.shape
    result: Array = x.reshape(b, num_heads, h // num_heads, t, d).sum(axis=2)
    return result


def scores(q: Array, k: Array, at: Pair) -> Array:
    """Masked scores of a pair of tiles  # (b, h, tq, tk)."""
    s = at.scale * (heads(q, at.head_size) @ shared(k, q.shape[2] // at.head_size, at.head_size).swapaxes(-1, -2))
    if at.causal:
        later = (at.k_start + np.arange(s.shape[3]))[None, :] > (at.q_start + np.arange(s.shape[2]))[:, None]
        s[..., later] = -np.inf
    return s


def survivors(key: Array | None, shape: tuple[int, ...], at: Pair) -> Array:
    """Dropout factors of a pair of tiles: 0 or 1 / (1 - p)  # (b, h, tq, tk)."""
    if key is None:
        return np.ones(shape)
    b, h, i, j = (np.arange(n, dtype=np.uint64) for n in shape)
    row = (b[:, None, None] + np.uint64(at.b_start)) * np.uint64(at.num_heads) + h[None, :, None] + np.uint64(at.h_start)
    row = row * np.uint64(at.length) + i[None, None, :] + np.uint64(at.q_start)
    index = row[..., None] * np.uint64(at.length) + j + np.uint64(at.k_start)
    return (bits(mix(int(key[0]), int(key[1]), at.stream), index) >= threshold(at.p)) / (1.0 - at.p)


@register("attention", "reference")
def attention(q: Array, k: Array, v: Array, o: Array, peak: Array, total: Array, *rest: Array, at: Pair, first: bool, last: bool) -> None:
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest` is [lse if last,] [key if p,] scratch."""
    *extra, _ = rest
    optional = list(extra)
    lse = optional.pop(0) if last else None
    s = scores(q, k, at)
    target = heads(o, at.head_size)
    top = s.max(axis=-1)
    if not first:
        top = np.maximum(top, peak)
        shrink = np.exp(peak - top)
        total *= shrink
        target[...] = target * shrink[..., None]
    else:
        total[...] = 0
        target[...] = 0
    weights = np.exp(s - top[..., None])
    total += weights.sum(axis=-1)
    target += (weights * survivors(optional[0] if optional else None, s.shape, at)) @ shared(v, s.shape[1], at.head_size)
    peak[...] = top
    if lse is not None:
        target[...] = target / total[..., None]
        lse[...] = peak + np.log(total)


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
) -> None:
    """One pair's share of dq, dk, dv. `kept` is lse, or with `stored` the weights; `first_k`: first to write dq, `first_q`: dk and dv.

    `rest` is [key,] scratch.
    """
    if first_k:
        dq[...] = 0
    if first_q:
        dk[...] = 0
        dv[...] = 0
    weights = kept if stored else np.exp(scores(q, k, at) - kept[..., None])
    mask = survivors(rest[0] if len(rest) > 1 else None, weights.shape, at)
    tq, tdo = (heads(x, at.head_size) for x in (q, do))
    tk, tv = (shared(x, tq.shape[1], at.head_size) for x in (k, v))
    gq, gk, gv = (heads(x, at.head_size) for x in (dq, dk, dv))
    gv += over_groups((weights * mask).swapaxes(-1, -2) @ tdo, gv.shape[1])
    ds = at.scale * weights * ((tdo @ tv.swapaxes(-1, -2)) * mask - delta[..., None])
    gq += ds @ tk
    gk += over_groups(ds.swapaxes(-1, -2) @ tq, gk.shape[1])


@register("attention_scores", "reference")
def attention_scores(q: Array, k: Array, s: Array, *, at: Pair) -> None:
    """s = masked scores of a pair of tiles, to be kept."""
    s[...] = scores(q, k, at)


@register("attention_apply", "reference")
def attention_apply(s: Array, lse: Array, v: Array, o: Array, *rest: Array, at: Pair, accumulate: bool) -> None:
    """s becomes the weights exp(s - lse); o (+)= dropout(weights) @ v; `rest` is [key, scratch]."""
    s[...] = np.exp(s - lse[..., None])
    target = heads(o, at.head_size)
    product = (s * survivors(rest[0] if rest else None, s.shape, at)) @ shared(v, s.shape[1], at.head_size)
    target[...] = target + product if accumulate else product


@register("attention_lse", "reference")
def attention_lse(s: Array, peak: Array, total: Array, *rest: Array, first: bool) -> None:
    """Add one tile of scores to the running row maximum and sum; the last task also gets lse; `rest` is [lse,] scratch."""
    *lse, _ = rest
    top = s.max(axis=-1) if first else np.maximum(s.max(axis=-1), peak)
    total[...] = np.exp(s - top[..., None]).sum(axis=-1) + (0 if first else total * np.exp(peak - top))
    peak[...] = top
    if lse:
        lse[0][...] = peak + np.log(total)
