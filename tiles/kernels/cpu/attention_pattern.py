"""Patterns of attention on the CPU: cap, bias and masks of a block of scores, and their gradients.

A bias depends on distances only, so a block of R queries and N keys has R + N - 1 values, one for each of its diagonals; so has its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import FLOOR, PLAIN, OptionalTiles, Pair
from .attention_blocks import DRAW_BYTES, QUERIES, Block
from .elementwise import WORK_BYTES, cells, pieces, single

Array = npt.NDArray[Any]

DEVICE_ROWS = 32
"""Number of queries in a block of the GPU kernels, which keep a partial sum of the table's gradient per block in the scratch."""


def bias_scratch_nbytes(batch: int, num_heads: int, tq: int, tk: int, count: int, itemsize: int) -> int:
    """Return the working memory for a bias of `count` buckets.

    On a CPU, it is two rows with a number for each diagonal of a block; on a GPU, such a row for each head and partial sums of the table's gradient.
    """
    here = 2 * (min(QUERIES, tq) + tk) * itemsize
    device = 4 * num_heads * (tq + tk - 1 + batch * -(-tq // DEVICE_ROWS) * count)
    return -(-max(here, device) // 8) * 8


def begin_floored(o: Array, peak: Array, total: Array) -> None:
    """Initialise the running attention for rows that may see no key."""
    o.view(f"u{o.itemsize}").fill(0)
    peak.fill(FLOOR)
    total.fill(0)


def fill_empty(total: Array) -> None:
    """Set sums that stayed 0, of rows that saw no key, to 1, so that their outputs stay 0."""
    for (piece,) in pieces(total):
        piece[piece == 0] = 1


def change_scores(s: Array, more: OptionalTiles[Array], scratch: Array, block: Block, at: Pair) -> None:
    """Change scale * q k^T into scores: cap, bias, -inf outside the window and across documents; later keys are masked with the weights."""
    pattern = at.pattern
    if pattern == PLAIN:
        return
    if pattern.cap:
        cap_scores(s, pattern.cap)
    if more.table is not None:
        bias, _ = _diagonals(s, scratch, at)
        for run, bucket in _runs(block, at):
            bias[run] = more.table[bucket, block.h]
        _add_diagonals(s, bias)
    if pattern.window:
        _mask_window(s, block, at)
    if more.of_queries is not None and more.of_keys is not None:
        mask_documents(s, more.of_queries[block.b, block.queries], more.of_keys[block.b, block.keys])


def cap_scores(s: Array, cap: float) -> None:
    """s = cap * tanh(s / cap)."""
    if single(s):
        from .numba import exp_loops

        exp_loops.capped(s, np.float32(cap))
        return
    s /= cap
    np.tanh(s, out=s)
    s *= cap


def cap_slopes(ds: Array, s: Array, cap: float) -> None:
    """ds *= 1 - tanh(s / cap)^2; `s` holds the scores before the cap and is overwritten."""
    if single(ds, s):
        from .numba import exp_loops

        exp_loops.capped_backward(ds, s, np.float32(cap))
        return
    s /= cap
    np.tanh(s, out=s)
    np.square(s, out=s)
    np.subtract(1, s, out=s)
    ds *= s


def add_slopes(ds: Array, more: OptionalTiles[Array], scratch: Array, block: Block, at: Pair) -> None:
    """Add a block's gradients of scores to the gradients of their buckets."""
    assert more.dtable is not None
    _, sums = _diagonals(ds, scratch, at)
    sums.fill(0)
    if single(ds, sums):
        from .numba import score_loops

        score_loops.sum_diagonals(ds, sums)
    else:
        for i, row in enumerate(ds):
            start = len(ds) - 1 - i
            sums[start : start + row.size] += row
    for run, bucket in _runs(block, at):
        more.dtable[bucket, block.h] += np.add.reduce(sums[run])


def _diagonals(s: Array, scratch: Array, at: Pair) -> tuple[Array, Array]:
    """Return two rows for the diagonals of a block, before the random bits in the scratch; diagonal 0 is that of the last query and the first key."""
    count = s.shape[0] + s.shape[1] - 1
    end = scratch.nbytes - (DRAW_BYTES if at.p else 0)
    one, other = (np.ndarray(count, s.dtype, buffer=scratch, offset=end - n * count * s.itemsize) for n in (1, 2))
    return one, other


def _runs(block: Block, at: Pair) -> Iterator[tuple[slice, int]]:
    """Yield (diagonals of a block, their bucket)."""
    assert at.pattern.buckets is not None
    base = at.k_start + block.low - (at.q_start + block.last - 1)
    count = block.last - block.first + block.num_keys - 1
    for first, end, bucket in at.pattern.buckets.runs():
        start, stop = max(0, first - base), min(count, end - base)
        if start < stop:
            yield slice(start, stop), bucket


def _add_diagonals(s: Array, bias: Array) -> None:
    if single(s, bias):
        from .numba import score_loops

        score_loops.add_diagonals(s, bias)
        return
    for i, row in enumerate(s):
        start = len(s) - 1 - i
        row += bias[start : start + row.size]


def _mask_window(s: Array, block: Block, at: Pair) -> None:
    """Set scores to -inf if the key lies before the query's window."""
    start = at.q_start + block.first + 1 - at.pattern.window - at.k_start - block.low  # first column that the first row sees
    if start + s.shape[0] - 1 <= 0:
        return
    if single(s):
        from .numba import score_loops

        score_loops.mask_beginnings(s, start)
        return
    for i, row in enumerate(s):
        row[: max(0, start + i)] = -np.inf


def mask_documents(s: Array, of_queries: Array, of_keys: Array) -> None:
    """Set scores to -inf if the document numbers differ  # (R, N), (R,), (N,)."""
    low, high = of_keys.min(), of_keys.max()
    if low == high and (of_queries == low).all():
        return
    if single(s):
        from .numba import score_loops

        score_loops.mask_unequal(s, of_queries, of_keys)
        return
    for piece, some in cells(s.shape[0], s.shape[1], 1, WORK_BYTES // 2):
        np.copyto(s[piece, some], -np.inf, where=of_queries[piece, None] != of_keys[None, some])
