"""Differentiable operations: each emits the tasks of its forward pass and keeps on the tape the data that its backward pass needs.

Letters: B sequences, T tokens, C features of the residual stream, H heads of D features, K and N in and out features, P positions, V vocabulary.

A backward function adds weight gradients first and the input's gradient last, so that the activation a weight gradient reads is freed before the
input's gradient takes memory. If x goes both into a norm and past it, the norm's backward pass takes the gradient of the other path and adds its own
in the same pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from tiles import TileTensor
from tiles.ops import elementwise, norm
from tiles.ops import embedding as embedding_ops
from tiles.ops import loss as loss_ops
from tiles.ops import random as random_ops
from tiles.ops import tokens as token_ops

from ..errors import UsageError
from .attention import RelativeBias as RelativeBias  # a part of this module's names
from .attention import attention as attention
from .autograd import Edge, Gradients, Tensor, accumulator_of, add_to, contribute_late, on_tape, only
from .autograd import add as add  # the sum, which `Tensor` has as an operator, lives with the tape
from .linear import are_together as are_together  # a part of this module's names
from .linear import is_joined as is_joined
from .linear import linear as linear
from .linear import linear_activation as linear_activation
from .linear import linear_pair as linear_pair
from .linear import linears as linears

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
            raise UsageError(f"dropout sites must be numbers from 0 to {SITES - 1}, got {site}", "use fewer layers, or no dropout")
        return self.minibatch * SITES + site


def _mapped(name: str, x: Tensor, y: TileTensor, backward: Callable[[TileTensor], TileTensor]) -> Tensor:
    """Return y, computed from x alone, with its place on the tape.

    Args:
        backward: function dy -> dx; it must capture only what it needs.
    """
    edge = x.edge
    return on_tape(name, [x], [y], lambda gradients: add_to([edge], [backward(only(gradients))]))[0]


def _accumulators(*parameters: Edge | None) -> list[TileTensor | None]:
    """Return the tensors in which gradients of parameters are summed; None for those that are not learnt."""
    return [None if edge is None else accumulator_of(edge) for edge in parameters]


def add_positions(x: Tensor, p: Tensor) -> Tensor:
    """Return x (B, T, C) + the first T rows of p (P, C)."""
    x_edge, p_edge = x.edge, p.edge

    def backward(gradients: Gradients) -> None:
        dy = only(gradients)  # (B, T, C)
        if p_edge is not None:
            elementwise.add_rows_backward(dy, accumulator_of(p_edge))
        add_to([x_edge], [dy])

    return on_tape("add_positions", [x, p], [elementwise.add_rows(x.data, p.data)], backward)[0]


def embedding(tokens: TileTensor, w: Tensor, first: int = 0) -> Tensor:
    """Look up rows first + tokens, tokens (B, T) int32, of w (V, C) -> (B, T, C)."""
    edge = w.edge

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            dy = only(gradients)  # (B, T, C)
            contribute_late(lambda: embedding_ops.embedding_backward(tokens, dy, accumulator_of(edge), first))

    return on_tape("embedding", [w], [embedding_ops.embedding(tokens, w.data, first)], backward)[0]


NormBackward = Callable[[TileTensor, list[TileTensor | None], TileTensor | None], TileTensor]
"""Takes dy (.., C), the accumulators of the norm's parameters and dresidual (.., C) or None, and returns dx (.., C) with dresidual added."""


def _normed(name: str, x: Tensor, parameters: Sequence[Tensor], y: TileTensor, through: NormBackward) -> Tensor:
    """Return the norm y of x (.., C) with its place on the tape."""
    x_edge, edges = x.edge, [p.edge for p in parameters]

    def backward(gradients: Gradients) -> None:
        add_to([x_edge], [through(only(gradients), _accumulators(*edges), None if x_edge is None else x_edge.take())])

    return on_tape(name, [x, *parameters], [y], backward)[0]


