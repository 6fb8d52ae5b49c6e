"""Products and lookups with quantised weights, readable: decode the weights, then compute as with floats.

Blocks w are uint8 (rows, bytes of a row); `block_format` is the name of their format. Numbers (N, K) or, of a table, (V, C).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...block_format import BLOCK_FORMATS, decode
from ..registry import register
from .embedding import embedding
from .matmul import rows

Array = npt.NDArray[Any]


@register("quantised_linear", "reference")
def quantised_linear(x: Array, w: Array, *rest: Array, block_format: str, trans_b: bool, has_bias: bool, accumulate: bool) -> None:
    """y (+)= x @ op(w) [+ bias]  # (R, K) @ (N, K)^T -> (R, N) with `trans_b`, else (R, N) @ (N, K) -> (R, K); rest is [bias,] y [, scratch]."""
    weights = decode(w, BLOCK_FORMATS[block_format]).astype(x.dtype)
    product = rows(x) @ (weights.T if trans_b else weights) + (rest[0] if has_bias else 0)
    target = rows(rest[has_bias])
    target[...] = target + product if accumulate else product


@register("quantised_embedding", "reference")
def quantised_embedding(tokens: Array, table: Array, x: Array, *, block_format: str, v_start: int, vocab: int, accumulate: bool) -> None:
    """x[b, t] = table[tokens[b, t]] for the rows in this tile; the first tile's task zeroes the rest."""
    values = np.asarray(decode(table, BLOCK_FORMATS[block_format]), x.dtype)
    embedding(tokens, values, x, v_start=v_start, vocab=vocab, accumulate=accumulate)


@register("decode_blocks", "reference")
def decode_blocks(w: Array, out: Array, *flags: Array, block_format: str) -> None:
    """out = the numbers of blocks  # (R, bytes) -> (R, C); the flags of a conditional task are not read."""
    out[...] = decode(w, BLOCK_FORMATS[block_format])
