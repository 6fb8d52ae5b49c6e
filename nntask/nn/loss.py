"""Differentiable head of a model: its scores, and their cross-entropy, which never needs all scores at once.

Letters: B sequences of T tokens, C features, V words or classes. This is a part of `functional`, whose rules hold.
"""

from __future__ import annotations

from typing import TypedDict

from tiles import TileTensor
from tiles.ops import loss as loss_ops

from ..errors import UsageError
from .autograd import Gradients, Tensor, accumulator_of, on_tape


class _HeadOptions(TypedDict):
    """Options shared by the forward and the backward pass."""

    scale: float
    bias: TileTensor | None
    factor: TileTensor | None
    cap: float | None


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    targets: TileTensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    factor: TileTensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """scale [* factor] * sum of the token losses -log softmax(x @ w.T + bias)[target] -> (1,); the logits (B, T, V) are never stored whole.

    Args:
        x: (B, T, C).
        w: (V, C).
        targets: (B, T) int32; -1 is ignored.
        scale: 1 / (B*T) for the mean over tokens.
        bias: (V,).
        factor: (1,) fp32, 1 / number of targets that count, written before each step; None if `scale` is enough.
        cap: c of the soft cap of logits, c tanh(logits / c) (Gemma 2, 2024).

    Returns:
        (1,), a loss: where a backward pass begins.
    """
    how: _HeadOptions = {"scale": scale, "bias": None if bias is None else bias.data, "factor": factor, "cap": cap}
    loss, lse = loss_ops.linear_cross_entropy(x.data, w.data, targets, **how)
    x_data, w_data, x_edge, w_edge, bias_edge = x.data, w.data, x.edge, w.edge, None if bias is None else bias.edge

    def backward(gradients: Gradients) -> None:
        if gradients[0] is not None:
            raise UsageError("a backward pass must begin at the loss of linear_cross_entropy, and here it came from a later tensor; use its scale=")
        dw, dbias = (None if edge is None else accumulator_of(edge) for edge in (w_edge, bias_edge))
        dx = loss_ops.linear_cross_entropy_backward(x_data, w_data, targets, lse, dw, dbias=dbias, **how)
        if x_edge is not None:
            x_edge.add(dx)

    return on_tape("linear_cross_entropy", [x, w, bias], [loss], backward, is_loss=True)[0]
