"""Initial weights from a counter-based generator indexed by global element position, so that they do not depend on the tiling.

The name of a parameter determines its stream, so adding a layer changes no other layer's weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from tiles import TileTensor
from tiles.ops import elementwise, random

Init = Callable[[TileTensor, int, int], object]
"""Fills a tensor, given a seed and a stream."""


def normal(std: float) -> Init:
    """Return an initializer with normal numbers of mean 0."""
    return lambda tensor, seed, stream: random.random_normal(tensor, std, seed, stream)


def uniform(bound: float) -> Init:
    """Return an initializer with numbers uniform in -bound to bound."""
    return lambda tensor, seed, stream: random.random_uniform(tensor, -bound, bound, seed, stream)


def constant(value: float) -> Init:
    """Return an initializer with the same number everywhere."""
    return lambda tensor, seed, stream: elementwise.fill(tensor, value)


def stream_of(name: str) -> int:
    """Return the random stream of the parameter `name`."""
    return zlib.crc32(name.encode())
