"""Phi 3 to 4 (Abdin et al., 2024), with the semantics of transformers' ``Phi3ForCausalLM``: a LLaMA with dropout after its layers.

Of each head a part may turn. Files have q, k and v as rows of one matrix, and gate and up as rows of another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from .config_fields import count, positive, probability, token
from .description import AttentionShape, BlockShape
from .foreign_keys import Only, Rules, ignored, off
from .llama import NAMES, GatedConfig
from .names import Joined, Names
from .rotary_config import PartialRotaryConfig

_JOINED: Final = ("q", "k", "v", "gate", "up")


@dataclass(frozen=True, kw_only=True)
class Phi3Config(GatedConfig, PartialRotaryConfig):
    """Shape and hyperparameters of a Phi 3; field names and meaning as in ``transformers.Phi3Config``, see the classes that it is based on.

    Args:
        partial_rotary_factor: part of each head that turns.
        resid_pdrop: dropout probability after each layer.
        sliding_window: tokens that a token sees, itself included; None for all.
        pad_token_id: id of padding, which transformers takes for 32000 where a file does not say it.

    Raises:
        UsageError: a value breaks its rule.
    """

    partial_rotary_factor: float = positive(1.0, 1.0)
    rms_norm_eps: float = positive(1e-5, 1e-5)
    resid_pdrop: float = probability(0.0)
    sliding_window: int | None = count(2047, None)
    pad_token_id: int | None = token(None)

    model_type: ClassVar[str] = "phi3"
    title: ClassVar[str] = "Phi 3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    dropouts: ClassVar[tuple[str, ...]] = ("resid_pdrop", "attention_dropout")
    foreign: ClassVar[Rules] = {
        **off("use the config of a Phi 3 without biases", "attention_bias mlp_bias lm_head_bias"),
        **{key: Only((1, None), "use the config of a Phi 3 whose blocks are alike") for key in ("full_attn_mod", "interpolate_factor")},
        **ignored("no version of the model reads it", "embd_pdrop"),
    }
    names: ClassVar[Names] = replace(
        NAMES,
        modules={attribute: name for attribute, name in NAMES.modules.items() if attribute not in _JOINED},
        joined=(
            Joined(members=("q", "k", "v"), whole="qkv_proj", axis=0, by_groups=True),
            Joined(members=("gate", "up"), whole="gate_up_proj", axis=0),
        ),
    )

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a block."""
        return self.sliding_window

    def attention(self, layer: int) -> AttentionShape:
        """The attention of one block, layer from 0."""
        return replace(super().attention(layer), rotary=self.rotary)

    def block(self, layer: int) -> BlockShape:
        """The parts of one block, layer from 0."""
        return replace(super().block(layer), dropout=self.resid_pdrop)


PRESETS: Final[Mapping[str, Phi3Config]] = {
    "phi3-mini": Phi3Config(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
        sliding_window=2047,
    ),
}
"""Name -> config: Phi 3 mini with 4,096 tokens."""
