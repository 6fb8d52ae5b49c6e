"""Products with a weight, differentiable: plain, with a bias, with an activation in the same pass, and with something of low rank added.

Letters: K and N in and out features, r rank. The rules of `functional` hold, of which this is a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import elementwise, matmul
from tiles.ops import random as random_ops

from .autograd import Gradients, Tensor, accumulator_of, on_tape, only


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to the product with a weight: scale * dropout(x) @ down^T @ up^T, of rank r.

    Args:
        down: (r, K).
        up: (N, r).
        dropout: of x, on this way only.
    """

    down: Tensor
    up: Tensor
    scale: float
    dropout: attention_ops.Dropout | None = None

    def drop(self, x: TileTensor) -> TileTensor:
        """`x`, or a gradient by it, with the dropped elements zero and the others scaled up."""
        return x if self.dropout is None else random_ops.dropout(x, self.dropout.p, self.dropout.key, self.dropout.stream)

    def scaled(self, u: TileTensor) -> TileTensor:
        """scale * u; of the small tensors (.., r) between the two factors, so that it costs nothing."""
        return u if self.scale == 1 else elementwise.scale(u, self.scale)


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, transpose_w: bool = False, added: LowRank | None = None) -> Tensor:
    """x (.., K) @ w (K, N) + b (N,) [+ added] -> (.., N); with `transpose_w`, w is (N, K)."""
    y = matmul.linear(x.data, w.data, None if b is None else b.data, transpose_w=transpose_w)
    u = _add_low_rank(x, added, y)
    return on_tape("linear", _linear_inputs(x, w, b, added), [y], _linear_backward(x, w, b, added, u, transpose_w=transpose_w))[0]


def linear_activation(x: Tensor, w: Tensor, b: Tensor | None, kind: str, *, added: LowRank | None = None) -> Tensor:
    """activation(x (.., K) @ w (K, N) + b (N,) [+ added]) -> (.., N); in one pass if nothing is added.

    Args:
        kind: gelu_new, gelu, relu or silu.
    """
    bias = None if b is None else b.data
    if added is None:
        pre, y = matmul.linear_gelu(x.data, w.data, bias, kind)
        u = None
    else:
        pre = matmul.linear(x.data, w.data, bias)
        u = _add_low_rank(x, added, pre)
        y = elementwise.activation(pre, kind)
    through_linear = _linear_backward(x, w, b, added, u, transpose_w=False)

    def backward(gradients: Gradients) -> None:
        through_linear([elementwise.activation_backward(pre, only(gradients), kind)])  # (.., N)

    return on_tape("linear_activation", _linear_inputs(x, w, b, added), [y], backward)[0]


def _linear_inputs(x: Tensor, w: Tensor, b: Tensor | None, added: LowRank | None) -> list[Tensor | None]:
    return [x, w, b] if added is None else [x, w, b, added.down, added.up]


def _add_low_rank(x: Tensor, added: LowRank | None, y: TileTensor) -> TileTensor | None:
    """y += u @ up^T of u = scale * dropout(x) @ down^T (.., r), which is returned; None if nothing is added."""
    if added is None:
        return None
    u = added.scaled(matmul.linear(added.drop(x.data), added.down.data, transpose_w=True))  # (.., K) @ (r, K)^T -> (.., r)
    matmul.add_linear(u, added.up.data, y, transpose_w=True)  # (.., r) @ (N, r)^T -> (.., N)
    return u


def _linear_backward(
    x: Tensor, w: Tensor, b: Tensor | None, added: LowRank | None, u: TileTensor | None, *, transpose_w: bool
) -> Callable[[Gradients], None]:
    w_data, x_edge, w_edge, b_edge = w.data, x.edge, w.edge, None if b is None else b.edge
    x_data = None if w_edge is None else x.data  # what nobody will read is not kept
    through_added = None if added is None or u is None else _low_rank_backward(x.data, added, u)

    def backward(gradients: Gradients) -> None:
        dy = only(gradients)  # (.., N)
        if w_edge is not None and x_data is not None:
            matmul.linear_backward_weight(x_data, dy, accumulator_of(w_edge), transpose_w=transpose_w)
        if b_edge is not None:
            matmul.linear_backward_bias(dy, accumulator_of(b_edge))
        du = None if through_added is None else through_added(dy)  # (.., r)
        if x_edge is None:
            return
        dx = matmul.linear_backward_input(dy, w_data, transpose_w=transpose_w)  # (.., K)
        if du is not None and added is not None and added.dropout is None:
            matmul.add_linear(du, added.down.data, dx)  # (.., r) @ (r, K) -> (.., K)
        x_edge.add(dx)
        if du is not None and added is not None and added.dropout is not None:
            x_edge.add(added.drop(matmul.linear(du, added.down.data)))  # (.., r) @ (r, K) -> (.., K)

    return backward


def _low_rank_backward(x: TileTensor, added: LowRank, u: TileTensor) -> Callable[[TileTensor], TileTensor]:
    """Takes dy (.., N), contributes to the factors and gives du (.., r); the dropped x is made again instead of kept."""

    def backward(dy: TileTensor) -> TileTensor:
        if added.up.edge is not None:
            matmul.linear_backward_weight(u, dy, accumulator_of(added.up.edge), transpose_w=True)  # (.., N)^T @ (.., r) -> (N, r)
        du = added.scaled(matmul.linear(dy, added.up.data))  # (.., N) @ (N, r) -> (.., r)
        if added.down.edge is not None:
            matmul.linear_backward_weight(added.drop(x), du, accumulator_of(added.down.edge), transpose_w=True)  # (.., r)^T @ (.., K) -> (r, K)
        return du

    return backward
