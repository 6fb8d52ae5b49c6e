"""Attention of whole sequences in one pair of tiles on the CPU: the kernels of pairs, with the statistics that they leave between tasks in scratch.

On GPUs a library may compute it (`cuda.library_attention`); here it is the same as one pair that is first and last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import Pair
from ..registry import register
from .attention import attention, attention_backward, attention_delta, attention_flops
from .attention_blocks import attention_scratch_nbytes

Array = npt.NDArray[Any]


def whole_scratch_nbytes(num_rows: int, num_queries: int, num_keys: int, itemsize: int) -> int:
    """Working memory of one task: two numbers for each row of each head, and what attention of a pair needs."""
    return 2 * num_rows * itemsize + attention_scratch_nbytes(num_queries, num_keys, itemsize)


@register("whole_attention", "cpu", flops=attention_flops(2.0))
def whole_attention(q: Array, k: Array, v: Array, o: Array, lse: Array, scratch: Array, *, at: Pair) -> None:
    """o and lse of whole sequences in one pair of tiles, without dropout and pattern."""
    (peak, total), rest = _statistics(lse, scratch)
    attention(q, k, v, o, peak, total, lse, rest, at=at, first=True, last=True)


@register("whole_attention_backward", "cpu", flops=attention_flops(5.0))
def whole_attention_backward(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dq: Array, dk: Array, dv: Array, scratch: Array, *, at: Pair
) -> None:
    """dq, dk and dv of `whole_attention`, from what it has left."""
    (delta, _), rest = _statistics(lse, scratch)
    attention_delta(o, do, delta, head_size=at.head_size)
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, rest, at=at, stored=False, first_k=True, first_q=True)


def _statistics(lse: Array, scratch: Array) -> tuple[tuple[Array, Array], Array]:
    """Two arrays like `lse` at the beginning of the scratch, and what is behind them."""
    first = np.ndarray(lse.shape, lse.dtype, buffer=scratch)
    second = np.ndarray(lse.shape, lse.dtype, buffer=scratch, offset=lse.nbytes)
    return (first, second), scratch[2 * lse.nbytes :]
