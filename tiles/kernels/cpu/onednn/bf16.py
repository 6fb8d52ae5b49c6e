"""Kernels that take bf16 tiles without fp32 copies: products by oneDNN with sums in fp32, each output rounded once.

Weight gradients are fp32 and receive their products directly; a gradient that several products of one task add to is summed in fp32 scratch.
Statistics stay fp32. Operations without a kernel here run on fp32 copies (`registry`).

Ladder, the same task on fp32 copies / here (1024 rows of GPT-2 small, one core, OPENBLAS_CORETYPE=Haswell): product with (768, 3072) 39 / 9.8 ms,
with bias and gelu_new 45 / 11.5 ms; gradient of gelu_new 6.9 / 1.3 ms; layer norm 0.77 / 0.13 ms, after an addition 1.2 / 0.18 ms, backward
1.9 / 0.85 ms; column sums of 3072 0.93 / 0.31 ms; head over 6,283 words forward 85 / 22 ms, backward 250 / 71 ms; lookup in 6,283 words
0.83 / 0.30 ms; AdamW over 768 x 3072 5.0 / 4.4 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product as grid
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...reference.loss import PLAIN, Head, backward_tiles, forward_tiles, scaled
from ...registry import BF16, register_bf16, registered
from ..elementwise import MOST_ROWS, cut
from ..embedding import embedding as lookup
from ..loss import COLUMNS, add_blocks, blocks, logit_gradients, shaped
from ..matmul import column_sums as fp32_column_sums
from ..matmul import rows
from . import operations as onednn

Array = npt.NDArray[Any]
Views = Sequence[Any]
Constants = Mapping[str, Any]

_FP32: Final = np.dtype(np.float32)

_WIDEST: Final = 4096
"""Largest number of features in a row for which fp32 copies of gain and shift, or gain and sums, are allocated: 48 KiB."""

_NORM_ROWS: Final = 64
"""Number of rows that go through a layer norm's backward pass together: 192 KiB of fp32 for 768 features."""


def are_bf16(*positions: int) -> Callable[[Views, Constants], bool]:
    """Return a function that returns whether the tiles at `positions` are bf16."""
    return lambda views, constants: all(views[position].dtype == BF16 for position in positions)


def _takes_product(views: Views, constants: Constants) -> bool:
    return bool(views[0].dtype == views[1].dtype == BF16 and constants["alpha"] == 1.0)


