"""Layers: parameters with a name, a shape, a tile and first values, and the function that uses them.

Letters: B sequences, T tokens, C features, K and N in and out features, V vocabulary.
"""

from __future__ import annotations

from tiles import TileTensor

from . import functional
from .autograd import Tensor
from .functional import Masks
from .init import constant, normal
from .module import Module, Parameter


class Linear(Module):
    """x (.., K) @ weight (K, N) + bias (N,) -> (.., N).

    Args:
        num_in: K.
        num_out: N.
        tile: features in and out per weight tile.
        std: of the first weights; the bias begins at zero.
        activation: applied in the same pass: gelu_new, gelu, relu, silu, or None.
    """

    def __init__(self, num_in: int, num_out: int, tile: tuple[int, int], *, std: float, activation: str | None = None) -> None:
        self.activation = activation
        self.weight = Parameter((num_in, num_out), tile, normal(std))
        self.bias = Parameter((num_out,), tile[1:], constant(0.0))

    def __call__(self, x: Tensor) -> Tensor:
        """(.., K) -> (.., N)."""
        if self.activation is not None:
            return functional.linear_activation(x, self.weight, self.bias, self.activation)
        return functional.linear(x, self.weight, self.bias)


class TransposedLinear(Module):
    """x (.., K) @ weight (N, K)^T [+ bias (N,)] -> (.., N): the layout of torch, whose files then map onto tiles as they are.

    Args:
        num_in: K.
        num_out: N.
        tile: features in and out per weight tile.
        std: of the first weights; the bias begins at zero.
        has_bias: whether there is one.
    """

    def __init__(self, num_in: int, num_out: int, tile: tuple[int, int], *, std: float, has_bias: bool = False) -> None:
        self.weight = Parameter((num_out, num_in), tile[::-1], normal(std))
        self.bias = Parameter((num_out,), tile[1:], constant(0.0)) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """(.., K) -> (.., N)."""
        return functional.linear(x, self.weight, self.bias, transpose_w=True)


class LayerNorm(Module):
    """Layer norm over the last axis (Ba et al., 2016) with weight (C,) and bias (C,)."""

    def __init__(self, width: int, tile: int, eps: float) -> None:
        self.eps = eps
        self.weight = Parameter((width,), (tile,), constant(1.0))
        self.bias = Parameter((width,), (tile,), constant(0.0))

    def __call__(self, x: Tensor) -> Tensor:
        """(.., C) -> (.., C)."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm), (.., C) each, in one pass."""
        return functional.residual_layer_norm(x, branch, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """RMS norm over the last axis (Zhang and Sennrich, 2019) with weight (C,)."""

    def __init__(self, width: int, tile: int, eps: float) -> None:
        self.eps = eps
        self.weight = Parameter((width,), (tile,), constant(1.0))

    def __call__(self, x: Tensor) -> Tensor:
        """(.., C) -> (.., C)."""
        return functional.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm), (.., C) each, in one pass."""
        return functional.residual_rms_norm(x, branch, self.weight, self.eps)


class Embedding(Module):
    """Rows of weight (V, C)."""

    def __init__(self, num_rows: int, width: int, tile: tuple[int, int], *, std: float) -> None:
        self.weight = Parameter((num_rows, width), tile, normal(std))

    def __call__(self, tokens: TileTensor) -> Tensor:
        """(B, T) int32 -> (B, T, C)."""
        return functional.embedding(tokens, self.weight)


class Dropout(Module):
    """Dropout at one place of a model (Srivastava et al., 2014).

    Args:
        p: probability of a zero.
        site: number of the place; each place has its own masks.
    """

    def __init__(self, p: float, site: int) -> None:
        self.p = p
        self.site = site

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """Same shape; `x` itself where there are no masks."""
        return functional.dropout(x, self.p, masks, self.site)
