"""Differentiable products with a weight: plain, with a bias, with an activation in the same pass, and with a low-rank update.

Letters: K and N in and out features, r rank. This is a part of `functional`, whose rules hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import elementwise, matmul
from tiles.ops import random as random_ops

from .autograd import Edge, Gradients, Tensor, accumulator_of, on_tape, only, tape_enabled


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank update of the product with a weight: scale * dropout(x) @ down^T @ up^T, of rank r.

    Args:
        down: (r, K).
        up: (N, r).
        dropout: dropout of x, in the update only.
    """

    down: Tensor
    up: Tensor
    scale: float
    dropout: attention_ops.Dropout | None = None

    def drop(self, x: TileTensor) -> TileTensor:
        """Return `x`, or its gradient, with the dropped elements zero and the others scaled up."""
        return x if self.dropout is None else random_ops.dropout(x, self.dropout.p, self.dropout.key, self.dropout.stream)

    def scaled(self, u: TileTensor) -> TileTensor:
        """Return scale * u. The scale is applied to the small tensors (.., r) between the two factors, at the least cost."""
        return u if self.scale == 1 else elementwise.scale(u, self.scale)


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, transpose_w: bool = False, added: LowRank | None = None) -> Tensor:
    """x (.., K) @ w (K, N) + b (N,) [+ added] -> (.., N); with `transpose_w`, w is (N, K)."""
    is_next_token = not tape_enabled() and x.data.shape[-2] == 1
    y = matmul.linear(x.data, w.data, None if b is None else b.data, transpose_w=transpose_w, in_parallel=is_next_token)
    through = _weight_backward(x, w, b, transpose_w=transpose_w)
    if added is not None:
        through = _low_rank_backward(x.data, added, _add_low_rank(x.data, added, y), through)
    return _with_tape("linear", x, w, b, added, y, through)


def linear_activation(x: Tensor, w: Tensor, b: Tensor | None, kind: str, *, transpose_w: bool = False, added: LowRank | None = None) -> Tensor:
    """activation(x (.., K) @ w (K, N) + b (N,) [+ added]) -> (.., N); in one pass if nothing is added; with `transpose_w`, w is (N, K).

    Args:
        kind: gelu_new, gelu, relu, silu or tanh.
    """
    bias = None if b is None else b.data
    through = _weight_backward(x, w, b, transpose_w=transpose_w)
    if added is None:
        pre, y = matmul.linear_gelu(x.data, w.data, bias, kind, transpose_w=transpose_w)
    else:
        pre = matmul.linear(x.data, w.data, bias, transpose_w=transpose_w)
        through = _low_rank_backward(x.data, added, _add_low_rank(x.data, added, pre), through)
        y = elementwise.activation(pre, kind)
    return _with_tape("linear_activation", x, w, b, added, y, lambda dy: through(elementwise.activation_backward(pre, dy, kind)))


