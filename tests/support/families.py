"""The model families, each with its oracle in transformers and tilings that divide none of its dimensions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from support import gpt2_oracle, llama_oracle
from support.llama_oracle import SCALINGS

from nntask.architecture.names import Names
from nntask.models import gpt2, llama
from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.models.llama import Llama, LlamaConfig
from nntask.tiling.model_tiling import ModelTiling

MIXED = LlamaConfig(
    vocab_size=61,
    hidden_size=30,
    intermediate_size=47,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=13,
    rope_theta=100.0,
    rope_scaling=SCALINGS[-1],
    attention_bias=True,
)
"""Three groups of two heads of queries whose heads together are wider than the residual stream; an untied head."""
ODD = GPT2Config(
    vocab_size=61,
    n_positions=13,
    n_embd=30,
    n_layer=2,
    n_head=5,
    n_inner=47,
    activation_function="gelu",
    scale_attn_by_inverse_layer_idx=True,
    tie_word_embeddings=False,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
BATCH, LENGTH = 5, 11
"""Of which the tilings below divide nothing."""


@dataclass(frozen=True)
class Family:
    """What tests need of a family.

    Args:
        config: small and odd, an untied head, no dropout.
        uneven: tile sizes that divide no dimension of `BATCH` sequences of `LENGTH` tokens with `config`.
        tilings: for any config: none, and ragged ones, by the heads that share a head of keys.
        longest: what the config calls the longest sequence.
        dropout: fields of a config.
    """

    name: str
    kind: type
    oracle: ModuleType
    names: Names
    config: Any
    uneven: tuple[ModelTiling, ...]
    longest: str
    dropout: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def tilings(self, config: Any) -> list[ModelTiling]:
        """No tiles, and ragged ones of one head, or one group of heads, and of two or three."""
        if self.kind is GPT2:
            return [ModelTiling(), self.uneven[0], ModelTiling(1, 4, 64, 16, 1, 32), ModelTiling(3, 9, 9, 70, 3, 50), ModelTiling(2, 3, 16, 5, 2, 7)]
        group = config.n_head // config.n_kv_head
        return [ModelTiling(), ModelTiling(2, 5, 7, 11, group, 13), ModelTiling(1, 4, 64, 16, 2 * group, 32)]

    def with_dropout(self, p: float) -> Any:
        """The config with dropout wherever there is one."""
        return replace(self.config, **dict.fromkeys(self.dropout, p))


FAMILIES = (
    Family(
        "gpt2",
        GPT2,
        gpt2_oracle,
        gpt2.NAMES,
        ODD,
        (
            ModelTiling(2, 5, 7, 11, 2, 13),
            ModelTiling(3, 4, 8, 10, 3, 9),
            ModelTiling(4, 3, 9, 20, 4, 25),
            ModelTiling(2, 7, 11, 46, 3, 60),
            ModelTiling(3, 10, 29, 3, 2, 7),
        ),
        "n_positions",
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    Family(
        "llama",
        Llama,
        llama_oracle,
        llama.NAMES,
        MIXED,
        (
            ModelTiling(2, 5, 7, 11, 4, 13),
            ModelTiling(3, 4, 8, 10, 2, 9),
            ModelTiling(4, 3, 9, 20, 4, 25),
            ModelTiling(2, 7, 11, 46, 4, 60),
            ModelTiling(3, 10, 29, 3, 2, 7),
        ),
        "max_position_embeddings",
        ("attention_dropout",),
    ),
)
