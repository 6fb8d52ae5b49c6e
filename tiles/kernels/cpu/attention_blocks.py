"""Blocks of queries in attention on the CPU: the keys they see, the place of their scores, and the weights that dropout keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..reference.attention import Pair
from ..reference.random import mix
from .blas import gemm
from .elementwise import PIECE_BYTES, WORK_BYTES, cells, single
from .random import survivors, thin, thin_rows

Array = npt.NDArray[Any]

QUERIES: Final = 128
"""Number of queries per block of scores."""

DRAW_BYTES: Final = 2 * PIECE_BYTES
"""Bytes of the buffer of random bits, the last ones of the scratch."""


def attention_scratch_nbytes(num_queries: int, num_keys: int, itemsize: int, p: float = 0.0, bias: int = 0) -> int:
    """Return the working memory of one task: two blocks of scores, `bias` bytes (`bias_scratch_nbytes`), and with dropout a buffer of random bits."""
    return 2 * min(QUERIES, num_queries) * num_keys * itemsize + bias + (DRAW_BYTES if p else 0)


def whole_scratch_nbytes(num_rows: int, num_queries: int, num_keys: int, itemsize: int) -> int:
    """Return the working memory of a task over whole sequences: two numbers for each row of each head, and the working memory of a pair."""
    return 2 * num_rows * itemsize + attention_scratch_nbytes(num_queries, num_keys, itemsize)


def lse_scratch_nbytes(num_rows: int, num_keys: int, itemsize: int) -> int:
    """Return the working memory of one task that sums stored scores: a block of rows."""
    return min(num_rows, max(1, PIECE_BYTES // (num_keys * itemsize))) * num_keys * itemsize


class Block(NamedTuple):
    """A block of queries [first, last) of one head.

    `b` and `h` index the running statistics, [low, high) are the keys that some query sees by its position, and `num_heads` counts the heads of
    queries in the tile.
    """

    b: int
    h: int
    first: int
    last: int
    low: int
    high: int
    num_heads: int

    @property
    def queries(self) -> slice:
        """Rows of the block in a tile of queries."""
        return slice(self.first, self.last)

    @property
    def keys(self) -> slice:
        """Rows of the seen keys in a tile of keys."""
        return slice(self.low, self.high)

    @property
    def num_keys(self) -> int:
        """Number of columns of the scores."""
        return self.high - self.low


def seen_keys(first: int, last: int, num_keys: int, at: Pair) -> tuple[int, int]:
    """Return the keys [low, high) of a tile that queries [first, last) see by their positions; they see none if high <= low."""
    high = min(num_keys, at.q_start + last - at.k_start) if at.causal else num_keys
    low = max(0, at.q_start + first + 1 - at.pattern.window - at.k_start) if at.pattern.window else 0
    return low, high


def blocks(batch: int, num_heads: int, tq: int, tk: int, at: Pair) -> Iterator[Block]:
    """Yield all blocks of a pair of tiles that see any key."""
    for b in range(batch):
        for h in range(num_heads):
            for first in range(0, tq, QUERIES):
                last = min(first + QUERIES, tq)
                low, high = seen_keys(first, last, tk, at)
                if high > low:
                    yield Block(b, h, first, last, low, high, num_heads)


def work_arrays(scratch: Array, dtype: np.dtype[Any], block: Block) -> tuple[Array, Array]:
    """Return two matrices (queries, keys) in the scratch memory."""
    shape = (block.last - block.first, block.num_keys)
    size = shape[0] * shape[1] * dtype.itemsize
    return np.ndarray(shape, dtype, buffer=scratch), np.ndarray(shape, dtype, buffer=scratch, offset=size)


def columns(x: Array, block: Block, size: int, rows: slice) -> Array:
    """Return one head's rows of a (b, t, h * D) tile, a strided view. If `x` has fewer heads than the queries, it is the head that they share."""
    head = block.h * (x.shape[2] // size) // block.num_heads
    return x[block.b, rows, head * size : (head + 1) * size]


def products(q: Array, k: Array, s: Array, block: Block, at: Pair) -> None:
    """s = scale * q k^T of a block, including later keys."""
    size = at.head_size
    gemm(columns(q, block, size, block.queries), columns(k, block, size, block.keys), s, trans_b=True, alpha=at.scale)


def first_seen(block: Block, at: Pair) -> int:
    """Return the number of keys that the first query of a block sees, which may exceed those of the block; each following query sees one more."""
    return at.q_start + block.first + 1 - at.k_start - block.low if at.causal else block.num_keys


def mask_later(s: Array, block: Block, at: Pair) -> None:
    """Set scores to -inf if the key is later than the query; only the last columns can be."""
    if not at.causal:
        return
    start = max(0, first_seen(block, at))
    if start < block.num_keys:
        keys = at.k_start + block.low + np.arange(start, block.num_keys)
        queries = at.q_start + np.arange(block.first, block.last)
        for piece, some in cells(queries.size, keys.size, 1, WORK_BYTES // 2):
            np.copyto(s[piece, start:][:, some], -np.inf, where=keys[None, some] > queries[piece, None])


def _bases(block: Block, at: Pair) -> Array:
    """Return the global index of each row's first weight  # -> (queries,), uint64."""
    row = ((at.b_start + block.b) * at.num_heads + at.h_start + block.h) * at.length + at.q_start
    bases: Array = (row + np.arange(block.first, block.last, dtype=np.uint64)) * np.uint64(at.row) + np.uint64(at.k_start + block.low)
    return bases


def block_survivors(key: Array, block: Block, at: Pair, scratch: Array) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """Yield (rows and columns of the block, mask of the weights that survive dropout), piece by piece, drawn in the end of the scratch."""
    for piece, some, keep in survivors(_mixed(key, at), _bases(block, at), block.num_keys, at.p, scratch[-DRAW_BYTES:]):
        yield (piece, some), keep


def _mixed(key: Array, at: Pair) -> tuple[int, int]:
    return mix(int(key[0]), int(key[1]), at.stream)


def drop(s: Array, key: Array, scratch: Array, block: Block, at: Pair) -> None:
    """s = dropout(s), for a block of weights."""
    if single(s):
        thin_rows(s, _bases(block, at), _mixed(key, at), at.p)
        return
    for piece, keep in block_survivors(key, block, at, scratch):
        thin(s[piece], keep, at.p, s[piece])
