"""Differentiable operations: each emits the tasks of its forward pass and keeps on the tape the data that its backward pass needs.

Letters: B sequences, T tokens, C features of the residual stream, H heads of D features, K and N in and out features, P positions, V vocabulary.

A backward function adds weight gradients first and the input's gradient last, so that the activation a weight gradient reads is freed before the
input's gradient takes memory. If x goes both into a norm and past it, the norm's backward pass takes the gradient of the other path and adds its own
in the same pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiles import TileTensor
from tiles.ops import elementwise, norm
from tiles.ops import embedding as embedding_ops
from tiles.ops import random as random_ops

from ..errors import UsageError
from .attention import RelativeBias as RelativeBias  # a part of this module's names
from .attention import attention as attention
from .autograd import Edge, Gradients, Tensor, accumulator_of, contribute_late, on_tape, only
from .autograd import add as add  # the sum, which `Tensor` has as an operator, lives with the tape
from .linear import linear as linear  # a part of this module's names
from .linear import linear_activation as linear_activation
from .loss import linear_cross_entropy as linear_cross_entropy
from .tokens import cast as cast
from .tokens import first_token as first_token
from .tokens import mean_tokens as mean_tokens
from .tokens import swapped as swapped

SITES: Final = 1 << 12
"""Largest number of places with dropout in a model: adapters use the second half of them, everything else the first."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Source of the dropout masks of one forward pass.

    Args:
        key: (2,) uint64 input tensor: seed and step.
        minibatch: number of the forward pass within the step, so that two minibatches of a batch have different masks.
    """

    key: TileTensor
    minibatch: int = 0

    def stream(self, site: int) -> int:
        """Return the random stream of one place in the model.

        Args:
            site: number of the place, from 0.

        Raises:
            UsageError: `site` is not below `SITES`.
        """
        if not 0 <= site < SITES:
            raise UsageError(f"a model drops out at {SITES} places at most, numbered from 0, got place {site}; use fewer layers, or no dropout")
        return self.minibatch * SITES + site


def add_positions(x: Tensor, p: Tensor) -> Tensor:
    """Return x (B, T, C) + the first T rows of p (P, C)."""
    x_edge, p_edge = x.edge, p.edge

    def backward(gradients: Gradients) -> None:
        dy = only(gradients)  # (B, T, C)
        if p_edge is not None:
            elementwise.add_rows_backward(dy, accumulator_of(p_edge))
        if x_edge is not None:
            x_edge.add(dy)

    return on_tape("add_positions", [x, p], [elementwise.add_rows(x.data, p.data)], backward)[0]


def embedding(tokens: TileTensor, w: Tensor, first: int = 0) -> Tensor:
    """Look up rows first + tokens, tokens (B, T) int32, of w (V, C) -> (B, T, C)."""
    edge = w.edge

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            dy = only(gradients)  # (B, T, C)
            contribute_late(lambda: embedding_ops.embedding_backward(tokens, dy, accumulator_of(edge), first))

    return on_tape("embedding", [w], [embedding_ops.embedding(tokens, w.data, first)], backward)[0]


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gamma (C,) + beta (C,) over the last axis -> (.., C)."""
    y, mean, rstd = norm.layer_norm(x.data, gamma.data, beta.data, eps)
    x_data, edges = x.data, (x.edge, gamma.edge, beta.edge)
    gamma_data = gamma.data

    def backward(gradients: Gradients) -> None:
        x_edge = edges[0]
        dx = _layer_norm_backward(x_data, gamma_data, mean, rstd, only(gradients), edges[1:], None if x_edge is None else x_edge.take())
        if x_edge is not None:
            x_edge.add(dx)

    return on_tape("layer_norm", [x, gamma, beta], [y], backward)[0]


