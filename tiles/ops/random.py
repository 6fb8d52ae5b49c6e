"""Dropout and random initial values: functions of the global element position, independent of tiling."""

from __future__ import annotations

from typing import Any

from scheduler import R, W

from ..emission import emit
from ..tensor import TileTensor


def dropout(x: TileTensor, p: float, key: TileTensor, stream: int) -> TileTensor:
    """y = x / (1 - p) for elements that survive, else 0; the same call on a gradient applies the same mask.

    Args:
        p: probability of dropping an element, in [0, 1).
        key: (2,) uint64, (seed, step).
        stream: number of this place in the network; each place draws a mask of its own.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be in [0, 1), got {p}")
    y = x.like(name="dropout")
    for index in x.tiling.indices():
        constants: dict[str, Any] = {"p": p, "stream": stream, "shape": x.shape, "origin": x.tiling.origin(index)}
        emit(x.runtime, "dropout", [(x[index], R), (key[0,], R), (y[index], W)], **constants)
    return y


def random_normal(tensor: TileTensor, std: float, seed: int, stream: int) -> TileTensor:
    """Overwrite `tensor` with samples of N(0, std^2); return it."""
    for index, handle in zip(tensor.tiling.indices(), tensor.handles, strict=True):
        constants: dict[str, Any] = {"std": std, "seed": seed, "stream": stream, "shape": tensor.shape, "origin": tensor.tiling.origin(index)}
        emit(tensor.runtime, "random_normal", [(handle, W)], **constants)
    return tensor


def random_uniform(tensor: TileTensor, low: float, high: float, seed: int, stream: int) -> TileTensor:
    """Overwrite `tensor` with samples of U(low, high); return it."""
    for index, handle in zip(tensor.tiling.indices(), tensor.handles, strict=True):
        origin = tensor.tiling.origin(index)
        constants: dict[str, Any] = {"low": low, "high": high, "seed": seed, "stream": stream, "shape": tensor.shape, "origin": origin}
        emit(tensor.runtime, "random_uniform", [(handle, W)], **constants)
    return tensor
