"""Cross-entropy of a linear head on the CPU: a vocabulary tile in blocks of columns, so that the full logits are never stored.

Ladder (1024 rows, width 768, vocabulary tile 6,283, fp32, one core): the products alone 81 ms forward, 245 ms backward; all of it 86 to 88
and 249 to 250 ms for blocks of 512 to 6,283 columns, so the block is chosen for memory: 4 MiB of logits at a time.
With compiled exponentials, 7,232 columns: forward 91 ms, both passes 361 ms (torch, which keeps all logits and so needs three products instead of
four, 124 and 330 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference.loss import PLAIN, Head, backward_tiles, forward_tiles, scaled
from ..reference.loss import head_finish as finish
from ..registry import register
from .blas import gemm
from .elementwise import MOST_ROWS, WORK_BYTES, cut, row_blocks, single
from .embedding import check_ids
from .matmul import column_sums, rows

Array = npt.NDArray[Any]
Product = Callable[[Array, Array, Array, bool], None]
"""(x, w, s, accumulate): s (+)= x @ w^T."""

Blocks = Iterator[tuple[int, int, Array]]
"""(first column, last column, logits) of each block of columns."""

COLUMNS: Final = 1024
"""Number of logits per row that exist at a time."""


@register("head_finish", "cpu")
def head_finish(targets: Array, peak: Array, total: Array, picked: Array, *rest: Array, scale: float) -> None:
    """lse = peak + log total; loss[0] = scale * [factor *] sum over tokens of (lse - picked), in fp64; `rest` is [factor,] lse, loss."""
    *factor, lse, loss = rest
    ids, tops, sums, chosen, out = (tile.reshape(-1) for tile in (targets, peak, total, picked, lse))
    loss[0], piece_loss = 0.0, np.empty(1)
    for piece in cut(targets.size, 4 * MOST_ROWS):  # a tile of up to 2048 tokens is one sum, as in the reference
        finish(ids[piece], tops[piece], sums[piece], chosen[piece], *factor, out[piece], piece_loss, scale=scale)
        loss += piece_loss


def loss_scratch_nbytes(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Return the working memory of one task: one block of logits."""
    return num_rows * min(COLUMNS, num_columns) * itemsize


def blocks(xs: Sequence[Array], ws: Sequence[Array], dtype: np.dtype[Any], buffer: Array, product: Product) -> Blocks:
    """Yield the logits, block by block of columns, in one buffer."""
    num_columns = ws[0].shape[0]
    for first in range(0, num_columns, COLUMNS):
        last = min(first + COLUMNS, num_columns)
        s = np.ndarray((xs[0].shape[0], last - first), dtype, buffer=buffer)
        for number, (x, w) in enumerate(zip(xs, ws, strict=True)):
            product(x, w[first:last], s, number > 0)
        yield first, last, s


def shaped(logit_blocks: Blocks, bias: Array | None, cap: float) -> Blocks:
    """Return the blocks with the bias (v,) added, and then capped; the same blocks if there is neither."""
    return logit_blocks if bias is None and not cap else _shaped(logit_blocks, bias, cap)


def _shaped(logit_blocks: Blocks, bias: Array | None, cap: float) -> Blocks:
    for first, last, s in logit_blocks:
        if bias is not None:
            s += bias[first:last].astype(s.dtype)
        if cap:
            s *= s.dtype.type(1 / cap)
            np.tanh(s, out=s)
            s *= s.dtype.type(cap)
        yield first, last, s


def _product(x: Array, w: Array, s: Array, accumulate: bool) -> None:
    gemm(x, w, s, trans_b=True, beta=float(accumulate))


def _inside(ids: Array, first: int, last: int) -> Iterator[tuple[Array, Array]]:
    """Yield (rows whose id lies in [first, last), that id minus `first`), a piece of rows at a time."""
    for piece in cut(ids.size, MOST_ROWS):
        rows_in = np.flatnonzero((ids[piece] >= first) & (ids[piece] < last)) + piece.start
        yield rows_in, ids[rows_in] - first


def _product_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of x @ w^T."""
    num_c = constants["num_c"]
    width = sum(view.shape[-1] for view in views[:num_c])
    return 2.0 * float(np.prod(views[0].shape[:-1])) * float(width * views[num_c].shape[0])


def _backward_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of the recomputed logits, of dx, and of dw if it is wanted."""
    has_dw = bool(backward_tiles(views, constants["num_c"], constants.get("how", PLAIN)).dws)
    return (3.0 if has_dw else 2.0) * _product_flops(views, constants)


