"""AdamW on moments in 8 bits on the CPU, block by block.

Ladder for 768 x 3072 fp32, one core, processor time, with the decimal tables of bitsandbytes: the reference's arrays 400 ms; compiled, with the
nearest code by bisection, 199 ms; by lookups 16.6 to 6.1 ms; with stochastic rounding, the smallest of seven lines for each position in a table, and
lookups of values, 5.6 ms. With codes that are floats, whose bits are shifted in vector instructions, 2.1 ms (`adam` on fp32 moments: 1.4 ms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference import moments as reference
from ..reference.moments import BLOCK, num_blocks
from ..reference.optimizer import clip_factor, split
from ..reference.random import mix
from ..registry import register
from .elementwise import single

Array = npt.NDArray[Any]

_BLOCKS: Final = 2
"""Number of blocks that NumPy updates at a time, so that its temporaries are small."""


@register("adam8bit", "cpu")
def adam8bit(
    param: Array,
    grad: Array,
    m: Array,
    m_scales: Array,
    v: Array,
    v_scales: Array,
    hyper: Array,
    *rest: Array,
    row: int,
    stream: int,
    tile: int,
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on the decoded moments, which are encoded afterwards; `rest` is [norm,] [master]."""
    norm, weights = split(rest, clip, master)
    target = param if weights is None else weights
    tensors = (target, grad, m, m_scales, v, v_scales)
    options, factor = hyper[row].tolist(), 1.0 if norm is None else clip_factor(norm, max_norm)
    if single(target, grad):
        from .numba import moment_loops

        lr, correction1, correction2, beta1, beta2, eps, weight_decay, number = options
        step, shrink = lr / correction1, 1.0 / math.sqrt(correction2)
        numbers = (beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps, step, shrink, 1.0 - lr * weight_decay, factor)
        work, key = np.empty((2, BLOCK), np.float32), np.uint32(mix(int(number), stream, tile)[0])
        flat: list[Any] = [tensor.reshape(-1) for tensor in tensors]
        moment_loops.adam8bit(*[*flat, work, work.view(np.uint32), np.array(numbers, np.float32), key])
    else:
        _in_blocks([tensor.reshape(-1) for tensor in tensors], options, factor, stream, tile)
    if weights is not None:
        np.copyto(param, weights, casting="unsafe")


def _in_blocks(tensors: Sequence[Array], options: Sequence[float], factor: float, stream: int, tile: int) -> None:
    """Compute the update with NumPy; `tensors` are the flat arguments of `reference.update`."""
    param, grad, m, m_scales, v, v_scales = tensors
    for first in range(0, num_blocks(param.size), _BLOCKS):
        scales, own = slice(first, first + _BLOCKS), slice(first * BLOCK, min((first + _BLOCKS) * BLOCK, param.size))
        random = reference.draws(options[7], stream, tile, range(own.start, own.stop))
        reference.update((param[own], grad[own], m[own], m_scales[scales], v[own], v_scales[scales]), options, factor, random)
