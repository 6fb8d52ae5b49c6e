"""Matrix products over tiles: chains of accumulating tasks along the contracted axis, the first of which writes without reading.

`linear` can also compute the products of a chain in parallel and add them in the chain's order.

Legend: x (..., K) activations whose leading axes are rows, w (K, N) or with `transpose_w` (N, K), bias (N,). The weight of `linear`, `linear_gelu`
and `linear_backward_input` may be quantised.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from scheduler import REDUX, RW, SCRATCH, Access, Condition, Handle, R, W

from ..emission import emit, scratch
from ..kernels.cpu.quantised import panel_scratch_nbytes
from ..kernels.registry import BF16, own_activation
from ..quantised import QuantisedTensor
from ..tensor import TileTensor
from . import elementwise
from .grid import chained, leading, same_axis, with_last


def linear(x: TileTensor, w: TileTensor, bias: TileTensor | None = None, *, transpose_w: bool = False, in_parallel: bool = False) -> TileTensor:
    """y = x @ op(w) + bias  # (..., K) @ (K, N) -> (..., N).

    Args:
        in_parallel: whether to compute the products of a chain in parallel, each in its own memory, if y is one tile. It is for few rows, for which a
            single worker would otherwise read the whole matrix.
    """
    y = _linear_output(x, w, bias, transpose_w)
    if in_parallel and prod(y.grid) == 1:
        _sum_in_parallel(x, w, bias, y, transpose_w)
        return y
    for row, n in itertools.product(leading(x), range(y.grid[-1])):
        for k in range(x.grid[-1]):
            _linear_task(x, w, bias, y, row, n, k, transpose_w, adds=k > 0)
    return y


def _sum_in_parallel(x: TileTensor, w: TileTensor, bias: TileTensor | None, y: TileTensor, transpose_w: bool) -> None:
    """Compute y, of one tile, as the sum of independent products. No sum overwrites its terms, so different workers may compute the sums."""
    (row,) = leading(x)
    count = x.grid[-1]
    products = [y.like(name="product") for _ in range(count)] if count > 1 else [y]
    for k, product in enumerate(products):
        _linear_task(x, w, bias, product, row, 0, k, transpose_w, adds=False)
    total = products[0]
    for k, product in enumerate(products[1:], 2):
        before, total = total, y if k == count else y.like(name="sum")
        emit(x.runtime, "add", [(before[*row, 0], R), (product[*row, 0], R), (total[*row, 0], W)])


def add_linear(x: TileTensor, w: TileTensor, y: TileTensor, *, transpose_w: bool = False) -> None:
    """y += x @ op(w)  # (..., K) @ (K, N) -> (..., N)."""
    inner, outer = (1, 0) if transpose_w else (0, 1)
    last = len(x.shape) - 1
    same_axis(x, last, w, inner)
    same_axis(y, last, w, outer)
    for axis in range(last):
        same_axis(x, axis, y, axis)
    constants: dict[str, Any] = {"trans_a": False, "trans_b": transpose_w, "alpha": 1.0, "accumulate": True}
    for row, n in itertools.product(leading(x), range(y.grid[-1])):
        for k in range(x.grid[-1]):
            emit(x.runtime, "matmul", [(x[*row, k], R), (w[(n, k) if transpose_w else (k, n)], R), (y[*row, n], RW)], **constants)


def linear_gelu(x: TileTensor, w: TileTensor, bias: TileTensor | None, kind: str, *, transpose_w: bool = False) -> tuple[TileTensor, TileTensor]:
    """pre = x @ op(w) + bias; y = activation(pre), applied by the last task of each chain. Returns (pre, y).

    If w is quantised, activations are separate tasks.
    """
    if isinstance(w, QuantisedTensor):
        pre = linear(x, w, bias, transpose_w=transpose_w)
        return pre, elementwise.activation(pre, kind)
    pre = _linear_output(x, w, bias, transpose_w)
    y = pre.like(name="activation")
    last = x.grid[-1] - 1
    for row, n in itertools.product(leading(x), range(y.grid[-1])):
        for k in range(last):
            _linear_task(x, w, bias, pre, row, n, k, transpose_w, adds=k > 0)
        accesses: list[Access] = [(x[*row, last], R), (w[(n, last) if transpose_w else (last, n)], R)]
        if bias is not None and last == 0:
            accesses.append((bias[n,], R))
        accesses += [(pre[*row, n], chained(last)), (y[*row, n], W)]
        emit(x.runtime, "linear_activation", accesses, kind=kind, trans_b=transpose_w, accumulate=last > 0)
    return pre, y


def has_slope_in_product(w: TileTensor, kind: str, *, transpose_w: bool = False) -> bool:
    """Return whether `linear_backward_activation` gives the gradient of an activation that op(w) multiplies.

    GPUs compute that of GELU by tanh in bf16. This depends on tiles and types alone, because the gradient is rounded once instead of twice.
    """
    is_known = kind == "gelu_new" and own_activation(kind) is None and w.runtime.has_gpus
    return is_known and w.dtype == BF16 and w.grid[0 if transpose_w else 1] == 1 and not isinstance(w, QuantisedTensor)


