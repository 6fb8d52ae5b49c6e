"""Initial weights, from a counter-based generator indexed by global element position: they do not depend on how a parameter is tiled.

The stream of a parameter follows from its name, so adding a layer changes no other layer's weights.
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
    """Normal numbers with mean 0."""
    return partial(_normal, std)


def uniform(bound: float) -> Init:
    """Numbers drawn evenly from -bound to bound."""
    return partial(_uniform, bound)


def constant(value: float) -> Init:
    """The same number everywhere."""
    return partial(_constant, value)


def stream_of(name: str) -> int:
    """Stream of the random numbers of the parameter `name`."""
    return zlib.crc32(name.encode())


def _normal(std: float, tensor: TileTensor, seed: int, stream: int) -> None:
    random.random_normal(tensor, std, seed, stream)


def _uniform(bound: float, tensor: TileTensor, seed: int, stream: int) -> None:
    random.random_uniform(tensor, -bound, bound, seed, stream)


def _constant(value: float, tensor: TileTensor, seed: int, stream: int) -> None:
    elementwise.fill(tensor, value)
