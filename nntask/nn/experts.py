"""Differentiable mixtures of experts: routing, the experts' work, and their load-balancing loss.

Letters: B sequences, T tokens, C features, E experts, K experts per token, I width inside an expert. The rules of `functional` hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiles import TileTensor
from tiles.ops import experts as expert_ops

from ..errors import UsageError
from .autograd import Edge, Gradients, Tensor, accumulator_of, add_to, on_tape, only, tape_enabled


class Routed(NamedTuple):
    """Routing of the tokens of one mixture of experts.

    Args:
        logits: (B, T, E), scores of the experts.
        weights: (B, T, K), weights of the chosen experts.
        routing: choices, weights and flags.
        has_tape: whether the tape was on, without which the load-balancing loss has no gradient.
    """

    logits: Tensor
    weights: Tensor
    routing: expert_ops.Routing
    has_tape: bool


def routed(logits: Tensor, num_chosen: int, *, renormalises: bool) -> Routed:
    """Choose the K experts with the largest logits for each token, of equal ones those with the lower index  # (B, T, E) -> (B, T, K)."""
    routing = expert_ops.route(logits.data, num_chosen, renormalises=renormalises)
    scores, choices, edge = logits.data, routing.choices, logits.edge

    def backward(gradients: Gradients) -> None:
        add_to([edge], [expert_ops.route_backward(scores, choices, only(gradients), renormalises=renormalises)])

    return Routed(logits, on_tape("routed", [logits], [routing.weights], backward)[0], routing, tape_enabled())


class LowRankExperts(NamedTuple):
    """Low-rank updates learnt in addition to frozen experts.

    Args:
        factors: a (r, C), which gate and up share, gate_b (I, r), up_b (I, r), down_a (r, I) and down_b (C, r) of each expert.
        scale: factor of the updates.
    """

    factors: Sequence[Sequence[Tensor]]
    scale: float


def mixture(x: Tensor, chosen: Routed, experts: Sequence[Sequence[Tensor]], y: Tensor | None = None, added: LowRankExperts | None = None) -> Tensor:
    """Return [y +] the weighted sum of silu(x gate^T) * (x up^T) down^T over the chosen experts  # (B, T, C) -> (B, T, C).

    Args:
        experts: gate (I, C), up (I, C) and down (C, I) of each expert.
        y: (B, T, C), to which the sum is added in place; no backward function may need it. None for none.
        added: low-rank updates of the matrices, which must be frozen then; None for none.

    Raises:
        UsageError: only one or two matrices of an expert are learnt, or matrices with updates.
    """
    matrices = [expert_ops.Expert(*(matrix.data for matrix in expert)) for expert in experts]
    edges = [[matrix.edge for matrix in expert if matrix.edge is not None] for expert in experts]
    for number, learnt in enumerate(edges):
        if tape_enabled() and len(learnt) not in (0, 3):
            raise UsageError(
                f"all three matrices of an expert must be learnt or none, got {len(learnt)} of 3 in expert {number}", "freeze them together"
            )
    updates = None
    if added is not None:
        updates = expert_ops.ExpertUpdates([expert_ops.ExpertUpdate(*(each.data for each in factors)) for factors in added.factors], added.scale)
        edges = [_only_factors(factors, learnt, x) for factors, learnt in zip(added.factors, edges, strict=True)]
    x_data, routing, x_edge, weights_edge, y_edge = x.data, chosen.routing, x.edge, chosen.weights.edge, None if y is None else y.edge

    def backward(gradients: Gradients) -> None:
        dy = only(gradients)
        if y_edge is not None:
            y_edge.add(dy)
        kind = expert_ops.Expert if updates is None else expert_ops.ExpertUpdate
        totals = [kind(*map(accumulator_of, learnt)) if learnt else None for learnt in edges]
        dx, dweights = expert_ops.experts_backward(x_data, routing, matrices, dy, totals, updates)
        add_to([weights_edge, x_edge], [dweights, dx])

    learnable = [*experts, *(() if added is None else added.factors)]
    inputs = [x, chosen.weights, y, *(parameter for expert in learnable for parameter in expert)]
    return on_tape("mixture", inputs, [expert_ops.experts(x_data, routing, matrices, None if y is None else y.data, updates)], backward)[0]


def _only_factors(factors: Sequence[Tensor], of_matrices: Sequence[Edge], x: Tensor) -> list[Edge]:
    """Return the edges of the factors of an expert's update, of which all are learnt, and none of the matrices; empty if no gradient is wanted.

    Raises:
        UsageError: some of them are frozen, or a matrix is learnt.
    """
    learnt = [factor.edge for factor in factors if factor.edge is not None]
    if tape_enabled() and (of_matrices or len(learnt) < len(factors)) and (of_matrices or learnt or x.edge is not None):
        raise UsageError(
            f"the {len(factors)} factors of an expert with adapters must be learnt, and its matrices frozen, got {len(learnt)} factors and "
            f"{len(of_matrices)} matrices that are learnt",
            "freeze the matrices alone",
        )
    return learnt


def balance_loss(layers: Sequence[Routed], documents: TileTensor | None, *, scale: float) -> Tensor:
    """Return scale E sum_e f_e P_e -> (1,): f_e choices of expert e per token, P_e its mean probability, both over all layers.

    It is the loss of transformers (Fedus et al., Switch, 2022, equations 4 to 6, with the layers taken together).

    Args:
        documents: (B, T) int32; tokens of document 0 are padding and do not count. None if all count.

    Raises:
        UsageError: the tape is on, but was off when tokens were routed, for example inside `checkpoint`.
    """
    if tape_enabled() and not all(each.has_tape for each in layers):
        raise UsageError("the load-balancing loss needs routing with the tape on, got routing inside checkpoint() or no_grad()", "route outside them")
    logits, choices, edges = [each.logits.data for each in layers], [each.routing.choices for each in layers], [each.logits.edge for each in layers]
    loss, slopes = expert_ops.balance(logits, choices, documents, scale=scale)

    def backward(gradients: Gradients) -> None:
        if gradients[0] is not None:
            raise UsageError("a backward pass must begin at the load-balancing loss, not at a tensor computed from it", "use its scale=")
        for scores, edge in zip(logits, edges, strict=True):
            if edge is not None:
                edge.add(expert_ops.balance_backward(scores, slopes, documents))

    return on_tape("balance_loss", [each.logits for each in layers], [loss], backward, is_loss=True)[0]


def sum_of_losses(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of two losses (1,), a loss itself."""

    def backward(gradients: Gradients) -> None:
        if gradients[0] is not None:
            raise UsageError("a backward pass must begin at the sum of losses, not at a tensor computed from it", "use their scale=")

    return on_tape("sum_of_losses", [first, second], [expert_ops.sum_of_losses(first.data, second.data)], backward, is_loss=True)[0]
