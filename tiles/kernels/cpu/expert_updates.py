"""Low-rank updates of an expert's matrices (LoRA) on the CPU: products of a block of its rows with thin factors, next to those of `experts`.

Legend: n rows of a block, C features in c tiles, I width inside the expert, r rank; the factors are named in `reference.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from ..reference.experts import ExpertFactors
from .blas import gemm

Array = npt.NDArray[Any]


class LowRankProducts:
    """Low-rank updates of one expert, computed on a block of its rows, and their gradients.

    Args:
        factors: tiles of the factors.
        scale: factor of the updates.
        low: memory for a block (n, r).
        slopes: the same for gradients; None in a forward pass.
        is_token: whether the products take the loops for rows of single tokens.
    """

    def __init__(self, factors: ExpertFactors, scale: float, low: Array, slopes: Array | None = None, *, is_token: bool = False) -> None:
        self._factors, self._scale, self._is_token = factors, scale, is_token
        self._low, self._slopes = low, low if slopes is None else slopes

    def add_inner(self, xs: Sequence[Array], gate: Array, up: Array) -> None:
        """Add the updates to the products with gate and up  # c arrays (n, c), (n, I) twice."""
        low = self._lowered(xs, self._factors.a, self._low)
        self._add(low, self._factors.gate_b, gate)
        self._add(low, self._factors.up_b, up)

    def lower_hidden(self, hidden: Array) -> Array:
        """Return the first argument of `add_outer`  # (n, I) -> (n, r)."""
        return self._lowered([hidden], [self._factors.down_a], self._low)

    def add_outer(self, low: Array, number: int, out: Array) -> None:
        """Add the update to tile `number` of the product with down  # (n, r), (n, c)."""
        self._add(low, self._factors.down_b[number], out)

    def add_hidden_slopes(self, dys: Sequence[Array], dhidden: Array) -> None:
        """Add the update of down to the slopes of hidden values  # c arrays (n, c), (n, I)."""
        slopes = self._slopes[: dhidden.shape[0]]
        for number, (dy, b) in enumerate(zip(dys, self._factors.down_b, strict=True)):
            gemm(dy, b, slopes, beta=float(number > 0))
        slopes *= slopes.dtype.type(self._scale)
        gemm(slopes, self._factors.down_a, dhidden, beta=1.0)

    def learn_outer(self, gradients: ExpertFactors, dys: Sequence[Array], hidden: Array, weigh: Callable[[Array], None], beta: float) -> None:
        """Compute the gradients of the factors of down, after `add_hidden_slopes`.

        Args:
            gradients: those of the factors.
            dys: c arrays (n, c).
            hidden: (n, I).
            weigh: function that multiplies rows by their weights.
            beta: factor of the old gradients.
        """
        slopes = self._slopes[: hidden.shape[0]]
        weigh(slopes)
        gemm(slopes, hidden, gradients.down_a, trans_a=True, beta=beta)
        low = self._lowered([hidden], [self._factors.down_a], self._slopes)
        weigh(low)
        for dy, out in zip(dys, gradients.down_b, strict=True):
            gemm(dy, low, out, trans_a=True, beta=beta)

    def learn_inner(self, gradients: ExpertFactors, xs: Sequence[Array], dgate: Array, dup: Array, beta: float) -> None:
        """Compute the gradients of the factors of gate and up, after `add_inner` and `learn_outer`  # c arrays (n, c), (n, I) twice."""
        n = dgate.shape[0]
        low, slopes = self._low[:n], self._slopes[:n]
        gemm(dgate, low, gradients.gate_b, trans_a=True, beta=beta)
        gemm(dup, low, gradients.up_b, trans_a=True, beta=beta)
        gemm(dgate, self._factors.gate_b, slopes)
        gemm(dup, self._factors.up_b, slopes, beta=1.0)
        slopes *= slopes.dtype.type(self._scale)
        for x, out in zip(xs, gradients.a, strict=True):
            gemm(slopes, x, out, trans_a=True, beta=beta)

    def add_input_slopes(self, number: int, dx: Array) -> None:
        """Add the updates to tile `number` of the slopes of x, after `learn_inner`  # (n, c)."""
        gemm(self._slopes[: dx.shape[0]], self._factors.a[number], dx, beta=1.0)

    def _lowered(self, xs: Sequence[Array], ws: Sequence[Array], out: Array) -> Array:
        """Return scale * x w^T, summed over tiles, in the first rows of `out`  # (n, k), (r, k) -> (n, r)."""
        low = out[: xs[0].shape[0]]
        for number, (x, w) in enumerate(zip(xs, ws, strict=True)):
            self._multiply(x, w, low, accumulate=number > 0)
        low *= low.dtype.type(self._scale)
        return low

    def _add(self, low: Array, b: Array, out: Array) -> None:
        self._multiply(low, b, out, accumulate=True)

    def _multiply(self, x: Array, w: Array, out: Array, *, accumulate: bool) -> None:
        """out (+)= x w^T; rows of single tokens have the same bits however many there are."""
        if self._is_token:
            from .numba import row_loops

            row_loops.multiply_turned(x, w, out, accumulate)
        else:
            gemm(x, w, out, trans_b=True, beta=float(accumulate))
