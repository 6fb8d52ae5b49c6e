"""Mixtures of experts on a GPU.

The host does not know how many rows chose an expert, so the products of an expert take all rows of the tile, and rows that did not choose it count
with weight 0: E / K times the work of the rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from ..reference.experts import ExpertBackward, ExpertFactors, ExpertForward, expert_backward_tiles, expert_forward_tiles, update_size
from ..registry import register
from .array import DeviceArray
from .elementwise import add_float, fill
from .launch import PARTIALS_NBYTES, THREADS, KernelSource, device, threads_for

_source = KernelSource("experts")
_FLOAT: Final = np.dtype(np.float32)


def expert_scratch_nbytes(num_rows: int, width: int, inner: int, itemsize: int, *, is_backward: bool, rank: int = 0) -> int:
    """Return the working memory of one task: products of all rows in fp32, and values computed from them in the type of activations.

    Args:
        num_rows: R.
        width, inner: C and I of the tile.
        rank: r of low-rank updates; 0 for none.
    """
    updates = num_rows * rank * itemsize * (2 if is_backward else 1)
    return _sums_nbytes(num_rows, width, rank, itemsize) + num_rows * inner * (12 + 3 * itemsize if is_backward else 8 + itemsize) + updates


def _sums_nbytes(num_rows: int, width: int, rank: int, itemsize: int) -> int:
    """Return the memory in which activations of 16 bits are summed."""
    return num_rows * max(width, rank) * 4 if itemsize < 4 else 0


def _split(given: ExpertForward | ExpertBackward) -> tuple[DeviceArray, DeviceArray]:
    """Return the scratch memory for sums, and the rest."""
    width, rank = max(x.shape[-1] for x in given.xs), given.factors.gate_b.shape[1] if given.factors else 0
    nbytes = _sums_nbytes(prod(given.xs[0].shape[:-1]), width, rank, given.xs[0].dtype.itemsize)
    return given.scratch[:nbytes], given.scratch[nbytes:]


def _arrays(scratch: DeviceArray, shape: tuple[int, ...], *dtypes: np.dtype[Any]) -> list[DeviceArray]:
    """Return arrays of one shape, one after another in the scratch memory."""
    found, address = [], scratch.address
    for dtype in dtypes:
        found.append(DeviceArray(address, shape, dtype))
        address += found[-1].nbytes
    return found


def _add(x: DeviceArray, w: DeviceArray, out: DeviceArray, scale: float, *, trans_b: bool = False) -> None:
    device().gemm(x, w, out, trans_a=False, trans_b=trans_b, alpha=scale, accumulate=True)


def _sum(terms: Sequence[tuple[DeviceArray, DeviceArray, float]], out: DeviceArray, memory: DeviceArray, *, trans_b: bool, accumulate: bool) -> None:
    """out (+)= the sum of products, which is rounded once.

    Args:
        terms: two matrices of each product, and its scale.
        memory: memory for the sum in fp32, if `out` has 16 bits.
    """
    is_exact = len(terms) == 1 or out.dtype == _FLOAT
    sums = out if is_exact else DeviceArray(memory.address, out.shape, _FLOAT)
    for number, (x, w, scale) in enumerate(terms):
        device().gemm(x, w, sums, trans_a=False, trans_b=trans_b, alpha=scale, accumulate=number > 0 or (is_exact and accumulate))
    if not is_exact:
        add_float(sums, out, accumulate=accumulate)


def _product(xs: Sequence[DeviceArray], ws: Sequence[DeviceArray], out: DeviceArray, memory: DeviceArray, *, trans_b: bool) -> None:
    """out = the sum of x op(w), as by `_sum`."""
    _sum([(x, w, 1.0) for x, w in zip(xs, ws, strict=True)], out, memory, trans_b=trans_b, accumulate=False)


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> tuple[float, float]:
    """Return the operations of three products, and those of low-rank updates, for all rows."""
    given = expert_forward_tiles(views, constants["num_c"], has_factors="scale" in constants)
    width, inner = sum(gate.shape[-1] for gate in given.gates), given.gates[0].shape[0]
    num_rows = prod(given.choices.shape[:-1])
    return float(6.0 * num_rows * width * inner), 2.0 * num_rows * update_size(given.factors)


def _forward_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of all products."""
    return sum(_flops(views, constants))


