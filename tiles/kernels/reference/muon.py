"""Tasks of Muon (Jordan et al., 2024) that are no matrix products, readable: momentum, scaling, polynomial and update of one tile.

The semantics are those of torch.optim.Muon, with fp32 in place of its bf16. `hyper`, `row`, `norm` and `master` are those of `optimizer`; columns 3
and 5 of `hyper` hold the momentum and the smallest norm. `tiles.ops.muon` puts the tasks and the products together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register
from .optimizer import clip_factor

Array = npt.NDArray[Any]


def divisor(total: Array, smallest: float) -> float:
    """Return the norm of a matrix from its sum of squares (1,), or `smallest` if that is larger; NaN stays NaN so that divergence is seen."""
    return max(math.sqrt(float(total[0])), smallest) if float(total[0]) >= 0 else math.nan


@register("muon_momentum", "reference")
def muon_momentum(
    grad: Array, buffer: Array, update: Array, hyper: Array, *norm: Array, row: int, nesterov: bool, max_norm: float, clip: bool
) -> None:
    """buffer += (1 - momentum) (grad - buffer); update = buffer, or with Nesterov momentum grad + momentum (buffer - grad)."""
    momentum = buffer.dtype.type(hyper[row, 3])
    g = grad.astype(buffer.dtype) * buffer.dtype.type(clip_factor(norm[0], max_norm) if clip else 1.0)
    buffer[...] = buffer + (1 - momentum) * (g - buffer)
    update[...] = g + momentum * (buffer - g) if nesterov else buffer


@register("muon_normalise", "reference")
def muon_normalise(x: Array, total: Array, hyper: Array, *, row: int) -> None:
    """x /= max(norm, smallest norm), where `total` (1,) is the sum of squares of the whole matrix."""
    x[...] = x / x.dtype.type(divisor(total, float(hyper[row, 5])))


@register("muon_polynomial", "reference")
def muon_polynomial(gram: Array, out: Array, *, a: float, b: float, diagonal: bool) -> None:
    """out = b gram, plus a times the identity in a tile on the diagonal of the matrix."""
    out[...] = b * gram + (a * np.eye(len(gram), dtype=gram.dtype) if diagonal else 0)


@register("muon_update", "reference")
def muon_update(param: Array, x: Array, hyper: Array, *weights: Array, row: int, ratio: float, master: bool) -> None:
    """param = (1 - lr weight_decay) param - lr ratio x; if `master`, on `weights`, an fp32 master, which the parameter becomes after rounding."""
    lr, weight_decay = float(hyper[row, 0]), float(hyper[row, 6])
    p = weights[0] if master else param
    p[...] = p * p.dtype.type(1.0 - lr * weight_decay) - p.dtype.type(lr * ratio) * x
    if master:
        param[...] = p