def residual_layer_norm(x: Tensor, branch: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = x + branch (.., C) and layer_norm(s), in one pass -> (s, normed)."""
    s, y, mean, rstd = norm.residual_layer_norm(x.data, branch.data, gamma.data, beta.data, eps)
    gamma_data, norm_edges = gamma.data, (gamma.edge, beta.edge)
    edges = [t.edge for t in (x, branch) if t.edge is not None]

    def backward(gradients: Gradients) -> None:
        ds, dy = gradients  # (.., C) each: of the sum, of its norm
        if dy is not None:
            ds = _layer_norm_backward(s, gamma_data, mean, rstd, dy, norm_edges, ds)
        assert ds is not None  # a node without any gradient is not visited
        for edge in edges:
            edge.add(ds)

    out = on_tape("residual_layer_norm", [x, branch, gamma, beta], [s, y], backward)
    return out[0], out[1]


def rms_norm(x: Tensor, gamma: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean of squares + eps) * (gamma (C,) + offset) over the last axis -> (.., C)."""
    y, rstd = norm.rms_norm(x.data, gamma.data, eps, offset)
    x_data, gamma_data, x_edge, gamma_edge = x.data, gamma.data, x.edge, gamma.edge

    def backward(gradients: Gradients) -> None:
        taken = None if x_edge is None else x_edge.take()
        dx = _rms_norm_backward(x_data, gamma_data, rstd, only(gradients), gamma_edge, taken, offset)
        if x_edge is not None:
            x_edge.add(dx)

    return on_tape("rms_norm", [x, gamma], [y], backward)[0]


def head_norm(x: Tensor, gamma: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean of squares + eps) * (gamma (D,) + offset) within each head (Henry et al., 2020)  # (.., H*D) -> (.., H*D)."""
    y, rstd = norm.head_norm(x.data, gamma.data, eps, offset)
    x_data, gamma_data, x_edge, gamma_edge = x.data, gamma.data, x.edge, gamma.edge

    def backward(gradients: Gradients) -> None:
        dgamma, taken = None if gamma_edge is None else accumulator_of(gamma_edge), None if x_edge is None else x_edge.take()
        dx = norm.head_norm_backward(x_data, gamma_data, rstd, only(gradients), dgamma, dresidual=taken, offset=offset)
        if x_edge is not None:
            x_edge.add(dx)

    return on_tape("head_norm", [x, gamma], [y], backward)[0]


def residual_rms_norm(x: Tensor, branch: Tensor, gamma: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """s = x + branch (.., C) and rms_norm(s), in one pass -> (s, normed)."""
    s, y, rstd = norm.residual_rms_norm(x.data, branch.data, gamma.data, eps, offset)
    gamma_data, gamma_edge = gamma.data, gamma.edge
    edges = [t.edge for t in (x, branch) if t.edge is not None]

    def backward(gradients: Gradients) -> None:
        ds, dy = gradients  # (.., C) each: of the sum, of its norm
        if dy is not None:
            ds = _rms_norm_backward(s, gamma_data, rstd, dy, gamma_edge, ds, offset)
        assert ds is not None  # a node without any gradient is not visited
        for edge in edges:
            edge.add(ds)

    out = on_tape("residual_rms_norm", [x, branch, gamma], [s, y], backward)
    return out[0], out[1]


def _rms_norm_backward(
    x: TileTensor, gamma: TileTensor, rstd: TileTensor, dy: TileTensor, edge: Edge | None, dresidual: TileTensor | None, offset: float
) -> TileTensor:
    """Return dx (.., C) with `dresidual` added; contribute to gamma's accumulator if gamma is learnt."""
    dgamma = None if edge is None else accumulator_of(edge)
    return norm.rms_norm_backward(x, gamma, rstd, dy, dgamma, dresidual=dresidual, offset=offset)


def _layer_norm_backward(
    x: TileTensor,
    gamma: TileTensor,
    mean: TileTensor,
    rstd: TileTensor,
    dy: TileTensor,
    edges: tuple[Edge | None, ...],
    dresidual: TileTensor | None,
) -> TileTensor:
    """Return dx (.., C) with `dresidual` added; contribute to gamma's and beta's accumulators if they are learnt."""
    dgamma, dbeta = (None if edge is None else accumulator_of(edge) for edge in edges)
    return norm.layer_norm_backward(x, gamma, mean, rstd, dy, dgamma, dbeta, dresidual=dresidual)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, equal shapes and tilings (Shazeer, GLU variants, 2020, without its products).

    Args:
        activation: silu (SwiGLU), gelu_new or gelu (GEGLU), relu (ReGLU), tanh, or a registered name.
    """
    gate_data, up_data, gate_edge, up_edge = gate.data, up.data, gate.edge, up.edge

    def backward(gradients: Gradients) -> None:
        gradients_of_inputs = elementwise.gated_backward(gate_data, up_data, only(gradients), activation)
        for edge, gradient in zip((gate_edge, up_edge), gradients_of_inputs, strict=True):
            if edge is not None:
                edge.add(gradient)

    return on_tape("gated", [gate, up], [elementwise.gated(gate_data, up_data, activation)], backward)[0]


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    edge = x.edge

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(elementwise.scale(only(gradients), factor))

    return on_tape("scaled", [x], [elementwise.scale(x.data, factor)], backward)[0]


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), which stays between -cap and cap (Gemma 2, 2024)."""
    edge, y = x.edge, elementwise.capped(x.data, cap)

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(elementwise.capped_backward(y, only(gradients), cap))

    return on_tape("capped", [x], [y], backward)[0]


def rotary(x: Tensor, cos: TileTensor, sin: TileTensor, head_size: int, rotary_size: int | None = None) -> Tensor:
    """Rotate every head of x (B, T, H*D) by the angles of its position (Su et al., RoFormer, 2021).

    Args:
        cos, sin: (T, R / 2), of the angles, rows cut like T; or (B, T, R / 2), cut like B and T, if sequences have positions of their own.
        head_size: D.
        rotary_size: R, even: number of first features of each head that turn, in pairs (i, i + R / 2); None for D.
    """
    edge = x.edge

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(elementwise.rotary(only(gradients), cos, sin, head_size, rotary_size, inverse=True))

    return on_tape("rotary", [x], [elementwise.rotary(x.data, cos, sin, head_size, rotary_size)], backward)[0]


def dropout(x: Tensor, p: float, masks: Masks | None, site: int) -> Tensor:
    """Zero each element with probability p and divide the others by 1 - p; return x itself without `masks` or with p = 0."""
    if masks is None or p == 0:
        return x
    edge, key, stream = x.edge, masks.key, masks.stream(site)

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(random_ops.dropout(only(gradients), p, key, stream))

    return on_tape("dropout", [x], [random_ops.dropout(x.data, p, key, stream)], backward)[0]
