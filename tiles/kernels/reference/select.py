"""Choosing one token of each sequence, written to be read."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


@register("select_rows", "reference")
def select_rows(x: Array, positions: Array, out: Array, *, start: int, length: int) -> None:
    """out[b, 0] = x[b, positions[b] - start] where that lies in this tile; other rows of `out` stay, or become 0 in the first tile's task.

    Args:
        x: (b, t, c) tile of tokens start .. start + t.
        positions: (b,) global positions.
        out: (b, 1, c).
        length: of the whole sequence.
    """
    for b in range(len(positions)):
        position = int(positions[b])
        if not 0 <= position < length:
            raise IndexError(f"positions must be 0 to {length - 1}, got {position} for sequence {b} of the tile; choose a token of the sequence")
        if start <= position < start + x.shape[1]:
            out[b, 0] = x[b, position - start]
        elif start == 0:
            out[b, 0] = 0  # the first tile's task finds garbage here