def linear_backward_activation(dy: TileTensor, w: TileTensor, pre: TileTensor, kind: str, *, transpose_w: bool = False) -> TileTensor:
    """dpre = dy @ op(w)^T * activation'(pre)  # (..., N) @ (N, K) -> (..., K), where `has_slope_in_product`."""
    dpre = _linear_output(dy, w, None, not transpose_w)
    for row, k in itertools.product(leading(dy), range(dpre.grid[-1])):
        factors: list[Access] = [(dy[*row, 0], R), (w[(0, k) if transpose_w else (k, 0)], R), (pre[*row, k], R)]
        emit(dy.runtime, "linear_activation_backward", [*factors, (dpre[*row, k], W)], kind=kind, trans_b=not transpose_w)
    return dpre


def _linear_output(x: TileTensor, w: TileTensor, bias: TileTensor | None, transpose_w: bool) -> TileTensor:
    inner, outer = (1, 0) if transpose_w else (0, 1)
    same_axis(x, len(x.shape) - 1, w, inner)
    if bias is not None:
        same_axis(bias, 0, w, outer)
    return with_last(x, w.shape[outer : outer + 1], w.tile[outer : outer + 1], "linear")


def _linear_task(
    x: TileTensor, w: TileTensor, bias: TileTensor | None, y: TileTensor, row: tuple[int, ...], n: int, k: int, transpose_w: bool, *, adds: bool
) -> None:
    """Emit one product; the first of a chain adds the bias. If `adds`, the product is added to y."""
    operands: list[Access] = [(x[*row, k], R), (w[(n, k) if transpose_w else (k, n)], R)]
    if isinstance(w, QuantisedTensor):
        with_bias: list[Access] = [(bias[n,], R)] if k == 0 and bias is not None else []
        _quantised_task(w, [*operands, *with_bias, (y[*row, n], chained(adds))], transpose_w, adds=adds)
        return
    if k == 0 and bias is not None:
        emit(x.runtime, "linear_bias", [*operands, (bias[n,], R), (y[*row, n], W)], trans_b=transpose_w)
        return
    constants: dict[str, Any] = {"trans_a": False, "trans_b": transpose_w, "alpha": 1.0, "accumulate": adds}
    emit(x.runtime, "matmul", [*operands, (y[*row, n], chained(adds))], **constants)


def _quantised_task(w: QuantisedTensor, accesses: list[Access], transpose_w: bool, *, adds: bool) -> None:
    """Emit one product with a quantised tile; `accesses` are x, w, [bias,] y. The stored matrix is (N, K), or its transpose."""
    views: list[Any] = [handle.view for handle, _ in accesses]
    trans_b, itemsize = transpose_w != w.is_turned, 8 if views[0].dtype == np.float64 else 4
    nbytes = panel_scratch_nbytes(views[0].shape, views[1].shape, w.block_format, itemsize, trans_b=trans_b)
    if nbytes and w.runtime.has_gpus:  # GPU kernels decode a whole tile
        nbytes = max(nbytes, views[1].shape[0] * w.block_format.columns(views[1].shape[1]) * views[0].dtype.itemsize)
    if nbytes:
        accesses = [*accesses, (scratch(w.runtime, nbytes), SCRATCH)]
    constants: dict[str, Any] = {"block_format": w.block_format.name, "trans_b": trans_b, "has_bias": len(views) > 3, "accumulate": adds}
    emit(w.runtime, "quantised_linear", accesses, **constants)


def decoded(w: QuantisedTensor) -> TileTensor:
    """Return the numbers of quantised weights as a new tensor of floats, for operations that do not support quantised weights."""
    values = TileTensor(w.runtime, w.shape, w.tile, w.dtype, name="decoded")
    for index in w.tiling.indices():
        decode_tile(w, index, values[index])
    return values


def decode_tile(w: QuantisedTensor, index: tuple[int, ...], values: Handle, flags: Handle | None = None, number: int = 0, share: float = 1.0) -> None:
    """Decode one tile of quantised weights to `values`, or skip that if a flag is 0.

    Args:
        flags, number, share: the flag's tile, and the rest of the condition (`Condition`); None for a task that always runs.
    """
    if w.is_turned:
        raise ValueError(f"weights that are stored transposed cannot be decoded tile by tile, got {w!r}; multiply by them instead")
    accesses: list[Access] = [(w[index], R), (values, W)]
    condition = None
    if flags is not None:
        accesses.append((flags, R))
        condition = Condition(guard=2, number=number, share=share)
    emit(w.runtime, "decode_blocks", accesses, condition=condition, block_format=w.block_format.name)


