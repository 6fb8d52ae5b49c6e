"""Products and lookups with quantised weights on the CPU.

A few fp32 rows take a compiled loop that widens the weights in registers, once for up to 8 rows. Reading the weights is most of the cost of one row,
so it falls to that of a quarter (q8_0) or a seventh (q4_0) of the bytes. More rows decode a panel of the weights into scratch that stays in cache
and multiply it by BLAS. Activations stay fp32: rounding them to 8 bits, as llama.cpp does, would change results by half a percent. Up to 32 rows of
tokens (`matmul.are_tokens`) take the loop, so that each row has the bits that it has alone.

Ladder, (R, 1024) @ (4096, 1024)^T from memory, one core with AVX-512 while others are busy, for R = 1, 4, 16, 32: q8_0 in registers
0.58 / 0.83 / 2.2 / 4.3 ms, by panels 1.1 / 1.4 / 4.2 / 5.5 ms; with each row of weights decoded for each row of x (R = 1, 4) 0.64 / 1.8 ms; q4_0 in
registers 0.43 / 0.66 / 2.2 / 4.2 ms, by panels 0.94 / 1.3 / 4.3 / 5.3 ms. R = 64 of q8_0: 8.5 and 6.9 ms. One row in registers, busy day, in ms: q4_0
0.35, iq4_xs 0.36, iq4_nl 0.38, q4_k 0.41, q8_0 and q2_k 0.43, q4_1 0.46, q5_k 0.48, q6_k 0.51, q5_0 0.52, q3_k 0.54, f16 0.55, bf16 and q5_1 0.60.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...block_format import BLOCK_FORMATS, BlockFormat, decode
from ..registry import register
from .blas import gemm
from .elementwise import cut, single
from .embedding import check_ids
from .matmul import are_tokens, rows

Array = npt.NDArray[Any]

FEW_ROWS: Final = 4
"""Largest number of rows of any kind for which the weights are decoded in registers."""
PANEL: Final = (128, 1024)
"""Numbers of rows and columns of weights that are decoded at a time; 512 KiB in fp32."""
_DECODED: Final = 2048
"""Number of weights that NumPy decodes at a time, so that its temporaries stay small."""


def panel_scratch_nbytes(activations: Sequence[int], blocks: tuple[int, ...], block_format: BlockFormat, itemsize: int, *, trans_b: bool) -> int:
    """Return the working memory of `quantised_linear`.

    Args:
        activations: shape of the activations, features last.
        blocks: shape of the weight's tile, in bytes.
        block_format: format of the weights.
        itemsize: bytes of an element of the type that the product is computed in.
        trans_b: whether the tile is multiplied as its transpose, an argument of the kernel.
    """
    if trans_b and itemsize == 4 and (prod(activations[:-1]) <= FEW_ROWS or are_tokens(activations)):
        return 0
    return min(blocks[0], PANEL[0]) * min(block_format.columns(blocks[1]), PANEL[1]) * itemsize


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return 2 M N K of the product."""
    numbers = views[1].shape[0] * BLOCK_FORMATS[constants["block_format"]].columns(views[1].shape[1])
    return float(2.0 * prod(views[0].shape[:-1]) * numbers)


@register("quantised_linear", "cpu", flops=_flops, is_bounded=True)
def quantised_linear(x: Array, w: Array, *rest: Array, block_format: str, trans_b: bool, has_bias: bool, accumulate: bool) -> None:
    """y (+)= x @ op(w) [+ bias]  # (R, K) @ (N, K)^T -> (R, N) with `trans_b`, else (R, N) @ (N, K) -> (R, K); rest is [bias,] y [, scratch]."""
    x, y, scratch = rows(x), rows(rest[has_bias]), rest[has_bias + 1 :]
    if has_bias and accumulate:
        y += rest[0]
    elif has_bias:
        y[...] = rest[0]
    accumulate = accumulate or has_bias
    if scratch:
        _by_panels(x, w, y, scratch[0], BLOCK_FORMATS[block_format], trans_b, accumulate)
        return
    from .numba.block_loops import ELEMENTS, multiply

    assert x.flags.c_contiguous
    assert w.flags.c_contiguous
    assert y.flags.c_contiguous  # the loop does not support strides
    multiply(x, w.view(ELEMENTS[block_format]), y, accumulate)


def load_block_loops(block_formats: Iterable[BlockFormat]) -> None:
    """Compile or load the loops of some formats before weights are allocated, since the compiler needs much memory for a while."""
    from .numba import block_loops

    for block_format in block_formats:
        blocks, numbers = np.zeros((1, 1), block_loops.ELEMENTS[block_format.name]), np.zeros((1, block_format.block_values), np.float32)
        block_loops.decode(blocks, numbers)
        block_loops.multiply(numbers, blocks, np.zeros((1, 1), np.float32), False)


def _by_panels(x: Array, w: Array, y: Array, scratch: Array, block_format: BlockFormat, trans_b: bool, accumulate: bool) -> None:
    """y (+)= x @ op(w), a panel of w at a time."""
    for columns, blocks in _column_pieces(w, block_format, PANEL[1]):
        for piece in cut(w.shape[0], PANEL[0]):
            panel = np.ndarray((piece.stop - piece.start, columns.stop - columns.start), y.dtype, buffer=scratch)
            decode_into(w[piece, blocks], panel, block_format)
            if trans_b:  # (R, k) @ (n, k)^T -> n columns of (R, N)
                gemm(x[:, columns], panel, y[:, piece], trans_b=True, beta=float(accumulate or columns.start > 0))
            else:  # n columns of (R, N) @ (n, k) -> k columns of (R, K)
                gemm(x[:, piece], panel, y[:, columns], beta=float(accumulate or piece.start > 0))


def _column_pieces(w: Array, block_format: BlockFormat, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield (columns of the numbers, bytes of a row) of pieces of `count` columns."""
    for columns in cut(block_format.columns(w.shape[1]), count):
        yield columns, slice(block_format.row_bytes(columns.start), block_format.row_bytes(columns.stop))


def decode_into(w: Array, out: Array, block_format: BlockFormat) -> None:
    """out = the numbers of blocks, (N, bytes) -> (N, K), with the bits of `decode` in fp32."""
    if single(out):
        from .numba import block_loops

        block_loops.decode(w.view(block_loops.ELEMENTS[block_format.name]), out)
        return
    for columns, blocks in _column_pieces(w, block_format, _DECODED):
        for row in range(w.shape[0]):
            out[row : row + 1, columns] = decode(w[row : row + 1, blocks], block_format)


@register("quantised_embedding", "cpu")
def quantised_embedding(tokens: Array, table: Array, x: Array, *, block_format: str, v_start: int, vocab: int, accumulate: bool) -> None:
    """x[b, t] = table[tokens[b, t]] for the rows in this tile; the first tile's task zeroes the rest."""
    check_ids(tokens, vocab)
    out, ids = rows(x), tokens.reshape(-1)
    if not accumulate:
        out[...] = 0
    for at in range(ids.size):
        row = int(ids[at]) - v_start
        if 0 <= row < table.shape[0]:
            decode_into(table[row : row + 1], out[at : at + 1], BLOCK_FORMATS[block_format])


@register("decode_blocks", "cpu")
def decode_blocks(w: Array, out: Array, *flags: Array, block_format: str) -> None:
    """out = the numbers of blocks  # (R, bytes) -> (R, C); the flags of a conditional task are not read."""
    decode_into(w, out, BLOCK_FORMATS[block_format])
