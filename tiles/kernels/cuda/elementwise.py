"""Elementwise operations on a GPU, and products with their additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate as accumulated
from itertools import product as grid_of
from typing import Any, Final

import numpy as np

from ..reference.matmul import products_of
from ..registry import BUILT_IN_ACTIVATIONS, register, register_many
from .array import DeviceArray
from .launch import ARRIVALS_NBYTES, PARTIALS_NBYTES, THREADS, KernelSource, device
from .many import SUMS_NBYTES, Task, by_type, filled, groups_of, pieces_of, table

_source = KernelSource("elementwise")
_FLOAT: Final = np.dtype(np.float32)
_COLUMNS: Final = table("x", "total", "partial", numbers=("widths", "accumulate", "pieces", "wide"))


@register("accumulate", "cuda")
def accumulate(total: DeviceArray, addend: DeviceArray) -> None:
    """total += addend."""
    add(total, addend, total)


@register("add", "cuda")
def add(a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
    """out = a + b."""
    _source.each("add", out.dtype, out.size, a, b, out, is_wide=True)


@register("scale", "cuda")
def scale(x: DeviceArray, out: DeviceArray, *, alpha: float) -> None:
    """out = alpha * x."""
    _source.each("scale", out.dtype, out.size, x, out, np.float32(alpha), is_wide=True)


@register("copy", "cuda")
def copy(x: DeviceArray, out: DeviceArray) -> None:
    """out = x, converted to out's dtype."""
    if x.dtype == out.dtype:
        scale(x, out, alpha=1.0)
    elif out.dtype == _FLOAT:
        _source.each("to_float", x.dtype, x.size, x, out, is_wide=True)
    else:
        _source.each("from_float", out.dtype, x.size, x, out, is_wide=True)


@register("fill", "cuda")
def fill(out: DeviceArray, *, value: float) -> None:
    """out = value everywhere."""
    if out.dtype == np.uint8:
        _source.each("fill_bytes", np.dtype(np.float32), out.size, out, np.int32(value))
        return
    _source.each("fill", out.dtype, out.size, out, np.float32(value), is_wide=True)


@register("add_into", "cuda")
def add_into(addend: DeviceArray, total: DeviceArray, *, accumulate: bool) -> None:
    """total (+)= addend."""
    if accumulate:
        add(total, addend, total)
    else:
        copy(addend, total)


def add_float(sums: DeviceArray, out: DeviceArray, *, accumulate: bool) -> None:
    """out (+)= sums in fp32, rounded once."""
    _source.each("add_float", out.dtype, out.size, sums, out, np.int32(accumulate), is_wide=True)


@register("add_rows", "cuda")
def add_rows(x: DeviceArray, p: DeviceArray, out: DeviceArray) -> None:
    """out[b] = x[b] + p[:t]  # (mb, t, c) + (at least t, c)."""
    _source.each("add_rows", x.dtype, x.size, x, p, out, np.int64(x.shape[1] * x.shape[2]), is_wide=True)


@register("add_rows_backward", "cuda")
def add_rows_backward(dy: DeviceArray, dp: DeviceArray, *, accumulate: bool) -> None:
    """dp[:t] (+)= sum of dy over b; rows beyond t get no contribution."""
    row = np.int64(dy.shape[1] * dy.shape[2])
    _source.each("add_rows_backward", dy.dtype, dp.size, dy, dp, np.int32(dy.shape[0]), row, np.int32(accumulate))


@register("activation", "cuda")
def activation(x: DeviceArray, y: DeviceArray, *, kind: str) -> None:
    """y = activation(x)."""
    _source.each("activation", x.dtype, x.size, x, y, _number(kind), is_wide=True)


@register("activation_backward", "cuda")
def activation_backward(x: DeviceArray, dy: DeviceArray, dx: DeviceArray, *, kind: str) -> None:
    """dx = dy * activation'(x)."""
    _source.each("activation_backward", x.dtype, x.size, x, dy, dx, _number(kind), is_wide=True)


def _number(kind: str) -> np.int32:
    if kind not in BUILT_IN_ACTIVATIONS:
        raise ValueError(f"activation {kind!r} has no CUDA code; there are {', '.join(BUILT_IN_ACTIVATIONS)}")
    return np.int32(BUILT_IN_ACTIVATIONS.index(kind))


