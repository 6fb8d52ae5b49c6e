"""GPT-2 (Radford et al., 2019), with the semantics of transformers' ``GPT2LMHeadModel``.

Its files have matrices (in, out), and q, k and v as column blocks of one ``c_attn``. Checkpoints on the Hub come with and without the prefix, with
and without attention masks (``attn.bias``), and some have a head although it is tied to the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import ClassVar, Final

from ..architecture.config_checks import ACTIVATIONS, choice, count, depth, positive, probability, switch
from ..architecture.description import BlockShape, Description, HeadShape, NormShape, StackShape
from ..architecture.family_config import ModelConfig
from ..architecture.foreign_keys import Alias, Rules, ignored
from ..architecture.names import Joined, Names
from .transformer import Transformer

NAMES: Final = Names(
    modules={
        "embed": "wte",
        "stack": "",
        "positions": "wpe",
        "blocks": "h",
        "attention_norm": "ln_1",
        "attention": "attn",
        "out": "c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward": "mlp",
        "up": "c_fc",
        "down": "c_proj",
        "norm": "ln_f",
    },
    prefix="transformer.",
    embedding="transformer.wte.weight",
    joined=(Joined(members=("q", "k", "v"), whole="c_attn", axis=1),),
    dropped=(".attn.bias", ".attn.masked_bias"),
)


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """Shape and hyperparameters of a GPT-2; field names and meaning as in ``transformers.GPT2Config``.

    Args:
        vocab_size, n_positions, n_embd, n_layer, n_head: V, P, C, number of blocks, and H, which divides C.
        n_inner: I; None for 4 C.
        activation_function: one of `ACTIVATIONS`.
        resid_pdrop, embd_pdrop, attn_pdrop: dropout probability after each branch, after the embeddings, on attention probabilities.
        layer_norm_epsilon: term added to the variance.
        initializer_range: standard deviation of initial weights.
        scale_attn_weights: whether scores are divided by sqrt(C / H).
        scale_attn_by_inverse_layer_idx: whether the scores of layer i (from 0) are also divided by i + 1.
        reorder_and_upcast_attn: accepted without effect, since scores are always computed in fp32 or better.
        tie_word_embeddings: whether the head is the token embedding.
    """

    model_type: ClassVar[str] = "gpt2"
    title: ClassVar[str] = "GPT-2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    positions_key: ClassVar[str] = "n_positions"
    layers_key: ClassVar[str] = "n_layer"
    width_key: ClassVar[str] = "n_embd"
    heads_key: ClassVar[str] = "n_head"
    inner_key: ClassVar[str] = "n_inner"
    example_key: ClassVar[str] = "n_embd"
    dropouts: ClassVar[tuple[str, ...]] = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    names: ClassVar[Names] = NAMES
    foreign: ClassVar[Rules] = {
        "hidden_size": Alias("n_embd"),
        "max_position_embeddings": Alias("n_positions"),
        "num_attention_heads": Alias("n_head"),
        "num_hidden_layers": Alias("n_layer"),
        **ignored("older keys that no version of the model reads", "n_ctx n_special predict_special_tokens"),
    }

    vocab_size: int = count(50257)
    n_positions: int = count(1024)
    n_embd: int = count(768)
    n_layer: int = depth(12)
    n_head: int = count(12)
    n_inner: int | None = count(3072, None)
    activation_function: str = choice(ACTIVATIONS, "gelu_new")
    resid_pdrop: float = probability(0.1)
    embd_pdrop: float = probability(0.1)
    attn_pdrop: float = probability(0.1)
    layer_norm_epsilon: float = positive(1e-5, 1e-5)
    initializer_range: float = positive(0.02, 0.02)
    scale_attn_weights: bool = switch(True)
    scale_attn_by_inverse_layer_idx: bool = switch(False)
    reorder_and_upcast_attn: bool = switch(False)
    tie_word_embeddings: bool = switch(True)

    @cached_property
    def description(self) -> Description:
        """Parts of the model; layers that add to the residual stream begin with std initializer_range / sqrt(2 L) (section 2.3 of the paper)."""
        std, norm = self.initializer_range, NormShape(kind="layer", eps=self.layer_norm_epsilon)
        return Description(
            stack=StackShape(
                blocks=tuple(self._block(layer, norm) for layer in range(self.n_layer)),
                std=std,
                num_positions=self.n_positions,
                dropout=self.embd_pdrop,
                norm=norm,
            ),
            head=HeadShape(is_tied=self.tie_word_embeddings, std=std),
            has_rows_in=True,
        )

    def _block(self, layer: int, norm: NormShape) -> BlockShape:
        std = self.initializer_range
        scale = 1 / sqrt(self.head_size) if self.scale_attn_weights else 1.0
        attention = self.attention_shape(
            scale=scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale,
            has_bias=True,
            has_out_bias=True,
            out_std=std / sqrt(2 * self.n_layer),
            dropout=self.attn_pdrop,
        )
        feed_forward = self.feed_forward_shape(self.activation_function, out_std=std / sqrt(2 * self.n_layer))
        return BlockShape(attention=attention, feed_forward=feed_forward, norm=norm, dropout=self.resid_pdrop)


class GPT2(Transformer):
    """A GPT-2 on a runtime, with the arguments of `Transformer`."""


PRESETS: Final[dict[str, GPT2Config]] = {
    "tiny": GPT2Config(vocab_size=4096, n_positions=256, n_embd=256, n_layer=4, n_head=4).with_dropout(0.0),
    "gpt2": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
    "gpt2-medium": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=1600, n_layer=48, n_head=25),
}
"""Name -> config. `tiny` learns text in minutes on two cores and has no dropout; the names with gpt2 are OpenAI's models."""
