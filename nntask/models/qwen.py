"""Qwen2 and Qwen3 (Yang et al., 2024 and 2025), with the semantics of transformers' ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``: LLaMAs whose
projections to queries, keys and values have biases (2), or whose queries and keys are normed head by head (3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..architecture.config_checks import count, layer_kinds, switch
from ..architecture.description import AttentionShape
from .llama import GatedConfig

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(GatedConfig):
    """Shape and hyperparameters of a Qwen2; field names and meaning as in ``transformers.Qwen2Config``.

    Args:
        num_key_value_heads: G; 32 by default, H if null.
        use_sliding_window: whether later blocks see a window only.
        sliding_window: number of tokens that a token sees in those blocks, itself included.
        max_window_layers: number of the first of those blocks.
        layer_types: for each block "full_attention" or "sliding_attention"; None if the three fields above decide.
    """

    num_key_value_heads: int | None = count(8, 32, or_null=True)
    use_sliding_window: bool = switch(False)
    sliding_window: int | None = count(4096, 4096, or_null=True)
    max_window_layers: int = count(28, 28, or_zero=True)
    layer_types: tuple[str, ...] | None = layer_kinds((FULL, SLIDING))

    kinds_keys: ClassVar[tuple[str, ...]] = ("layer_types",)
    unwritten: ClassVar[tuple[str, ...]] = ("head_dim",)
    model_type: ClassVar[str] = "qwen2"
    title: ClassVar[str] = "Qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token sees in a block; None for all."""
        is_windowed = layer >= self.max_window_layers if self.layer_types is None else self.layer_types[layer] == SLIDING
        return self.sliding_window if self.use_sliding_window and is_windowed else None

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), has_bias=True)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Shape and hyperparameters of a Qwen3; field names and meaning as in ``transformers.Qwen3Config``.

    Args:
        head_dim: D; 128 by default.
        attention_bias: whether the projections of attention have biases.
    """

    head_dim: int | None = count(128, 128, or_null=True)
    attention_bias: bool = switch(False)

    model_type: ClassVar[str] = "qwen3"
    title: ClassVar[str] = "Qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), has_bias=self.attention_bias, head_norm=self.norm)


_SMALL: Final[dict[str, Any]] = {"rope_theta": 1e6, "tie_word_embeddings": True}
PRESETS: Final[Mapping[str, Qwen2Config]] = {
    "qwen2.5-0.5b": Qwen2Config.of_size(151936, 896, 4864, 24, 14, 32768, num_key_value_heads=2, **_SMALL),
    "qwen2.5-1.5b": Qwen2Config.of_size(151936, 1536, 8960, 28, 12, 32768, num_key_value_heads=2, **_SMALL),
}
"""Name -> config: Qwen2.5 0.5B and 1.5B."""

PRESETS_3: Final[Mapping[str, Qwen3Config]] = {
    "qwen3-0.6b": Qwen3Config.of_size(151936, 1024, 3072, 28, 16, 40960, num_key_value_heads=8, **_SMALL),
    "qwen3-1.7b": Qwen3Config.of_size(151936, 2048, 6144, 28, 16, 40960, num_key_value_heads=8, **_SMALL),
}
"""Name -> config: Qwen3 0.6B and 1.7B."""
