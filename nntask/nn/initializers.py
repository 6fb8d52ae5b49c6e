"""Initial weights from a counter-based generator indexed by global element position, so that they do not depend on the tiling.

The name of a parameter determines its stream, so adding a layer changes no other layer's weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

from tiles import TileTensor
from tiles.ops import elementwise, random

Init = Callable[[TileTensor, int, int], None]
"""Fills a tensor, given a seed and a stream."""


def normal(std: float) -> Init:
    """Return an initializer with normal numbers of mean 0."""
    return partial(_normal, std)


def uniform(bound: float) -> Init:
    """Return an initializer with numbers uniform in -bound to bound."""
    return partial(_uniform, bound)


def constant(value: float) -> Init:
    """Return an initializer with the same number everywhere."""
    return partial(_constant, value)


def stream_of(name: str) -> int:
    """Return the random stream of the parameter `name`."""
    return zlib.crc32(name.encode())


def _normal(std: float, tensor: TileTensor, seed: int, stream: int) -> None:
    random.random_normal(tensor, std, seed, stream)


def _uniform(bound: float, tensor: TileTensor, seed: int, stream: int) -> None:
    random.random_uniform(tensor, -bound, bound, seed, stream)


def _constant(value: float, tensor: TileTensor, seed: int, stream: int) -> None:
    elementwise.fill(tensor, value)
