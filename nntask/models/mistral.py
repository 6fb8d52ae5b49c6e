"""Mistral (Jiang et al., 2023), with the semantics of transformers' ``MistralForCausalLM``: a LLaMA whose tokens see a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from ..architecture.config_checks import count
from .llama import GatedConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(GatedConfig):
    """Shape and hyperparameters of a Mistral; field names and meaning as in ``transformers.MistralConfig``.

    Args:
        num_key_value_heads: G; 8 by default, H if null.
        sliding_window: number of tokens that a token sees, itself included; None for all.
    """

    num_key_value_heads: int | None = count(8, 8, or_null=True)
    sliding_window: int | None = count(4096, 4096, or_null=True)

    model_type: ClassVar[str] = "mistral"
    title: ClassVar[str] = "Mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"


PRESETS: Final[dict[str, MistralConfig]] = {
    "mistral-7b": MistralConfig.of_size(32000, 4096, 14336, 32, 32, 32768, rms_norm_eps=1e-5),
}
"""Name -> config: Mistral 7B."""
