"""Operations from the tokens of a sequence to one vector, and the swap of tokens and features, on a GPU."""

from __future__ import annotations

import numpy as np

from ..registry import register
from .array import DeviceArray
from .launch import KernelSource

_source = KernelSource("tables")
_SQUARE = 32
"""Number of rows and columns that a block transposes at once."""


@register("first_token", "cuda")
def first_token(x: DeviceArray, y: DeviceArray) -> None:
    """y = the first token, for a tile at the beginning of the sequences  # (b, t, c) -> (b, 1, c)."""
    _source.each("first_token", x.dtype, y.size, x, y, np.int32(x.shape[1]), np.int32(x.shape[2]))


@register("first_token_backward", "cuda")
def first_token_backward(dy: DeviceArray, dx: DeviceArray) -> None:
    """dx = dy at the first token, else 0  # (b, 1, c) -> (b, t, c)."""
    _source.each("first_token_backward", dx.dtype, dx.size, dy, dx, np.int32(dx.shape[1]), np.int32(dx.shape[2]))


@register("mean_tokens", "cuda")
def mean_tokens(x: DeviceArray, total: DeviceArray, *y: DeviceArray, first: bool, length: int) -> None:
    """total (+)= sum of x over its tokens  # (b, t, c) -> (b, c); the last tile's task also gets `y`: y = total / length  # (b, 1, c)."""
    numbers = (np.int32(x.shape[1]), np.int32(x.shape[2]), np.int32(first), np.float32(1 / length))
    _source.each("mean_tokens", x.dtype, total.size, x, total, y[0] if y else None, *numbers)


@register("mean_tokens_backward", "cuda")
def mean_tokens_backward(dy: DeviceArray, dx: DeviceArray, *, length: int) -> None:
    """dx = dy / length at every token  # (b, 1, c) -> (b, t, c)."""
    numbers = (np.int32(dx.shape[1]), np.int32(dx.shape[2]), np.float32(1 / length))
    _source.each("mean_tokens_backward", dx.dtype, dx.size, dy, dx, *numbers)


@register("swap_tokens", "cuda")
def swap_tokens(x: DeviceArray, y: DeviceArray) -> None:
    """y[b, j, i] = x[b, i, j]  # (b, t, c) -> (b, c, t)."""
    batch, length, width = x.shape
    down, right = (-(-extent // _SQUARE) for extent in (length, width))
    shared = 4 * _SQUARE * (_SQUARE + 1)
    _source.start("swap_tokens", x.dtype, x, y, np.int32(length), np.int32(width), grid=(batch * down, right, 1), shared=shared)
