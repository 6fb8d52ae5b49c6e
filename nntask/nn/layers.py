"""Layers: parameters with a name, a shape, a tile and first values, and the function that uses them.

Letters: B sequences, T tokens, C features, K and N in and out features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiles import TileTensor
from tiles.ops import attention as attention_ops

from . import functional
from .autograd import Tensor
from .functional import Masks
from .initializers import constant, normal
from .linear import LowRank
from .module import Module, Parameter, in_module


class Adapter(Module):
    """Low-rank update learnt in addition to a frozen weight: ``scale * dropout(x) @ A^T @ B^T``; `nntask.adapters.lora` adds it to models.

    Args:
        down: A, (r, K); layers whose weights are parts of one matrix share it.
        num_out: N.
        tile: features out per tile.
        scale: factor of the update.
        p: probability of dropping an element of x.
        site: number of the place for dropout masks.
    """

    def __init__(self, down: Parameter, num_out: int, tile: int, *, scale: float, p: float, site: int) -> None:
        self.scale, self.p, self.site = scale, p, site
        self.A = down
        self.B = Parameter((num_out, down.shape[0]), (tile, -1), constant(0.0))

    def low_rank(self, masks: Masks | None) -> LowRank:
        """Return the update for one forward pass."""
        dropout = attention_ops.Dropout(self.p, masks.key, masks.stream(self.site)) if masks is not None and self.p else None
        return LowRank(self.A, self.B, self.scale, dropout)


class Linear(Module):
    """x (.., K) @ weight (K, N) [+ bias (N,)] -> (.., N), and an activation in the same pass.

    Args:
        num_in: K.
        num_out: N.
        tile: features in and out per weight tile.
        std: standard deviation of the first weights; the bias begins at zero.
        activation: gelu_new, gelu, relu, silu, tanh, or None.
        has_bias: whether to add a bias.
        has_rows_in: False for a weight (N, K), the layout of torch, whose files then map onto tiles as they are.

    Attributes:
        lora: the adapter; None without one.
        takes_adapter: whether `nntask.adapters.lora` may add one.
    """

    lora: Adapter | None = None
    takes_adapter = True

    def __init__(
        self,
        num_in: int,
        num_out: int,
        tile: tuple[int, int],
        *,
        std: float,
        activation: str | None = None,
        has_bias: bool = True,
        has_rows_in: bool = True,
    ) -> None:
        self.activation, self.has_rows_in = activation, has_rows_in
        shape, cut = ((num_in, num_out), tile) if self.has_rows_in else ((num_out, num_in), tile[::-1])
        self.weight = Parameter(shape, cut, normal(std))
        self.bias = Parameter((num_out,), tile[1:], constant(0.0)) if has_bias else None

    def __call__(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """(.., K) -> (.., N)."""
        transpose, added = not self.has_rows_in, None if self.lora is None else self.lora.low_rank(masks)
        if self.activation is not None:
            return functional.linear_activation(x, self.weight, self.bias, self.activation, transpose_w=transpose, added=added)
        return functional.linear(x, self.weight, self.bias, transpose_w=transpose, added=added)


def projections(layers: Sequence[Linear], x: Tensor, masks: Masks | None) -> Iterator[Tensor]:
    """Yield the result of each layer for x, (.., K) -> (.., N). Layers without adapters and activations may share tasks (`functional.linears`)."""
    are_plain = all(layer.lora is None and layer.activation is None for layer in layers)
    if are_plain and functional.are_together(x, [layer.weight for layer in layers]):
        results = [*functional.linears(x, [(layer.weight, layer.bias) for layer in layers], transpose_w=not layers[0].has_rows_in)]
        while results:
            yield results.pop(0)  # not kept here, so that its data ends with its last use
    else:
        for layer in layers:
            yield layer(x, masks)


def are_joined(up: Linear, down: Linear) -> bool:
    """Return whether `joined` computes two layers."""
    is_plain = up.activation is not None and up.lora is None and down.activation is None and down.lora is None
    return is_plain and functional.is_joined(down.weight, up.activation or "", transpose_w=not down.has_rows_in)


def joined(up: Linear, down: Linear, x: Tensor) -> Tensor:
    """Return down(up(x)), (.., K) -> (.., N), whose backward passes share tasks (`functional.linear_pair`)."""
    assert up.activation is not None
    return functional.linear_pair(x, (up.weight, up.bias), (down.weight, down.bias), up.activation, transpose_w=not up.has_rows_in)


class LayerNorm(Module):
    """Layer norm over the last axis (Ba et al., 2016) with weight (C,) and bias (C,)."""

    def __init__(self, width: int, tile: int, eps: float) -> None:
        self.eps = eps
        self.weight = Parameter((width,), (tile,), constant(1.0))
        self.bias = Parameter((width,), (tile,), constant(0.0))

    def __call__(self, x: Tensor) -> Tensor:
        """(.., C) -> (.., C)."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

    @in_module
    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + branch, its norm), (.., C) each, in one pass."""
        return functional.residual_layer_norm(x, branch, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """RMS norm over the last axis (Zhang and Sennrich, 2019), multiplied by weight (C,) + offset.

    Args:
        width: C.
        tile: features of a tile.
        eps: added to the mean of squares.
        offset: added to the weight (Gemma: 1); the first weight is 1 - offset.
    """

    def __init__(self, width: int, tile: int, eps: float, offset: float = 0.0) -> None:
        self.eps, self.offset = eps, offset
        self.weight = Parameter((width,), (tile,), constant(1.0 - offset))

    def __call__(self, x: Tensor) -> Tensor:
        """(.., C) -> (.., C)."""
        return functional.rms_norm(x, self.weight, self.eps, self.offset)

    @in_module
    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + branch, its norm), (.., C) each, in one pass."""
        return functional.residual_rms_norm(x, branch, self.weight, self.eps, self.offset)


class HeadNorm(RMSNorm):
    """RMS norm within each head (Henry et al., 2020), multiplied by weight (D,) + offset, the same for all heads; tiles hold whole heads."""

    def __init__(self, head_size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(head_size, -1, eps, offset)

    def __call__(self, x: Tensor) -> Tensor:
        """(.., H*D) -> (.., H*D)."""
        return functional.head_norm(x, self.weight, self.eps, self.offset)


class Embedding(Module):
    """Lookup of rows of weight (V, C)."""

    def __init__(self, num_rows: int, width: int, tile: tuple[int, int], *, std: float) -> None:
        self.weight = Parameter((num_rows, width), tile, normal(std))

    def __call__(self, tokens: TileTensor, first: int = 0) -> Tensor:
        """Look up the rows `first` + tokens of the weight, (B, T) int32 -> (B, T, C)."""
        return functional.embedding(tokens, self.weight, first)


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
        """Return a tensor of the same shape; `x` itself without masks."""
        return functional.dropout(x, self.p, masks, self.site)