def _normed_sum(
    name: str, inputs: tuple[Tensor, Tensor], parameters: Sequence[Tensor], s: TileTensor, y: TileTensor, through: NormBackward
) -> tuple[Tensor, Tensor]:
    """Return the sum s of two inputs and its norm y, (.., C) each, with their place on the tape."""
    edges, norm_edges = [t.edge for t in inputs], [p.edge for p in parameters]

    def backward(gradients: Gradients) -> None:
        ds, dy = gradients  # (.., C) each: of the sum, of its norm
        if dy is not None:
            ds = through(dy, _accumulators(*norm_edges), ds)
        assert ds is not None  # a node without any gradient is not visited
        add_to(edges, [ds, ds])

    out = on_tape(name, [*inputs, *parameters], [s, y], backward)
    return out[0], out[1]


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gamma (C,) + beta (C,) over the last axis -> (.., C)."""
    y, mean, rstd = norm.layer_norm(x.data, gamma.data, beta.data, eps)
    return _normed("layer_norm", x, [gamma, beta], y, _layer_norm_backward(x.data, gamma.data, mean, rstd))


def residual_layer_norm(x: Tensor, branch: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = x + branch (.., C) and layer_norm(s), in one pass -> (s, normed)."""
    s, y, mean, rstd = norm.residual_layer_norm(x.data, branch.data, gamma.data, beta.data, eps)
    return _normed_sum("residual_layer_norm", (x, branch), [gamma, beta], s, y, _layer_norm_backward(s, gamma.data, mean, rstd))


def _layer_norm_backward(x: TileTensor, gamma: TileTensor, mean: TileTensor, rstd: TileTensor) -> NormBackward:
    return lambda dy, totals, dresidual: norm.layer_norm_backward(x, gamma, mean, rstd, dy, *totals, dresidual=dresidual)


def rms_norm(x: Tensor, gamma: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean of squares + eps) * (gamma (C,) + offset) over the last axis -> (.., C)."""
    y, rstd = norm.rms_norm(x.data, gamma.data, eps, offset)
    return _normed("rms_norm", x, [gamma], y, _rms_norm_backward(norm.rms_norm_backward, x.data, gamma.data, rstd, offset))


def residual_rms_norm(x: Tensor, branch: Tensor, gamma: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """s = x + branch (.., C) and rms_norm(s), in one pass -> (s, normed)."""
    s, y, rstd = norm.residual_rms_norm(x.data, branch.data, gamma.data, eps, offset)
    through = _rms_norm_backward(norm.rms_norm_backward, s, gamma.data, rstd, offset)
    return _normed_sum("residual_rms_norm", (x, branch), [gamma], s, y, through)


def head_norm(x: Tensor, gamma: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean of squares + eps) * (gamma (D,) + offset) within each head (Henry et al., 2020)  # (.., H*D) -> (.., H*D)."""
    y, rstd = norm.head_norm(x.data, gamma.data, eps, offset)
    return _normed("head_norm", x, [gamma], y, _rms_norm_backward(norm.head_norm_backward, x.data, gamma.data, rstd, offset))


