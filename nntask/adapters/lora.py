"""LoRA (Hu et al., 2021, arXiv 2106.09685): the model is frozen, and a trained low-rank product is added to each of its matrices.

    y = x W + b + alpha / r * dropout(x) A^T B^T        (their equation 3, scaled as in section 4.1)

W is (K, N), A (r, K), B (N, r). A begins uniform in [-1 / sqrt(K), 1 / sqrt(K)], as in the authors' code and in PEFT, and B at zero. Rules:

- Every parameter of the original model is frozen: no gradient, no optimizer state, and no task writes it. Every `Linear` layer, that is each
  matrix of attention and of the feed-forward layers, gets an adapter; those of experts only if asked for. Only a classifier's head, which is new,
  and the layer before it are trained whole, as in PEFT.
- Weights that are one matrix in the family's files, such as GPT-2's q, k and v, or in transformers' arrays of all experts, gate and up, count as one
  matrix: their layers share A and the dropout mask of x, and their B are row blocks of one B. So the adapters equal those of PEFT, which adapts the
  matrices of transformers' modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiles import TileTensor

from ..architecture.description import MixtureShape
from ..architecture.family_config import ModelConfig
from ..architecture.names import is_of_head
from ..errors import UsageError
from ..hf.layout import names_of
from ..models.blocks import Mixture
from ..models.language import LanguageModel
from ..models.mixtures import MixtureConfig
from ..nn.functional import SITES
from ..nn.initializers import uniform
from ..nn.layers import Adapter, Linear
from ..nn.module import Parameter

Array = npt.NDArray[Any]

_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class LoRA:
    """Hyperparameters of LoRA adapters.

    Args:
        rank: r, at least 1.
        alpha: numerator of the scale alpha / r, above 0.
        dropout: probability in [0, 1) that an element of the adapter's input is dropped.
        experts: whether each expert of a mixture gets adapters, too, which have no dropout, as in PEFT.

    Raises:
        UsageError: a hyperparameter is out of its range.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    experts: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < inf or not 0 <= self.dropout < 1:
            raise UsageError(
                "a LoRA's rank must be at least 1, its alpha above 0 and its dropout at least 0 and below 1, "
                f"got {self.rank}, {self.alpha:g} and {self.dropout:g}",
                "for example 8, 16 and 0",
            )
        if self.experts and self.dropout:
            raise UsageError(f"a LoRA of experts must have a dropout of 0, as in PEFT, got {self.dropout:g}", "set it to 0")

    @property
    def scale(self) -> float:
        """The factor alpha / r of an adapter's output."""
        return self.alpha / self.rank


def is_factor(name: str) -> bool:
    """Return whether our name of a parameter belongs to an adapter."""
    return name.endswith((".lora.A", ".lora.B"))


def base_tensors(model: LanguageModel) -> dict[str, TileTensor]:
    """Return the tensors of a model without its adapters, by name."""
    return {name: tensor for name, tensor in model.tensors().items() if not is_factor(name)}


def _is_trained_whole(model: LanguageModel, name: str) -> bool:
    """Return whether a parameter or module is trained itself while others have adapters."""
    return model.config.num_labels > 0 and is_of_head(name)


def mixtures_of(config: ModelConfig) -> list[MixtureShape]:
    """Return the shapes of a model's mixtures of experts, in order of its blocks; empty for a dense model."""
    if not isinstance(config, MixtureConfig):
        return []
    return [block.feed_forward for block in config.description.stack.blocks if isinstance(block.feed_forward, MixtureShape)]


def num_idle_factors(config: ModelConfig, lora: LoRA) -> int:
    """Return the number of weights of adapters that a token does not pass through: those of experts that are not chosen for it."""
    shapes = mixtures_of(config) if lora.experts else []
    sizes = [(shape.num_experts - shape.num_chosen) * (2 * config.n_embd + 3 * shape.expert.inner_size) for shape in shapes]
    return lora.rank * sum(sizes)


def largest_rank(config: ModelConfig, *, experts: bool = False) -> int:
    """Return the largest rank for a model: the smallest dimension of its adapted matrices, beyond which the product has no lower rank.

    Args:
        experts: whether experts have adapters.
    """
    widths = [config.inner_size]
    if isinstance(config, MixtureConfig):
        inner = [block.feed_forward for block in config.description.stack.blocks]
        adapted_layers = [layer.shared if isinstance(layer, MixtureShape) else layer for layer in inner]
        adapted_layers += [shape.expert for shape in mixtures_of(config)] if experts else []
        widths = [layer.inner_size for layer in adapted_layers if layer is not None]
    return min(config.n_embd, *widths, config.n_head * config.head_size, config.n_kv_head * config.head_size)


