"""OPT (Zhang et al., 2022), with the semantics of transformers' ``OPTForCausalLM``: a GPT-2 with ReLU whose first token has position 2.

This file is the example of `docs/guides/models.md`: a config with its rules, a description, and the names of the weights in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

from ..architecture.config_checks import ACTIVATIONS, choice, count, depth, positive, probability, shown, switch, token
from ..architecture.description import BlockShape, Description, HeadShape, NormShape, StackShape
from ..architecture.family_config import KeyedConfig
from ..architecture.foreign_keys import Only, Rules, Used, ignored, only
from ..architecture.names import Names
from ..errors import UsageError

FIRST_POSITION: Final = 2
"""Row of the first token in the table of positions."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(KeyedConfig):
    """Shape and hyperparameters of an OPT; field names and meaning as in ``transformers.OPTConfig``.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: V, C, number of blocks, and H, which divides C.
        ffn_dim, max_position_embeddings: I and P.
        activation_function: one of `ACTIVATIONS`.
        dropout, attention_dropout: dropout probability after each layer, on attention probabilities.
        init_std: standard deviation of initial weights.
        enable_bias: whether products have biases.
        tie_word_embeddings: whether the head is the token embedding.
        pad_token_id: id of padding.
    """

    vocab_size: int = count(50272)
    hidden_size: int = count(768)
    num_hidden_layers: int = depth(12)
    num_attention_heads: int = count(12)
    ffn_dim: int = count(3072)
    max_position_embeddings: int = count(2048)
    activation_function: str = choice(ACTIVATIONS, "relu")
    dropout: float = probability(0.1)
    attention_dropout: float = probability(0.0)
    init_std: float = positive(0.02, 0.02)
    enable_bias: bool = switch(True)
    tie_word_embeddings: bool = switch(True)
    pad_token_id: int | None = token(1)

    model_type: ClassVar[str] = "opt"
    title: ClassVar[str] = "OPT"
    architecture: ClassVar[str] = "OPTForCausalLM"
    inner_key: ClassVar[str] = "ffn_dim"
    foreign: ClassVar[Rules] = {
        "word_embed_proj_dim": Used(),
        **only((True,), "use another OPT than 350m", "do_layer_norm_before layer_norm_elementwise_affine"),
        "_remove_final_layer_norm": Only((False,), "use another OPT than 350m"),
        "layerdrop": Only((0.0, 0, None), "layers are never left out in training here; write 0"),
        **ignored("no version of the model reads it", "activation_dropout"),
    }
    dropouts: ClassVar[tuple[str, ...]] = ("dropout", "attention_dropout")
    names: ClassVar[Names] = Names(
        modules={
            "embed": "embed_tokens",
            "stack": "",
            "positions": "embed_positions",
            "blocks": "layers",
            "attention_norm": "self_attn_layer_norm",
            "attention": "self_attn",
            "q": "q_proj",
            "k": "k_proj",
            "v": "v_proj",
            "out": "out_proj",
            "feed_forward_norm": "final_layer_norm",
            "feed_forward": "",
            "up": "fc1",
            "down": "fc2",
            "norm": "final_layer_norm",
        },
        prefix="model.decoder.",
        embedding="model.decoder.embed_tokens.weight",
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read a config, and refuse embeddings of another width, which only OPT-350m has; `foreign` refuses its norms after the layers."""
        width = values.get("word_embed_proj_dim")
        if width is not None and width != values.get("hidden_size"):
            raise UsageError(
                f"word_embed_proj_dim in {source} must be hidden_size = {values.get('hidden_size')}, got {shown(width)}", "use another OPT than 350m"
            )
        return super().read(values, source)

    @property
    def initializer_range(self) -> float:
        """Standard deviation of initial weights."""
        return self.init_std

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        std, norm = self.init_std, NormShape(kind="layer", eps=1e-5)
        attention = self.attention_shape(has_bias=self.enable_bias, has_out_bias=self.enable_bias, dropout=self.attention_dropout)
        feed_forward = self.feed_forward_shape(self.activation_function, has_bias=self.enable_bias)
        block = BlockShape(attention=attention, feed_forward=feed_forward, norm=norm, dropout=self.dropout)
        rows = self.n_positions + FIRST_POSITION
        stack = StackShape(blocks=(block,) * self.n_layer, std=std, num_positions=rows, first_position=FIRST_POSITION, norm=norm)
        return Description(stack=stack, head=HeadShape(is_tied=self.tie_word_embeddings, std=std))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object."""
        return {**super().to_dict(), "word_embed_proj_dim": self.hidden_size, "do_layer_norm_before": True}


PRESETS: Final[Mapping[str, OPTConfig]] = {
    "opt-125m": OPTConfig.of_size(50272, 768, 3072, 12, 12, 2048),
    "opt-1.3b": OPTConfig.of_size(50272, 2048, 8192, 24, 32, 2048),
}
"""Name -> config: OPT 125M and 1.3B."""