def linear_backward_input(dy: TileTensor, w: TileTensor, *, transpose_w: bool = False) -> TileTensor:
    """dx = dy @ op(w)^T  # (..., N) @ (N, K) -> (..., K)."""
    return linear(dy, w, transpose_w=not transpose_w)


def linear_backward_weight(x: TileTensor, dy: TileTensor, dw: TileTensor, *, transpose_w: bool = False) -> None:
    """dw (+)= x^T @ dy  # (K, ...) @ (..., N) -> (K, N); with `transpose_w` dy^T @ x -> (N, K)."""
    a, b = (dy, x) if transpose_w else (x, dy)
    same_axis(a, len(a.shape) - 1, dw, 0)
    same_axis(b, len(b.shape) - 1, dw, 1)
    constants: dict[str, Any] = {"trans_a": True, "trans_b": False, "alpha": 1.0}
    for row in leading(x):
        for i, j in itertools.product(*map(range, dw.grid)):
            emit(x.runtime, "matmul", [(a[*row, i], R), (b[*row, j], R), (dw[i, j], REDUX)], **constants)


def multiplied_together(x: TileTensor, ws: Sequence[TileTensor]) -> list[list[int]]:
    """Return groups of weights by which `x` is multiplied, by number: those of one shape and tiling if GPUs compute, else each by itself.

    GPUs compute the gradients of a group in one launch, where a single one leaves multiprocessors idle. On CPUs, one task for each weight keeps
    more workers busy.
    """
    is_alone = not x.runtime.has_gpus or any(isinstance(w, QuantisedTensor) for w in ws)
    groups: dict[Any, list[int]] = {}
    for number, w in enumerate(ws):
        groups.setdefault(number if is_alone else (w.shape, w.tile, w.dtype), []).append(number)
    return [*groups.values()]


def linear_backward_weights(x: TileTensor, dys: Sequence[TileTensor], dws: Sequence[TileTensor], *, transpose_w: bool = False) -> None:
    """Contribute to the gradients of a group of weights as `linear_backward_weight` does, with one task for all weights."""
    lefts, rights = (dys, [x]) if transpose_w else ([x], dys)
    constants: dict[str, Any] = {"num_a": len(lefts), "num_b": len(rights), "trans_a": True, "trans_b": False}
    for left, right, dw in zip(itertools.cycle(lefts), itertools.cycle(rights), dws, strict=False):
        same_axis(left, len(left.shape) - 1, dw, 0)
        same_axis(right, len(right.shape) - 1, dw, 1)
    for row in leading(x):
        for i, j in itertools.product(*map(range, dws[0].grid)):
            factors: list[Access] = [*((a[*row, i], R) for a in lefts), *((b[*row, j], R) for b in rights)]
            emit(x.runtime, "matmuls", [*factors, *((dw[i, j], REDUX) for dw in dws)], **constants)


def linear_backward_bias(dy: TileTensor, db: TileTensor) -> None:
    """db (+)= sum of dy over rows  # (..., N) -> (N,)."""
    same_axis(dy, len(dy.shape) - 1, db, 0)
    for row in leading(dy):
        for n in range(db.grid[0]):
            emit(dy.runtime, "column_sums", [(dy[*row, n], R), (db[n,], REDUX)])


def matmul(
    a: TileTensor,
    b: TileTensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    out: TileTensor | None = None,
) -> TileTensor:
    """out (+)= alpha * op(a) @ op(b)  # (..., M, K) @ (..., K, N) -> (..., M, N), leading axes equal.

    Args:
        out: tensor that receives the product as REDUX contributions; None for a new tensor.
    """
    rank = len(a.shape)
    m, k = (rank - 1, rank - 2) if transpose_a else (rank - 2, rank - 1)
    kb, n = (rank - 1, rank - 2) if transpose_b else (rank - 2, rank - 1)
    if len(b.shape) != rank or rank < 2:
        raise ValueError(f"matmul needs two tensors with the same number of axes, at least 2; got {a!r} and {b!r}")
    same_axis(a, k, b, kb)
    for axis in range(rank - 2):
        same_axis(a, axis, b, axis)
    if out is None:
        out = with_last(a, (a.shape[m], b.shape[n]), (a.tile[m], b.tile[n]), "matmul")
    else:
        same_axis(a, m, out, rank - 2)
        same_axis(b, n, out, rank - 1)
    op = "matmul" if rank == 2 else "batched_matmul"
    constants: dict[str, Any] = {"trans_a": transpose_a, "trans_b": transpose_b, "alpha": alpha}
    for row in leading(a, 2):
        for i, j in itertools.product(range(a.grid[m]), range(b.grid[n])):
            for step in range(a.grid[k]):
                left = a[(*row, step, i) if transpose_a else (*row, i, step)]
                right = b[(*row, j, step) if transpose_b else (*row, step, j)]
                emit(a.runtime, op, [(left, R), (right, R), (out[*row, i, j], REDUX)], **constants)
    return out
