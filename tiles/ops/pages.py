"""A cache of keys and values in pages, and attention of tokens of several texts over it (Kwon et al., PagedAttention, 2023).

Legend: q, o (R, 1, H * D), k, v (R, 1, G * D), each row a token of some text, in one tile along the rows, cut along heads; positions (R, 1) int32 of
the tokens; table (R, M) int32: the pages of the row's text in the order of its positions, below 0 for none; keys, values (N, T, G * D): N pages of T
positions, cut along pages and heads, whole pages in a tile.

A row without pages is idle: it writes nothing and its output is 0. Texts may share pages; no text may write to a shared page. Several rows may be
tokens of one text, if all of them are appended before they attend.
"""

from __future__ import annotations

import itertools
from typing import Any

from scheduler import RW, SCRATCH, Access, R, W

from ..emission import emit, scratch
from ..kernels.cpu.cache import cache_scratch_nbytes
from ..kernels.reference.attention import Pattern
from ..tensor import TileTensor
from .attention import UNCHANGED, Scoring
from .grid import chained, same_axis, same_tiling


def clear(keys: TileTensor, values: TileTensor, tile: int) -> None:
    """Fill the pages of tile number `tile` with zeros, which allocates the tile; pages must be cleared before tokens are appended."""
    for tensor in (keys, values):
        for h in range(tensor.grid[2]):
            emit(tensor.runtime, "fill", [(tensor[tile, 0, h], W)], value=0.0)


def append(k: TileTensor, v: TileTensor, positions: TileTensor, table: TileTensor, keys: TileTensor, values: TileTensor, tiles: range) -> None:
    """Write the new keys and values at their positions.

    Args:
        tiles: numbers of the tiles of pages; they include every page that `table` names.
    """
    _check(k, positions, table, keys)
    same_tiling(k, v)
    same_tiling(keys, values)
    for h, t in itertools.product(range(keys.grid[2]), tiles):
        accesses: list[Access] = [(k[0, 0, h], R), (v[0, 0, h], R), (positions[0, 0], R), (table[0, 0], R)]
        accesses += [(keys[t, 0, h], RW), (values[t, 0, h], RW)]
        emit(k.runtime, "append_to_pages", accesses, first_page=t * keys.tile[0])


def attention(
    q: TileTensor,
    keys: TileTensor,
    values: TileTensor,
    positions: TileTensor,
    table: TileTensor,
    tiles: range,
    *,
    head_size: int,
    scale: float,
    scoring: Scoring = UNCHANGED,
) -> TileTensor:
    """o = softmax(scale * q k^T) v per head over the pages of each row's text; a token sees positions up to its own.

    Args:
        tiles: numbers of the tiles of pages; they include every page that `table` names.
        scoring: changes of the scores; documents and a bias are not supported.

    Raises:
        ValueError: `scoring` has documents or a bias, or tilings do not fit together.
    """
    if scoring.documents or scoring.bias:
        raise ValueError(f"pages support neither documents nor a bias, got {scoring}; use a cache without pages")
    group, rest = divmod(q.shape[2], keys.shape[2])
    if rest or q.tile[2] != group * keys.tile[2] or keys.tile[2] % head_size:
        raise ValueError(f"a tile of queries must hold the heads that share the heads of a tile of keys, got head size {head_size}, {q!r}, {keys!r}")
    _check(q, positions, table, keys)
    o, (rows, most), length, heads = q.like(name="attention"), table.shape, keys.shape[1], q.tile[2] // head_size
    dtype = q.dtype if q.dtype.itemsize == 8 else "float32"
    partial = TileTensor(q.runtime, (rows, most, q.shape[2]), (rows, most, q.tile[2]), dtype, name="partial")
    shape = (rows, most, q.shape[2] // head_size), (rows, most, heads)
    peaks, totals = (TileTensor(q.runtime, *shape, dtype, name=name) for name in ("peaks", "totals"))
    nbytes = cache_scratch_nbytes(1, heads, length, partial.dtype.itemsize)  # the scores of one token with one page
    more: dict[str, Any] = {"pattern": Pattern(scoring.cap or 0.0, None, scoring.window or 0)} if scoring != UNCHANGED else {}
    for h in range(q.grid[2]):
        partials = (partial[0, 0, h], peaks[0, 0, h], totals[0, 0, h])
        for t in tiles:
            mode = chained(t > tiles.start)
            accesses: list[Access] = [(q[0, 0, h], R), (keys[t, 0, h], R), (values[t, 0, h], R), (positions[0, 0], R), (table[0, 0], R)]
            accesses += [*((handle, mode) for handle in partials), (scratch(q.runtime, nbytes), SCRATCH)]
            emit(q.runtime, "paged_attention", accesses, head_size=head_size, scale=scale, first_page=t * keys.tile[0], **more)
        accesses = [*((handle, R) for handle in partials), (positions[0, 0], R), (table[0, 0], R), (o[0, 0, h], W)]
        emit(q.runtime, "combine_pages", accesses, length=length)
    return o


def _check(x: TileTensor, positions: TileTensor, table: TileTensor, keys: TileTensor) -> None:
    if x.shape[1] != 1 or x.grid[0] != 1 or positions.shape != x.shape[:2] or table.grid != (1, 1) or keys.grid[1] != 1:
        raise ValueError(
            f"tokens over pages must be rows of one tile, with a position and a row of the table each, and tiles must hold whole pages; got {x!r}, "
            f"{positions!r}, {table!r}, {keys!r}"
        )
    same_axis(x, 0, positions, 0)
    same_axis(x, 0, table, 0)