@register("silu_gate", "cuda")
def silu_gate(gate: DeviceArray, up: DeviceArray, y: DeviceArray) -> None:
    """y = silu(gate) * up."""
    _source.each("silu_gate", y.dtype, y.size, gate, up, y, is_wide=True)


@register("silu_gate_backward", "cuda")
def silu_gate_backward(gate: DeviceArray, up: DeviceArray, dy: DeviceArray, dgate: DeviceArray, dup: DeviceArray) -> None:
    """Gradients of `silu_gate`."""
    _source.each("silu_gate_backward", dy.dtype, dy.size, gate, up, dy, dgate, dup, is_wide=True)


@register("gate", "cuda")
def gate(gates: DeviceArray, up: DeviceArray, y: DeviceArray, *, kind: str) -> None:
    """y = activation(gates) * up."""
    _source.each("gate", y.dtype, y.size, gates, up, y, _number(kind), is_wide=True)


@register("gate_backward", "cuda")
def gate_backward(gates: DeviceArray, up: DeviceArray, dy: DeviceArray, dgates: DeviceArray, dup: DeviceArray, *, kind: str) -> None:
    """Gradients of `gate`."""
    _source.each("gate_backward", dy.dtype, dy.size, gates, up, dy, dgates, dup, _number(kind), is_wide=True)


@register("cap", "cuda")
def cap(x: DeviceArray, y: DeviceArray, *, most: float) -> None:
    """y = most * tanh(x / most)."""
    _source.each("cap", x.dtype, x.size, x, y, np.float32(most), is_wide=True)


@register("cap_backward", "cuda")
def cap_backward(y: DeviceArray, dy: DeviceArray, dx: DeviceArray, *, most: float) -> None:
    """dx = dy * (1 - (y / most)^2), from the output y of `cap`."""
    _source.each("cap_backward", y.dtype, y.size, y, dy, dx, np.float32(most), is_wide=True)


@register("clamp", "cuda")
def clamp(x: DeviceArray, y: DeviceArray, *, most: float) -> None:
    """y = x between -most and most."""
    _source.each("clamp", x.dtype, x.size, x, y, np.float32(most), is_wide=True)


@register("clamp_backward", "cuda")
def clamp_backward(x: DeviceArray, dy: DeviceArray, dx: DeviceArray, *, most: float) -> None:
    """dx = dy if |x| <= most, else 0."""
    _source.each("clamp_backward", x.dtype, x.size, x, dy, dx, np.float32(most), is_wide=True)


@register("rotary", "cuda")
def rotary(x: DeviceArray, cos: DeviceArray, sin: DeviceArray, y: DeviceArray, *, head_size: int, inverse: bool) -> None:
    """Rotate pairs (i, i + R/2) of the first R features of each head by the position's angles  # x, y (mb, t, h * D); cos, sin ([mb,] t, R / 2)."""
    length, half, sign = np.int32(cos.rows().shape[0]), cos.shape[-1], np.float32(-1.0 if inverse else 1.0)
    count = x.size // head_size * (head_size - half)  # pairs, and features that are copied
    _source.each("rotary", x.dtype, count, x, cos, sin, y, length, np.int32(x.shape[2]), np.int32(head_size), np.int32(half), sign)


@register("rotary_angles", "cuda")
def rotary_angles(frequencies: DeviceArray, cos: DeviceArray, sin: DeviceArray, *, start: int) -> None:
    """cos and sin of position * frequency  # (D / 2,) -> (t, D / 2) each, positions from `start`."""
    _source.each("rotary_angles", _FLOAT, cos.size, frequencies, cos, sin, np.int32(start), np.int32(cos.shape[1]))


