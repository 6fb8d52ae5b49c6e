"""Gemma 2 and 3 (Gemma Team, 2024 and 2025) for text, with the semantics of transformers' ``Gemma2ForCausalLM`` and ``Gemma3ForCausalLM``.

Norms surround both layers and multiply by weight + 1, some blocks see a window, and token embeddings are scaled by sqrt(C). In Gemma 2, scores of
attention and of tokens are capped. In Gemma 3, queries and keys are normed head by head, and blocks with a window have their own rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

from ..architecture.config_checks import ACTIVATIONS, LARGEST_DEPTH, check_object, choice, count, layer_kinds, positive, shown, switch
from ..architecture.description import AttentionShape, BlockShape, Description, NormShape
from ..architecture.foreign_keys import Only, Rules, Used, off
from ..architecture.names import Names
from ..architecture.rotary import Rotary
from ..errors import UsageError
from .llama import NAMES, GatedConfig
from .qwen import FULL, SLIDING


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(GatedConfig):
    """Base of the configs of Gemma 2 and 3.

    Args:
        hidden_activation: activation of the gate.
        head_dim: D.
        query_pre_attn_scalar: number whose square root divides the scores.
        sliding_window: number of tokens that a token sees in blocks with a window, itself included.
        layer_types: for each block "full_attention" or "sliding_attention"; None makes every `pattern`-th block full.
        attention_bias: whether the projections of attention have biases.
        final_logit_softcapping: soft cap of the scores of tokens; None for none.
    """

    num_key_value_heads: int | None = count(4, 4)
    head_dim: int | None = count(256, 256)
    hidden_activation: str = choice(ACTIVATIONS, "gelu_pytorch_tanh")
    query_pre_attn_scalar: int = count(256, 256)
    sliding_window: int = count(512, 4096)
    layer_types: tuple[str, ...] | None = layer_kinds((FULL, SLIDING))
    attention_bias: bool = switch(False)
    final_logit_softcapping: float | None = positive(30.0, None)
    tie_word_embeddings: bool = switch(True)

    pattern: ClassVar[int]
    gate_key: ClassVar[str] = "hidden_activation"
    kinds_keys: ClassVar[tuple[str, ...]] = ("layer_types",)
    foreign: ClassVar[Rules] = {
        "sliding_window_pattern": Used(),
        "_sliding_window_pattern": Used(),
        **off("use a Gemma of text, whose tokens see those before them", "use_bidirectional_attention"),
    }
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
        """Read the pattern that older files have instead of the list, and ignore their ``hidden_act``, which no version reads."""
        known = super().read({key: value for key, value in values.items() if key != "hidden_act"}, source)
        pattern, count = values.get("sliding_window_pattern", values.get("_sliding_window_pattern")), values.get("num_hidden_layers")
        if type(count) is int and count <= LARGEST_DEPTH:
            if known.get("layer_types") is None and type(pattern) is int and pattern > 0:
                known["layer_types"] = _kinds(count, pattern)
            if isinstance(kinds := known.get("layer_types"), list | tuple) and list(kinds) == _kinds(count, cls.pattern):
                known["layer_types"] = None
        return known

    @property
    def kinds(self) -> list[str]:
        """Kind of each block."""
        return list(self.layer_types or _kinds(self.num_hidden_layers, self.pattern))

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token sees in a block; None for all."""
        return None if self.kinds[layer] == FULL else self.sliding_window

    @property
    def norm(self) -> NormShape:
        """Shape of all norms."""
        return NormShape(kind="rms", eps=self.rms_norm_eps, offset=1.0)

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        found = super().description
        stack, head = replace(found.stack, embedding_scale=self.hidden_size**0.5), replace(found.head, cap=self.final_logit_softcapping)
        return replace(found, stack=stack, head=head)

    def block(self, layer: int) -> BlockShape:
        """Return the parts of one block."""
        return replace(super().block(layer), norms="around")

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), scale=self.query_pre_attn_scalar**-0.5)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object."""
        values = super().to_dict()
        del values["hidden_act"]
        return {**values, "layer_types": self.kinds}


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Shape and hyperparameters of a Gemma 2; field names and meaning as in ``transformers.Gemma2Config``.

    Args:
        layer_types: for each block "full_attention" or "sliding_attention"; None makes every second block full.
        final_logit_softcapping: soft cap of the scores of tokens; None for none.
        attn_logit_softcapping: soft cap of the scores of attention; None for none.
    """

    final_logit_softcapping: float | None = positive(30.0, 30.0, or_null=True)
    attn_logit_softcapping: float | None = positive(50.0, 50.0, or_null=True)

    pattern: ClassVar[int] = 2
    model_type: ClassVar[str] = "gemma2"
    title: ClassVar[str] = "Gemma 2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), cap=self.attn_logit_softcapping)


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Shape and hyperparameters of a Gemma 3; field names and meaning as in ``transformers.Gemma3TextConfig``.

    Args:
        layer_types: for each block "full_attention" or "sliding_attention"; None makes every sixth block full.
        rope_local_base_freq: base of the rotary frequencies in blocks with a window; `rope_theta` and `rope_scaling` apply to the other blocks.
    """

    rope_theta: float = positive(1e6, 1e6)
    rope_local_base_freq: float = positive(10000.0, 10000.0)

    pattern: ClassVar[int] = 6
    foreign: ClassVar[Rules] = {"attn_logit_softcapping": Only((None,), "use the config of a Gemma 2, whose scores of attention are capped")}
    model_type: ClassVar[str] = "gemma3_text"
    title: ClassVar[str] = "Gemma 3"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read the format of transformers 5, too, which has rotary parameters for each kind of block."""
        both, taken = values.get("rope_parameters"), dict(values)
        if isinstance(both, Mapping) and (FULL in both or SLIDING in both):
            for kind in (FULL, SLIDING):
                check_object(both.get(kind), f"{kind} of rope_parameters in {source}", "rope_theta")
            if (scaling := both[SLIDING].get("rope_type", "default")) != "default":
                raise UsageError(
                    f"rope_type of {SLIDING} in {source} must be default, as windowed blocks rotate unscaled, got {shown(scaling)}", "write default"
                )
            taken["rope_parameters"] = both[FULL]
            taken["rope_local_base_freq"] = both[SLIDING].get("rope_theta", 10000.0)
        return super().read(taken, source)

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        found, local = super().attention(layer), Rotary(size=self.head_size, theta=self.rope_local_base_freq)
        return replace(found, head_norm=self.norm, rotary=found.rotary if self.window(layer) is None else local)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, with rotary parameters for each kind of block."""
        values = super().to_dict()
        scaling = values.pop("rope_scaling") or {"rope_type": "default"}
        local = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
        del values["rope_theta"], values["rope_local_base_freq"]
        return {**values, "rope_parameters": {FULL: {**scaling, "rope_theta": self.rope_theta}, SLIDING: local}}


def _kinds(count: int, pattern: int) -> list[str]:
    """Return the kinds of `count` blocks, with every `pattern`-th block full."""
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(count)]


PRESETS_2: Final[Mapping[str, Gemma2Config]] = {
    "gemma2-2b": Gemma2Config.of_size(256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4),
}
"""Name -> config: Gemma 2 2B."""

PRESETS: Final[Mapping[str, Gemma3Config]] = {
    "gemma3-270m": Gemma3Config.of_size(262144, 640, 2048, 18, 4, 32768, num_key_value_heads=1, sliding_window=512),
    "gemma3-1b": Gemma3Config.of_size(262144, 1152, 6912, 26, 4, 32768, num_key_value_heads=1, sliding_window=512),
}
"""Name -> config: Gemma 3 270M and 1B."""
