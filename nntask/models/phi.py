"""Phi (Li et al., 2023), with the semantics of transformers' ``PhiForCausalLM``.

Both layers of a block read the stream through one norm, a part of each head turns with the position, and every product has a bias, the head's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final

from ..architecture.config_checks import ACTIVATIONS, choice, positive, probability
from ..architecture.description import BlockShape, Description, HeadShape, NormShape, StackShape
from ..architecture.foreign_keys import Rules, off
from ..architecture.names import Names
from ..architecture.rotary_config import PartialRotaryConfig
from .llama import NAMES


@dataclass(frozen=True, kw_only=True)
class PhiConfig(PartialRotaryConfig):
    """Shape and hyperparameters of a Phi 1 to 2; field names and meaning as in ``transformers.PhiConfig``.

    Args:
        hidden_act: one of `ACTIVATIONS`.
        resid_pdrop, embd_pdrop: dropout probability after each layer, after the embeddings.
        layer_norm_eps: term added to the variance.
    """

    partial_rotary_factor: float = positive(0.5, 0.5)
    hidden_act: str = choice(ACTIVATIONS, "gelu_new")
    resid_pdrop: float = probability(0.0)
    embd_pdrop: float = probability(0.0)
    layer_norm_eps: float = positive(1e-5, 1e-5)

    model_type: ClassVar[str] = "phi"
    title: ClassVar[str] = "Phi"
    architecture: ClassVar[str] = "PhiForCausalLM"
    dropouts: ClassVar[tuple[str, ...]] = ("resid_pdrop", "embd_pdrop", "attention_dropout")
    foreign: ClassVar[Rules] = off("use the config of a Phi without norms of queries and keys", "qk_layernorm")
    names: ClassVar[Names] = replace(
        NAMES,
        modules={**NAMES.modules, "out": "dense", "up": "fc1", "down": "fc2", "norm": "final_layernorm"},
        outside={"head_bias": "lm_head.bias"},
        dropped=(),
    )

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        std, norm = self.initializer_range, NormShape(kind="layer", eps=self.layer_norm_eps)
        attention = self.attention_shape(has_bias=True, has_out_bias=True, dropout=self.attention_dropout, rotary=self.rotary)
        feed_forward = self.feed_forward_shape(self.hidden_act)
        block = BlockShape(attention=attention, feed_forward=feed_forward, norm=norm, is_parallel=True, has_two_norms=False, dropout=self.resid_pdrop)
        return Description(
            stack=StackShape(blocks=(block,) * self.n_layer, std=std, dropout=self.embd_pdrop, norm=norm),
            head=HeadShape(is_tied=self.tie_word_embeddings, std=std, has_bias=True),
        )


PRESETS: Final[Mapping[str, PhiConfig]] = {
    "phi-1.5": PhiConfig.of_size(51200, 2048, 8192, 24, 32, 2048),
    "phi-2": PhiConfig.of_size(51200, 2560, 10240, 32, 32, 2048, partial_rotary_factor=0.4),
}
"""Name -> config: Phi 1.5 and 2."""