@register_bf16("matmul", takes=_takes_product)
def matmul(a: Array, b: Array, out: Array, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= op(a) @ op(b) over rows; out bf16 or fp32."""
    onednn.gemm(rows(a), rows(b), rows(out), trans_a=trans_a, trans_b=trans_b, accumulate=accumulate)


@register_bf16("batched_matmul", takes=_takes_product)
def batched_matmul(a: Array, b: Array, out: Array, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= op(a) @ op(b) for each index of the leading axes, which all three share."""
    for index in grid(*map(range, out.shape[:-2])):
        onednn.gemm(a[index], b[index], out[index], trans_a=trans_a, trans_b=trans_b, accumulate=accumulate)


@register_bf16("linear_bias", takes=are_bf16(0, 1))
def linear_bias(x: Array, w: Array, bias: Array, y: Array, *, trans_b: bool) -> None:
    """y = x @ op(w) + bias  # (R, K) @ (K, N) + (N,) -> (R, N)."""
    onednn.gemm(rows(x), w, rows(y), trans_b=trans_b, bias=bias)


@register_bf16("linear_activation", takes=are_bf16(0, 1, -2, -1))
def linear_activation(x: Array, w: Array, *rest: Array, kind: str, trans_b: bool, accumulate: bool) -> None:
    """pre (+)= x @ op(w) [+ bias]; y = activation(rounded pre); rest is [bias,] pre, y."""
    *bias, pre, y = rest
    onednn.gemm(rows(x), w, rows(pre), trans_b=trans_b, accumulate=accumulate, bias=bias[0] if bias else None)
    onednn.activation(pre, y, kind)


@register_bf16("column_sums", takes=lambda views, constants: views[0].dtype == BF16 and views[1].dtype == np.float32)
def column_sums(dy: Array, db: Array, *, accumulate: bool) -> None:
    """db (+)= sum of dy over rows, computed as ones times dy  # (R, N) -> (N,)."""
    matrix = rows(dy)
    for piece in cut(matrix.shape[0], 4 * MOST_ROWS):
        ones = np.ones((1, piece.stop - piece.start), BF16)
        onednn.gemm(ones, matrix[piece], db[None], accumulate=accumulate or piece.start > 0)


@register_bf16("add", takes=are_bf16(0, 1, 2))
def add(a: Array, b: Array, out: Array) -> None:
    """out = a + b."""
    onednn.add(a, b, out)


@register_bf16("activation", takes=are_bf16(0, 1))
def activation(x: Array, y: Array, *, kind: str) -> None:
    """y = activation(x)."""
    onednn.activation(x, y, kind)


@register_bf16("activation_backward", takes=are_bf16(0, 1, 2))
def activation_backward(x: Array, dy: Array, dx: Array, *, kind: str) -> None:
    """dx = dy * activation'(x)."""
    onednn.activation_backward(x, dy, dx, kind)


@register_bf16("copy", takes=lambda views, constants: {view.dtype for view in views} <= {BF16, np.dtype(np.float32)})
def copy(x: Array, out: Array) -> None:
    """out = x, converted to out's dtype."""
    if x.dtype == out.dtype:
        np.copyto(out, x)
    else:
        onednn.convert(x, out)


register_bf16("embedding", takes=are_bf16(1, 2))(lookup)  # copies rows, without arithmetic


def _takes_norm(views: Views, constants: Constants) -> bool:
    *_, y, mean, rstd = views
    return bool(views[0].dtype == y.dtype == BF16 and mean.dtype == rstd.dtype == np.float32 and y.shape[-1] <= _WIDEST)


@register_bf16("layer_norm", takes=_takes_norm)
def layer_norm(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var + eps)."""
    spread = rstd.reshape(-1)
    wide = gamma.astype(np.float32), beta.astype(np.float32)
    onednn.layer_norm(rows(x), *wide, rows(y), mean.reshape(-1), spread, eps)
    spread += np.float32(eps)
    np.sqrt(spread, out=spread)
    np.reciprocal(spread, out=spread)


@register_bf16("residual_layer_norm", takes=lambda views, constants: are_bf16(1, 4)(views, constants) and _takes_norm(views, constants))
def residual_layer_norm(x: Array, r: Array, gamma: Array, beta: Array, s: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """s = x + r; y = layer_norm(rounded s), so that the backward pass gets the same numbers in s."""
    onednn.add(x, r, s)
    layer_norm(s, gamma, beta, y, mean, rstd, eps=eps)


def _takes_norm_backward(views: Views, constants: Constants) -> bool:
    x, _, mean, rstd, dy, *rest = views
    *wide, dx, dgamma, dbeta = rest
    short = all(view.dtype == BF16 for view in (x, dy, dx, *wide[: constants["residual"]]))
    return short and all(view.dtype == np.float32 for view in (mean, rstd, dgamma, dbeta)) and bool(dx.shape[-1] <= _WIDEST)


def _norm_backward_scratch(views: Views, constants: Constants) -> int:
    """Return the bytes of a block of dx and of a block of the gradient added to it, in fp32."""
    shape = views[0].shape
    return int(8 * min(_NORM_ROWS, prod(shape[:-1])) * shape[-1])


@register_bf16("layer_norm_backward", takes=_takes_norm_backward, scratch_nbytes=_norm_backward_scratch)
def layer_norm_backward(x: Array, gamma: Array, mean: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool) -> None:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) [+ dresidual]; g = dy * gamma; dgamma (+)= dy * xhat; dbeta (+)= dy."""
    *extra, dx, dgamma, dbeta, scratch = rest
    x, dy, dx, mean, rstd = rows(x), rows(dy), rows(dx), mean.reshape(-1), rstd.reshape(-1)
    wide, partials = gamma.astype(np.float32), np.empty((2, gamma.size), np.float32)
    if not accumulate:
        dgamma[...] = 0
        dbeta[...] = 0
    for block in cut(x.shape[0], _NORM_ROWS):
        out, added = np.ndarray((2, *x[block].shape), np.float32, buffer=scratch)
        variance = 1 / np.square(rstd[block])
        onednn.layer_norm_backward(x[block], wide, mean[block], variance, dy[block], out, *partials)
        dgamma += partials[0]
        dbeta += partials[1]
        if residual:
            onednn.convert(rows(extra[0])[block], added)
            out += added
        onednn.convert(out, dx[block])


def _takes_master(views: Views, constants: Constants) -> bool:
    return bool(constants["master"] and views[0].dtype == BF16 and views[1].dtype == np.float32)


def _update(op: str, param: Array, state: Sequence[Array], rest: Sequence[Array], at: int, constants: Constants) -> None:
    """Update the fp32 master, `rest[at]`, as if it were the parameter; then write it, rounded, to the parameter."""
    master = rest[at]
    others = (array for number, array in enumerate(rest) if number != at)
    plain = registered(op, "cpu")
    assert plain is not None, f"{op} has a kernel for bf16 tiles and none for fp32"
    plain(master, *state, *others, **{**constants, "master": False})
    onednn.convert(master, param)


@register_bf16("adam", takes=_takes_master)
def adam(param: Array, grad: Array, m: Array, v: Array, hyper: Array, *rest: Array, clip: bool, **constants: Any) -> None:
    """Adam or AdamW; `rest` is [norm,] master, [scratch]."""
    _update("adam", param, (grad, m, v, hyper), rest, int(clip), {**constants, "clip": clip})


@register_bf16("adam8bit", takes=_takes_master)
def adam8bit(param: Array, *tiles: Array, clip: bool, **constants: Any) -> None:
    """AdamW on moments in 8 bits; `tiles` are grad, m, its scales, v, its scales, hyper, [norm,] master."""
    _update("adam8bit", param, tiles[:6], tiles[6:], int(clip), {**constants, "clip": clip})


@register_bf16("muon_update", takes=_takes_master)
def muon_update(param: Array, x: Array, hyper: Array, *rest: Array, **constants: Any) -> None:
    """The last task of Muon; `rest` is the master."""
    _update("muon_update", param, (x, hyper), rest, 0, constants)


@register_bf16("sgd", takes=_takes_master)
def sgd(param: Array, grad: Array, hyper: Array, *rest: Array, has_buffer: bool, clip: bool, **constants: Any) -> None:
    """SGD; `rest` is [buffer if `has_buffer`,] [norm,] master, [scratch]."""
    _update("sgd", param, (grad, hyper), rest, int(has_buffer) + int(clip), {**constants, "clip": clip, "has_buffer": has_buffer})


def _takes_head(views: Views, constants: Constants) -> bool:
    has_bias = constants.get("how", PLAIN).has_bias
    return all(view.dtype == BF16 for view in views[: 2 * constants["num_c"] + has_bias])


def _product(x: Array, w: Array, s: Array, accumulate: bool) -> None:
    onednn.gemm(x, w, s, trans_b=True, accumulate=accumulate)


@register_bf16("head_forward", takes=_takes_head)
def head_forward(*tiles: Array, num_c: int, v_start: int, vocab: int, first: bool, how: Head = PLAIN) -> None:
    """Add one vocabulary tile to the running statistics; `tiles` are those of `forward_tiles`."""
    given = forward_tiles(tiles, num_c, how)
    logit_blocks = shaped(blocks([rows(x) for x in given.xs], given.ws, _FP32, given.scratch, _product), given.bias, how.cap)
    add_blocks(logit_blocks, *given.statistics, v_start=v_start, vocab=vocab, first=first)


def _head_backward_scratch(views: Views, constants: Constants) -> int:
    """Return the bytes of the gradients of x in fp32, and of one block of logits' gradients in bf16."""
    num_c = constants["num_c"]
    num_rows = prod(views[0].shape[:-1])
    return int(num_rows * (4 * sum(view.shape[-1] for view in views[:num_c]) + 2 * min(COLUMNS, views[num_c].shape[0])))


def _takes_head_backward(views: Views, constants: Constants) -> bool:
    given = backward_tiles(views, constants["num_c"], constants.get("how", PLAIN))
    return _takes_head(views, constants) and all(dx.dtype == BF16 for dx in given.dxs)


@register_bf16("head_backward", takes=_takes_head_backward, scratch_nbytes=_head_backward_scratch)
def head_backward(*tiles: Array, num_c: int, v_start: int, scale: float, first: bool, accumulate: bool, how: Head = PLAIN) -> None:
    """Compute the contribution of one vocabulary tile to dx and dw, and overwrite dbias; `tiles` are those of `backward_tiles`, then scratch."""
    *others, own = tiles
    given = backward_tiles(others, num_c, how)
    xs, ids, lse, scale = [rows(x) for x in given.xs], given.targets.reshape(-1), given.lse.reshape(-1), scaled(scale, given.factor)
    sums, used = [], 0
    for dx in given.dxs:
        sums.append(np.ndarray(rows(dx).shape, np.float32, buffer=own, offset=used))
        used += sums[-1].nbytes
        if not first:
            onednn.convert(dx, sums[-1].reshape(dx.shape))
    for start, end, p in shaped(blocks(xs, given.ws, _FP32, given.scratch, _product), given.bias, how.cap):
        logit_gradients(p, ids, lse, v_start + start, v_start + end, scale, how.cap)
        if given.dbias is not None:
            fp32_column_sums(p, given.dbias[start:end], accumulate=False)
        short = np.ndarray(p.shape, BF16, buffer=own, offset=used)
        onednn.convert(p, short)
        for w, dx in zip(given.ws, sums, strict=True):
            onednn.gemm(short, w[start:end], dx, accumulate=not first or start > 0)
        for x, dw in zip(xs, given.dws, strict=bool(given.dws)):
            onednn.gemm(short, x, dw[start:end], trans_a=True, accumulate=accumulate)
    for dx, total in zip(given.dxs, sums, strict=True):
        onednn.convert(total.reshape(dx.shape), dx)
