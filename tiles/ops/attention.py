"""Attention over sequence tiles: chains over key tiles forward, one task per pair of tiles backward; fully masked pairs are not emitted.

Legend: q, o (B, T, H * D) cut into (b, t, h * D); k, v (B, S, G * D) cut into (b, s, g * D), where H / G = h / g consecutive heads of queries share
each head of keys and values (Ainslie et al., GQA, 2023): a task gets the tiles of k and v as they are, and adds the gradients of a shared head in
the order of its heads of queries; lse (B, H, T). Causal attention is self-attention: S = T and s = t. Pairs of tiles that lie entirely outside a
window are not emitted. Document numbers are data, unknown while tasks are emitted, so kernels apply their masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Required, TypedDict, Unpack

import numpy as np

from scheduler import REDUX, RW, SCRATCH, Access, Handle, R, W

from ..emission import emit, scratch
from ..kernels.cpu.attention_blocks import attention_scratch_nbytes, lse_scratch_nbytes, whole_scratch_nbytes
from ..kernels.cpu.attention_pattern import bias_scratch_nbytes
from ..kernels.cuda.library_attention import takes_heads
from ..kernels.reference.attention import PLAIN, Pair, Pattern
from ..kernels.reference.buckets import Buckets
from ..kernels.registry import BF16
from ..tensor import TileTensor
from .grid import chained, same_axis, same_tiling


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of attention weights.

    Args:
        p: probability of dropping a weight.
        key: (2,) uint64, (seed, step).
        stream: number of this place in the network; each place draws a mask of its own.
    """

    p: float
    key: TileTensor
    stream: int


@dataclass(frozen=True, slots=True)
class Bias:
    """Relative position bias: numbers added to scores by the distance of key and query.

    Args:
        table: (buckets, H), cut like the heads of queries.
        buckets: rule that assigns distances to rows of `table`.
    """

    table: TileTensor
    buckets: Buckets


@dataclass(frozen=True, slots=True)
class Scoring:
    """Changes of the scores besides the causal mask; see `kernels.reference.attention.Pattern`.

    Args:
        cap: limit c of the scores, which become c tanh(score / c); None for no limit.
        bias: numbers added to the scores; None for none.
        window: number of keys that a query sees at most, its own position included; None for all.
        documents: int32 document numbers of queries (B, T) and keys (B, S): a query sees keys of its own document. Both may be the same tensor.
    """

    cap: float | None = None
    bias: Bias | None = None
    window: int | None = None
    documents: tuple[TileTensor, TileTensor] | None = None


