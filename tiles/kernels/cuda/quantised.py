"""Products and lookups with quantised weights on a device: see `source/quantised.cu`.

Few rows multiply blocks as they are. More rows multiply the whole tile, decoded to the type of the activations into declared scratch, by cuBLAS.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...block_format import BLOCK_FORMATS
from ..registry import register
from .array import DeviceArray
from .elementwise import add_biases
from .launch import KernelSource, device, threads_for

_source: Final = KernelSource("quantised")


@register("quantised_linear", "cuda")
def quantised_linear(x: DeviceArray, w: DeviceArray, *rest: Any, block_format: str, trans_b: bool, has_bias: bool, accumulate: bool) -> None:
    """y (+)= x @ op(w) [+ bias]  # (R, K) @ (N, K)^T -> (R, N) with `trans_b`, else (R, N) @ (N, K) -> (R, K); rest is [bias,] y [, scratch]."""
    bias, y, scratch = rest[0] if has_bias else None, rest[has_bias].rows(), rest[has_bias + 1 :]
    named, x = BLOCK_FORMATS[block_format], x.rows()
    columns = named.columns(w.shape[1])
    if not scratch:
        threads = threads_for(columns)
        numbers = (np.int32(columns), np.int32(named.block_bytes), np.int32(accumulate))
        _source.start("multiply_rows", x.dtype, x, w, bias, y, *numbers, grid=(w.shape[0], x.shape[0], 1), threads=threads, shared=4 * threads)
        return
    weights = scratch[0].at(x.dtype, w.shape[0], columns)
    decode_blocks(w, weights, block_format=block_format)
    device().gemm(x, weights, y, trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=accumulate)
    if bias is not None:
        add_biases([(y, bias)])


@register("decode_blocks", "cuda")
def decode_blocks(w: DeviceArray, out: DeviceArray, *, block_format: str) -> None:
    """out = the numbers of blocks  # (R, bytes) -> (R, C)."""
    _source.each("decode_blocks", out.dtype, out.size, w, out, np.int32(BLOCK_FORMATS[block_format].block_bytes))


@register("quantised_embedding", "cuda")
def quantised_embedding(
    tokens: DeviceArray, table: DeviceArray, x: DeviceArray, *, block_format: str, v_start: int, vocab: int, accumulate: bool
) -> None:
    """x[b, t] = table[tokens[b, t]] where this tile has the row; the first tile zeroes the rest."""
    size = BLOCK_FORMATS[block_format].block_bytes
    numbers = (np.int32(v_start), np.int32(table.shape[0]), np.int32(x.shape[-1]), np.int32(size), np.int32(accumulate))
    _source.each("quantised_embedding", x.dtype, x.size, tokens, table, x, *numbers)
