"""LoRA (Hu et al., 2021, arXiv 2106.09685): a frozen model, and beside each of its matrices a product of two thin ones that are learnt.

    y = x W + b + alpha / r * dropout(x) A^T B^T        (their equation 3, scaled as in section 4.1)

with W (K, N) as x meets it, A (r, K) and B (N, r). A begins uniform within 1 / sqrt(K) of zero (Kaiming's bound with a = sqrt(5), as in the authors'
code and in PEFT), drawn by position like all first weights; B begins at zero, so that training begins with the frozen model itself.

Rules.

- Everything that was there is frozen: no gradient, no state of the optimizer, no task that writes it. Every `Adaptable` layer, which are the
  matrices of attention and of the feed-forward layers, gets an adapter.
- Weights that are one matrix in the family's files, such as GPT-2's q, k and v, are one matrix here too: they share A and the dropped x, and their
  B are parts of one. So adapters are those of PEFT, which sees the files' matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .functional import SITES
from .hf.shadow import names_of
from .init import uniform
from .layers import Adaptable, Adapter
from .models.interface import ModelConfig
from .models.language import LanguageModel
from .models.registry import family_of
from .module import Parameter

Array = npt.NDArray[Any]

_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class LoRA:
    """What adapters are like.

    Args:
        rank: r.
        alpha: the scale of what they add is alpha / r.
        dropout: probability of dropping an element of a matrix's input on the way through its adapter.

    Raises:
        UsageError: a number is out of range.
    """

    rank: int
    alpha: float
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < inf or not 0 <= self.dropout < 1:
            raise UsageError(
                "a LoRA's rank must be at least 1, its alpha above 0 and its dropout at least 0 and below 1, "
                f"got {self.rank}, {self.alpha:g} and {self.dropout:g}; for example 8, 16 and 0"
            )

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


def largest_rank(config: ModelConfig) -> int:
    """The smallest width of the matrices that are adapted; a product of a larger rank is no thinner than they are."""
    return min(config.n_embd, config.inner_size, config.n_head * config.head_size, config.n_kv_head * config.head_size)


def add_adapters(model: LanguageModel, lora: LoRA, *, seed: int = 0) -> None:
    """Freeze a model and put adapters beside its matrices, in its element type; do it once, before its optimizer is made.

    Args:
        seed: of the first values of A.

    Raises:
        UsageError: the rank is above `largest_rank`, the model has adapters already, or more matrices than there are places for their dropout.
    """
    limit = largest_rank(model.config)
    if lora.rank > limit:
        raise UsageError(f"a LoRA's rank must be at most {limit}, the smallest width of a matrix that it adapts, got {lora.rank}; lower it")
    if any(layer.lora is not None for layer in _adaptable(model).values()):
        raise UsageError("a model takes adapters once, and this one has some; build it again for others")
    groups = adapted(model)
    if lora.dropout and len(groups) > SITES // 2:
        raise UsageError(f"a LoRA with dropout adapts {SITES // 2} matrices at most, and the model has {len(groups)}; set its dropout to 0")
    model.freeze()
    for number, members in enumerate(groups.values()):
        _adapt(list(members.values()), lora, SITES // 2 + number)
    dtype = model.lm_head.data.dtype
    for name, parameter in model.named_parameters().items():
        if parameter.trainable:
            parameter.allocate(model.runtime, name, dtype, seed)


def adapted(model: LanguageModel) -> dict[str, dict[str, Adaptable]]:
    """Name of a module in the family's files -> our layers whose weights it holds, by name, in the order of its columns."""
    layers = _adaptable(model)
    factors = _factors(layers)
    base = {name: p.shape for name, p in model.named_parameters().items() if id(p) not in factors}
    theirs = names_of(family_of(model.config), model.config, base)
    groups: dict[str, dict[str, Adaptable]] = {}
    for name, layer in layers.items():
        groups.setdefault(theirs[name + _WEIGHT].removesuffix(_WEIGHT), {})[name] = layer
    return groups


def product(layer: Adaptable, down: Array, up: Array) -> tuple[Array, Array]:
    """Two matrices whose product, in the layout of the layer's weight, is what its adapter adds to it: scale * A^T B^T, or scale * B A.

    Args:
        down: A, (r, K).
        up: B, (N, r).
    """
    assert layer.lora is not None
    up = up * layer.lora.scale
    return (down.T, up.T) if layer.has_rows_in else (up, down)


def wide(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The element type that adapters are merged in: fp64 for fp64, fp32 for all others."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def merged(weight: Array, left: Array, right: Array) -> Array:
    """weight + left @ right, in `wide` of the weight's type; the last two as of `product`, in that type."""
    found: Array = weight.astype(wide(weight.dtype)) + left @ right
    return found


def merged_arrays(model: LanguageModel) -> dict[str, Array]:
    """The weights of a model, by name; what adapters add is in them, and they are rounded to their type once."""
    layers, found = _adaptable(model), {name: tensor.read() for name, tensor in model.tensors().items()}
    for name, layer in layers.items():
        if layer.lora is not None:
            weight = found[name + _WEIGHT]
            down, up = (factor.read().astype(wide(weight.dtype)) for factor in (layer.lora.A, layer.lora.B))
            found[name + _WEIGHT] = merged(weight, *product(layer, down, up)).astype(weight.dtype)
    factors = _factors(layers)
    return {name: found[name] for name, parameter in model.named_parameters().items() if id(parameter) not in factors}


def _factors(layers: dict[str, Adaptable]) -> set[int]:
    """The ids of A and B of every adapter."""
    return {id(p) for layer in layers.values() if layer.lora is not None for p in layer.lora.parameters()}


def _adaptable(model: LanguageModel) -> dict[str, Adaptable]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adaptable)}


def _adapt(layers: list[Adaptable], lora: LoRA, site: int) -> None:
    """Adapters of layers whose weights are parts of one matrix; they have the same input."""
    (num_in, _), (tile_in, _) = _ways(layers[0])
    down = Parameter((lora.rank, num_in), (-1, tile_in), uniform(num_in**-0.5))
    for layer in layers:
        (_, num_out), (_, tile_out) = _ways(layer)
        layer.lora = Adapter(down, num_out, tile_out, scale=lora.scale, p=lora.dropout, site=site)


def _ways(layer: Adaptable) -> tuple[tuple[int, int], tuple[int, int]]:
    """(features in, features out) of a layer, and of a tile of its weight."""
    shape, tile = layer.weight.extents, layer.weight.tile
    first, second = (0, 1) if layer.has_rows_in else (1, 0)
    return (shape[first], shape[second]), (tile[first], tile[second])
