"""Operations from the tokens of a sequence to one vector, and the swap of tokens and features.

Legend: x (B, T, C): sequences, tokens, features.
"""

from __future__ import annotations

import numpy as np

from scheduler import Access, R, W

from ..emission import emit
from ..tensor import TileTensor
from .elementwise import fill
from .grid import chained


def first_token(x: TileTensor) -> TileTensor:
    """Return the first token of each sequence  # (B, T, C) -> (B, 1, C)."""
    y = _one_token(x, "first token")
    for b, _, c in y.tiling.indices():
        emit(x.runtime, "first_token", [(x[b, 0, c], R), (y[b, 0, c], W)])
    return y


def first_token_backward(dy: TileTensor, length: int, tile: int) -> TileTensor:
    """dx = dy at the first token, else 0  # (B, 1, C) -> (B, T, C).

    Args:
        length: number of tokens T.
        tile: number of tokens in a tile.
    """
    dx = _all_tokens(dy, length, tile, "d first token")
    for b, t, c in dx.tiling.indices():
        if t == 0:
            emit(dx.runtime, "first_token_backward", [(dy[b, 0, c], R), (dx[b, 0, c], W)])
    return fill(dx, 0.0, [dx.tiling.flat(index) for index in dx.tiling.indices() if index[1]])


def mean_tokens(x: TileTensor) -> TileTensor:
    """Return the mean over all tokens of each sequence, summed from the first to the last  # (B, T, C) -> (B, 1, C)."""
    y = _one_token(x, "mean token")
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    total = TileTensor(x.runtime, (x.shape[0], x.shape[2]), (x.tile[0], x.tile[2]), dtype, name="sum of tokens")
    last = x.grid[1] - 1
    for b, _, c in y.tiling.indices():
        for t in range(x.grid[1]):
            accesses: list[Access] = [(x[b, t, c], R), (total[b, c], chained(t))]
            accesses += [(y[b, 0, c], W)] if t == last else []
            emit(x.runtime, "mean_tokens", accesses, first=t == 0, length=x.shape[1])
    return y


def mean_tokens_backward(dy: TileTensor, length: int, tile: int) -> TileTensor:
    """dx = dy / T at every token  # (B, 1, C) -> (B, T, C); the arguments are those of `first_token_backward`."""
    dx = _all_tokens(dy, length, tile, "d mean token")
    for b, t, c in dx.tiling.indices():
        emit(dx.runtime, "mean_tokens_backward", [(dy[b, 0, c], R), (dx[b, t, c], W)], length=length)
    return dx


def swapped(x: TileTensor) -> TileTensor:
    """Swap tokens and features, and the axes of tiles with them  # (B, T, C) -> (B, C, T)."""
    _check_axes(x)
    (batch, length, width), (b_tile, t_tile, c_tile) = x.shape, x.tile
    y = TileTensor(x.runtime, (batch, width, length), (b_tile, c_tile, t_tile), x.dtype, name="swapped")
    for b, t, c in x.tiling.indices():
        emit(x.runtime, "swap_tokens", [(x[b, t, c], R), (y[b, c, t], W)])
    return y


def _one_token(x: TileTensor, name: str) -> TileTensor:
    _check_axes(x)
    return TileTensor(x.runtime, (x.shape[0], 1, x.shape[2]), (x.tile[0], 1, x.tile[2]), x.dtype, name=name)


def _all_tokens(dy: TileTensor, length: int, tile: int, name: str) -> TileTensor:
    _check_axes(dy)
    if dy.shape[1] != 1:
        raise ValueError(f"dy must be the gradient of one token of each sequence, (B, 1, C); got {dy!r}")
    return TileTensor(dy.runtime, (dy.shape[0], length, dy.shape[2]), (dy.tile[0], tile, dy.tile[2]), dy.dtype, name=name)


def _check_axes(x: TileTensor) -> None:
    if len(x.shape) != 3:
        raise ValueError(f"tokens of sequences must have three axes, (B, T, C); got {x!r}")
