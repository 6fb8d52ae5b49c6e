"""Attention of whole sequences in one pair of tiles on the CPU: the kernels of pairs, with the statistics between their tasks in scratch.

On GPUs a library may compute it (`cuda.library_attention`); here it is the attention of a pair that is both first and last.
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
    """Return the working memory of one task: two numbers for each row of each head, and the working memory of a pair."""
    return 2 * num_rows * itemsize + attention_scratch_nbytes(num_queries, num_keys, itemsize)


@register("whole_attention", "cpu", flops=attention_flops(2.0))
def whole_attention(q: Array, k: Array, v: Array, o: Array, lse: Array, scratch: Array, *, at: Pair) -> None:
    """Compute o and lse of whole sequences in one pair of tiles, without dropout or pattern."""
    (peak, total), rest = _statistics(lse, scratch)
    attention(q, k, v, o, peak, total, lse, rest, at=at, first=True, last=True)


@register("whole_attention_backward", "cpu", flops=attention_flops(5.0))
def whole_attention_backward(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dq: Array, dk: Array, dv: Array, scratch: Array, *, at: Pair
) -> None:
    """Compute dq, dk and dv of `whole_attention` from its results o and lse."""
    (delta, _), rest = _statistics(lse, scratch)
    attention_delta(o, do, delta, head_size=at.head_size)
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, rest, at=at, stored=False, first_k=True, first_q=True)


def _statistics(lse: Array, scratch: Array) -> tuple[tuple[Array, Array], Array]:
    """Return two arrays like `lse` at the beginning of the scratch, and the rest of the scratch."""
    first = np.ndarray(lse.shape, lse.dtype, buffer=scratch)
    second = np.ndarray(lse.shape, lse.dtype, buffer=scratch, offset=lse.nbytes)
    return (first, second), scratch[2 * lse.nbytes :]