def _rms_norm_backward(emit: Callable[..., TileTensor], x: TileTensor, gamma: TileTensor, rstd: TileTensor, offset: float) -> NormBackward:
    return lambda dy, totals, dresidual: emit(x, gamma, rstd, dy, *totals, dresidual=dresidual, offset=offset)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, equal shapes and tilings (Shazeer, GLU variants, 2020, without its products).

    Args:
        activation: silu (SwiGLU), gelu_new or gelu (GEGLU), relu (ReGLU), tanh, or a registered name.
    """
    gate_data, up_data, edges = gate.data, up.data, (gate.edge, up.edge)

    def backward(gradients: Gradients) -> None:
        add_to(edges, elementwise.gated_backward(gate_data, up_data, only(gradients), activation))

    return on_tape("gated", [gate, up], [elementwise.gated(gate_data, up_data, activation)], backward)[0]


def row_gated(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x, one gate for each row  # (.., 1), (.., C) -> (.., C)."""
    gate_data, x_data, edges = gate.data, x.data, (gate.edge, x.edge)

    def backward(gradients: Gradients) -> None:
        add_to(edges, elementwise.row_gated_backward(gate_data, x_data, only(gradients)))

    return on_tape("row_gated", [gate, x], [elementwise.row_gated(gate_data, x_data)], backward)[0]


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return _mapped("scaled", x, elementwise.scale(x.data, factor), lambda dy: elementwise.scale(dy, factor))


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), which stays between -cap and cap (Gemma 2, 2024)."""
    y = elementwise.capped(x.data, cap)
    return _mapped("capped", x, y, lambda dy: elementwise.capped_backward(y, dy, cap))


def clamped(x: Tensor, most: float) -> Tensor:
    """`x` between -most and most, without a gradient beyond them (OLMo, 2024, section 2.2)."""
    return _mapped("clamped", x, elementwise.clamped(x.data, most), lambda dy: elementwise.clamped_backward(x.data, dy, most))


def rotary(x: Tensor, cos: TileTensor, sin: TileTensor, head_size: int, rotary_size: int | None = None) -> Tensor:
    """Rotate every head of x (B, T, H*D) by the angles of its position (Su et al., RoFormer, 2021).

    Args:
        cos, sin: (T, R / 2), of the angles, rows cut like T; or (B, T, R / 2), cut like B and T, if sequences have positions of their own.
        head_size: D.
        rotary_size: R, even: number of first features of each head that are rotated, in pairs (i, i + R / 2); None for D.
    """
    y = elementwise.rotary(x.data, cos, sin, head_size, rotary_size)
    return _mapped("rotary", x, y, lambda dy: elementwise.rotary(dy, cos, sin, head_size, rotary_size, inverse=True))


def dropout(x: Tensor, p: float, masks: Masks | None, site: int) -> Tensor:
    """Zero each element with probability p and divide the others by 1 - p; return x itself without `masks` or with p = 0."""
    if masks is None or p == 0:
        return x
    key, stream = masks.key, masks.stream(site)
    return _mapped("dropout", x, random_ops.dropout(x.data, p, key, stream), lambda dy: random_ops.dropout(dy, p, key, stream))


def first_token(x: Tensor) -> Tensor:
    """Return the first token of each sequence, as BERT's pooler takes it (Devlin et al., 2019)  # (B, T, C) -> (B, 1, C)."""
    length, tile = x.shape[1], x.data.tile[1]
    return _mapped("first_token", x, token_ops.first_token(x.data), lambda dy: token_ops.first_token_backward(dy, length, tile))


def mean_tokens(x: Tensor) -> Tensor:
    """Return the mean over the tokens of each sequence, added up from the first to the last  # (B, T, C) -> (B, 1, C)."""
    length, tile = x.shape[1], x.data.tile[1]
    return _mapped("mean_tokens", x, token_ops.mean_tokens(x.data), lambda dy: token_ops.mean_tokens_backward(dy, length, tile))


def swapped(x: Tensor) -> Tensor:
    """Exchange tokens and features, so that a linear layer mixes tokens (Tolstikhin et al., MLP-Mixer, 2021)  # (B, T, C) -> (B, C, T)."""
    return _mapped("swapped", x, token_ops.swapped(x.data), token_ops.swapped)


def cast(x: Tensor, dtype: npt.DTypeLike) -> Tensor:
    """Cast x to another element type; return `x` itself if it has that type. Layers need inputs in the type of their weights."""
    if x.dtype == dtype:
        return x
    before = x.dtype
    return _mapped("cast", x, elementwise.cast(x.data, dtype), lambda dy: elementwise.cast(dy, before))


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
    how: dict[str, Any] = {"scale": scale, "bias": None if bias is None else bias.data, "factor": factor, "cap": cap}
    loss, lse = loss_ops.linear_cross_entropy(x.data, w.data, targets, **how)
    x_data, w_data, x_edge, w_edge, bias_edge = x.data, w.data, x.edge, w.edge, None if bias is None else bias.edge

    def backward(gradients: Gradients) -> None:
        if gradients[0] is not None:
            raise UsageError("a backward pass must begin at the loss of linear_cross_entropy, not at a tensor computed from it", "use its scale=")
        dw, dbias = _accumulators(w_edge, bias_edge)
        add_to([x_edge], [loss_ops.linear_cross_entropy_backward(x_data, w_data, targets, lse, dw, dbias=dbias, **how)])

    return on_tape("linear_cross_entropy", [x, w, bias], [loss], backward, is_loss=True)[0]
