"""Mixtures of experts over tiles: routing, one task for each expert and tile of rows, and the load-balancing loss.

A task of an expert gets a whole tile of rows and gathers those that chose the expert, so the shapes of a recorded step are the same for all data.
Results are added in the order of experts to a tensor that begins at zero (or at the result of a shared expert): no task of an expert is the first
to write it. If all rows are in one tile, there are several such tensors, so several workers compute, and the tensors are added at the end. The
routing writes a flag for each expert that a row chose, and tasks of other experts are skipped, before their weights are fetched. Of the backward
tasks of an expert that is learnt, the first of each sum always runs: gradients must exist, and are zero for an expert without tokens. Gradients of
low-rank updates begin with tasks that write zeros, so a frozen expert without tokens is not fetched.

Legend: x (B, T, C), logits (B, T, E), choices (B, T, K) int32, weights (B, T, K), flags (b, t, E) uint8 for b x t tiles of rows; matrices of an
expert: gate (I, C), up (I, C), down (C, I), and of its low-rank update of rank r: a (r, C), gate_b (I, r), up_b (I, r), down_a (r, I), down_b (C, r).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from scheduler import REDUX, RW, SCRATCH, Access, Condition, Handle, R, W

from ..emission import emit, scratch
from ..kernels.cpu.experts import expert_scratch_nbytes
from ..kernels.reference.experts import ExpertFactors
from ..quantised import QuantisedTensor
from ..tensor import TileTensor
from . import elementwise
from .grid import chained, leading, same_axis
from .matmul import decode_tile

SUMS: Final = 4
"""Number of tensors to which whole experts are added if all rows are in one tile. Of 8 experts out of 64, the busier one of two workers computes 4.7
on average, and 5.0 with two tensors."""


class Routing(NamedTuple):
    """Result of `route`."""

    choices: TileTensor
    weights: TileTensor
    flags: TileTensor


class Expert(NamedTuple):
    """Matrices of an expert, or their gradients."""

    gate: TileTensor
    up: TileTensor
    down: TileTensor


class ExpertUpdate(NamedTuple):
    """Factors of the low-rank update (LoRA) of an expert's matrices, or their gradients; gate and up share a."""

    a: TileTensor
    gate_b: TileTensor
    up_b: TileTensor
    down_a: TileTensor
    down_b: TileTensor

    def tiles(self, i: int) -> list[Handle]:
        """Return the tiles for tile `i` of I, in the order of `ExpertFactors.tiles`."""
        columns = range(self.a.grid[1])
        factors = ExpertFactors(
            [self.a[0, c] for c in columns], self.gate_b[i, 0], self.up_b[i, 0], self.down_a[0, i], [self.down_b[c, 0] for c in columns]
        )
        return factors.tiles


class ExpertUpdates(NamedTuple):
    """Low-rank updates of all experts.

    Args:
        of_experts: the update of each expert.
        scale: factor of all updates.
    """

    of_experts: Sequence[ExpertUpdate]
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.of_experts[0].a.shape[0]


def route(logits: TileTensor, num_chosen: int, *, renormalises: bool) -> Routing:
    """Choose for each row the K experts with the largest logits, of equal ones those with the lower index  # (B, T, E) -> (B, T, K) twice, (b, t, E).

    Args:
        num_chosen: K.
        renormalises: whether the weights, which are the softmax over all experts, are divided by their sum over the chosen ones.
    """
    runtime, num_experts = logits.runtime, logits.shape[-1]
    wide = np.float64 if logits.dtype == np.float64 else np.float32
    choices = TileTensor(runtime, (*logits.shape[:-1], num_chosen), (*logits.tile[:-1], num_chosen), np.int32, name="choices")
    weights = choices.like(dtype=wide, name="weights of choices")
    flags = TileTensor(runtime, (*logits.grid[:-1], num_experts), (*(1 for _ in logits.grid[:-1]), num_experts), np.uint8, name="flags of experts")
    for row in leading(logits):
        accesses: list[Access] = [(logits[*row, 0], R), *((out[*row, 0], W) for out in (choices, weights, flags))]
        emit(runtime, "route", accesses, condition=Condition(flags=3), renormalises=renormalises)
    return Routing(choices, weights, flags)


def route_backward(logits: TileTensor, choices: TileTensor, dweights: TileTensor, *, renormalises: bool) -> TileTensor:
    """Return dlogits  # (B, T, E), (B, T, K), (B, T, K) -> (B, T, E)."""
    dlogits = logits.like(name="d logits of experts")
    for row in leading(logits):
        accesses: list[Access] = [(logits[*row, 0], R), (choices[*row, 0], R), (dweights[*row, 0], R), (dlogits[*row, 0], W)]
        emit(logits.runtime, "route_backward", accesses, renormalises=renormalises)
    return dlogits


