"""Operations from the tokens of a sequence to one vector, and the swap of tokens and features, readable.

Legend: x tiles (b, t, c): sequences, tokens, features.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


@register("first_token", "reference")
def first_token(x: Array, y: Array) -> None:
    """y = the first token, for a tile at the beginning of the sequences  # (b, t, c) -> (b, 1, c)."""
    y[...] = x[:, :1]


@register("first_token_backward", "reference")
def first_token_backward(dy: Array, dx: Array) -> None:
    """dx = dy at the first token, else 0  # (b, 1, c) -> (b, t, c)."""
    dx[...] = 0
    dx[:, :1] = dy


@register("mean_tokens", "reference")
def mean_tokens(x: Array, total: Array, *y: Array, first: bool, length: int) -> None:
    """total (+)= sum of x over its tokens  # (b, t, c) -> (b, c); the last tile's task also gets `y`: y = total / length  # (b, 1, c)."""
    total[...] = x.sum(axis=1, dtype=total.dtype) + (0 if first else total)
    for out in y:
        out[...] = total[:, None] / length


@register("mean_tokens_backward", "reference")
def mean_tokens_backward(dy: Array, dx: Array, *, length: int) -> None:
    """dx = dy / length at every token  # (b, 1, c) -> (b, t, c)."""
    dx[...] = dy / length


@register("swap_tokens", "reference")
def swap_tokens(x: Array, y: Array) -> None:
    """y[b, j, i] = x[b, i, j]  # (b, t, c) -> (b, c, t)."""
    y[...] = x.swapaxes(1, 2)
