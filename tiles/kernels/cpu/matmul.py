"""Matrix products on the CPU: one BLAS call each, except for a few rows that are single tokens of texts, which take compiled loops (`are_tokens`).

Ladder (1024 x 768 x 768 fp32, one core): the product 10.4 ms; with bias added in a pass after it or written first under beta = 1, 10.4 to 10.5 ms.
Column sums of 1024 x 3072, arrays in no cache: NumPy on the whole 0.36 ms, compiled four rows at a time 0.39 ms (torch 1.1 ms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product as grid
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference.matmul import products_of
from ..registry import register
from .activation import activate_into, activation_backward
from .blas import gemm
from .elementwise import WORK_BYTES, cut, row_blocks, single

Array = npt.NDArray[Any]

TOKEN_ROWS: Final = 32
"""Largest number of single-token rows that take the loops; a BLAS is faster for more."""


def are_tokens(shape: Sequence[int]) -> bool:
    """Return whether activations (R, 1, C) are a few rows of one token each.

    The products of such a row have the same bits as for the row alone. So a step may have any number of texts, and no text depends on the others.
    """
    return len(shape) == 3 and shape[1] == 1 and shape[0] <= TOKEN_ROWS


def _product(x: Array, w: Array, out: Array, *, trans_b: bool, accumulate: bool) -> None:
    """out (+)= x @ op(w) over rows."""
    if are_tokens(x.shape) and single(x, w, out) and x.flags.c_contiguous and out.flags.c_contiguous and w.strides[1] == w.itemsize:
        from .numba import row_loops

        multiply = row_loops.multiply_turned if trans_b else row_loops.multiply
        multiply(rows(x), w, rows(out), accumulate)
        return
    gemm(rows(x), w, rows(out), trans_b=trans_b, beta=float(accumulate))


def rows(x: Array) -> Array:
    """Return `x` with all axes but the last merged into rows, without a copy."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return 2 M N K of op(a) @ op(b)."""
    a, b = views[0].shape, views[1].shape
    size_a = float(np.prod(a))
    return float(2.0 * size_a * (b[-2] if constants.get("trans_b") else b[-1]))


@register("matmul", "cpu", flops=_flops, is_bounded=True)
def matmul(a: Array, b: Array, out: Array, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * op(a) @ op(b) over rows."""
    if not trans_a and alpha == 1.0 and b.ndim == 2:
        _product(a, b, out, trans_b=trans_b, accumulate=accumulate)
        return
    gemm(rows(a), rows(b), rows(out), trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=float(accumulate))


def _flops_of_all(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the flops of several products."""
    return sum(_flops([a, b], constants) for a, b, _ in products_of(views, constants["num_a"], constants["num_b"]))


@register("matmuls", "cpu", flops=_flops_of_all, is_bounded=True)
def matmuls(*tiles: Array, num_a: int, num_b: int, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
    """out (+)= op(a) @ op(b) over rows, for each of several products of one shape."""
    for a, b, out in products_of(tiles, num_a, num_b):
        matmul(a, b, out, trans_a=trans_a, trans_b=trans_b, alpha=1.0, accumulate=accumulate)


PANEL: Final = 192
"""Number of rows of a Gram matrix that one product computes."""


def _gram_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the flops of x @ y^T, both (M, N), or of x^T @ y, on and above the diagonal's squares."""
    (inner, outer) = views[0].shape[::-1] if constants["trans"] else views[0].shape
    return float(inner * (inner + min(inner, PANEL)) * outer)


@register("gram", "cpu", flops=_gram_flops, is_bounded=True)
def gram(x: Array, *rest: Array, trans: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * x @ y^T, or with `trans` alpha * x^T @ y; `rest` is [y,] out, and x is y if there is none.

    The result of the whole chain of products is symmetric. Below the diagonal, values are copied from above: 26 ms instead of 38 ms for 768 x 3072 on
    one core.
    """
    y, out = rest[0] if len(rest) == 2 else x, rest[-1]
    for first in range(0, len(out), PANEL):
        last = min(first + PANEL, len(out))
        own, others = (x[:, first:last], y[:, first:]) if trans else (x[first:last], y[first:])
        gemm(own, others, out[first:last, first:], trans_a=trans, trans_b=not trans, alpha=alpha, beta=float(accumulate))
        out[last:, first:last] = out[first:last, last:].T


@register("batched_matmul", "cpu", flops=_flops, is_bounded=True)
def batched_matmul(a: Array, b: Array, out: Array, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * op(a) @ op(b) for each index of the leading axes, which all three share."""
    for index in grid(*map(range, out.shape[:-2])):
        gemm(a[index], b[index], out[index], trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=float(accumulate))


@register("linear_bias", "cpu", flops=_flops)
def linear_bias(x: Array, w: Array, bias: Array, y: Array, *, trans_b: bool) -> None:
    """y = x @ op(w) + bias  # (R, K) @ (K, N) + (N,) -> (R, N)."""
    rows(y)[...] = bias
    _product(x, w, y, trans_b=trans_b, accumulate=True)


@register("linear_activation", "cpu", flops=_flops)
def linear_activation(x: Array, w: Array, *rest: Array, kind: str, trans_b: bool, accumulate: bool) -> None:
    """pre (+)= x @ op(w) [+ bias]; y = activation(pre); rest is [bias,] pre, y."""
    *bias, pre, y = rest
    out = rows(pre)
    if bias and accumulate:
        out += bias[0]
    elif bias:
        out[...] = bias[0]
    _product(x, w, pre, trans_b=trans_b, accumulate=accumulate or bool(bias))
    activate_into(pre, y, kind)


@register("linear_activation_backward", "cpu", flops=_flops)
def linear_activation_backward(dy: Array, w: Array, pre: Array, dpre: Array, *, kind: str, trans_b: bool) -> None:
    """dpre = dy @ op(w) * activation'(pre)  # (R, N) @ (N, K) -> (R, K)."""
    _product(dy, w, dpre, trans_b=trans_b, accumulate=False)
    values, slopes = pre.reshape(-1), dpre.reshape(-1)
    for piece in cut(slopes.size, WORK_BYTES // (4 * slopes.itemsize)):  # an activation overwrites dpre before it has read all of dy
        activation_backward(values[piece], slopes[piece].copy(), slopes[piece], kind=kind)


@register("column_sums", "cpu")
def column_sums(dy: Array, db: Array, *, accumulate: bool) -> None:
    """db (+)= sum of dy over rows, block by block  # (R, N) -> (N,)."""
    matrix = rows(dy)
    if not accumulate:
        db[...] = 0
    if single(matrix, db):
        from .numba import loops

        loops.column_sums(matrix, db)
        return
    for block in row_blocks(matrix.shape[0], matrix.shape[1] * matrix.itemsize):
        add_column_sums(matrix[block], db)


def add_column_sums(block: Array, total: Array) -> None:
    """total += sum of rows  # (R, N) -> (N,)."""
    if total.nbytes <= WORK_BYTES // 3:
        total += np.add.reduce(block, axis=0)
        return
    for columns in cut(total.size, WORK_BYTES // (3 * total.itemsize)):
        total[columns] += np.add.reduce(block[:, columns], axis=0)