UNCHANGED: Final = Scoring()


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of all operations here; the backward pass gets those of the forward pass."""

    head_size: Required[int]
    """D"""
    scale: Required[float]
    """factor of q k^T"""
    causal: bool
    """whether a query sees only keys up to its own position; True unless given"""
    dropout: Dropout | None
    scoring: Scoring


@dataclass(frozen=True, slots=True)
class _Attention:
    """The arguments that all tasks of one attention share."""

    q: TileTensor
    k: TileTensor
    head_size: int
    scale: float
    causal: bool
    dropout: Dropout | None
    scoring: Scoring

    def pair(self, b: int, h: int, i: int, j: int) -> Pair:
        """Return the description of the pair of query tile i and key tile j."""
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
            self.pattern(len(self.document_tiles(b, i, j))),
            num_keys=self.k.shape[1],
        )

    def pattern(self, documents: int) -> Pattern:
        """Return the pattern of a task with `documents` tiles of document numbers."""
        how = self.scoring
        if how == UNCHANGED:
            return PLAIN
        return Pattern(how.cap or 0.0, how.bias.buckets if how.bias else None, how.window or 0, documents)

    def document_tiles(self, b: int, i: int, j: int) -> list[Handle]:
        """Return the document numbers of a pair's queries and keys; one tile if both are the same."""
        if self.scoring.documents is None:
            return []
        of_queries, of_keys = self.scoring.documents
        return list(dict.fromkeys((of_queries[b, i], of_keys[b, j])))

    def keys(self, i: int) -> range:
        """Return the key tiles that query tile i sees at all."""
        if not self.causal:
            return range(self.k.grid[1])
        last_query = min((i + 1) * self.q.tile[1], self.q.shape[1]) - 1
        window = self.scoring.window or self.q.shape[1]
        return range(max(0, i * self.q.tile[1] + 1 - window) // self.k.tile[1], min(self.k.grid[1], last_query // self.k.tile[1] + 1))

    def panels(self) -> Iterator[tuple[int, int, int]]:
        """Return all (sequence tile, head tile, query tile)."""
        return itertools.product(range(self.q.grid[0]), range(self.q.grid[2]), range(self.q.grid[1]))

    def key(self) -> list[Access]:
        """Return the access to the dropout key, if there is dropout."""
        return [(self.dropout.key[0,], R)] if self.dropout else []

    def pattern_tiles(self, b: int, h: int, i: int, j: int) -> list[Access]:
        """Return the accesses that the pattern of a pair needs: documents, the table of the bias."""
        accesses: list[Access] = [(tile, R) for tile in self.document_tiles(b, i, j)]
        return [*accesses, (self.scoring.bias.table[0, h], R)] if self.scoring.bias else accesses

    def scratch(self) -> Access:
        """Return the access to working memory of one task."""
        itemsize, (b, t, width), s = 8 if self.q.dtype == np.float64 else 4, self.q.tile, self.k.tile[1]
        p, bias = self.dropout.p if self.dropout else 0.0, self.scoring.bias
        nbytes = bias_scratch_nbytes(b, width // self.head_size, t, s, bias.buckets.count, itemsize) if bias else 0
        return scratch(self.q.runtime, attention_scratch_nbytes(t, s, itemsize, p, nbytes)), SCRATCH

    def is_for_library(self) -> bool:
        """Return whether a library may compute it on GPUs: bf16, whole sequences in one pair of tiles, no change of scores but the causal mask."""
        if self.q.dtype != BF16 or self.dropout or self.scoring != UNCHANGED or not self.q.runtime.has_gpus:
            return False
        return takes_heads(self.head_size) and self.q.grid[1] == self.k.grid[1] == 1

    def whole_scratch(self) -> Access:
        """Return the access to working memory of one task over whole sequences."""
        b, t, width = self.q.tile
        return scratch(self.q.runtime, whole_scratch_nbytes(b * t * width // self.head_size, t, self.k.tile[1], 4)), SCRATCH

    def lse_scratch(self) -> Access:
        """Return the access to working memory of one `attention_lse` task over stored scores."""
        itemsize, (b, t, width) = 8 if self.q.dtype == np.float64 else 4, self.q.tile
        nbytes = lse_scratch_nbytes(b * t * width // self.head_size, self.k.tile[1], itemsize)
        return scratch(self.q.runtime, nbytes), SCRATCH

    def per_row(self, name: str) -> TileTensor:
        """Return a new tensor with one number per head and query  # (B, H, T)."""
        q, size = self.q, self.head_size
        shape, tile = (q.shape[0], q.shape[2] // size, q.shape[1]), (q.tile[0], q.tile[2] // size, q.tile[1])
        return TileTensor(q.runtime, shape, tile, np.float64 if q.dtype == np.float64 else np.float32, name=name)


def _describe(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    *,
    head_size: int,
    scale: float,
    causal: bool = True,
    dropout: Dropout | None = None,
    scoring: Scoring = UNCHANGED,
) -> _Attention:
    same_tiling(k, v)
    for axis in (0, 1) if causal else (0,):
        same_axis(q, axis, k, axis)
    if any(x.shape[2] % head_size or x.tile[2] % head_size for x in (q, k)):
        raise ValueError(f"attention tiles must hold whole heads; got head size {head_size} and {q!r} with {k!r}")
    group, rest = divmod(q.shape[2], k.shape[2])
    if rest or q.tile[2] != group * k.tile[2]:
        raise ValueError(f"a tile of queries must hold the heads that share the heads of a tile of keys, got head size {head_size}, {q!r} with {k!r}")
    if scoring != UNCHANGED:
        _check(q, k, head_size, causal, scoring)
    return _Attention(q, k, head_size, scale, causal, dropout if dropout and dropout.p > 0 else None, scoring)


def _check(q: TileTensor, k: TileTensor, head_size: int, causal: bool, scoring: Scoring) -> None:
    if scoring.window is not None and (scoring.window < 1 or not causal):
        raise ValueError(f"a window needs causal attention and at least one position, got {scoring.window} and causal {causal}; pass window=None")
    if scoring.cap is not None and not scoring.cap > 0:
        raise ValueError(f"a cap of scores must be positive, got {scoring.cap}; pass cap=None for none")
    for numbers, x in zip(scoring.documents or (), (q, k), strict=False):
        if numbers.dtype != np.int32 or len(numbers.shape) != 2:
            raise ValueError(f"documents must be int32 numbers, one per sequence and position, got {numbers!r} for {x!r}; convert them")
        same_axis(numbers, 0, x, 0)
        same_axis(numbers, 1, x, 1)
    if scoring.bias:
        table, count = scoring.bias.table, scoring.bias.buckets.count
        shape, tile = (count, q.shape[2] // head_size), (count, q.tile[2] // head_size)
        if table.shape != shape or table.tile != tile:
            raise ValueError(f"the table of a bias must have a row per bucket and be cut like heads, {shape} by {tile}; got {table!r}; cut it so")


def attention(
    q: TileTensor, k: TileTensor, v: TileTensor, *, library: bool = False, **options: Unpack[AttentionOptions]
) -> tuple[TileTensor, TileTensor]:
    """o = dropout(softmax(scale * q k^T)) v per head, without storing the scores. Returns (o, lse).

    Args:
        library: whether the attention library that the program has opened on its GPUs (`CudaDevice.open_attention`) computes the operation if it
            can; pass the same value to the backward pass.
    """
    whole = _describe(q, k, v, **options)
    if library and whole.is_for_library():
        return _by_library(whole, v)
    o, lse, peak, total = q.like(name="attention"), whole.per_row("lse"), whole.per_row("row maximum"), whole.per_row("row sum")
    for b, h, i in whole.panels():
        seen = whole.keys(i)
        for j in seen:
            first, last = j == seen.start, j == seen.stop - 1
            mode = chained(not first)
            accesses: list[Access] = [(q[b, i, h], R), (k[b, j, h], R), (v[b, j, h], R)]
            accesses += [(o[b, i, h], mode), (peak[b, h, i], mode), (total[b, h, i], mode)]
            if last:
                accesses.append((lse[b, h, i], W))
            accesses += [*whole.key(), *whole.pattern_tiles(b, h, i, j), whole.scratch()]
            emit(q.runtime, "attention", accesses, at=whole.pair(b, h, i, j), first=first, last=last)
    return o, lse


def _by_library(whole: _Attention, v: TileTensor) -> tuple[TileTensor, TileTensor]:
    q, k = whole.q, whole.k
    o, lse = q.like(name="attention"), whole.per_row("lse")
    for b, h, _ in whole.panels():
        accesses: list[Access] = [(q[b, 0, h], R), (k[b, 0, h], R), (v[b, 0, h], R), (o[b, 0, h], W), (lse[b, h, 0], W), whole.whole_scratch()]
        emit(q.runtime, "whole_attention", accesses, at=whole.pair(b, h, 0, 0))
    return o, lse


def _backward_by_library(
    whole: _Attention, v: TileTensor, o: TileTensor, do: TileTensor, lse: TileTensor
) -> tuple[TileTensor, TileTensor, TileTensor]:
    q, k = whole.q, whole.k
    same_tiling(q, o, do)
    dq, dk, dv = q.like(name="dq"), k.like(name="dk"), v.like(name="dv")
    for b, h, _ in whole.panels():
        accesses: list[Access] = [(q[b, 0, h], R), (k[b, 0, h], R), (v[b, 0, h], R), (o[b, 0, h], R), (lse[b, h, 0], R), (do[b, 0, h], R)]
        accesses += [(x[b, 0, h], W) for x in (dq, dk, dv)]
        emit(q.runtime, "whole_attention_backward", [*accesses, whole.whole_scratch()], at=whole.pair(b, h, 0, 0))
    return dq, dk, dv


def attention_backward(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    o: TileTensor,
    lse: TileTensor,
    do: TileTensor,
    *,
    dtable: TileTensor | None = None,
    library: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[TileTensor, TileTensor, TileTensor]:
    """Gradients (dq, dk, dv) of `attention`, recomputing the weights from lse; `dtable` receives the bias gradient as REDUX contributions."""
    whole = _describe(q, k, v, **options)
    if library and whole.is_for_library():
        return _backward_by_library(whole, v, o, do, lse)
    return _backward(whole, v, o, do, lse, None, dtable)


def _backward(
    whole: _Attention, v: TileTensor, o: TileTensor, do: TileTensor, lse: TileTensor, weights: TileTensor | None, dtable: TileTensor | None
) -> tuple[TileTensor, TileTensor, TileTensor]:
    q, k = whole.q, whole.k
    same_tiling(q, o, do)
    delta = whole.per_row("delta")
    dq, dk, dv = q.like(name="dq"), k.like(name="dk"), v.like(name="dv")
    written: set[tuple[int, int, int]] = set()
    for b, h, i in whole.panels():
        emit(q.runtime, "attention_delta", [(o[b, i, h], R), (do[b, i, h], R), (delta[b, h, i], W)], head_size=whole.head_size)
        for j in whole.keys(i):
            first_k, first_q = j == whole.keys(i).start, (b, h, j) not in written
            written.add((b, h, j))
            mode = chained(not first_q)
            saved = lse[b, h, i] if weights is None else weights[b, h, i, j]
            accesses: list[Access] = [(q[b, i, h], R), (k[b, j, h], R), (v[b, j, h], R), (do[b, i, h], R), (saved, R), (delta[b, h, i], R)]
            accesses += [(dq[b, i, h], chained(not first_k)), (dk[b, j, h], mode), (dv[b, j, h], mode), *whole.key()]
            accesses += whole.pattern_tiles(b, h, i, j)
            if dtable is not None:
                accesses.append((dtable[0, h], REDUX))
            constants: dict[str, Any] = {"stored": weights is not None, "first_k": first_k, "first_q": first_q}
            emit(q.runtime, "attention_backward", [*accesses, whole.scratch()], at=whole.pair(b, h, i, j), **constants)
    return dq, dk, dv


def stored_attention(q: TileTensor, k: TileTensor, v: TileTensor, **options: Unpack[AttentionOptions]) -> tuple[TileTensor, TileTensor]:
    """Compute the same attention and keep its weights for the backward pass. Returns (o, weights (B, H, T, S))."""
    whole = _describe(q, k, v, **options)
    o, lse, peak, total = q.like(name="attention"), whole.per_row("lse"), whole.per_row("row maximum"), whole.per_row("row sum")
    shape, tile = (*lse.shape, k.shape[1]), (*lse.tile, k.tile[1])
    weights = TileTensor(q.runtime, shape, tile, q.dtype, name="attention weights")
    for b, h, i in whole.panels():
        _keep_scores(whole, b, h, i, weights, [peak[b, h, i], total[b, h, i], lse[b, h, i]])
        for j in whole.keys(i):
            more = j > whole.keys(i).start
            accesses: list[Access] = [(weights[b, h, i, j], RW), (lse[b, h, i], R), (v[b, j, h], R), (o[b, i, h], chained(more)), *whole.key()]
            if whole.dropout:
                accesses.append(whole.scratch())
            emit(q.runtime, "attention_apply", accesses, at=whole.pair(b, h, i, j), accumulate=more)
    return o, weights


def _keep_scores(whole: _Attention, b: int, h: int, i: int, weights: TileTensor, sums: list[Handle]) -> None:
    """Compute the scores of a query tile, and in `sums` their maxima, sums of exponentials and log-sum-exps."""
    q, seen, scoring = whole.q, whole.keys(i), whole.scoring
    blind: dict[str, Any] = {"may_blind": True} if scoring.window or scoring.documents else {}
    for j in seen:
        s, mode = weights[b, h, i, j], chained(j > seen.start)
        accesses: list[Access] = [(q[b, i, h], R), (whole.k[b, j, h], R), (s, W), *whole.pattern_tiles(b, h, i, j)]
        if scoring.bias or scoring.documents:
            accesses.append(whole.scratch())
        emit(q.runtime, "attention_scores", accesses, at=whole.pair(b, h, i, j))
        accesses = [(s, R), (sums[0], mode), (sums[1], mode)]
        if j == seen.stop - 1:
            accesses.append((sums[2], W))
        emit(q.runtime, "attention_lse", [*accesses, whole.lse_scratch()], first=j == seen.start, **blind)


def stored_attention_backward(
    q: TileTensor,
    k: TileTensor,
    v: TileTensor,
    o: TileTensor,
    weights: TileTensor,
    do: TileTensor,
    *,
    dtable: TileTensor | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[TileTensor, TileTensor, TileTensor]:
    """Gradients (dq, dk, dv) of `stored_attention`."""
    whole = _describe(q, k, v, **options)
    return _backward(whole, v, o, do, weights, weights, dtable)