def experts(
    x: TileTensor, routing: Routing, matrices: Sequence[Expert], y: TileTensor | None = None, updates: ExpertUpdates | None = None
) -> TileTensor:
    """y = [y +] sum over the chosen experts e of weight_e * (silu(x gate_e^T) * (x up_e^T)) down_e^T  # (B, T, C) -> (B, T, C).

    Args:
        y: tensor to which the results are added; None for a new one.
        updates: low-rank updates, with which the matrices are gate + scale gate_b a, up + scale up_b a and down + scale down_b down_a.
    """
    y = elementwise.fill(x.like(name="experts"), 0.0) if y is None else y
    same_axis(x, len(x.shape) - 1, matrices[0].gate, 1)
    num_c, rows, num_inner = x.grid[-1], list(leading(x)), matrices[0].gate.grid[0]
    num_sums = 1 if len(rows) > 1 else num_inner if num_inner > 1 else min(SUMS, len(matrices))
    sums = [y, *(elementwise.fill(x.like(name="experts"), 0.0) for _ in range(1, num_sums))]
    for number, expert in enumerate(matrices):
        for i, row in itertools.product(range(num_inner), rows):
            y = sums[(i if num_inner > 1 else number) % num_sums]
            outputs: list[Access] = [(y[*row, c], RW) for c in range(num_c)]
            inputs = _inputs(x, row, routing, expert, i, number) + _factors(updates, number, i)
            accesses = [*inputs, *outputs, _scratch(x, expert, updates, is_backward=False)]
            constants = _constants(x, number, updates)
            emit(x.runtime, "expert_forward", accesses, condition=_condition(x, routing, number), **constants)
    return functools.reduce(elementwise.add, sums)


def experts_backward(
    x: TileTensor,
    routing: Routing,
    matrices: Sequence[Expert],
    dy: TileTensor,
    gradients: Sequence[Expert | ExpertUpdate | None],
    updates: ExpertUpdates | None = None,
) -> tuple[TileTensor, TileTensor]:
    """Return dx (B, T, C) and dweights (B, T, K) of `experts`.

    Args:
        gradients: for each expert the tensors that receive contributions; those of its update with `updates`, else None for a frozen expert.
    """
    dx, dweights = (elementwise.fill(tensor.like(name=f"d {tensor.name}"), 0.0) for tensor in (x, routing.weights))
    num_c = x.grid[-1]
    for number, (expert, gradient) in enumerate(zip(matrices, gradients, strict=True)):
        if isinstance(gradient, ExpertUpdate):
            _begin(x, routing, gradient, number)
        for i, row in itertools.product(range(expert.gate.grid[0]), leading(x)):
            accesses = _inputs(x, row, routing, expert, i, number) + _factors(updates, number, i)
            accesses += [(dy[*row, c], R) for c in range(num_c)]
            accesses += [*((dx[*row, c], RW) for c in range(num_c)), (dweights[*row, 0], RW)]
            if isinstance(gradient, ExpertUpdate):
                accesses += [(tile, REDUX) for tile in gradient.tiles(i)]
            elif gradient is not None:
                accesses += [*((gradient.gate[i, c], REDUX) for c in range(num_c)), *((gradient.up[i, c], REDUX) for c in range(num_c))]
                accesses += [(gradient.down[c, i], REDUX) for c in range(num_c)]
            accesses.append(_scratch(x, expert, updates, is_backward=True))
            emit(x.runtime, "expert_backward", accesses, condition=_condition(x, routing, number), **_constants(x, number, updates))
    return dx, dweights


def _begin(x: TileTensor, routing: Routing, gradient: ExpertUpdate, number: int) -> None:
    """Write zeros to the gradients of an expert's update that have no contribution yet, in all lanes to which contributions go."""
    tiles = dict.fromkeys(tile for i in range(gradient.gate_b.grid[0]) for tile in gradient.tiles(i))
    condition = _condition(x, routing, number)._replace(guard=0)
    for _ in range(x.runtime.num_open_lanes):
        accesses: list[Access] = [(routing.flags[*next(iter(leading(x))), 0], R), *((tile, REDUX) for tile in tiles)]
        emit(x.runtime, "zero_sums", accesses, condition=condition)


def _factors(updates: ExpertUpdates | None, number: int, i: int) -> list[Access]:
    return [] if updates is None else [(tile, R) for tile in updates.of_experts[number].tiles(i)]


def _constants(x: TileTensor, number: int, updates: ExpertUpdates | None) -> dict[str, Any]:
    """Return the constants of a task; only one with low-rank updates has a scale."""
    return {"num_c": x.grid[-1], "expert": number, **({} if updates is None else {"scale": updates.scale})}


