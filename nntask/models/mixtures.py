"""Mixtures of experts with the semantics of transformers' ``MixtralForCausalLM``, ``OlmoeForCausalLM``, ``Qwen2MoeForCausalLM`` and
``Qwen3MoeForCausalLM``: LLaMAs whose feed-forward layers are several experts, of which a router chooses some for each token.

Files store one matrix per expert and layer; transformers holds those of all experts of a block in one array, which is read as well. Of equal scores
the expert with the lower index is chosen; torch leaves that choice open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

from ..architecture.config_checks import count, factor, layer_kinds, layers, positive, switch
from ..architecture.description import AttentionShape, BlockShape, Description, FeedForwardShape, MixtureShape
from ..architecture.foreign_keys import Alias, Rules, ignored, only
from ..architecture.names import Names, Stacked
from ..errors import UsageError
from .llama import NAMES, GatedConfig
from .qwen import FULL, SLIDING

_MODULES: Final = {**NAMES.modules, "router": "gate", "shared": "shared_expert", "shared_gate": "shared_expert_gate"}


def _stacked(gate: str, up: str, down: str) -> tuple[Stacked, ...]:
    return (
        Stacked(whole="experts.gate_up_proj", module="experts", members=(gate, up)),
        Stacked(whole="experts.down_proj", module="experts", members=(down,)),
    )


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(GatedConfig):
    """Base of the configs with mixtures of experts.

    Args:
        num_experts_per_tok: K, number of experts for each token; at most E.
        output_router_logits: whether the load-balancing loss is added to the loss in training.
        router_aux_loss_coef: factor of that loss.

    Attributes:
        experts_key: key of E, the number of experts.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum; a field of some families.
    """

    num_experts_per_tok: int = count(2, 2)
    output_router_logits: bool = switch(False)
    router_aux_loss_coef: float = factor(0.001)

    experts_key: ClassVar[str] = "num_experts"
    norm_topk_prob = True
    names: ClassVar[Names] = replace(NAMES, modules=_MODULES, stacked=_stacked("gate_proj", "up_proj", "down_proj"))

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that a token does not choose more experts than there are."""
        chosen, experts = values["num_experts_per_tok"], values[cls.experts_key]
        if chosen > experts:
            raise UsageError(
                f"num_experts_per_tok in {source} must be at most {cls.experts_key} = {experts}, got {chosen}",
                f"the nearest legal value is {experts}",
            )
        super().check_together(values, source)

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        described = super().description
        return replace(described, balance=self.router_aux_loss_coef) if self.output_router_logits and self._mixed_layers else described

    @property
    def _mixed_layers(self) -> list[int]:
        """Numbers of the blocks with experts."""
        return [layer for layer in range(self.n_layer) if self.has_experts(layer)]

    def has_experts(self, layer: int) -> bool:
        """Return whether a block has experts instead of one feed-forward layer."""
        return True

    def block(self, layer: int) -> BlockShape:
        """Return the parts of one block, layer from 0."""
        return replace(super().block(layer), feed_forward=self.mixture() if self.has_experts(layer) else self.dense())

    def dense(self) -> FeedForwardShape:
        """Return the feed-forward layer of a block without experts."""
        return self.feed_forward()

    def mixture(self) -> MixtureShape:
        """Return the experts of a block."""
        return MixtureShape(
            expert=self.feed_forward(),
            num_experts=getattr(self, self.experts_key),
            num_chosen=self.num_experts_per_tok,
            renormalises=self.norm_topk_prob,
            std=self.initializer_range,
        )


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MixtureConfig):
    """Shape and hyperparameters of a Mixtral (Jiang et al., 2024); field names and meaning as in ``transformers.MixtralConfig``.

    Args:
        num_key_value_heads: G; 8 by default, H if null.
        rope_theta: base of the rotary frequencies.
        sliding_window: number of tokens that a token sees, itself included; None for all.
        num_local_experts: E, number of experts.
    """

    num_key_value_heads: int | None = count(8, 8, or_null=True)
    rope_theta: float = positive(1e6, 1e6)
    rms_norm_eps: float = positive(1e-5, 1e-5)
    sliding_window: int | None = count(4096, None)
    num_local_experts: int = count(8, 8)

    experts_key: ClassVar[str] = "num_local_experts"
    model_type: ClassVar[str] = "mixtral"
    title: ClassVar[str] = "Mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    unwritten: ClassVar[tuple[str, ...]] = ("head_dim",)
    foreign: ClassVar[Rules] = {
        "num_experts": Alias("num_local_experts"),
        **only((0.0, 0, None), "set it to 0: the inputs of routers are not changed at random here", "router_jitter_noise"),
    }
    names: ClassVar[Names] = replace(
        NAMES,
        modules={**_MODULES, "feed_forward": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"},
        stacked=_stacked("w1", "w3", "w2"),
        older={f".mlp.{end}": f".block_sparse_moe.{end}" for end in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")},
    )


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MixtureConfig):
    """Shape and hyperparameters of an OLMoE (Muennighoff et al., 2024); field names and meaning as in ``transformers.OlmoeConfig``.

    Args:
        rms_norm_eps: term added to the mean of squares.
        attention_bias: whether the projections of attention have biases.
        num_experts: E, number of experts.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        clip_qkv: largest magnitude of queries, keys and values before rotation; None for no limit.
    """

    rms_norm_eps: float = positive(1e-5, 1e-5)
    clip_qkv: float | None = positive(8.0, None)
    attention_bias: bool = switch(False)
    num_experts: int = count(64, 64)
    num_experts_per_tok: int = count(8, 8)
    norm_topk_prob: bool = switch(False)
    router_aux_loss_coef: float = factor(0.01)

    model_type: ClassVar[str] = "olmoe"
    title: ClassVar[str] = "OLMoE"
    architecture: ClassVar[str] = "OlmoeForCausalLM"
    unwritten: ClassVar[tuple[str, ...]] = ("head_dim",)
    foreign: ClassVar[Rules] = {
        "num_local_experts": Alias("num_experts"),
    }

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that heads have the width that the joint norm of queries has in transformers."""
        super().check_together(values, source)
        size, usual = values["head_dim"], values["hidden_size"] // values["num_attention_heads"]
        if size not in (None, usual):
            raise UsageError(f"head_dim in {source} must be hidden_size / num_attention_heads = {usual}, got {size}", "leave it out")

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), head_norm=self.norm, has_joint_norm=True, clip=self.clip_qkv)


@dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(MixtureConfig):
    """Base of the configs of Qwen's mixtures of experts, some of whose blocks may have one feed-forward layer instead of experts.

    Args:
        moe_intermediate_size: I of an expert; `intermediate_size` is that of blocks without experts.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        decoder_sparse_step: n, if every nth block has experts.
        mlp_only_layers: numbers of further blocks without experts.
        use_sliding_window: whether tokens see a window only.
        sliding_window: number of tokens that a token sees in a window, itself included; 0 or None for all.
    """

    moe_intermediate_size: int = count(768, 768)
    norm_topk_prob: bool = switch(False)
    decoder_sparse_step: int = count(1, 1)
    mlp_only_layers: tuple[int, ...] = layers()
    use_sliding_window: bool = switch(False)
    sliding_window: int | None = count(4096, 4096, or_null=True, or_zero=True)

    inner_key: ClassVar[str] = "moe_intermediate_size"
    unwritten: ClassVar[tuple[str, ...]] = ("head_dim",)

    def has_experts(self, layer: int) -> bool:
        """Return whether a block has experts instead of one feed-forward layer."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def dense(self) -> FeedForwardShape:
        """Return the feed-forward layer of a block without experts."""
        return replace(self.feed_forward(), inner_size=self.intermediate_size)

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token sees in a block; None for all."""
        return self.sliding_window or None if self.use_sliding_window else None

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object."""
        return {**super().to_dict(), "mlp_only_layers": list(self.mlp_only_layers)}


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(QwenMoeConfig):
    """Shape and hyperparameters of a Qwen2-MoE (Yang et al., 2024); field names and meaning as in ``transformers.Qwen2MoeConfig``.

    Args:
        moe_intermediate_size: I of an expert.
        shared_expert_intermediate_size: I of the expert that all tokens pass through.
        num_experts: E, number of experts.
        qkv_bias: whether the projections to queries, keys and values have biases.
        max_window_layers: number of blocks from which on tokens see all, with `use_sliding_window`.
        layer_types: for each block "full_attention" or "sliding_attention"; None for windows in every other block below `max_window_layers`.
    """

    moe_intermediate_size: int = count(1408, 1408)
    shared_expert_intermediate_size: int = count(5632, 5632)
    num_experts: int = count(60, 60)
    num_experts_per_tok: int = count(4, 4)
    qkv_bias: bool = switch(True)
    max_window_layers: int = count(28, 28, or_zero=True)
    layer_types: tuple[str, ...] | None = layer_kinds((FULL, SLIDING))

    kinds_keys: ClassVar[tuple[str, ...]] = ("layer_types",)
    model_type: ClassVar[str] = "qwen2_moe"
    title: ClassVar[str] = "Qwen2-MoE"
    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token sees in a block; None for all."""
        is_windowed = layer % 2 == 0 and layer < self.max_window_layers if self.layer_types is None else self.layer_types[layer] == SLIDING
        return super().window(layer) if is_windowed else None

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), has_bias=self.qkv_bias)

    def mixture(self) -> MixtureShape:
        """Return the experts of a block."""
        return replace(super().mixture(), shared=replace(self.feed_forward(), inner_size=self.shared_expert_intermediate_size))


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(QwenMoeConfig):
    """Shape and hyperparameters of a Qwen3-MoE (Yang et al., 2025); field names and meaning as in ``transformers.Qwen3MoeConfig``.

    Args:
        num_key_value_heads: G.
        num_local_experts: E, number of experts; num_experts in files of transformers 4.
        attention_bias: whether the projections of attention have biases.
    """

    num_key_value_heads: int | None = count(4, 4, or_null=True)
    num_local_experts: int = count(128, 128)
    num_experts_per_tok: int = count(8, 8)
    attention_bias: bool = switch(False)

    experts_key: ClassVar[str] = "num_local_experts"
    model_type: ClassVar[str] = "qwen3_moe"
    title: ClassVar[str] = "Qwen3-MoE"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    foreign: ClassVar[Rules] = {
        "num_experts": Alias("num_local_experts"),
        **ignored("transformers' class does not read it", "max_window_layers"),
    }

    def attention(self, layer: int) -> AttentionShape:
        """Return the attention of one block."""
        return replace(super().attention(layer), head_norm=self.norm)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, with the number of experts under the names of both versions of transformers."""
        return {**super().to_dict(), "num_experts": self.num_local_experts}


_LONG: Final[dict[str, Any]] = {"rope_theta": 1e6}
PRESETS_MIXTRAL: Final[Mapping[str, MixtralConfig]] = {"mixtral-8x7b": MixtralConfig.of_size(32000, 4096, 14336, 32, 32, 32768)}
"""Name -> config: Mixtral 8x7B."""

PRESETS_OLMOE: Final[Mapping[str, OlmoeConfig]] = {
    "olmoe-tiny": OlmoeConfig.of_size(4096, 256, 256, 4, 4, 256, num_experts=8, num_experts_per_tok=2, output_router_logits=True),
    "olmoe-1b-7b": OlmoeConfig.of_size(50304, 2048, 1024, 16, 16, 4096),
}
"""Name -> config: a small one that learns text in minutes, and OLMoE 1B-7B."""

PRESETS_QWEN2: Final[Mapping[str, Qwen2MoeConfig]] = {
    "qwen1.5-moe-a2.7b": Qwen2MoeConfig.of_size(151936, 2048, 1408, 24, 16, 8192, intermediate_size=5632, num_key_value_heads=16, **_LONG)
}
"""Name -> config: Qwen1.5-MoE A2.7B."""

PRESETS_QWEN3: Final[Mapping[str, Qwen3MoeConfig]] = {
    "qwen3-30b-a3b": Qwen3MoeConfig.of_size(151936, 2048, 768, 48, 32, 40960, intermediate_size=6144, head_dim=128, norm_topk_prob=True, **_LONG)
}
"""Name -> config: Qwen3 30B-A3B."""
