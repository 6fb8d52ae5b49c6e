"""GPT-NeoX (Black et al., 2022) and Pythia (Biderman et al., 2023), with the semantics of transformers' ``GPTNeoXForCausalLM``.

Both layers of a block read the same stream, and a part of each head turns with the position. Files have q, k and v of each head next to each other in
one ``query_key_value``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

from ..architecture.config_checks import ACTIVATIONS, choice, positive, probability, switch
from ..architecture.description import BlockShape, Description, HeadShape, NormShape, StackShape
from ..architecture.foreign_keys import Rules, Used
from ..architecture.names import Joined, Names
from ..architecture.rotary_config import PartialRotaryConfig
from ..errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(PartialRotaryConfig):
    """Shape and hyperparameters of a GPT-NeoX; field names and meaning as in ``transformers.GPTNeoXConfig``.

    Args:
        hidden_act: one of `ACTIVATIONS`.
        hidden_dropout: dropout probability after the embeddings and each layer.
        layer_norm_eps: term added to the variance.
        use_parallel_residual: whether both layers of a block read the same stream.
        attention_bias: whether the projections of attention have biases.
    """

    partial_rotary_factor: float = positive(0.25, 0.25)
    hidden_act: str = choice(ACTIVATIONS, "gelu")
    hidden_dropout: float = probability(0.0)
    layer_norm_eps: float = positive(1e-5, 1e-5)
    use_parallel_residual: bool = switch(True)
    attention_bias: bool = switch(True)

    model_type: ClassVar[str] = "gpt_neox"
    title: ClassVar[str] = "GPT-NeoX"
    architecture: ClassVar[str] = "GPTNeoXForCausalLM"
    dropouts: ClassVar[tuple[str, ...]] = ("hidden_dropout", "attention_dropout")
    foreign: ClassVar[Rules] = {"rotary_pct": Used(), "rotary_emb_base": Used()}
    factor_keys: ClassVar[tuple[str, ...]] = ("rotary_pct",)
    theta_keys: ClassVar[tuple[str, ...]] = ("rotary_emb_base",)
    names: ClassVar[Names] = Names(
        modules={
            "embed": "embed_in",
            "stack": "",
            "blocks": "layers",
            "attention_norm": "input_layernorm",
            "out": "dense",
            "feed_forward_norm": "post_attention_layernorm",
            "feed_forward": "mlp",
            "up": "dense_h_to_4h",
            "down": "dense_4h_to_h",
            "norm": "final_layer_norm",
        },
        prefix="gpt_neox.",
        embedding="gpt_neox.embed_in.weight",
        older={"embed_out.weight": "lm_head.weight"},
        joined=(Joined(members=("q", "k", "v"), whole="query_key_value", axis=0, by_head=True),),
        dropped=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    )

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that heads are not shared and are together as wide as the model, as in the files."""
        super().check_together(values, source)
        width, heads = values["hidden_size"], values["num_attention_heads"]
        for key, only in {"num_key_value_heads": heads, "head_dim": width // heads}.items():
            if values[key] not in (None, only):
                raise UsageError(f"{key} in {source} must be absent, null or {only}, the only value of a GPT-NeoX, got {values[key]}", "leave it out")

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        std, norm = self.initializer_range, NormShape(kind="layer", eps=self.layer_norm_eps)
        attention = self.attention_shape(
            has_bias=self.attention_bias, has_out_bias=self.attention_bias, dropout=self.attention_dropout, rotary=self.rotary
        )
        feed_forward = self.feed_forward_shape(self.hidden_act)
        block = BlockShape(
            attention=attention, feed_forward=feed_forward, norm=norm, is_parallel=self.use_parallel_residual, dropout=self.hidden_dropout
        )
        return Description(
            stack=StackShape(blocks=(block,) * self.n_layer, std=std, dropout=self.hidden_dropout, norm=norm),
            head=HeadShape(is_tied=self.tie_word_embeddings, std=std),
        )


PRESETS: Final[Mapping[str, GPTNeoXConfig]] = {
    "pythia-70m": GPTNeoXConfig.of_size(50304, 512, 2048, 6, 8, 2048),
    "pythia-160m": GPTNeoXConfig.of_size(50304, 768, 3072, 12, 12, 2048),
    "pythia-410m": GPTNeoXConfig.of_size(50304, 1024, 4096, 24, 16, 2048),
    "pythia-1b": GPTNeoXConfig.of_size(50304, 2048, 8192, 16, 8, 2048),
}
"""Name -> config: Pythia of four sizes."""
