"""Differentiable mixtures of experts: routing, the experts' work, and their load-balancing loss.

Letters: B sequences, T tokens, C features, E experts, K experts per token, I width inside an expert. The rules of `functional` hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiles import TileTensor
from tiles.ops import experts as expert_ops

from ..errors import UsageError
from .autograd import Gradients, Tensor, accumulator_of, add_to, on_tape, only, tape_enabled


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


def mixture(x: Tensor, chosen: Routed, experts: Sequence[Sequence[Tensor]], y: Tensor | None = None) -> Tensor:
    """Return [y +] the weighted sum of silu(x gate^T) * (x up^T) down^T over the chosen experts  # (B, T, C) -> (B, T, C).

    Args:
        experts: gate (I, C), up (I, C) and down (C, I) of each expert.
        y: (B, T, C), to which the sum is added in place; no backward function may need it. None for none.

    Raises:
        UsageError: only one or two matrices of an expert are learnt.
    """
    matrices = [expert_ops.Expert(*(matrix.data for matrix in expert)) for expert in experts]
    edges = [[matrix.edge for matrix in expert if matrix.edge is not None] for expert in experts]
    for number, learnt in enumerate(edges):
        if tape_enabled() and len(learnt) not in (0, 3):
            raise UsageError(
                f"all three matrices of an expert must be learnt or none, got {len(learnt)} of 3 in expert {number}", "freeze them together"
            )
    x_data, routing, x_edge, weights_edge, y_edge = x.data, chosen.routing, x.edge, chosen.weights.edge, None if y is None else y.edge

    def backward(gradients: Gradients) -> None:
        dy = only(gradients)
        if y_edge is not None:
            y_edge.add(dy)
        totals = [expert_ops.Expert(*map(accumulator_of, learnt)) if learnt else None for learnt in edges]
        dx, dweights = expert_ops.experts_backward(x_data, routing, matrices, dy, totals)
        add_to([weights_edge, x_edge], [dweights, dx])

    inputs = [x, chosen.weights, y, *(matrix for expert in experts for matrix in expert)]
    return on_tape("mixture", inputs, [expert_ops.experts(x_data, routing, matrices, None if y is None else y.data)], backward)[0]


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
