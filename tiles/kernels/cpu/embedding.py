"""Table lookup and its gradient on the CPU.

Ladder for the gradient of 1024 tokens by 768: np.add.at 5.3 ms, a loop of row additions 0.8 ms (and no temporary).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.embedding import check_tokens
from ..registry import register
from .matmul import rows

Array = npt.NDArray[Any]


@register("embedding", "cpu")
def embedding(tokens: Array, table: Array, x: Array, *, v_start: int, vocab: int, accumulate: bool) -> None:
    """x[b, t] = table[tokens[b, t]] where this tile has the row; the first tile zeroes the rest."""
    check_tokens(tokens, vocab)
    if table.shape[0] == vocab:
        np.take(table, tokens.reshape(-1), axis=0, out=rows(x), mode="clip")
        return
    if not accumulate:
        x[...] = 0
    local, out = tokens.reshape(-1) - v_start, rows(x)
    for row in np.flatnonzero((local >= 0) & (local < table.shape[0])):
        out[row] = table[local[row]]


@register("embedding_backward", "cpu")
def embedding_backward(tokens: Array, dy: Array, dtable: Array, *, v_start: int, accumulate: bool) -> None:
    """dtable[tokens[b, t]] += dy[b, t] for rows of this tile, in the order of positions."""
    if not accumulate:
        dtable[...] = 0
    local, source = tokens.reshape(-1) - v_start, rows(dy)
    for row in np.flatnonzero((local >= 0) & (local < dtable.shape[0])):
        dtable[local[row]] += source[row]
