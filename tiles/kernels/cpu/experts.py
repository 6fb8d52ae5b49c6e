"""Mixtures of experts on the CPU: the rows of an expert are gathered to blocks, multiplied by BLAS, and added back in the order of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..reference.experts import expert_backward_tiles, expert_forward_tiles, update_size
from ..registry import register
from .activation import silu_gate, silu_gate_backward
from .blas import gemm
from .elementwise import cut, single
from .expert_updates import LowRankProducts
from .matmul import are_tokens, rows

Array = npt.NDArray[Any]

BLOCK_ROWS: Final = 256
"""Number of an expert's rows that are computed at a time."""


class Work:
    """Working memory of one expert's task: lists of its rows, and arrays for a block of them.

    Args:
        scratch: `expert_scratch_nbytes` bytes.
        num_rows: R.
        dtype: element type of the blocks.
    """

    def __init__(self, scratch: Array, num_rows: int, dtype: np.dtype[Any]) -> None:
        self._free, self._offset, self._dtype = scratch, 8 * num_rows, dtype
        self._rows, self._slots = np.ndarray((2, num_rows), np.int32, buffer=scratch)
        self._block_rows = min(BLOCK_ROWS, num_rows)

    def find(self, choices: Array, expert: int) -> Iterator[tuple[Array, Array]]:
        """Yield (rows, slots of the choice) of the expert, a block at a time."""
        from .numba import routing_loops

        count = routing_loops.rows_of(choices, expert, self._rows, self._slots)
        for block in cut(count, BLOCK_ROWS):
            yield self._rows[block], self._slots[block]

    def array(self, width: int) -> Array:
        """Return memory for a block of rows of this width."""
        found = np.ndarray((self._block_rows, width), self._dtype, buffer=self._free, offset=self._offset)
        self._offset += found.nbytes
        return found


def expert_scratch_nbytes(num_rows: int, width: int, inner: int, itemsize: int, *, is_backward: bool, rank: int = 0) -> int:
    """Return the working memory of one task.

    Args:
        num_rows: R.
        width: C, of all tiles together.
        inner: I of the tile.
        rank: r of low-rank updates; 0 for none.
    """
    block_rows = min(BLOCK_ROWS, num_rows)
    return 8 * num_rows + itemsize * block_rows * (
        (2 if is_backward else 1) * (width + rank) + (6 if is_backward else 3) * inner + (width if is_backward else 0)
    )


def _gather(tiles: Sequence[Array], indices: Array, out: Array) -> list[Array]:
    """Copy some rows of a panel to `out`, tile by tile, and return the copies  # c tiles (R, c) -> c arrays (n, c)."""
    copies, start = [], 0
    flat = out.reshape(-1)
    for tile in tiles:
        width = tile.shape[1]
        copy = flat[start : start + indices.size * width].reshape(indices.size, width)
        np.take(tile, indices, axis=0, out=copy, mode="clip")
        copies.append(copy)
        start += copy.size
    return copies


def _product(xs: Sequence[Array], ws: Sequence[Array], out: Array, *, is_token: bool = False) -> Array:
    """out = x w^T, summed over tiles  # c arrays (n, c), c tiles (I, c) -> (n, I). Rows of single tokens take the loops, as in `matmul`."""
    from .numba import row_loops

    for number, (x, w) in enumerate(zip(xs, ws, strict=True)):
        if is_token:
            row_loops.multiply_turned(x, w, out, number > 0)
        else:
            gemm(x, w, out, trans_b=True, beta=float(number > 0))
    return out


def _are_plain(*tiles: Array) -> bool:
    """Return whether all tiles are fp32 and contiguous."""
    for tile in tiles:  # noqa: SIM110 - hot path: half the time of a generator
        if tile.dtype != np.float32 or not tile.flags.c_contiguous:
            return False
    return True


def _flops(views: Sequence[Any], constants: Mapping[str, Any]) -> tuple[float, float]:
    """Return the operations of three products, and those of low-rank updates, for the mean number of rows of an expert that has any; the shapes of
    choices and flags have K and E."""
    given = expert_forward_tiles(views, constants["num_c"], has_factors="scale" in constants)
    width, inner = sum(gate.shape[-1] for gate in given.gates), given.gates[0].shape[0]
    share, num_rows = float(given.choices.shape[-1] / given.flags.shape[-1]), float(np.prod(given.choices.shape[:-1]))
    of_a_column = float(6.0 * num_rows * share / (1.0 - (1.0 - share) ** num_rows))
    return of_a_column * width * inner, of_a_column / 3.0 * update_size(given.factors)


