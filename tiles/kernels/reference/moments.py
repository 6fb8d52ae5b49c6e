"""Moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022), and AdamW on them, readable.

A tile's numbers, row by row, form blocks of `BLOCK`; the last one may be shorter. A block has a scale, its largest magnitude. Magnitudes divided by
the scale have codes of 7 bits for first moments, where bit 7 is the sign, and of 8 bits for second moments. Codes are floats with four bits of
mantissa (`values`), where the paper has a table with decimal decades: arithmetic on bits replaces lookups and searches.

Rounding is stochastic: a number between two values becomes either, on average itself. To the nearest, a second moment would often keep its code,
because it changes by less than half a step. The random bits depend on the step, the tile, and the element's place in the tile.

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

FIRST: Final = 127
"""Largest code of a magnitude of first moments, that of the scale."""

SECOND: Final = 255
"""Largest code of second moments."""

DROPPED: Final = 19
"""Number of bits of an fp32 number that a code lacks; four bits of the mantissa are left."""

SMALLEST: Final = np.finfo(np.float32).tiny
"""Smallest normal number. Numbers of blocks whose scale has a smaller magnitude are divided by it, so that the reciprocal is finite."""


def num_blocks(size: int) -> int:
    """Return the number of blocks of a tile of `size` elements."""
    return -(-size // BLOCK)


def least_bits(largest: int) -> int:
    """Return the bits of the float whose code is 0, given the largest code, which is that of 1."""
    return 0x3F800000 - (largest << DROPPED)


def values(largest: int) -> Array:
    """Return the values of the codes from 0 to `largest`: the floats from the least one, c, to 1, moved and stretched to go from 0 to 1.

    They are equidistant up to about c, 2^-8 for first and 2^-16 for second moments. Above, there are 16 in each octave.
    """
    floats = (np.arange(largest + 1, dtype=np.uint32) * np.uint32(1 << DROPPED) + np.uint32(least_bits(largest))).view(np.float32)
    return np.asarray((floats - floats[0]) / (1 - floats[0]))


def draws(step: float, stream: int, tile: int, elements: range) -> Array:
    """Return the random bits of elements of a tile: the upper 16 are for the first moment, the lower 16 for the second  # (n,) uint32.

    Those of successive steps are independent. Multiples of the golden ratio would leave 4 % of noise in a second moment that decays, not 13 %, but
    with a bias of 3 %, as codes and bits are correlated.
    """
    key, _ = mix(int(step), stream, tile)
    return scrambled(np.arange(elements.start, elements.stop, dtype=np.uint64).astype(np.uint32) ^ np.uint32(key))


def decode(codes: Array, scales: Array, largest: int) -> Array:
    """Return the numbers of the codes of a tile, in fp32."""
    flat = codes.reshape(-1)
    signs = np.where(flat > largest, np.float32(-1), np.float32(1))
    return np.asarray((signs * values(largest)[flat & largest] * np.repeat(scales, BLOCK)[: flat.size]).reshape(codes.shape))


def encode(numbers: Array, codes: Array, scales: Array, largest: int, random: Array) -> None:
    """Write the codes and the scales of the numbers of a tile. A scale is NaN if a number of its block is.

    Args:
        random: integer from 0 to 65,535 for each element: rounding is upwards for more of them the nearer the number is to the higher magnitude.
    """
    flat, bits_at_0 = numbers.reshape(-1), np.uint32(least_bits(largest))
    least = bits_at_0.view(np.float32)
    for block in range(num_blocks(flat.size)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        exact = flat[own].astype(np.float32)
        scale = np.abs(exact).max()
        floats = np.abs(exact) * ((1 - least) / np.maximum(scale, SMALLEST)) + least
        code = (floats.view(np.uint32) - bits_at_0 + (random[own] << np.uint32(DROPPED - 16))) >> np.uint32(DROPPED)
        code = code | np.signbit(exact) * np.uint32(FIRST + 1) if largest == FIRST else np.maximum(code, flat[own] > 0)
        codes.reshape(-1)[own], scales[block] = code, scale


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
    mean = beta1 * decode(m, m_scales, FIRST).astype(p.dtype) + (1.0 - beta1) * g
    square = beta2 * decode(v, v_scales, SECOND).astype(p.dtype) + (1.0 - beta2) * g * g
    p *= p.dtype.type(1.0 - lr * weight_decay)
    p -= (lr / correction1 * mean / (np.sqrt(square) / math.sqrt(correction2) + eps)).astype(p.dtype)
    encode(mean, m, m_scales, FIRST, random >> np.uint32(16))
    encode(square, v, v_scales, SECOND, random & np.uint32(0xFFFF))
