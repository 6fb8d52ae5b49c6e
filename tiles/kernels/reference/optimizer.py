"""Optimizer updates of one tile, readable, with the semantics and the order of operations of torch.optim.

`hyper` has a row of `HYPER` fp64 numbers for each group of parameters; a task reads row `row`. They are an input, so that they may change
between replays: lr, 1 - beta1^t, 1 - beta2^t, beta1 (momentum of SGD), beta2, eps, weight decay, number t of the step.

With clipping, `norm` holds the sum of squares of all gradients and each is scaled by min(1, max_norm / (sqrt(norm) + 1e-6)), as
torch.nn.utils.clip_grad_norm_ does.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]
T = TypeVar("T")

HYPER: Final = 8
"""Number of columns of `hyper`."""


def clip_factor(norm: Array, max_norm: float) -> float:
    """Return the factor by which clipping multiplies gradients; NaN stays NaN so that divergence is seen."""
    total = math.sqrt(float(norm[0])) if float(norm[0]) >= 0 else math.nan
    return min(1.0, max_norm / (total + 1e-6)) if not math.isnan(total) else math.nan


def split(rest: tuple[T, ...], clip: bool, master: bool) -> tuple[T | None, T | None]:
    """Return the optional last arguments as (norm, master), None for one that is missing."""
    optional = list(rest)
    return optional.pop(0) if clip else None, optional.pop(0) if master else None


@register("adam", "reference")
def adam(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    hyper: Array,
    *rest: Array,
    row: int,
    decoupled: bool,
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """Adam (Kingma and Ba 2015, algorithm 1) or AdamW (Loshchilov and Hutter 2019, algorithm 2); `rest` is [norm,] [master]."""
    norm, weights = split(rest, clip, master)
    p = param if weights is None else weights
    lr, correction1, correction2, beta1, beta2, eps, weight_decay, _ = hyper[row].tolist()
    g = grad.astype(p.dtype) * p.dtype.type(1.0 if norm is None else clip_factor(norm, max_norm))
    if decoupled:
        p *= p.dtype.type(1.0 - lr * weight_decay)
    else:
        g = g + p.dtype.type(weight_decay) * p
    m[...] = beta1 * m + (1.0 - beta1) * g
    v[...] = beta2 * v + (1.0 - beta2) * g * g
    p -= (lr / correction1 * m / (np.sqrt(v) / math.sqrt(correction2) + eps)).astype(p.dtype)
    if weights is not None:
        param[...] = weights


@register("sgd", "reference")
def sgd(
    param: Array,
    grad: Array,
    hyper: Array,
    *rest: Array,
    row: int,
    has_buffer: bool,
    nesterov: bool,
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """SGD with momentum as in torch.optim.SGD (dampening 0, the buffer starting at zero); `rest` is [buffer if `has_buffer`,] [norm,] [master]."""
    lr, _, _, momentum, _, _, weight_decay, _ = hyper[row].tolist()
    optional = list(rest)
    buffer = optional.pop(0) if has_buffer else None
    norm, weights = split(tuple(optional), clip, master)
    p = param if weights is None else weights
    g = grad.astype(p.dtype) * p.dtype.type(1.0 if norm is None else clip_factor(norm, max_norm))
    g = g + p.dtype.type(weight_decay) * p
    if buffer is not None:
        buffer[...] = momentum * buffer + g
        g = g + p.dtype.type(momentum) * buffer if nesterov else buffer
    p -= (lr * g).astype(p.dtype)
    if weights is not None:
        param[...] = weights


@register("sum_squares", "reference")
def sum_squares(x: Array, out: Array) -> None:
    """out[0] = sum of squares of x in fp64."""
    out[0] = (x.astype(np.float64) ** 2).sum()


@register("sum_scalars", "reference")
def sum_scalars(*arrays: Array) -> None:
    """Write the sum of all arguments but the last to the last one, in order."""
    *addends, out = arrays
    out[0] = sum(float(addend[0]) for addend in addends)
