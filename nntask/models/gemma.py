"""Gemma 3 (Gemma Team, 2025) for text, with the semantics of transformers' ``Gemma3ForCausalLM``.

Norms stand around both layers and multiply by weight + 1, queries and keys are normed head by head, most blocks see a window and turn by frequencies
of their own, and token embeddings are scaled by sqrt(C).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..errors import UsageError
from .config_checks import LARGEST_DEPTH, check_object, shown
from .config_fields import ACTIVATIONS, choice, count, layer_kinds, positive, switch
from .description import AttentionShape, BlockShape, Description, NormShape
from .foreign_keys import Only, Rules, Used, off
from .llama import NAMES, GatedConfig
from .names import Names
from .qwen import FULL, SLIDING
from .rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GatedConfig):
    """Shape and hyperparameters of a Gemma 3; field names and meaning as in ``transformers.Gemma3TextConfig``.

    Args:
        hidden_activation: of the gate.
        head_dim: D.
        query_pre_attn_scalar: scores are divided by its square root.
        sliding_window: tokens that a token sees in blocks with a window, itself included.
        layer_types: for each block "full_attention" or "sliding_attention"; None for every sixth block full.
        rope_local_base_freq: base of the rotary frequencies in blocks with a window; `rope_theta` and `rope_scaling` are those of the others.
        attention_bias: whether the projections of attention have biases.
        final_logit_softcapping: scores of tokens are capped by it; None for as they are.

    Raises:
        UsageError: a value breaks its rule.
    """

    num_key_value_heads: int | None = count(4, 4)
    head_dim: int | None = count(256, 256)
    hidden_activation: str = choice(ACTIVATIONS, "gelu_pytorch_tanh")
    query_pre_attn_scalar: int = count(256, 256)
    sliding_window: int = count(512, 4096)
    layer_types: tuple[str, ...] | None = layer_kinds((FULL, SLIDING))
    rope_theta: float = positive(1e6, 1e6)
    rope_local_base_freq: float = positive(10000.0, 10000.0)
    attention_bias: bool = switch(False)
    final_logit_softcapping: float | None = positive(30.0, None)
    tie_word_embeddings: bool = switch(True)

    kinds_keys: ClassVar[tuple[str, ...]] = ("layer_types",)
    foreign: ClassVar[Rules] = {
        "sliding_window_pattern": Used(),
        "_sliding_window_pattern": Used(),
        "attn_logit_softcapping": Only((None,), "use the config of a Gemma 2, whose scores of attention are capped"),
        **off("use a Gemma 3 of text, whose tokens see those before them", "use_bidirectional_attention"),
    }
    model_type: ClassVar[str] = "gemma3_text"
    title: ClassVar[str] = "Gemma 3"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    names: ClassVar[Names] = replace(
        NAMES,
        modules={
            **NAMES.modules,
            "attention_end_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward_end_norm": "post_feedforward_layernorm",
        },
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """transformers 5 has rotary parameters for each kind of block, older files a pattern in place of the list."""
        both, taken = values.get("rope_parameters"), dict(values)
        if isinstance(both, Mapping) and (FULL in both or SLIDING in both):
            for kind in (FULL, SLIDING):
                check_object(both.get(kind), f"{kind} of rope_parameters in {source}", "rope_theta")
            if (scaling := both[SLIDING].get("rope_type", "default")) != "default":
                raise UsageError(
                    f"rope_type of {SLIDING} in {source} must be default, as blocks with a window turn unscaled, got {shown(scaling)}; write default"
                )
            taken["rope_parameters"] = both[FULL]
            taken["rope_local_base_freq"] = both[SLIDING].get("rope_theta", 10000.0)
        known = super().read(taken, source)
        pattern, count = values.get("sliding_window_pattern", values.get("_sliding_window_pattern")), values.get("num_hidden_layers")
        if type(count) is int and count <= LARGEST_DEPTH:
            if known.get("layer_types") is None and type(pattern) is int and pattern > 0:
                known["layer_types"] = _kinds(count, pattern)
            if isinstance(kinds := known.get("layer_types"), list | tuple) and list(kinds) == _kinds(count):
                known["layer_types"] = None
        return known

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a block."""
        kinds = self.layer_types or _kinds(self.num_hidden_layers)
        return None if kinds[layer] == FULL else self.sliding_window

    @property
    def norm(self) -> NormShape:
        """Of all norms."""
        return NormShape(kind="rms", eps=self.rms_norm_eps, offset=1.0)

    @property
    def description(self) -> Description:
        """The model's parts."""
        found = super().description
        stack, head = replace(found.stack, embedding_scale=self.hidden_size**0.5), replace(found.head, cap=self.final_logit_softcapping)
        return replace(found, stack=stack, head=head)

    def block(self, layer: int) -> BlockShape:
        """The parts of one block."""
        return replace(super().block(layer), norms="around")

    def attention(self, layer: int) -> AttentionShape:
        """The attention of one block."""
        local = Rotary(size=self.head_size, theta=self.rope_local_base_freq)
        found = super().attention(layer)
        return replace(
            found,
            scale=self.query_pre_attn_scalar**-0.5,
            has_bias=self.attention_bias,
            has_out_bias=self.attention_bias,
            head_norm=self.norm,
            rotary=found.rotary if self.window(layer) is None else local,
        )

    @property
    def activation(self) -> str:
        """Name of the activation's kernel."""
        return ACTIVATIONS[self.hidden_activation]

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, with rotary parameters for each kind of block."""
        values = super().to_dict()
        scaling = values.pop("rope_scaling") or {"rope_type": "default"}
        local = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
        del values["hidden_act"], values["rope_theta"], values["rope_local_base_freq"]
        kinds = self.layer_types or _kinds(self.num_hidden_layers)
        return {**values, "layer_types": list(kinds), "rope_parameters": {FULL: {**scaling, "rope_theta": self.rope_theta}, SLIDING: local}}


def _kinds(count: int, pattern: int = 6) -> list[str]:
    """Kinds of `count` blocks, every one of `pattern` full."""
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(count)]


PRESETS: Final[Mapping[str, Gemma3Config]] = {
    "gemma3-270m": Gemma3Config(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        sliding_window=512,
    ),
    "gemma3-1b": Gemma3Config(
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        sliding_window=512,
    ),
}
"""Name -> config: Gemma 3 270M and 1B."""
