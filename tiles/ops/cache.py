"""A cache of keys and values that grows along its positions, and attention of new tokens over it.

Legend: q, o (B, w, H * D), k, v (B, w, G * D) of w new tokens in a row, cut along sequences and heads only; positions (B, w) int32, consecutive
within a sequence; keys, values (B, P, G * D) the cache, cut along all three axes. Each sequence has a position of its own, so sequences of unequal
length need no padding: each new token writes at its own position and attends to positions up to its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from scheduler import RW, SCRATCH, Access, R, W

from ..emission import emit, scratch
from ..kernels.cpu.cache import cache_scratch_nbytes
from ..kernels.reference.attention import Pattern
from ..tensor import TileTensor
from .attention import UNCHANGED, Scoring
from .grid import chained, same_axis, same_tiling


def clear(keys: TileTensor, values: TileTensor, tile: int) -> None:
    """Fill tile number `tile` of the positions with zeros, which allocates it; a tile must be cleared before tokens are appended."""
    for tensor in (keys, values):
        for b, h in itertools.product(range(tensor.grid[0]), range(tensor.grid[2])):
            emit(tensor.runtime, "fill", [(tensor[b, tile, h], W)], value=0.0)


def append(k: TileTensor, v: TileTensor, positions: TileTensor, keys: TileTensor, values: TileTensor, tiles: Iterable[int]) -> None:
    """Write the new keys and values at their positions.

    Args:
        tiles: numbers of the tiles along the cache's positions; they include every tile that a position in `positions` falls into.
    """
    _check(k, positions, keys)
    same_tiling(k, v)
    same_tiling(keys, values)
    for b, h, t in itertools.product(range(keys.grid[0]), range(keys.grid[2]), tiles):
        accesses: list[Access] = [(k[b, 0, h], R), (v[b, 0, h], R), (positions[b, 0], R), (keys[b, t, h], RW), (values[b, t, h], RW)]
        emit(k.runtime, "append_to_cache", accesses, start=t * keys.tile[1])


def gather_rows(source: TileTensor, rows: TileTensor, target: TileTensor, tiles: Iterable[int]) -> None:
    """target[b, p] = source[rows[b], p] at the positions p of some tiles, overwriting them.

    Args:
        source: (A, P, G * D).
        rows: (B,) int32, cut like the sequences of `target`. A tile of `rows` may name only rows in the tile of `source` with the same number;
            other rows fail the task with IndexError.
        target: (B, P, G * D), cut like `source` except along the sequences; another tensor.
        tiles: numbers of the tiles along the positions.
    """
    same_axis(target, 0, rows, 0)
    if target is source or source.grid != target.grid or source.shape[1:] != target.shape[1:] or source.tile[1:] != target.tile[1:]:
        raise ValueError(f"rows must be gathered into another tensor with the same positions, features and grid, got {source!r} and {target!r}")
    for b, h, t in itertools.product(range(source.grid[0]), range(source.grid[2]), tiles):
        accesses: list[Access] = [(source[b, t, h], R), (rows[b,], R), (target[b, t, h], W)]
        emit(source.runtime, "gather_rows", accesses, start=b * source.tile[0])


def reorder_rows(x: TileTensor, rows: TileTensor, tiles: Iterable[int]) -> None:
    """x[b, p] = x[rows[b], p] at the positions p of some tiles, through temporary tiles; the arguments are those of `gather_rows`."""
    moved = x.like(name="reordered")
    for t in tiles:
        gather_rows(x, rows, moved, [t])
        for b, h in itertools.product(range(x.grid[0]), range(x.grid[2])):
            emit(x.runtime, "copy", [(moved[b, t, h], R), (x[b, t, h], W)])


def first_seen_tile(window: int | None, written: range, tile: int) -> int:
    """Return the number of the first tile of positions that a token in the tiles `written` attends to, given a window if there is one."""
    return max(0, written.start * tile + 1 - window) // tile if window else 0


def cached_attention(
    q: TileTensor,
    keys: TileTensor,
    values: TileTensor,
    positions: TileTensor,
    tiles: range,
    *,
    head_size: int,
    scale: float,
    scoring: Scoring = UNCHANGED,
) -> TileTensor:
    """o = softmax(scale * q k^T) v per head over tiles of the cache; a token attends to positions up to its own.

    Args:
        tiles: numbers of all tiles that some token attends to.
        scoring: changes of the scores; documents are not supported.

    Raises:
        ValueError: `scoring` has documents, or tilings do not fit together.
    """
    if scoring.documents:
        raise ValueError(f"attention over a cache does not support documents, got {scoring.documents}; attend without a cache")
    group, rest = divmod(q.shape[2], keys.shape[2])
    if rest or q.tile[2] != group * keys.tile[2] or keys.tile[2] % head_size:
        raise ValueError(f"a tile of queries must hold the heads that share the heads of a tile of keys, got head size {head_size}, {q!r}, {keys!r}")
    _check(q, positions, keys)
    o = q.like(name="attention")
    shape, tile = (q.shape[0], q.shape[2] // head_size, q.shape[1]), (q.tile[0], q.tile[2] // head_size, q.shape[1])
    peak, total = (TileTensor(q.runtime, shape, tile, q.dtype if q.dtype.itemsize == 8 else "float32", name=name) for name in ("peak", "total"))
    bias = scoring.bias
    nbytes = cache_scratch_nbytes(q.shape[1], tile[1], keys.tile[1], 8 if q.dtype.itemsize == 8 else 4, has_bias=bias is not None)
    pattern: dict[str, Any] = {}
    if scoring != UNCHANGED:
        pattern["pattern"] = Pattern(scoring.cap or 0.0, bias.buckets if bias else None, scoring.window or 0)
    for b, h in itertools.product(range(q.grid[0]), range(q.grid[2])):
        for t in tiles:
            mode = chained(t > tiles.start)
            accesses: list[Access] = [(q[b, 0, h], R), (keys[b, t, h], R), (values[b, t, h], R), (positions[b, 0], R)]
            accesses += [(o[b, 0, h], mode), (peak[b, h, 0], mode), (total[b, h, 0], mode)]
            if bias:
                accesses.append((bias.table[0, h], R))
            accesses.append((scratch(q.runtime, nbytes), SCRATCH))
            span: dict[str, Any] = {"start": t * keys.tile[1], "first": t == tiles.start, "last": t == tiles.stop - 1}
            emit(q.runtime, "cached_attention", accesses, head_size=head_size, scale=scale, **span, **pattern)
    return o


def _check(x: TileTensor, positions: TileTensor, keys: TileTensor) -> None:
    if x.grid[1] != 1 or positions.grid[1] != 1 or x.shape[1] != positions.shape[1]:
        raise ValueError(f"new tokens must be one tile along their axis, with a position each; got {x!r} and {positions!r}")
    same_axis(x, 0, positions, 0)
    same_axis(x, 0, keys, 0)
