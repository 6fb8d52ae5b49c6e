"""LLaMA (Touvron et al., 2023; Llama 3, 2024), with the semantics of transformers' ``LlamaForCausalLM``, and the base of models derived from it.

Matrices are (out, in), as Hugging Face stores them, so that tiles map onto files without transposition. Older checkpoints also hold the rotary
frequencies, which are computed from the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

from ..architecture.config_checks import choice, positive, switch
from ..architecture.description import AttentionShape, BlockShape, Description, FeedForwardShape, HeadShape, NormShape, StackShape
from ..architecture.names import Names
from ..architecture.rotary import RopeScaling
from ..architecture.rotary_config import RotaryConfig
from .transformer import Transformer

NAMES: Final = Names(
    modules={
        "embed": "embed_tokens",
        "stack": "",
        "blocks": "layers",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "out": "o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    },
    prefix="model.",
    embedding="model.embed_tokens.weight",
    dropped=("rotary_emb.inv_freq",),
)


@dataclass(frozen=True, kw_only=True)
class GatedConfig(RotaryConfig):
    """Base of LLaMA and of the models derived from it: RMS norms before the layers, rotary positions, a gate in the feed-forward layer.

    Args:
        hidden_act: "silu", or its synonym "swish".
        rms_norm_eps: term added to the mean of squares.

    Attributes:
        gate_key: key of the activation of the gate.
        attention_bias, mlp_bias: whether the projections of attention and of the feed-forward layer have biases; fields of some families.
    """

    hidden_act: str = choice(("silu", "swish"), "silu")
    rms_norm_eps: float = positive(1e-5, 1e-6)

    names: ClassVar[Names] = NAMES
    num_inner_matrices: ClassVar[int] = 3
    gate_key: ClassVar[str] = "hidden_act"
    attention_bias = mlp_bias = False

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        return Description(
            stack=StackShape(blocks=tuple(self.block(layer) for layer in range(self.n_layer)), std=self.initializer_range, norm=self.norm),
            head=HeadShape(is_tied=self.tie_word_embeddings, std=self.initializer_range),
        )

    @property
    def norm(self) -> NormShape:
        """Shape of all norms."""
        return NormShape(kind="rms", eps=self.rms_norm_eps)

    def block(self, layer: int) -> BlockShape:
        """Return the parts of one block, layer from 0."""
        return BlockShape(attention=self.attention(layer), feed_forward=self.feed_forward(), norm=self.norm)

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block, layer from 0."""
        window = self.window(layer)
        return self.attention_shape(
            has_bias=self.attention_bias,
            has_out_bias=self.attention_bias,
            dropout=self.attention_dropout,
            window=None if window is None or window >= self.n_positions else window,
            rotary=self.rotary,
        )

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token sees in a block, itself included; None for all."""
        window: int | None = getattr(self, "sliding_window", None)
        return window

    def feed_forward(self) -> FeedForwardShape:
        """Return the feed-forward layer of every block."""
        return self.feed_forward_shape(getattr(self, self.gate_key), has_gate=True, has_bias=self.mlp_bias)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(GatedConfig):
    """Shape and hyperparameters of a LLaMA; field names and meaning as in ``transformers.LlamaConfig``, with the fields of the base classes.

    Args:
        attention_bias, mlp_bias: whether the projections of attention and of the feed-forward layer have biases.
    """

    attention_bias: bool = switch(False)
    mlp_bias: bool = switch(False)

    model_type: ClassVar[str] = "llama"
    title: ClassVar[str] = "LLaMA"
    architecture: ClassVar[str] = "LlamaForCausalLM"


class Llama(Transformer):
    """A LLaMA on a runtime, with the arguments of `Transformer`."""


_SCALING: Final = RopeScaling(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_LLAMA_3_2: Final[dict[str, Any]] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": _SCALING,
}
PRESETS: Final[dict[str, LlamaConfig]] = {
    "llama-tiny": LlamaConfig.of_size(4096, 256, 704, 4, 4, 256, num_key_value_heads=2, rms_norm_eps=1e-5),
    "llama-1b": LlamaConfig.of_size(128256, 2048, 8192, 16, 32, 131072, **_LLAMA_3_2),
    "llama-3b": LlamaConfig.of_size(128256, 3072, 8192, 28, 24, 131072, **_LLAMA_3_2),
}
"""Name -> config. `llama-tiny` learns text in minutes on two cores; the others are Llama 3.2 1B and 3B."""
