"""Selection of one token of each sequence, and of sequences of a batch, readable."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


@register("select_rows", "reference")
def select_rows(x: Array, positions: Array, out: Array, *, start: int, length: int) -> None:
    """out[b, 0] = x[b, positions[b] - start] if the position lies in this tile; other rows of `out` stay, or become 0 in the first tile's task.

    Args:
        x: (b, t, c) tile of tokens start .. start + t.
        positions: (b,) global positions.
        out: (b, 1, c) selected tokens.
        length: number of tokens of the whole sequence.
    """
    for b in range(len(positions)):
        position = int(positions[b])
        if not 0 <= position < length:
            raise IndexError(f"positions must be 0 to {length - 1}, got {position} for sequence {b} of the tile; choose a token of the sequence")
        if start <= position < start + x.shape[1]:
            out[b, 0] = x[b, position - start]
        elif start == 0:
            out[b, 0] = 0  # uninitialised before the first tile's task


@register("gather_rows", "reference")
def gather_rows(source: Array, rows: Array, out: Array, *, start: int) -> None:
    """out[b] = source[rows[b] - start].

    Args:
        source: (r, ...) tile of rows start .. start + r.
        rows: (b,) global rows, all in the tile.
        out: (b, ...) of the same element type.
    """
    for b in range(len(rows)):
        row = int(rows[b])
        if not start <= row < start + len(source):
            raise IndexError(f"rows of this tile must be {start} to {start + len(source) - 1}, got {row} for row {b} of it; gather within tiles only")
        out[b] = source[row - start]
