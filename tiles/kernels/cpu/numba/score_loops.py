"""Compiled loops over a block of scores of attention: biases by distance, windows and documents; fp32 (see `compiled`).

Letters: R rows, N columns. A bias has a number for each of the R + N - 1 diagonals, beginning with that of the last row and the first column.
"""

from __future__ import annotations

import numpy as np

from .compiled import EXACT, Array, compiled, f32


@compiled(EXACT)
def add_diagonals(s: Array, bias: Array) -> None:
    """s += the bias of each element's diagonal  # (R, N), (R + N - 1,)."""
    for i in range(s.shape[0]):
        row, own = s[i], bias[s.shape[0] - 1 - i :]
        for j in range(row.size):
            row[j] += own[j]


@compiled(EXACT)
def sum_diagonals(s: Array, sums: Array) -> None:
    """sums += the elements of each diagonal, in the order of rows  # (R, N), (R + N - 1,)."""
    for i in range(s.shape[0]):
        row, own = s[i], sums[s.shape[0] - 1 - i :]
        for j in range(row.size):
            own[j] += row[j]


@compiled(EXACT)
def mask_beginnings(s: Array, start: int) -> None:
    """Set the elements before column `start + i` of row i to -inf  # (R, N)."""
    for i in range(s.shape[0]):
        row = s[i]
        for j in range(max(0, min(row.size, start + i))):
            row[j] = -f32(np.inf)


@compiled(EXACT)
def mask_unequal(s: Array, of_rows: Array, of_columns: Array) -> None:
    """Set elements to -inf if the numbers of row and column differ  # (R, N), (R,), (N,)."""
    for i in range(s.shape[0]):
        row, own = s[i], of_rows[i]
        for j in range(row.size):
            row[j] = row[j] if of_columns[j] == own else -f32(np.inf)
