"""Operations from the tokens of a sequence to one vector, selections of tokens and sequences, and the swap of tokens and features, on the CPU.

Ladder of `swap_tokens`, 1024 x 768 fp32, arrays in no cache: NumPy's copy of a view 1.12 ms, in squares of 32 to 128 numbers 0.81 to 1.34 ms, in
rows of 16 tokens 0.76 ms; 8 sequences of 196 x 768: 1.28, 1.28 to 1.91 and 1.23 ms. The differences do not justify more than one line. Sums over
tokens are `column_sums`, whose ladder is in `matmul`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference.select import gather_rows, select_rows
from ..reference.tokens import first_token, first_token_backward
from ..registry import Kernel, register, register_bf16
from .matmul import column_sums

Array = npt.NDArray[Any]

register("select_rows", "cpu")(select_rows)
_COPIES: Final[Mapping[str, Kernel]] = {"first_token": first_token, "first_token_backward": first_token_backward, "gather_rows": gather_rows}
for _op, _kernel in _COPIES.items():
    register(_op, "cpu")(_kernel)
    register_bf16(_op, takes=lambda views, constants: True)(_kernel)  # copies only, without arithmetic


@register("mean_tokens", "cpu")
def mean_tokens(x: Array, total: Array, *y: Array, first: bool, length: int) -> None:
    """total (+)= sum of x over its tokens  # (b, t, c) -> (b, c); the last tile's task also gets `y`: y = total / length  # (b, 1, c)."""
    for sequence, sums in zip(x, total, strict=True):
        column_sums(sequence, sums, accumulate=not first)
    for out in y:
        np.multiply(total, total.dtype.type(1 / length), out=out[:, 0])


@register("mean_tokens_backward", "cpu")
def mean_tokens_backward(dy: Array, dx: Array, *, length: int) -> None:
    """dx = dy / length at every token  # (b, 1, c) -> (b, t, c)."""
    np.multiply(dy, dy.dtype.type(1 / length), out=dx)


@register("swap_tokens", "cpu")
def swap_tokens(x: Array, y: Array) -> None:
    """y[b, j, i] = x[b, i, j]  # (b, t, c) -> (b, c, t)."""
    np.copyto(y, x.swapaxes(1, 2))


@register_bf16("swap_tokens", takes=lambda views, constants: True)
def swap_bf16_tokens(x: Array, y: Array) -> None:
    """y[b, j, i] = x[b, i, j], by copying bit patterns."""
    swap_tokens(x.view(np.uint16), y.view(np.uint16))
