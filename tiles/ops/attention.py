"""Attention over sequence tiles: chains over key tiles forward, one task per pair of tiles backward; fully masked pairs are not emitted.

Legend: q, o (B, T, H * D) cut into (b, t, h * D); k, v (B, T, G * D) cut into (b, t, g * D), where H / G = h / g heads of queries in a row share each
head of keys and values (Ainslie et al., GQA, 2023): a task gets the tiles of k and v as they are, and adds the gradients of a shared head in the
order of its heads of queries; lse (B, H, T).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scheduler import RW, SCRATCH, Access, R, W

from ..emission import emit, scratch
from ..kernels.cpu.attention import attention_scratch_nbytes, lse_scratch_nbytes
from ..kernels.reference.attention import Pair
from ..tensor import TileTensor
from .grid import chained, same_axis, same_tiling


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of attention weights.

    Args:
        p: probability of dropping.
        key: (2,) uint64, (seed, step).
        stream: tells this place in the network from others.
    """

    p: float
    key: TileTensor
    stream: int


@dataclass(frozen=True, slots=True)
class _Attention:
    """What all tasks of one attention share."""

    q: TileTensor
    k: TileTensor
    head_size: int
    scale: float
    causal: bool
    dropout: Dropout | None

    def pair(self, b: int, h: int, i: int, j: int) -> Pair:
        """The pair of query tile i and key tile j."""
        q, drop = self.q, self.dropout
        return Pair(
            self.head_size,
            self.scale,
            self.causal,
            i * q.tile[1],
            j * self.k.tile[1],
            b * q.tile[0],
            h * q.tile[2] // self.head_size,
            q.shape[2] // self.head_size,
            q.shape[1],
            drop.p if drop else 0.0,
            drop.stream if drop else 0,
        )

    def keys(self, i: int) -> int:
        """Number of key tiles that query tile i sees at all."""
        if not self.causal:
            return self.k.grid[1]
        last_query = min((i + 1) * self.q.tile[1], self.q.shape[1]) - 1
        return min(self.k.grid[1], last_query // self.k.tile[1] + 1)

    def panels(self) -> Iterator[tuple[int, int, int]]:
        """(sequence tile, head tile, query tile)."""
        return itertools.product(range(self.q.grid[0]), range(self.q.grid[2]), range(self.q.grid[1]))

    def extra(self) -> list[Access]:
        """The dropout key, if any."""
        return [(self.dropout.key[0,], R)] if self.dropout else []

    def scratch(self) -> Access:
        """Working memory for one task."""
        itemsize = 8 if self.q.dtype == np.float64 else 4
        p = self.dropout.p if self.dropout else 0.0
        return scratch(self.q.runtime, attention_scratch_nbytes(self.q.tile[1], self.k.tile[1], itemsize, p)), SCRATCH

    def lse_scratch(self) -> Access:
        """Working memory for one sum over kept scores."""
        itemsize, (b, t, width) = 8 if self.q.dtype == np.float64 else 4, self.q.tile
        nbytes = lse_scratch_nbytes(b * t * width // self.head_size, self.k.tile[1], itemsize)
        return scratch(self.q.runtime, nbytes), SCRATCH

    def per_row(self, name: str) -> TileTensor:
        """One number per head and query  # (B, H, T)."""
        q, size = self.q, self.head_size
        shape, tile = (q.shape[0], q.shape[2] // size, q.shape[1]), (q.tile[0], q.tile[2] // size, q.tile[1])
        return TileTensor(q.runtime, shape, tile, np.float64 if q.dtype == np.float64 else np.float32, name=name)


def _describe(q: TileTensor, k: TileTensor, v: TileTensor, head_size: int, scale: float, causal: bool, dropout: Dropout | None) -> _Attention:
    same_tiling(k, v)
    for axis in (0, 1):
        same_axis(q, axis, k, axis)
    if any(x.shape[2] % head_size or x.tile[2] % head_size for x in (q, k)):
        raise ValueError(f"attention tiles must hold whole heads; got head size {head_size} and {q!r} with {k!r}")
    group, rest = divmod(q.shape[2], k.shape[2])
    if rest or q.tile[2] != group * k.tile[2]:
        raise ValueError(f"a tile of queries must hold the heads that share the heads of a tile of keys, got head size {head_size}, {q!r} with {k!r}")
    return _Attention(q, k, head_size, scale, causal, dropout if dropout and dropout.p > 0 else None)


def attention(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    *,
    head_size: int,
    scale: float,
    causal: bool = True,
    dropout: Dropout | None = None,
) -> tuple[TileTensor, TileTensor]:
    """o = dropout(softmax(scale * q k^T)) v per head, without the scores. Returns (o, lse)."""
    whole = _describe(q, k, v, head_size, scale, causal, dropout)
    o, lse, peak, total = q.like(name="attention"), whole.per_row("lse"), whole.per_row("row maximum"), whole.per_row("row sum")
    for b, h, i in whole.panels():
        num = whole.keys(i)
        for j in range(num):
            mode = chained(j)
            accesses: list[Access] = [(q[b, i, h], R), (k[b, j, h], R), (v[b, j, h], R)]
            accesses += [(o[b, i, h], mode), (peak[b, h, i], mode), (total[b, h, i], mode)]
            if j == num - 1:
                accesses.append((lse[b, h, i], W))
            accesses += [*whole.extra(), whole.scratch()]
            emit(q.runtime, "attention", accesses, at=whole.pair(b, h, i, j), first=j == 0, last=j == num - 1)
    return o, lse


def attention_backward(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    o: TileTensor,
    lse: TileTensor,
    do: TileTensor,
    *,
    head_size: int,
    scale: float,
    causal: bool = True,
    dropout: Dropout | None = None,
) -> tuple[TileTensor, TileTensor, TileTensor]:
    """Gradients (dq, dk, dv) of `attention`, recomputing the weights from lse."""
    whole = _describe(q, k, v, head_size, scale, causal, dropout)
    return _backward(whole, v, o, do, lse, None)


def _backward(
    whole: _Attention, v: TileTensor, o: TileTensor, do: TileTensor, lse: TileTensor, weights: TileTensor | None
) -> tuple[TileTensor, TileTensor, TileTensor]:
    q, k = whole.q, whole.k
    same_tiling(q, o, do)
    delta = whole.per_row("delta")
    dq, dk, dv = q.like(name="dq"), k.like(name="dk"), v.like(name="dv")
    written: set[tuple[int, int, int]] = set()
    for b, h, i in whole.panels():
        emit(q.runtime, "attention_delta", [(o[b, i, h], R), (do[b, i, h], R), (delta[b, h, i], W)], head_size=whole.head_size)
        for j in range(whole.keys(i)):
            first_q = (b, h, j) not in written
            written.add((b, h, j))
            mode = chained(not first_q)
            kept = lse[b, h, i] if weights is None else weights[b, h, i, j]
            accesses: list[Access] = [(q[b, i, h], R), (k[b, j, h], R), (v[b, j, h], R), (do[b, i, h], R), (kept, R), (delta[b, h, i], R)]
            accesses += [(dq[b, i, h], chained(j)), (dk[b, j, h], mode), (dv[b, j, h], mode), *whole.extra(), whole.scratch()]
            constants = {"stored": weights is not None, "first_k": j == 0, "first_q": first_q}
            emit(q.runtime, "attention_backward", accesses, at=whole.pair(b, h, i, j), **constants)
    return dq, dk, dv


def stored_attention(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    *,
    head_size: int,
    scale: float,
    causal: bool = True,
    dropout: Dropout | None = None,
) -> tuple[TileTensor, TileTensor]:
    """The same attention with its weights kept for the backward pass. Returns (o, weights (B, H, T, T))."""
    whole = _describe(q, k, v, head_size, scale, causal, dropout)
    o, lse, peak, total = q.like(name="attention"), whole.per_row("lse"), whole.per_row("row maximum"), whole.per_row("row sum")
    shape, tile = (*lse.shape, k.shape[1]), (*lse.tile, k.tile[1])
    weights = TileTensor(q.runtime, shape, tile, q.dtype, name="attention weights")
    for b, h, i in whole.panels():
        num = whole.keys(i)
        for j in range(num):
            s, mode = weights[b, h, i, j], chained(j)
            emit(q.runtime, "attention_scores", [(q[b, i, h], R), (k[b, j, h], R), (s, W)], at=whole.pair(b, h, i, j))
            accesses: list[Access] = [(s, R), (peak[b, h, i], mode), (total[b, h, i], mode)]
            if j == num - 1:
                accesses.append((lse[b, h, i], W))
            emit(q.runtime, "attention_lse", [*accesses, whole.lse_scratch()], first=j == 0)
        for j in range(num):
            accesses = [(weights[b, h, i, j], RW), (lse[b, h, i], R), (v[b, j, h], R), (o[b, i, h], chained(j)), *whole.extra()]
            if whole.dropout:
                accesses.append(whole.scratch())
            emit(q.runtime, "attention_apply", accesses, at=whole.pair(b, h, i, j), accumulate=j > 0)
    return o, weights


def stored_attention_backward(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    o: TileTensor,
    weights: TileTensor,
    do: TileTensor,
    *,
    head_size: int,
    scale: float,
    causal: bool = True,
    dropout: Dropout | None = None,
) -> tuple[TileTensor, TileTensor, TileTensor]:
    """Gradients (dq, dk, dv) of `stored_attention`."""
    whole = _describe(q, k, v, head_size, scale, causal, dropout)
    return _backward(whole, v, o, do, weights, weights)
