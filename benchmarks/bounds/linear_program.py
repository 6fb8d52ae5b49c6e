"""A linear program that is put together piece by piece and solved by SciPy (extra `bench`), which is imported when it is solved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Terms = tuple[Indices, Indices, Numbers]
"""Row, column and coefficient of each term, shape (terms,) each; coefficients of the same row and column add up."""


class LinearProgram:
    """Variables from 0 to a limit each, and linear conditions on them."""

    def __init__(self) -> None:
        self._upper: list[Numbers] = []
        self._num_columns = 0
        self._equal: list[tuple[Sequence[Terms], Numbers]] = []
        self._at_least: list[tuple[Sequence[Terms], Numbers]] = []

    def variables(self, upper: Numbers) -> Indices:
        """Add variables and return their columns, shape (variables,).

        Args:
            upper: upper limit of each variable, shape (variables,).
        """
        columns: Indices = self._num_columns + np.arange(len(upper))
        self._upper.append(upper)
        self._num_columns += len(upper)
        return columns

    def equal(self, right: Numbers, *terms: Terms) -> None:
        """Demand that rows of terms equal `right`, shape (rows,)."""
        self._equal.append((terms, right))

    def at_least(self, right: Numbers, *terms: Terms) -> None:
        """Demand that rows of terms are at least `right`, shape (rows,)."""
        self._at_least.append((terms, right))

    def minimise(self, *costs: tuple[Indices, Numbers], method: str = "highs") -> Numbers:
        """Solve the program and return the values of its variables, shape (columns,).

        Args:
            costs: columns and the cost per unit of each; other columns cost nothing.
            method: solver of `scipy.optimize.linprog`.

        Raises:
            RuntimeError: the solver failed.
            ImportError: SciPy is not installed.
        """
        from scipy.optimize import linprog

        cost = np.zeros(self._num_columns)
        for columns, each in costs:
            cost[columns] += each
        upper = np.concatenate(self._upper)
        equal, equals = self._matrix(self._equal)
        least, leasts = self._matrix(self._at_least)
        bounds = np.column_stack([np.zeros(len(upper)), upper])
        solved = linprog(cost, A_ub=-least, b_ub=-leasts, A_eq=equal, b_eq=equals, bounds=bounds, method=method)
        if solved.status != 0:
            raise RuntimeError(f"HiGHS did not solve a program of {len(upper)} variables in {len(equals) + len(leasts)} rows: {solved.message}")
        found: Numbers = solved.x
        return found

    def _matrix(self, conditions: Sequence[tuple[Sequence[Terms], Numbers]]) -> tuple[Any, Numbers]:
        """Return all conditions of a kind as a sparse matrix and its right side."""
        from scipy import sparse

        begin, entries = 0, [(np.zeros(0, int), np.zeros(0, int), np.zeros(0))]
        for terms, right in conditions:
            entries += [(begin + rows, columns, values) for rows, columns, values in terms]
            begin += len(right)
        rows, columns, values = (np.concatenate([entry[at] for entry in entries]) for at in range(3))
        rights = np.concatenate([np.zeros(0), *(right for _, right in conditions)])
        return sparse.csr_array((values, (rows, columns)), shape=(begin, self._num_columns)), rights
