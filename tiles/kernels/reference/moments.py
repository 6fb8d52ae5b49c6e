"""Moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022), and AdamW on them, readable.

A tile's numbers, row by row, form blocks of `BLOCK`; the last one may be shorter. A number is its code's value in a table of 256, times the largest
magnitude of the block, its scale. Both tables have seven decades from 1e-7 to 1, the higher ones divided more finely (section 2.2); the signed one is
for first moments, the unsigned one for second moments.

A second moment above zero never gets the code of zero. Otherwise a first moment whose code is not that of zero would be divided by epsilon.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..registry import register
from .optimizer import clip_factor, split

Array = npt.NDArray[Any]

BLOCK: Final = 256
"""Number of elements of a tile that share a scale."""

DECADES: Final = 7
"""Number of decades of a table."""


def num_blocks(size: int) -> int:
    """Return the number of blocks of a tile of `size` elements."""
    return -(-size // BLOCK)


def dynamic_map(signed: bool) -> Array:
    """Return the values of the 256 codes, ascending, in fp32: 0, 1, and the centres of equal intervals of each decade, of both signs if `signed`."""
    centres: list[float] = []
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, count + 1)
        centres += (10.0 ** (decade + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2).tolist()
    negative = [-centre for centre in centres] if signed else []
    return np.array(sorted([*negative, 0.0, *centres, 1.0]), np.float32)


SIGNED: Final = dynamic_map(True)
UNSIGNED: Final = dynamic_map(False)


def midpoints(table: Array) -> Array:
    """Return the 255 numbers at which the nearest code changes, in fp32; a number equal to one gets the lower code."""
    return np.asarray((table[:-1] + table[1:]) / np.float32(2))


def decode(codes: Array, scales: Array, table: Array) -> Array:
    """Return the numbers of the codes of a tile, in fp32."""
    each = np.repeat(scales, BLOCK)[: codes.size]  # a scale for every number
    return np.asarray((table[codes.reshape(-1)] * each).reshape(codes.shape))


def encode(values: Array, codes: Array, scales: Array, table: Array) -> None:
    """Write the codes and the scales of the numbers of a tile. A scale is NaN if a number of its block is."""
    flat, limits = values.reshape(-1), midpoints(table)
    for block in range(num_blocks(flat.size)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        scale = np.abs(flat[own]).max().astype(np.float32)
        ratio = flat[own] / scale if scale > 0 else np.zeros_like(flat[own])
        nearest = np.searchsorted(limits, ratio)
        if table[0] == 0:
            nearest = np.maximum(nearest, flat[own] > 0)
        codes.reshape(-1)[own], scales[block] = nearest, scale


@register("adam8bit", "reference")
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
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on the decoded moments, which are encoded afterwards; `rest` is [norm,] [master]."""
    norm, weights = split(rest, clip, master)
    p = param if weights is None else weights
    lr, correction1, correction2, beta1, beta2, eps, weight_decay, _ = hyper[row].tolist()
    g = grad.astype(p.dtype) * p.dtype.type(1.0 if norm is None else clip_factor(norm, max_norm))
    mean = beta1 * decode(m, m_scales, SIGNED).astype(p.dtype) + (1.0 - beta1) * g
    square = beta2 * decode(v, v_scales, UNSIGNED).astype(p.dtype) + (1.0 - beta2) * g * g
    p *= p.dtype.type(1.0 - lr * weight_decay)
    p -= (lr / correction1 * mean / (np.sqrt(square) / math.sqrt(correction2) + eps)).astype(p.dtype)
    encode(mean, m, m_scales, SIGNED)
    encode(square, v, v_scales, UNSIGNED)
    if weights is not None:
        param[...] = weights