def _backward_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of two recomputed products, three for gradients of activations, and three for those of matrices or updates that are
    learnt."""
    matrices, updates = _flops(views, constants)
    has_gradients = not updates and bool(expert_backward_tiles(views, constants["num_c"]).dgates)
    return (8.0 if has_gradients else 5.0) / 3.0 * matrices + 8.0 / 3.0 * updates


@register("route", "cuda")
def route(logits: DeviceArray, choices: DeviceArray, weights: DeviceArray, flags: DeviceArray, *, renormalises: bool) -> None:
    """Choose the K experts with the largest logits, of equal ones those with the lower index; weights are their probabilities."""
    num_experts, num_chosen = logits.shape[-1], choices.shape[-1]
    numbers = (np.int32(num_experts), np.int32(num_chosen), np.int32(renormalises))
    _source.each("route", logits.dtype, logits.size // num_experts, logits, choices, weights, *numbers)
    _source.each("flag_experts", logits.dtype, num_experts, choices, flags, np.int32(choices.size))


@register("route_backward", "cuda")
def route_backward(logits: DeviceArray, choices: DeviceArray, dweights: DeviceArray, dlogits: DeviceArray, *, renormalises: bool) -> None:
    """dlogits from dweights; choices have no gradient."""
    num_experts = logits.shape[-1]
    numbers = (np.int32(num_experts), np.int32(choices.shape[-1]), np.int32(renormalises))
    _source.each("route_backward", logits.dtype, logits.size // num_experts, logits, choices, dweights, dlogits, *numbers)


@register("expert_forward", "cuda", flops=_forward_flops)
def expert_forward(*tiles: DeviceArray, num_c: int, expert: int, scale: float | None = None) -> None:
    """y += weight * (silu(x gate^T) * (x up^T)) down^T for the rows that chose the expert; `tiles` as in `expert_forward_tiles`."""
    given = expert_forward_tiles(tiles, num_c, has_factors=scale is not None)
    xs, dtype, inner, (memory, rest) = [x.rows() for x in given.xs], given.xs[0].dtype, given.gates[0].shape[0], _split(given)
    gate, up, hidden = _arrays(rest, (xs[0].shape[0], inner), _FLOAT, _FLOAT, dtype)
    _product(xs, given.gates, gate, memory, trans_b=True)
    _product(xs, given.ups, up, memory, trans_b=True)
    low = None
    if given.factors is not None and scale is not None:
        (low,) = _low_arrays(rest, hidden, given.factors, 1)
        _add_inner(xs, given.factors, low, memory, gate, up, scale)
    numbers = (np.int32(inner), np.int32(given.choices.shape[-1]), np.int32(expert))
    _source.each("weigh_hidden", dtype, hidden.size, gate, up, given.choices, given.weights, hidden, *numbers)
    if given.factors is not None and low is not None:
        _product([hidden], [given.factors.down_a], low, memory, trans_b=True)
    for number, (y, down) in enumerate(zip(given.ys, given.downs, strict=True)):
        terms = [(hidden, down, 1.0)]
        if given.factors is not None and scale is not None and low is not None:
            terms.append((low, given.factors.down_b[number], scale))
        _sum(terms, y.rows(), memory, trans_b=True, accumulate=True)


def _low_arrays(scratch: DeviceArray, last: DeviceArray, factors: ExpertFactors, count: int) -> list[DeviceArray]:
    """Return `count` arrays (R, r) of the scratch memory after `last`, of its type."""
    used = last.address + last.nbytes - scratch.address
    shape = (last.shape[0], factors.gate_b.shape[1])
    return _arrays(scratch[used:], shape, *[last.dtype] * count)


def _add_inner(
    xs: Sequence[DeviceArray], factors: ExpertFactors, low: DeviceArray, memory: DeviceArray, gate: DeviceArray, up: DeviceArray, scale: float
) -> None:
    """Add low-rank updates to the products with gate and up, and leave x a^T in `low`; `memory` is for its sums."""
    _product(xs, factors.a, low, memory, trans_b=True)
    for out, b in ((gate, factors.gate_b), (up, factors.up_b)):
        _add(low, b, out, scale, trans_b=True)


@register("expert_backward", "cuda", flops=_backward_flops)
def expert_backward(*tiles: DeviceArray, num_c: int, expert: int, accumulate: bool = False, scale: float | None = None) -> None:
    """Gradients of `expert_forward`; its products are recomputed. `tiles` as in `expert_backward_tiles`."""
    given = expert_backward_tiles(tiles, num_c, has_factors=scale is not None)
    xs, dys, dtype, inner = [x.rows() for x in given.xs], [dy.rows() for dy in given.dys], given.xs[0].dtype, given.gates[0].shape[0]
    num_rows, (memory, rest) = xs[0].shape[0], _split(given)
    gate, up, slope, dgate, dup, hidden = _arrays(rest, (num_rows, inner), _FLOAT, _FLOAT, _FLOAT, dtype, dtype, dtype)
    _product(xs, given.gates, gate, memory, trans_b=True)
    _product(xs, given.ups, up, memory, trans_b=True)
    _product(dys, given.downs, slope, memory, trans_b=False)
    low: list[DeviceArray] = []
    if given.factors is not None and scale is not None:
        low_x, slopes = low = _low_arrays(rest, hidden, given.factors, 2)
        _add_inner(xs, given.factors, low_x, memory, gate, up, scale)
        _product(dys, given.factors.down_b, slopes, memory, trans_b=False)
        _add(slopes, given.factors.down_a, slope, scale)
    numbers, threads = (np.int32(inner), np.int32(given.choices.shape[-1]), np.int32(expert)), threads_for(inner, num_rows)
    arrays = (gate, up, slope, given.choices, given.weights, given.dweights, dgate, dup, hidden)
    _source.start("expert_slopes", dtype, *arrays, *numbers, grid=(num_rows, 1, 1), threads=threads, shared=4 * threads)
    if low and scale is not None:
        _learn_factors(given, (xs, dys), (*low, dgate, dup, hidden), memory, accumulate, scale)
    for number, (dx, gates, ups) in enumerate(zip(given.dxs, given.gates, given.ups, strict=True)):
        terms = [(dgate, gates, 1.0), (dup, ups, 1.0)]
        if given.factors is not None and scale is not None:
            terms.append((low[1], given.factors.a[number], scale))
        _sum(terms, dx.rows(), memory, trans_b=False, accumulate=True)
    if not given.dgates:
        return
    for number, (x, dy) in enumerate(zip(xs, dys, strict=True)):
        for a, b, out in ((dgate, x, given.dgates[number]), (dup, x, given.dups[number]), (dy, hidden, given.ddowns[number])):
            device().gemm(a, b, out, trans_a=True, trans_b=False, alpha=1.0, accumulate=accumulate)


def _learn_factors(
    given: ExpertBackward,
    rows: tuple[Sequence[DeviceArray], Sequence[DeviceArray]],
    inner: Sequence[DeviceArray],
    memory: DeviceArray,
    accumulate: bool,
    scale: float,
) -> None:
    """Compute the gradients of the factors of low-rank updates, and leave dgate gate_b + dup up_b in the place of dy down_b.

    Args:
        rows: panels x and dy.
        inner: x a^T and dy down_b (R, r); slopes of gate and up, and hidden times weight (R, I), 0 for rows that did not choose the expert.
        memory: memory for sums.
    """
    (xs, dys), (low, slopes, dgate, dup, hidden), factors, gradients = rows, inner, given.factors, given.dfactors
    assert factors is not None
    assert gradients is not None

    def learn(a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        device().gemm(a, b, out, trans_a=True, trans_b=False, alpha=scale, accumulate=accumulate)

    learn(slopes, hidden, gradients.down_a)
    learn(dgate, low, gradients.gate_b)
    learn(dup, low, gradients.up_b)
    _product([hidden], [factors.down_a], low, memory, trans_b=True)
    for dy, out in zip(dys, gradients.down_b, strict=True):
        learn(dy, low, out)
    _product([dgate, dup], [factors.gate_b, factors.up_b], slopes, memory, trans_b=False)
    for x, out in zip(xs, gradients.a, strict=True):
        learn(slopes, x, out)


@register("zero_sums", "cuda")
def zero_sums(flags: DeviceArray, *sums: DeviceArray, accumulate: bool) -> None:
    """Write zeros to sums that begin here; keep those that have begun."""
    for total in () if accumulate else sums:
        fill(total, value=0.0)


@register("balance", "cuda")
def balance(logits: DeviceArray, choices: DeviceArray, *rest: DeviceArray, first: bool) -> None:
    """Add one tile of rows to the sums of the load-balancing loss; `rest` is [documents,] sums. Rows of document 0 do not count."""
    *documents, sums = rest
    num_rows, num_experts = prod(logits.shape[:-1]), logits.shape[-1]
    if 8 * num_rows > PARTIALS_NBYTES:
        raise ValueError(f"the load-balancing loss takes tiles of {PARTIALS_NBYTES // 8:,} tokens at most, got {num_rows}; use smaller tiles")
    totals = device().partials.at(_FLOAT, num_rows, 2)
    _source.each("row_totals", logits.dtype, num_rows, logits, totals, np.int32(num_experts))
    arrays = (logits, choices, documents[0] if documents else None, totals, sums)
    numbers = (np.int32(num_rows), np.int32(num_experts), np.int32(choices.shape[-1]), np.int32(first))
    _source.start("balance", logits.dtype, *arrays, *numbers, grid=(num_experts + 1, 1, 1), shared=16 * THREADS)


@register("balance_finish", "cuda")
def balance_finish(sums: DeviceArray, loss: DeviceArray, slopes: DeviceArray, *, scale: float) -> None:
    """loss = scale E sum_e f_e P_e and its derivatives by the probabilities of a row."""
    _source.start("balance_finish", _FLOAT, sums, loss, slopes, np.float64(scale), np.int32(slopes.size), grid=(1, 1, 1), threads=1)


@register("balance_backward", "cuda")
def balance_backward(logits: DeviceArray, slopes: DeviceArray, *rest: DeviceArray) -> None:
    """dlogits of the load-balancing loss; `rest` is [documents,] dlogits."""
    *documents, dlogits = rest
    arrays = (logits, slopes, documents[0] if documents else None, dlogits)
    _source.each("balance_backward", logits.dtype, prod(logits.shape[:-1]), *arrays, np.int32(logits.shape[-1]))


@register("row_gate", "cuda")
def row_gate(gate: DeviceArray, x: DeviceArray, y: DeviceArray) -> None:
    """y = sigmoid(gate) * x, one gate for each row  # (.., 1), (.., c) -> (.., c)."""
    _source.each("row_gate", x.dtype, x.size, gate, x, y, np.int32(x.shape[-1]))


@register("row_gate_backward", "cuda")
def row_gate_backward(gate: DeviceArray, x: DeviceArray, dy: DeviceArray, dx: DeviceArray, dgate: DeviceArray, *, first: bool) -> None:
    """Gradients of `row_gate`; that of the gate is a sum over tiles of the row, of which this is the first or not."""
    _source.by_row("row_gate_backward", x, gate, x, dy, dx, dgate, np.int32(x.shape[-1]), np.int32(first))