@register("head_forward", "cpu", flops=_product_flops)
def head_forward(*tiles: Array, num_c: int, v_start: int, vocab: int, first: bool, how: Head = PLAIN) -> None:
    """Add one vocabulary tile to the running statistics; `tiles` are those of `forward_tiles`."""
    given = forward_tiles(tiles, num_c, how)
    xs = [rows(x) for x in given.xs]
    logit_blocks = shaped(blocks(xs, given.ws, xs[0].dtype, given.scratch, _product), given.bias, how.cap)
    add_blocks(logit_blocks, *given.statistics, v_start=v_start, vocab=vocab, first=first)


def add_blocks(logit_blocks: Blocks, targets: Array, peak: Array, total: Array, picked: Array, *, v_start: int, vocab: int, first: bool) -> None:
    """Add blocks of logits to each row's running maximum and sum of exponentials, and pick the targets' logits."""
    check_ids(targets, vocab, -1)
    ids, peak, total, picked = targets.reshape(-1), peak.reshape(-1), total.reshape(-1), picked.reshape(-1)
    if first:
        peak.fill(-np.inf)
        total.fill(0)
        picked.fill(0)
    for start, end, s in logit_blocks:
        for here, column in _inside(ids, v_start + start, v_start + end):
            picked[here] = s[here, column]
        if single(s, peak, total):
            from .numba import exp_loops

            exp_loops.add_to_lse(s, peak, total)
            continue
        for block in row_blocks(s.shape[0], s.shape[1] * s.itemsize // 4):
            piece = s[block]
            top = np.maximum(np.maximum.reduce(piece, axis=1), peak[block])
            total[block] *= np.exp(peak[block] - top)
            piece -= top[:, None]
            np.exp(piece, out=piece)
            total[block] += np.add.reduce(piece, axis=1)
            peak[block] = top


def logit_gradients(p: Array, ids: Array, lse: Array, first: int, last: int, scale: float, cap: float = 0.0) -> None:
    """p = scale * (exp(logits - lse) - 1 at the target), 0 for ignored tokens; p holds the logits of columns [first, last).

    If the logits z are capped to c tanh(z / c), the gradients by z get the factor 1 - tanh^2.
    """
    if cap:
        for block in row_blocks(p.shape[0], p.shape[1] * p.itemsize, WORK_BYTES // 2):
            slope = p[block] * p.dtype.type(1 / cap)
            slope *= slope
            np.subtract(1, slope, out=slope)
            logit_gradients(p[block], ids[block], lse[block], first, last, scale)
            p[block] *= slope
        return
    if single(p, lse):
        from .numba import exp_loops

        exp_loops.scaled_exp(p, lse, np.float32(scale))
    else:
        for block in row_blocks(p.shape[0], p.shape[1] * p.itemsize // 4):
            piece = p[block]
            piece -= lse[block, None]
            np.exp(piece, out=piece)
            piece *= p.dtype.type(scale)
    for here, column in _inside(ids, first, last):
        p[here, column] -= p.dtype.type(scale)
    for ignored, _ in _inside(ids, -1, 0):
        p[ignored] = 0


@register("head_backward", "cpu", flops=_backward_flops)
def head_backward(*tiles: Array, num_c: int, v_start: int, scale: float, first: bool, accumulate: bool, how: Head = PLAIN) -> None:
    """Compute the contribution of one vocabulary tile to dx and dw, and overwrite dbias; `tiles` are those of `backward_tiles`."""
    given = backward_tiles(tiles, num_c, how)
    xs, dxs = [rows(x) for x in given.xs], [rows(dx) for dx in given.dxs]
    ids, lse, scale = given.targets.reshape(-1), given.lse.reshape(-1), scaled(scale, given.factor)
    for start, end, p in shaped(blocks(xs, given.ws, xs[0].dtype, given.scratch, _product), given.bias, how.cap):
        logit_gradients(p, ids, lse, v_start + start, v_start + end, scale, how.cap)
        if given.dbias is not None:
            column_sums(p, given.dbias[start:end], accumulate=False)
        for w, dx in zip(given.ws, dxs, strict=True):
            gemm(p, w[start:end], dx, beta=float(not first or start > 0))
        for x, dw in zip(xs, given.dws, strict=bool(given.dws)):
            gemm(p, x, dw[start:end], trans_a=True, beta=float(accumulate))