def add_adapters(model: LanguageModel, lora: LoRA, *, seed: int = 0) -> None:
    """Freeze a model and add adapters of its element type to its matrices. Call it once, before the optimizer is created.

    Args:
        model: model without adapters.
        lora: hyperparameters of the adapters.
        seed: seed of the initial values of A.

    Raises:
        UsageError: the rank is above `largest_rank`, the model has adapters already, it has more matrices than dropout streams, or it has no experts
            that could have adapters.
    """
    if lora.experts and not mixtures_of(model.config):
        raise UsageError("a LoRA of experts needs a mixture of experts, and the model has none", "use adapters without experts")
    limit = largest_rank(model.config, experts=lora.experts)
    if lora.rank > limit:
        raise UsageError(f"a LoRA's rank must be at most {limit}, the smallest width of a matrix that it adapts, got {lora.rank}", "lower it")
    if any(layer.lora is not None for layer in _adaptable(model).values()):
        raise UsageError("a model can have only one set of adapters, and this one has some", "build a new model for others")
    for layer in expert_layers(model) if lora.experts else ():
        layer.takes_adapter = True
    groups = adapted(model)
    if lora.dropout and len(groups) > SITES // 2:
        raise UsageError(f"a LoRA with dropout adapts {SITES // 2} matrices at most, and the model has {len(groups)}", "set its dropout to 0")
    for name, parameter in model.named_parameters().items():
        if not _is_trained_whole(model, name):
            parameter.freeze()
    for number, members in enumerate(groups.values()):
        _adapt(list(members.values()), lora, SITES // 2 + number)
    dtype = model.lm_head.data.dtype
    for name, parameter in model.named_parameters().items():
        if is_factor(name):
            parameter.allocate(model.runtime, name, dtype, seed)


def adapted(model: LanguageModel) -> dict[str, dict[str, Linear]]:
    """Return the adapted layers by the module of the family's files that joins their weights: module -> {name: our layer}, in column order.

    Layers of experts are grouped by transformers' arrays of all experts, as in `Names.array_of`: array.number of the expert -> {name: our layer}.
    """
    layers = _adaptable(model)
    factors = _factors(layers)
    base = {name: p.shape for name, p in model.named_parameters().items() if id(p) not in factors}
    theirs = names_of(model.config, base)
    groups: dict[str, dict[str, Linear]] = {}
    for name, layer in layers.items():
        module = theirs[name + _WEIGHT].removesuffix(_WEIGHT)
        array = model.config.names.array_of(module)
        groups.setdefault(module if array is None else f"{array[0]}.{array[1]}", {})[name] = layer
    return groups


def expert_layers(model: LanguageModel) -> list[Linear]:
    """Return the layers of all experts of a model."""
    return [layer for _, module in model.named_modules() if isinstance(module, Mixture) for layer in module.expert_layers()]


def adapter_factors(layer: Linear, down: Array, up: Array) -> tuple[Array, Array]:
    """Return the two factors of an adapter's update, in the layout of the layer's weight.

    Args:
        layer: layer with an adapter.
        down: (r, K), A.
        up: (N, r), B.

    Returns:
        (K, r) and (r, N) for a weight (K, N), with product scale * A^T B^T; (N, r) and (r, K) for a weight (N, K), with product scale * B A.
    """
    assert layer.lora is not None
    up = up * layer.lora.scale
    return (down.T, up.T) if layer.has_rows_in else (up, down)


def merge_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the element type in which adapters are merged into a weight of type `dtype`: fp64 for fp64, fp32 for all others."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def merged(weight: Array, left: Array, right: Array) -> Array:
    """Return weight + left @ right in the merge type of the weight; `left` and `right` are the factors of `adapter_factors` in that type."""
    found: Array = weight.astype(merge_dtype(weight.dtype)) + left @ right
    return found


def merged_arrays(model: LanguageModel) -> dict[str, Array]:
    """Return the weights of a model by name, with its adapters merged in; each weight is rounded to its element type once."""
    layers, found = _adaptable(model), {name: tensor.read() for name, tensor in model.tensors().items()}
    for name, layer in layers.items():
        if layer.lora is not None:
            weight = found[name + _WEIGHT]
            down, up = (factor.read().astype(merge_dtype(weight.dtype)) for factor in (layer.lora.A, layer.lora.B))
            found[name + _WEIGHT] = merged(weight, *adapter_factors(layer, down, up)).astype(weight.dtype)
    factors = _factors(layers)
    return {name: found[name] for name, parameter in model.named_parameters().items() if id(parameter) not in factors}


def _factors(layers: dict[str, Linear]) -> set[int]:
    """Return the ids of A and B of every adapter."""
    return {id(p) for layer in layers.values() if layer.lora is not None for p in layer.lora.parameters()}


def _adaptable(model: LanguageModel) -> dict[str, Linear]:
    """Return the layers that take an adapter, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear) and module.takes_adapter}
    return {name: layer for name, layer in layers.items() if not _is_trained_whole(model, name)}


def _adapt(layers: list[Linear], lora: LoRA, site: int) -> None:
    """Give adapters to layers whose weights are column blocks of one matrix: they have one input, and share A and the dropout stream `site`."""
    (num_in, _), (tile_in, _) = _ways(layers[0])
    down = Parameter((lora.rank, num_in), (-1, tile_in), uniform(num_in**-0.5))
    for layer in layers:
        (_, num_out), (_, tile_out) = _ways(layer)
        layer.lora = Adapter(down, num_out, tile_out, scale=lora.scale, p=lora.dropout, site=site)


def _ways(layer: Linear) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (input features, output features) of a layer, and the same of a tile of its weight."""
    shape, tile = layer.weight.extents, layer.weight.tile
    first, second = (0, 1) if layer.has_rows_in else (1, 0)
    return (shape[first], shape[second]), (tile[first], tile[second])