def _inputs(x: TileTensor, row: tuple[int, ...], routing: Routing, expert: Expert, i: int, number: int) -> list[Access]:
    """Return the accesses that both passes of one task begin with. Quantised tiles are decoded for this task, and only if a row chose the expert."""
    columns, condition = range(x.grid[-1]), _condition(x, routing, number)

    def as_floats(matrix: TileTensor, *index: int) -> Handle:
        if not isinstance(matrix, QuantisedTensor):
            return matrix[index]
        values = TileTensor(x.runtime, matrix.tiling.extents(index), (-1, -1), matrix.dtype, name="decoded")[0, 0]
        decode_tile(matrix, index, values, routing.flags[*row, 0], number, condition.share)
        return values

    tiles = [*(x[*row, c] for c in columns), *(as_floats(expert.gate, i, c) for c in columns), *(as_floats(expert.up, i, c) for c in columns)]
    tiles += [*(as_floats(expert.down, c, i) for c in columns), *(tensor[*row, 0] for tensor in routing)]
    return [(tile, R) for tile in tiles]


def _condition(x: TileTensor, routing: Routing, number: int) -> Condition:
    """Return the condition of a task of an expert: a row of the tile chose it. If choices are even and independent, that has the given share."""
    num_rows, share = int(np.prod(x.tile[:-1])), routing.choices.shape[-1] / routing.flags.shape[-1]
    return Condition(guard=4 * x.grid[-1] + 2, number=number, share=1.0 - (1.0 - share) ** num_rows)


def _scratch(x: TileTensor, expert: Expert, updates: ExpertUpdates | None, *, is_backward: bool) -> Access:
    num_rows, itemsize, rank = int(np.prod(x.tile[:-1])), 8 if x.dtype == np.float64 else 4, 0 if updates is None else updates.rank
    nbytes = expert_scratch_nbytes(num_rows, x.shape[-1], expert.gate.tile[0], itemsize, is_backward=is_backward, rank=rank)
    if x.runtime.has_gpus:
        from ..kernels.cuda.experts import expert_scratch_nbytes as on_device

        nbytes = max(nbytes, on_device(num_rows, x.tile[-1], expert.gate.tile[0], x.dtype.itemsize, is_backward=is_backward, rank=rank))
    return scratch(x.runtime, nbytes), SCRATCH


def balance(
    logits: Sequence[TileTensor], choices: Sequence[TileTensor], documents: TileTensor | None, *, scale: float
) -> tuple[TileTensor, TileTensor]:
    """loss = scale E sum_e f_e P_e over the rows of all layers (Fedus et al., Switch, 2022, equations 4 to 6), as transformers computes it.

    Args:
        logits, choices: (B, T, E) and (B, T, K) of each layer.
        documents: (B, T) int32; tokens of document 0 are padding and do not count. None if all count.

    Returns:
        loss (1,) fp64 and slopes (E,), the derivatives of the loss by the probabilities of each row that counts.
    """
    first, num_experts = logits[0], logits[0].shape[-1]
    dtype = np.float64 if first.dtype == np.float64 else np.float32
    sums = TileTensor(first.runtime, (2 * num_experts + 1,), (-1,), np.float64, name="sums of loads")
    loss = TileTensor(first.runtime, (1,), (1,), np.float64, name="load-balancing loss")
    slopes = TileTensor(first.runtime, (num_experts,), (-1,), dtype, name="slopes of experts")
    layers = zip(logits, choices, strict=True)
    for step, ((scores, chosen), row) in enumerate(itertools.product(layers, list(leading(first)))):
        accesses: list[Access] = [(scores[*row, 0], R), (chosen[*row, 0], R), *_tile(documents, row)]
        emit(first.runtime, "balance", [*accesses, (sums[0,], chained(step))], first=step == 0)
    emit(first.runtime, "balance_finish", [(sums[0,], R), (loss[0,], W), (slopes[0,], W)], scale=scale)
    return loss, slopes


def _tile(documents: TileTensor | None, row: tuple[int, ...]) -> list[Access]:
    return [] if documents is None else [(documents[row], R)]


def balance_backward(logits: TileTensor, slopes: TileTensor, documents: TileTensor | None) -> TileTensor:
    """Return dlogits of `balance` for one layer  # (B, T, E)."""
    dlogits = logits.like(name="d logits of experts")
    for row in leading(logits):
        accesses: list[Access] = [(logits[*row, 0], R), (slopes[0,], R), *_tile(documents, row)]
        emit(logits.runtime, "balance_backward", [*accesses, (dlogits[*row, 0], W)])
    return dlogits


def sum_of_losses(first: TileTensor, second: TileTensor) -> TileTensor:
    """Return the sum of two losses  # (1,) fp64 -> (1,)."""
    total = first.like(name="loss")
    emit(first.runtime, "sum_scalars", [(first[0,], R), (second[0,], R), (total[0,], W)])
    return total