@register("rotary_angles_at", "cuda")
def rotary_angles_at(frequencies: DeviceArray, positions: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> None:
    """cos and sin of position * frequency  # (D / 2,), (b, t) -> (b, t, D / 2) each."""
    _source.each("rotary_angles_at", _FLOAT, cos.size, frequencies, positions, cos, sin, np.int32(cos.shape[-1]))


@register("column_sums", "cuda")
def column_sums(dy: DeviceArray, db: DeviceArray, *, accumulate: bool) -> None:
    """db (+)= sum of dy over rows  # (..., N) -> (N,)."""
    column_sums_many([((dy, db), {"accumulate": accumulate})])


@register_many(column_sums)
def column_sums_many(tasks: Sequence[Task]) -> None:
    """Compute `column_sums` for several tiles, with one launch per element type, as far as the memory for partial sums suffices."""
    most = PARTIALS_NBYTES // SUMS_NBYTES
    for alike in by_type(tasks):
        for first in range(0, len(alike), most):
            _column_sums([(dy, db) for (dy, db), _ in alike[first : first + most]], [flags["accumulate"] for _, flags in alike[first : first + most]])


def _column_sums(tiles: Sequence[tuple[DeviceArray, DeviceArray]], flags: Sequence[bool]) -> None:
    """db (+)= sum of dy over rows for each (dy, db); the partial sums fit the memory for them."""
    widths = [dy.shape[-1] for dy, _ in tiles]
    pieces = [pieces_of(dy.size // width, width) for (dy, _), width in zip(tiles, widths, strict=True)]
    groups = [groups_of(width, dy) for (dy, _), width in zip(tiles, widths, strict=True)]
    begins = accumulated([0, *(count * width if count > 1 else 0 for count, width in zip(pieces, widths, strict=True))])
    rows = [(*pair, DeviceArray(device().partials.address + 4 * begin, (), _FLOAT)) for pair, begin in zip(tiles, begins, strict=False)]
    numbers = {"widths": widths, "accumulate": flags, "pieces": pieces, "wide": [is_wide for _, is_wide in groups]}
    blocks = [count * number for count, (number, _) in zip(pieces, groups, strict=True)]
    element = tiles[0][0].dtype
    given: Any = filled(_COLUMNS, rows, blocks, **numbers)
    _source.start("column_sums", element, given, arrivals(sum(blocks)), grid=(sum(blocks), 1, 1), shared=4 * 4 * THREADS)


def arrivals(count: int) -> DeviceArray:
    """Return a kernel's counters of blocks, which are 0 before and after it."""
    if 4 * count > ARRIVALS_NBYTES:
        raise ValueError(f"sums of columns take {ARRIVALS_NBYTES // 4:,} blocks at most, got {count:,}; use smaller tiles")
    return device().arrivals.at(np.uint32, count)


def activation_sums(x: DeviceArray, dy: DeviceArray, dx: DeviceArray, total: DeviceArray, *, kind: str, accumulate: bool) -> None:
    """dx = dy * activation'(x), as by `activation_backward`; total (+)= sums of its rows, as by `column_sums`."""
    start_with_sums(_source, "activation_sums", (x, dy, dx), dx, total, (_number(kind),), accumulate=accumulate)


def start_with_sums(
    source: KernelSource, kernel: str, arrays: Sequence[DeviceArray], y: DeviceArray, total: DeviceArray, numbers: Sequence[Any], *, accumulate: bool
) -> None:
    """Start a kernel that writes y and sums its columns in pieces of rows, which it adds to `total` in the end, or overwrites it with their sum.

    Args:
        arrays: first arguments of the kernel, before partial sums and total; it reads four columns at a time if all of them allow that.
        numbers: arguments between the sums and the sizes.
    """
    width = y.shape[-1]
    num_rows = y.size // width
    pieces, (groups, is_wide) = pieces_of(num_rows, width), groups_of(width, *arrays)
    partial = device().partials.at(_FLOAT, pieces, width)
    sizes = (np.int32(num_rows), np.int32(width), np.int32(accumulate), np.int32(is_wide))
    sums = (partial, total, arrivals(groups))
    source.start(kernel, y.dtype, *arrays, *sums, *numbers, *sizes, grid=(groups, pieces, 1), shared=4 * 4 * THREADS)


@register("select_rows", "cuda")
def select_rows(x: DeviceArray, positions: DeviceArray, out: DeviceArray, *, start: int, length: int) -> None:
    """out[b, 0] = x[b, positions[b] - start] if the position lies in this tile; the first tile's task zeroes the other rows."""
    _source.each("select_rows", x.dtype, out.size, x, positions, out, np.int32(start), np.int32(x.shape[1]), np.int32(x.shape[2]))


@register("gather_rows", "cuda")
def gather_rows(source: DeviceArray, rows: DeviceArray, out: DeviceArray, *, start: int) -> None:
    """out[b] = source[rows[b] - start]; a row outside the tile becomes 0."""
    numbers = (np.int32(start), np.int32(source.shape[0]), np.int64(source.size // source.shape[0]))
    _source.each("gather_rows", source.dtype, out.size, source, rows, out, *numbers)


@register("matmul", "cuda")
def matmul(a: DeviceArray, b: DeviceArray, out: DeviceArray, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * op(a) @ op(b) over rows."""
    device().gemm(a.rows(), b.rows(), out.rows(), trans_a=trans_a, trans_b=trans_b, alpha=alpha, accumulate=accumulate)


@register("matmuls", "cuda")
def matmuls(*tiles: DeviceArray, num_a: int, num_b: int, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
    """out (+)= op(a) @ op(b) over rows, for each of several products of one shape, in one launch if cuBLAS has it."""
    products = [(a.rows(), b.rows(), out.rows()) for a, b, out in products_of(tiles, num_a, num_b)]
    device().gemms(products, trans_a=trans_a, trans_b=trans_b, accumulate=accumulate)


def _gram_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the flops of x @ y^T, both (M, N), or of x^T @ y: all of it, where the CPU's kernel computes half."""
    (inner, outer) = views[0].shape[::-1] if constants["trans"] else views[0].shape
    return float(2 * inner * inner * outer)


@register("gram", "cuda", flops=_gram_flops)
def gram(x: DeviceArray, *rest: DeviceArray, trans: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * x @ y^T, or with `trans` alpha * x^T @ y; `rest` is [y,] out, and x is y if there is none. The result is symmetric."""
    y, out = rest[0] if len(rest) == 2 else x, rest[-1]
    device().gemm(x, y, out, trans_a=trans, trans_b=not trans, alpha=alpha, accumulate=accumulate)


@register("batched_matmul", "cuda")
def batched_matmul(a: DeviceArray, b: DeviceArray, out: DeviceArray, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> None:
    """out (+)= alpha * op(a) @ op(b) for each index of the leading axes, which all three share."""
    for index in grid_of(*map(range, out.shape[:-2])):
        matrices = [_matrix(x, index) for x in (a, b, out)]
        device().gemm(*matrices, trans_a=trans_a, trans_b=trans_b, alpha=alpha, accumulate=accumulate)


def _matrix(x: DeviceArray, index: tuple[int, ...]) -> DeviceArray:
    """Return one matrix of a stack."""
    number = 0
    for at, extent in zip(index, x.shape, strict=False):
        number = number * extent + at
    return x.reshape(-1, *x.shape[-2:])[number : number + 1].reshape(*x.shape[-2:])


@register("linear_bias", "cuda")
def linear_bias(x: DeviceArray, w: DeviceArray, bias: DeviceArray, y: DeviceArray, *, trans_b: bool) -> None:
    """y = x @ op(w) + bias  # (R, K) @ (K, N) + (N,) -> (R, N)."""
    product_with_bias(x, w, bias, y, trans_b=trans_b, accumulate=False)


@register("linear_activation", "cuda")
def linear_activation(x: DeviceArray, w: DeviceArray, *rest: Any, kind: str, trans_b: bool, accumulate: bool) -> None:
    """pre (+)= x @ op(w) [+ bias]; y = activation(rounded pre); rest is [bias,] pre, y."""
    *bias, pre, y = rest
    product_with_bias(x, w, bias[0] if bias else None, pre, trans_b=trans_b, accumulate=accumulate)
    activation(pre, y, kind=kind)


@register("linear_activation_backward", "cuda")
def linear_activation_backward(dy: DeviceArray, w: DeviceArray, pre: DeviceArray, dpre: DeviceArray, *, kind: str, trans_b: bool) -> None:
    """dpre = dy @ op(w) * activation'(pre); rounded once where cuBLASLt has such a product, else before the multiplication as well."""
    left, out = dy.rows(), dpre.rows()
    if kind == "gelu_new" and device().gemm_with_gelu_slope(left, w, pre.rows(), out, trans_b=trans_b):
        return
    device().gemm(left, w, out, trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=False)
    activation_backward(pre, dpre, dpre, kind=kind)


def product_with_bias(x: DeviceArray, w: DeviceArray, bias: DeviceArray | None, y: DeviceArray, *, trans_b: bool, accumulate: bool) -> None:
    """y (+)= x @ op(w) [+ bias]; rounded once where cuBLASLt has such a product, else after each addition."""
    if bias is not None and not accumulate and device().gemm_with_bias(x.rows(), w, bias, y.rows(), trans_b=trans_b):
        return
    device().gemm(x.rows(), w, y.rows(), trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=accumulate)
    if bias is not None:
        _source.each("add_bias", y.dtype, y.size, y, bias, np.int32(y.shape[-1]), is_wide=True)
