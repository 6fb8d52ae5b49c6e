"""Table lookup and its gradient, readable. A task gets the table's rows [v_start, v_start + v)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


def check_tokens(tokens: Array, vocab: int) -> None:
    """Check that all ids are in the vocabulary.

    Raises:
        IndexError: an id is outside; the message names the first one and its position in the tile.
    """
    wrong = (tokens < 0) | (tokens >= vocab)
    if wrong.any():
        position = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise IndexError(f"token ids must be in [0, {vocab}), got {int(tokens[position])} at position {position} of its tile")


@register("embedding", "reference")
def embedding(tokens: Array, table: Array, x: Array, *, v_start: int, vocab: int, accumulate: bool) -> None:
    """x[b, t] = table[tokens[b, t]] for the rows in this tile; the first tile's task zeroes the rest."""
    check_tokens(tokens, vocab)
    if not accumulate:
        x[...] = 0
    inside = (tokens >= v_start) & (tokens < v_start + table.shape[0])
    x[inside] = table[tokens[inside] - v_start]


@register("embedding_backward", "reference")
def embedding_backward(tokens: Array, dy: Array, dtable: Array, *, v_start: int, accumulate: bool) -> None:
    """dtable[tokens[b, t]] += dy[b, t] for rows of this tile, in the order of positions."""
    if not accumulate:
        dtable[...] = 0
    inside = (tokens >= v_start) & (tokens < v_start + dtable.shape[0])
    np.add.at(dtable, tokens[inside] - v_start, dy[inside])
