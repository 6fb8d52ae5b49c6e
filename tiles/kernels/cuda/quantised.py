"""Products and lookups with quantised weights on a GPU; the kernels are in `source/quantised.cu`.

Few rows are multiplied by blocks directly. For more rows, the whole tile is decoded into declared scratch, to the type of the activations, and
multiplied by cuBLAS.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...block_format import BLOCK_FORMATS
from ..registry import register
from .array import DeviceArray
from .elementwise import product_with_bias
from .launch import KernelSource, threads_for

_source: Final = KernelSource("quantised")
_OF_32: Final = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
_OF_256: Final = {"q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_xs": 23}
_KINDS: Final = {**_OF_32, **_OF_256}
"""Name of a format -> ggml's number, which the kernels use."""


def _layout(block_format: str) -> tuple[np.int32, np.int32, np.int32]:
    """Return kind, numbers and bytes of a block, the arguments of the kernels."""
    chosen = BLOCK_FORMATS[block_format]
    return np.int32(_KINDS[block_format]), np.int32(chosen.block_values), np.int32(chosen.block_bytes)


@register("quantised_linear", "cuda")
def quantised_linear(x: DeviceArray, w: DeviceArray, *rest: Any, block_format: str, trans_b: bool, has_bias: bool, accumulate: bool) -> None:
    """y (+)= x @ op(w) [+ bias]  # (R, K) @ (N, K)^T -> (R, N) with `trans_b`, else (R, N) @ (N, K) -> (R, K); rest is [bias,] y [, scratch]."""
    bias, y, scratch = rest[0] if has_bias else None, rest[has_bias].rows(), rest[has_bias + 1 :]
    named, x = BLOCK_FORMATS[block_format], x.rows()
    columns = named.columns(w.shape[1])
    if not scratch:
        threads = threads_for(columns, 1)
        numbers = (np.int32(columns), *_layout(block_format), np.int32(accumulate))
        _source.start("multiply_rows", x.dtype, x, w, bias, y, *numbers, grid=(w.shape[0], x.shape[0], 1), threads=threads, shared=4 * threads)
        return
    weights = scratch[0].at(x.dtype, w.shape[0], columns)
    decode_blocks(w, weights, block_format=block_format)
    product_with_bias(x, weights, bias, y, trans_b=trans_b, accumulate=accumulate)


@register("decode_blocks", "cuda")
def decode_blocks(w: DeviceArray, out: DeviceArray, *flags: DeviceArray, block_format: str) -> None:
    """out = the numbers of blocks  # (R, bytes) -> (R, C); the flags of a conditional task are not read."""
    _source.each("decode_blocks", out.dtype, out.size, w, out, *_layout(block_format))


@register("quantised_embedding", "cuda")
def quantised_embedding(
    tokens: DeviceArray, table: DeviceArray, x: DeviceArray, *, block_format: str, v_start: int, vocab: int, accumulate: bool
) -> None:
    """x[b, t] = table[tokens[b, t]] for the rows in this tile; the first tile's task zeroes the rest."""
    numbers = (np.int32(v_start), np.int32(table.shape[0]), np.int32(x.shape[-1]), *_layout(block_format), np.int32(accumulate))
    _source.each("quantised_embedding", x.dtype, x.size, tokens, table, x, *numbers)