def are_together(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether `linears` shares tasks of a backward pass between some of these weights."""
    return tape_enabled() and len(matmul.multiplied_together(x.data, [w.data for w in weights])) < len(weights)


def linears(x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]], *, transpose_w: bool = False) -> tuple[Tensor, ...]:
    """Return `linear` of x (.., K) by each weight and bias (.., N), where `are_together`.

    In the backward pass, weights of one shape share tasks, and the second and later products add to one dx instead of a tensor of their own.
    """
    groups, ws = matmul.multiplied_together(x.data, [w.data for w, _ in layers]), [w.data for w, _ in layers]
    ys = [matmul.linear(x.data, w.data, None if b is None else b.data, transpose_w=transpose_w) for w, b in layers]
    x_edge, w_edges, b_edges = x.edge, [w.edge for w, _ in layers], [None if b is None else b.edge for _, b in layers]
    x_data = x.data if any(w_edges) else None  # data that no task will read is not kept

    def backward(gradients: Gradients) -> None:
        dx: TileTensor | None = None
        for group in reversed(groups):
            dys = {number: dy for number in reversed(group) if (dy := gradients[number]) is not None}
            if x_data is not None:
                _add_weight_gradients(x_data, [(edge, dy) for number, dy in dys.items() if (edge := w_edges[number]) is not None], transpose_w)
            for number, dy in dys.items():
                if (edge := b_edges[number]) is not None:
                    matmul.linear_backward_bias(dy, accumulator_of(edge))
            for number, dy in dys.items() if x_edge is not None else ():
                if dx is None:
                    dx = matmul.linear_backward_input(dy, ws[number], transpose_w=transpose_w)  # (.., K)
                else:
                    matmul.add_linear(dy, ws[number], dx, transpose_w=not transpose_w)  # (.., K)
        if x_edge is not None and dx is not None:
            x_edge.add(dx)

    return on_tape("linears", [x, *(tensor for layer in layers for tensor in layer)], ys, backward)


def is_joined(w: Tensor, kind: str, *, transpose_w: bool = False) -> bool:
    """Return whether `linear_pair` shares tasks between a weight and the activation before it."""
    return tape_enabled() and matmul.has_slope_in_product(w.data, kind, transpose_w=transpose_w)


def linear_pair(x: Tensor, up: tuple[Tensor, Tensor | None], down: tuple[Tensor, Tensor | None], kind: str, *, transpose_w: bool = False) -> Tensor:
    """Return `linear` of `linear_activation` of x, by two weights and biases, (.., K) -> (.., N), where `is_joined`."""
    (w, b), (w_down, b_down) = up, down
    pre, h = matmul.linear_gelu(x.data, w.data, None if b is None else b.data, kind, transpose_w=transpose_w)  # (.., I)
    y = matmul.linear(h, w_down.data, None if b_down is None else b_down.data, transpose_w=transpose_w)
    through_up = _weight_backward(x, w, b, transpose_w=transpose_w)
    through_down = _weight_backward(Tensor(h), w_down, b_down, transpose_w=transpose_w)
    edge, w_data = x.edge, w_down.data
    is_read = any(tensor is not None and tensor.edge is not None for tensor in (x, w, b))

    def backward(gradients: Gradients) -> None:
        dy = only(gradients)
        through_down(dy)
        if is_read:
            dx = through_up(matmul.linear_backward_activation(dy, w_data, pre, kind, transpose_w=transpose_w))
            if edge is not None and dx is not None:
                edge.add(dx)

    return on_tape("linear_pair", [x, w, b, w_down, b_down], [y], backward)[0]


def _add_weight_gradients(x: TileTensor, learnt: Sequence[tuple[Edge, TileTensor]], transpose_w: bool) -> None:
    """Contribute to the gradients of weights with these edges and dys: by one task for all, unless only some of them have contributions already."""
    if len(learnt) > 1 and len({edge.gradient is None for edge, _ in learnt}) == 1:
        sums = [accumulator_of(edge) for edge, _ in learnt]
        matmul.linear_backward_weights(x, [dy for _, dy in learnt], sums, transpose_w=transpose_w)
        return
    for edge, dy in learnt:
        matmul.linear_backward_weight(x, dy, accumulator_of(edge), transpose_w=transpose_w)


Through = Callable[[TileTensor], TileTensor | None]
"""Takes dy (.., N), contributes to the gradients of weights and returns dx (.., K), a new tensor; None if dx is not wanted."""


def _with_tape(name: str, x: Tensor, w: Tensor, b: Tensor | None, added: LowRank | None, y: TileTensor, through: Through) -> Tensor:
    edge = x.edge

    def backward(gradients: Gradients) -> None:
        dx = through(only(gradients))
        if edge is not None and dx is not None:
            edge.add(dx)

    return on_tape(name, [x, w, b, *(() if added is None else (added.down, added.up))], [y], backward)[0]


def _weight_backward(x: Tensor, w: Tensor, b: Tensor | None, *, transpose_w: bool) -> Through:
    w_data, w_edge, b_edge, wants_dx = w.data, w.edge, None if b is None else b.edge, x.edge is not None
    x_data = None if w_edge is None else x.data  # data that no task will read is not kept

    def backward(dy: TileTensor) -> TileTensor | None:
        if w_edge is not None and x_data is not None:
            matmul.linear_backward_weight(x_data, dy, accumulator_of(w_edge), transpose_w=transpose_w)
        if b_edge is not None:
            matmul.linear_backward_bias(dy, accumulator_of(b_edge))
        return matmul.linear_backward_input(dy, w_data, transpose_w=transpose_w) if wants_dx else None  # (.., K)

    return backward


def _add_low_rank(x: TileTensor, added: LowRank, y: TileTensor) -> TileTensor:
    """Add u @ up^T to y, with u = scale * dropout(x) @ down^T (.., r), and return u."""
    u = added.scaled(matmul.linear(added.drop(x), added.down.data, transpose_w=True))  # (.., K) @ (r, K)^T -> (.., r)
    matmul.add_linear(u, added.up.data, y, transpose_w=True)  # (.., r) @ (N, r)^T -> (.., N)
    return u


def _low_rank_backward(x: TileTensor, added: LowRank, u: TileTensor, through_weight: Through) -> Through:
    """Return the backward pass through the weight and the update; it recomputes the dropped x instead of keeping it."""

    def backward(dy: TileTensor) -> TileTensor | None:
        if added.up.edge is not None:
            matmul.linear_backward_weight(u, dy, accumulator_of(added.up.edge), transpose_w=True)  # (.., N)^T @ (.., r) -> (N, r)
        du = added.scaled(matmul.linear(dy, added.up.data))  # (.., N) @ (N, r) -> (.., r)
        if added.down.edge is not None:
            matmul.linear_backward_weight(added.drop(x), du, accumulator_of(added.down.edge), transpose_w=True)  # (.., r)^T @ (.., K) -> (r, K)
        dx = through_weight(dy)
        if dx is None:
            return None
        if added.dropout is not None:
            return elementwise.add(dx, added.drop(matmul.linear(du, added.down.data)))  # (.., r) @ (r, K) -> (.., K)
        matmul.add_linear(du, added.down.data, dx)  # (.., r) @ (r, K) -> (.., K)
        return dx

    return backward
