"""Matrix products, readable. Leading axes of activations are rows: (mb, st, k) is an (mb * st, k) matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..registry import register
from .elementwise import activate, slope

Array = npt.NDArray[Any]
_T = TypeVar("_T")


def rows(x: Array) -> Array:
    """Return `x` with all axes but the last merged into rows, without a copy."""
    return x.reshape(-1, x.shape[-1])


@register("matmul", "reference")
def matmul(a: Array, b: Array, out: Array, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * op(a) @ op(b) over rows."""
    a, b, target = rows(a), rows(b), rows(out)
    product = alpha * ((a.T if trans_a else a) @ (b.T if trans_b else b))
    target[...] = target + product if accumulate else product


def products_of(tiles: Sequence[_T], num_a: int, num_b: int) -> Iterator[tuple[_T, _T, _T]]:
    """Yield (a, b, out) of each product of `matmuls`, whose tiles are first factors, second factors and results; a single factor is shared."""
    for number, out in enumerate(tiles[num_a + num_b :]):
        yield tiles[number if num_a > 1 else 0], tiles[num_a + (number if num_b > 1 else 0)], out


@register("matmuls", "reference")
def matmuls(*tiles: Array, num_a: int, num_b: int, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
    """out (+)= op(a) @ op(b) over rows, for each of several products of one shape (`products_of`)."""
    for a, b, out in products_of(tiles, num_a, num_b):
        matmul(a, b, out, trans_a=trans_a, trans_b=trans_b, alpha=1.0, accumulate=accumulate)


@register("gram", "reference")
def gram(x: Array, *rest: Array, trans: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * x @ y^T, or with `trans` alpha * x^T @ y; `rest` is [y,] out, and x is y if there is none. The result is symmetric."""
    y, out = rest[0] if len(rest) == 2 else x, rest[-1]
    product = alpha * (x.T @ y if trans else x @ y.T)
    out[...] = out + product if accumulate else product


@register("batched_matmul", "reference")
def batched_matmul(a: Array, b: Array, out: Array, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * op(a) @ op(b) for each index of the leading axes, which all three share."""
    product = alpha * ((np.swapaxes(a, -1, -2) if trans_a else a) @ (np.swapaxes(b, -1, -2) if trans_b else b))
    out[...] = out + product if accumulate else product


@register("linear_bias", "reference")
def linear_bias(x: Array, w: Array, bias: Array, y: Array, *, trans_b: bool) -> None:
    """y = x @ op(w) + bias  # (R, K) @ (K, N) + (N,) -> (R, N)."""
    rows(y)[...] = rows(x) @ (w.T if trans_b else w) + bias


@register("linear_activation", "reference")
def linear_activation(x: Array, w: Array, *rest: Array, kind: str, trans_b: bool, accumulate: bool) -> None:
    """pre (+)= x @ op(w) [+ bias]; y = activation(pre); rest is [bias,] pre, y."""
    *bias, pre, y = rest
    product = rows(x) @ (w.T if trans_b else w)
    rows(pre)[...] = (rows(pre) if accumulate else 0) + product + (bias[0] if bias else 0)
    y[...] = activate(pre, kind)


@register("linear_activation_backward", "reference")
def linear_activation_backward(dy: Array, w: Array, pre: Array, dpre: Array, *, kind: str, trans_b: bool) -> None:
    """dpre = dy @ op(w) * activation'(pre)  # (R, N) @ (N, K) -> (R, K)."""
    rows(dpre)[...] = rows(dy) @ (w.T if trans_b else w) * slope(rows(pre), kind)


@register("column_sums", "reference")
def column_sums(dy: Array, db: Array, *, accumulate: bool) -> None:
    """db (+)= sum of dy over rows  # (R, N) -> (N,)."""
    total = rows(dy).sum(axis=0)
    db[...] = db + total if accumulate else total
