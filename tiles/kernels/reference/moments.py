"""Moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022), and AdamW on them, readable.

A tile's numbers, row by row, form blocks of `BLOCK`; the last one may be shorter. A number is its code's value in a table of 256, times the block's
scale: its number of the largest magnitude, a positive one if there are two. Both tables have seven decades from 1e-7 to 1, the higher ones divided
more finely (section 2.2); the signed one is for first moments, the unsigned one for second moments. The signed one has 1, but not -1, so a scale has
a sign.

Rounding is stochastic: a number between two values becomes either, on average itself. To the nearest, a second moment would often keep its code,
because it changes by less than half a step of the table. The random bits depend on the step, the tile, and the element's place in the tile.

A second moment above zero never gets the code of zero. Otherwise a first moment whose code is not that of zero would be divided by epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..registry import register
from .optimizer import clip_factor, split
from .random import mix, scrambled

Array = npt.NDArray[Any]

BLOCK: Final = 256
"""Number of elements of a tile that share a scale."""

DECADES: Final = 7
"""Number of decades of a table."""

SMALLEST: Final = np.finfo(np.float32).tiny
"""Smallest normal number. Numbers of blocks whose scale has a smaller magnitude are divided by it, so that the reciprocal is finite."""


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


def draws(step: float, stream: int, tile: int, elements: range) -> Array:
    """Return the random bits of elements of a tile: the upper 16 are for the first moment, the lower 16 for the second  # (n,) uint32."""
    key, _ = mix(int(step), stream, tile)
    return scrambled(np.arange(elements.start, elements.stop, dtype=np.uint64).astype(np.uint32) ^ np.uint32(key))


def decode(codes: Array, scales: Array, table: Array) -> Array:
    """Return the numbers of the codes of a tile, in fp32."""
    scale_of_element = np.repeat(scales, BLOCK)[: codes.size]
    return np.asarray((table[codes.reshape(-1)] * scale_of_element).reshape(codes.shape))


def encode(values: Array, codes: Array, scales: Array, table: Array, random: Array) -> None:
    """Write the codes and the scales of the numbers of a tile. A scale is NaN if a number of its block is.

    Args:
        random: number from 0 to 65,535 for each element: rounding is upwards for more of them the nearer the number is to the higher magnitude.
    """
    flat, zero = values.reshape(-1), int(np.searchsorted(table, 0.0))
    magnitudes, most = table[zero:], table.size - 1 - zero  # codes of negative numbers are mirrored
    for block in range(num_blocks(flat.size)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        low, high = flat[own].min(), flat[own].max()
        scale = np.float32(low if -low > high else high) + np.float32(0)
        inverse = np.float32(1) / np.maximum(np.abs(scale), SMALLEST)
        ratio = np.nan_to_num(flat[own] * (-inverse if scale < 0 else inverse))
        position = np.interp(np.abs(ratio), magnitudes, np.arange(most + 1.0)) * 65536
        number = (position.astype(np.int64) + random[own]) >> 16
        number = np.maximum(number, flat[own] > 0) if zero == 0 else np.where(ratio < 0, -np.minimum(number, zero), number)
        codes.reshape(-1)[own], scales[block] = zero + number, scale


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
    stream: int,
    tile: int,
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on the decoded moments, which are encoded afterwards; `rest` is [norm,] [master].

    Each parameter has another `stream`, and each of its tiles another `tile`.
    """
    norm, weights = split(rest, clip, master)
    factor = 1.0 if norm is None else clip_factor(norm, max_norm)
    p = param if weights is None else weights
    update((p, grad, m, m_scales, v, v_scales), hyper[row].tolist(), factor, draws(hyper[row, 7], stream, tile, range(p.size)))
    if weights is not None:
        param[...] = weights


def update(tiles: Sequence[Array], options: Sequence[float], factor: float, random: Array) -> None:
    """Compute the update of whole blocks.

    Args:
        tiles: the first six arguments of `adam8bit`.
        options: row of `hyper`.
        factor: factor of the gradient.
        random: `draws` of the elements.
    """
    p, grad, m, m_scales, v, v_scales = tiles
    lr, correction1, correction2, beta1, beta2, eps, weight_decay, _ = options
    g = grad.astype(p.dtype) * p.dtype.type(factor)
    mean = beta1 * decode(m, m_scales, SIGNED).astype(p.dtype) + (1.0 - beta1) * g
    square = beta2 * decode(v, v_scales, UNSIGNED).astype(p.dtype) + (1.0 - beta2) * g * g
    p *= p.dtype.type(1.0 - lr * weight_decay)
    p -= (lr / correction1 * mean / (np.sqrt(square) / math.sqrt(correction2) + eps)).astype(p.dtype)
    encode(mean, m, m_scales, SIGNED, random >> np.uint32(16))
    encode(square, v, v_scales, UNSIGNED, random & np.uint32(0xFFFF))