def _expert_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of all products."""
    return sum(_flops(views, constants))


def _backward_flops(views: Sequence[Any], constants: Mapping[str, Any]) -> float:
    """Return the operations of two recomputed products, three for gradients of activations, and three for those of matrices or updates that are
    learnt."""
    matrices, updates = _flops(views, constants)
    has_gradients = not updates and bool(expert_backward_tiles(views, constants["num_c"]).dgates)
    return (8.0 if has_gradients else 5.0) / 3.0 * matrices + 8.0 / 3.0 * updates


@register("route", "cpu")
def route(logits: Array, choices: Array, weights: Array, flags: Array, *, renormalises: bool) -> None:
    """Choose the K experts with the largest logits, of equal ones those with the lower index; weights are their probabilities."""
    from .numba import routing_loops

    routing_loops.choose(rows(logits), rows(choices), rows(weights), flags.reshape(-1), renormalises)


@register("route_backward", "cpu")
def route_backward(logits: Array, choices: Array, dweights: Array, dlogits: Array, *, renormalises: bool) -> None:
    """dlogits from dweights; choices have no gradient."""
    from .numba import routing_loops

    routing_loops.choose_backward(rows(logits), rows(choices), rows(dweights), rows(dlogits), renormalises)


@register("expert_forward", "cpu", flops=_expert_flops, is_bounded=True)
def expert_forward(*tiles: Array, num_c: int, expert: int, scale: float | None = None) -> None:
    """y += weight * (silu(x gate^T) * (x up^T)) down^T for the rows that chose the expert; `tiles` as in `expert_forward_tiles`."""
    from .numba import routing_loops, row_loops

    if scale is None and num_c == 1 and are_tokens(tiles[0].shape) and _are_plain(*tiles[:4], tiles[7]):
        x, gate, up, down, choices, weights, _, y, scratch = tiles
        row_loops.add_expert(rows(x), gate, up, down, rows(choices), rows(weights), rows(y), scratch, expert)
        return
    given = expert_forward_tiles(tiles, num_c, has_factors=scale is not None)
    if given.flags.reshape(-1)[expert] == 0:
        return
    xs, ys, choices, weights = [rows(x) for x in given.xs], [rows(y) for y in given.ys], rows(given.choices), rows(given.weights)
    inner, work = given.gates[0].shape[0], Work(given.scratch, choices.shape[0], xs[0].dtype)
    is_token = are_tokens(given.xs[0].shape) and single(*xs, *given.gates, *given.ups, *given.downs)
    block, gate, up, hidden = work.array(sum(x.shape[1] for x in xs)), work.array(inner), work.array(inner), work.array(inner)
    updates = low = None
    if given.factors is not None and scale is not None:
        updates = LowRankProducts(given.factors, scale, work.array(given.factors.gate_b.shape[1]), is_token=is_token)
    for indices, slots in work.find(choices, expert):
        n = indices.size
        gathered = _gather(xs, indices, block)
        gates, ups = (_product(gathered, ws, out[:n], is_token=is_token) for ws, out in ((given.gates, gate), (given.ups, up)))
        if updates is not None:
            updates.add_inner(gathered, gate[:n], up[:n])
        silu_gate(gates, ups, hidden[:n])
        low = None if updates is None else updates.lower_hidden(hidden[:n])
        for number, (y, down, out) in enumerate(zip(ys, given.downs, gathered, strict=True)):  # the rows of x are not needed any more
            _product([hidden[:n]], [down], out, is_token=is_token)
            if updates is not None and low is not None:
                updates.add_outer(low, number, out)
            routing_loops.add_to_rows(out, indices, weights, slots, y)


@register("expert_backward", "cpu", flops=_backward_flops)
def expert_backward(*tiles: Array, num_c: int, expert: int, accumulate: bool = False, scale: float | None = None) -> None:
    """Gradients of `expert_forward`; its products are recomputed. `tiles` as in `expert_backward_tiles`."""
    given = expert_backward_tiles(tiles, num_c, has_factors=scale is not None)
    if given.flags.reshape(-1)[expert] == 0:
        if not accumulate:
            for tile in given.learnt:
                tile.fill(0)
        return
    xs, dys = [rows(x) for x in given.xs], [rows(dy) for dy in given.dys]
    choices, width, inner = rows(given.choices), sum(x.shape[1] for x in xs), given.gates[0].shape[0]
    work = Work(given.scratch, choices.shape[0], xs[0].dtype)
    block, dblock, dx_block = work.array(width), work.array(width), work.array(width)
    inside = [work.array(inner) for _ in range(6)]
    updates = None
    if given.factors is not None and scale is not None:
        rank = given.factors.gate_b.shape[1]
        updates = LowRankProducts(given.factors, scale, work.array(rank), work.array(rank))
    for number, (indices, slots) in enumerate(work.find(choices, expert)):
        x, dy = _gather(xs, indices, block), _gather(dys, indices, dblock)
        arrays = [array[: indices.size] for array in inside]
        _block_backward(given, x, dy, dx_block, arrays, (indices, slots), accumulate or number > 0, updates)


def _block_backward(
    given: Any,
    x: list[Array],
    dy: list[Array],
    dx_block: Array,
    inside: list[Array],
    chosen: tuple[Array, Array],
    accumulate: bool,
    updates: LowRankProducts | None,
) -> None:
    """Add the gradients of a block of rows; `inside` are six arrays (n, I), `dx_block` is one of n rows."""
    from .numba import routing_loops

    (indices, slots), weights, dweights = chosen, rows(given.weights), rows(given.dweights)
    gate, up, hidden, dhidden, dgate, dup = inside
    _product(x, given.gates, gate)
    _product(x, given.ups, up)
    if updates is not None:
        updates.add_inner(x, gate, up)
    silu_gate(gate, up, hidden)
    for number, (slope, down) in enumerate(zip(dy, given.downs, strict=True)):
        gemm(slope, down, dhidden, beta=float(number > 0))
    if updates is not None:
        updates.add_hidden_slopes(dy, dhidden)
    routing_loops.weigh(dhidden, hidden, indices, slots, weights, dweights)
    silu_gate_backward(gate, up, dhidden, dgate, dup)
    if updates is not None:
        updates.learn_outer(given.dfactors, dy, hidden, lambda low: routing_loops.scale_rows(low, indices, weights, slots), float(accumulate))
        updates.learn_inner(given.dfactors, x, dgate, dup, float(accumulate))
    out = dx_block.reshape(-1)
    for number, dx in enumerate(given.dxs):
        target = rows(dx)
        piece = out[: indices.size * target.shape[1]].reshape(indices.size, target.shape[1])
        gemm(dgate, given.gates[number], piece)
        gemm(dup, given.ups[number], piece, beta=1.0)
        if updates is not None:
            updates.add_input_slopes(number, piece)
        routing_loops.add_rows(piece, indices, target)
    if not given.dgates:
        return
    for slope in dy:
        routing_loops.scale_rows(slope, indices, weights, slots)
    for number, (a, b) in enumerate(zip(x, dy, strict=True)):
        gemm(dgate, a, given.dgates[number], trans_a=True, beta=float(accumulate))
        gemm(dup, a, given.dups[number], trans_a=True, beta=float(accumulate))
        gemm(b, hidden, given.ddowns[number], trans_a=True, beta=float(accumulate))


@register("zero_sums", "cpu")
def zero_sums(flags: Array, *sums: Array, accumulate: bool) -> None:
    """Write zeros to sums that begin here; keep those that have begun."""
    for total in () if accumulate else sums:
        total.fill(0)


_NO_DOCUMENTS: Final = np.empty(0, np.int32)


@register("balance", "cpu")
def balance(logits: Array, choices: Array, *rest: Array, first: bool) -> None:
    """Add one tile of rows to the sums of the load-balancing loss; `rest` is [documents,] sums. Rows of document 0 do not count."""
    from .numba import routing_loops

    *documents, sums = rest
    if first:
        sums.fill(0)
    routing_loops.balance(rows(logits), rows(choices), documents[0].reshape(-1) if documents else _NO_DOCUMENTS, sums)


@register("balance_finish", "cpu")
def balance_finish(sums: Array, loss: Array, slopes: Array, *, scale: float) -> None:
    """loss = scale E sum_e f_e P_e and its derivatives by the probabilities of a row."""
    num_experts, rows_counted = slopes.size, max(float(sums[-1]), 1.0)
    factor = scale * num_experts / rows_counted / rows_counted
    loss[0] = factor * float(sums[:num_experts] @ sums[num_experts:-1])
    np.multiply(sums[:num_experts], factor, out=slopes, casting="same_kind")


@register("balance_backward", "cpu")
def balance_backward(logits: Array, slopes: Array, *rest: Array) -> None:
    """dlogits of the load-balancing loss; `rest` is [documents,] dlogits."""
    from .numba import routing_loops

    *documents, dlogits = rest
    routing_loops.balance_backward(rows(logits), slopes, documents[0].reshape(-1) if documents else _NO_DOCUMENTS, rows(dlogits))
