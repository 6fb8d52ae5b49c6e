"""Tasks of Muon on the CPU: one pass over a tile in pieces that stay in cache. Matrix products, its real work, are those of `matmul`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.muon import divisor
from ..reference.optimizer import clip_factor
from ..registry import register
from .elementwise import WORK_BYTES, pieces

Array = npt.NDArray[Any]


@register("muon_momentum", "cpu")
def muon_momentum(
    grad: Array, buffer: Array, update: Array, hyper: Array, *norm: Array, row: int, nesterov: bool, max_norm: float, clip: bool
) -> None:
    """buffer += (1 - momentum) (grad - buffer); update = buffer, or with Nesterov momentum grad + momentum (buffer - grad)."""
    number = buffer.dtype.type
    momentum, factor = number(hyper[row, 3]), number(clip_factor(norm[0], max_norm) if clip else 1.0)
    work = np.empty(min(WORK_BYTES // buffer.itemsize, buffer.size), buffer.dtype)
    for raw, mean, out in pieces(grad, buffer, update, nbytes=WORK_BYTES):
        away = work[: out.size]
        np.multiply(raw, factor, out=out)
        np.subtract(out, mean, out=away)
        away *= number(1) - momentum
        mean += away
        if nesterov:
            np.subtract(mean, out, out=away)
            away *= momentum
            out += away
        else:
            out[...] = mean


@register("muon_normalise", "cpu")
def muon_normalise(x: Array, total: Array, hyper: Array, *, row: int) -> None:
    """x /= max(norm, smallest norm), where `total` (1,) is the sum of squares of the whole matrix."""
    x /= x.dtype.type(divisor(total, float(hyper[row, 5])))


@register("muon_polynomial", "cpu")
def muon_polynomial(gram: Array, out: Array, *, a: float, b: float, diagonal: bool) -> None:
    """out = b gram, plus a times the identity in a tile on the diagonal of the matrix."""
    np.multiply(gram, gram.dtype.type(b), out=out)
    if diagonal:
        out.reshape(-1)[:: len(out) + 1] += gram.dtype.type(a)


@register("muon_update", "cpu")
def muon_update(param: Array, x: Array, hyper: Array, *weights: Array, row: int, ratio: float, master: bool) -> None:
    """param = (1 - lr weight_decay) param - lr ratio x; if `master`, on `weights`, an fp32 master, which the parameter becomes after rounding."""
    target = weights[0] if master else param
    number = target.dtype.type
    keep, step = number(1.0 - float(hyper[row, 0]) * float(hyper[row, 6])), number(float(hyper[row, 0]) * ratio)
    work = np.empty(min(WORK_BYTES // target.itemsize, target.size), target.dtype)
    for p, direction in pieces(target, x, nbytes=WORK_BYTES):
        change = np.multiply(direction, step, out=work[: p.size])
        p *= keep
        p -= change
    if master:
        np.copyto(param, target, casting="unsafe")
