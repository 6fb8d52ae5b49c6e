"""GPT-Neo (Black et al., 2021), with the semantics of transformers' ``GPTNeoForCausalLM``: blocks see all tokens or a window, in turn, and scores are
not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

from ..architecture.config_checks import ACTIVATIONS, LARGEST_DEPTH, choice, count, depth, layer_kinds, positive, probability, shown, switch
from ..architecture.description import AttentionShape, BlockShape, Description, HeadShape, NormShape, StackShape
from ..architecture.family_config import KeyedConfig
from ..architecture.foreign_keys import Alias, Rules, Used
from ..architecture.names import Names
from ..errors import UsageError
from .gpt2 import NAMES

GLOBAL: Final = "global"
LOCAL: Final = "local"


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(KeyedConfig):
    """Shape and hyperparameters of a GPT-Neo; field names and meaning as in ``transformers.GPTNeoConfig``.

    Args:
        vocab_size, hidden_size, num_layers, num_heads, max_position_embeddings: V, C, number of blocks, H, which divides C, and P.
        intermediate_size: I; None for 4 C.
        attention_layers: for each block "global" or "local"; None for the two in turn.
        window_size: number of tokens that a token sees in a local block, itself included.
        activation_function: one of `ACTIVATIONS`.
        resid_dropout, embed_dropout, attention_dropout: dropout probability after each layer, after the embeddings, on attention probabilities.
        layer_norm_epsilon: term added to the variance.
        initializer_range: standard deviation of initial weights.
        tie_word_embeddings: whether the head is the token embedding.
    """

    vocab_size: int = count(50257)
    hidden_size: int = count(768)
    num_layers: int = depth(12)
    num_heads: int = count(12)
    max_position_embeddings: int = count(2048)
    intermediate_size: int | None = count(3072, None)
    attention_layers: tuple[str, ...] | None = layer_kinds((GLOBAL, LOCAL))
    window_size: int = count(256, 256)
    activation_function: str = choice(ACTIVATIONS, "gelu_new")
    resid_dropout: float = probability(0.0)
    embed_dropout: float = probability(0.0)
    attention_dropout: float = probability(0.0)
    layer_norm_epsilon: float = positive(1e-5, 1e-5)
    initializer_range: float = positive(0.02, 0.02)
    tie_word_embeddings: bool = switch(True)

    model_type: ClassVar[str] = "gpt_neo"
    title: ClassVar[str] = "GPT-Neo"
    architecture: ClassVar[str] = "GPTNeoForCausalLM"
    layers_key: ClassVar[str] = "num_layers"
    heads_key: ClassVar[str] = "num_heads"
    kinds_keys: ClassVar[tuple[str, ...]] = ("attention_layers",)
    foreign: ClassVar[Rules] = {"attention_types": Used(), "num_attention_heads": Alias("num_heads"), "num_hidden_layers": Alias("num_layers")}
    dropouts: ClassVar[tuple[str, ...]] = ("resid_dropout", "embed_dropout", "attention_dropout")
    names: ClassVar[Names] = replace(
        NAMES,
        modules={**NAMES.modules, "attention": "attn.attention", "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"},
        joined=(),
        dropped=(".attention.bias", ".attention.masked_bias"),
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read the ``attention_types`` of older files, pairs of a list of kinds and its number of repeats, instead of the list of all blocks."""
        known, types = super().read(values, source), values.get("attention_types")
        if known.get("attention_layers") is None and types is not None:
            try:
                known["attention_layers"] = tuple(kind for kinds, times in types for _ in range(min(times, LARGEST_DEPTH)) for kind in kinds)
            except (TypeError, ValueError):
                rule = 'must be pairs of a list of kinds and how often it is repeated, like [[["global", "local"], 6]]'
                raise UsageError(f"attention_types in {source} {rule}, got {shown(types)}", "correct it") from None
        if isinstance(kinds := known.get("attention_layers"), list | tuple) and list(kinds) == _in_turn(known.get("num_layers")):
            known["attention_layers"] = None
        return known

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        std, norm = self.initializer_range, NormShape(kind="layer", eps=self.layer_norm_epsilon)
        feed_forward = self.feed_forward_shape(self.activation_function)
        blocks = tuple(
            BlockShape(attention=self._attention(layer), feed_forward=feed_forward, norm=norm, dropout=self.resid_dropout)
            for layer in range(self.num_layers)
        )
        return Description(
            stack=StackShape(blocks=blocks, std=std, num_positions=self.n_positions, dropout=self.embed_dropout, norm=norm),
            head=HeadShape(is_tied=self.tie_word_embeddings, std=std),
        )

    def _attention(self, layer: int) -> AttentionShape:
        kind = (self.attention_layers or _in_turn(self.num_layers))[layer]
        window = self.window_size if kind == LOCAL and self.window_size < self.n_positions else None
        return self.attention_shape(scale=1.0, has_bias=False, has_out_bias=True, dropout=self.attention_dropout, window=window)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, with the kinds of blocks in the older form, which every version reads."""
        values = super().to_dict()
        kinds = values.pop("attention_layers") or _in_turn(self.num_layers)
        return {**values, "attention_types": [[list(kinds), 1]]}


def _in_turn(num_layers: Any) -> list[str]:
    """Return the kinds of blocks of a config that does not list them."""
    return [(GLOBAL, LOCAL)[layer % 2] for layer in range(num_layers if type(num_layers) is int and num_layers <= LARGEST_DEPTH else 0)]


PRESETS: Final[Mapping[str, GPTNeoConfig]] = {
    "gpt-neo-125m": GPTNeoConfig(vocab_size=50257, hidden_size=768, num_layers=12, num_heads=12, max_position_embeddings=2048),
    "gpt-neo-1.3b": GPTNeoConfig(vocab_size=50257, hidden_size=2048, num_layers=24, num_heads=16, max_position_embeddings=2048),
}
"""Name -> config: GPT-Neo 125M and 1.3B."""
