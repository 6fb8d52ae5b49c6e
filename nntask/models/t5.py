"""T5 (Raffel et al., 2020) and T5 1.1, with the semantics of transformers' ``T5ForConditionalGeneration``.

An encoder and a decoder with RMS norms before the layers, biases of scores by distance, and layers without biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Self

from ..architecture.config_checks import ACTIVATIONS, choice, count, depth, positive, probability, shown, switch, token
from ..architecture.description import BlockShape, Description, HeadShape, NormShape, RelativePositions, StackShape
from ..architecture.family_config import KeyedConfig
from ..architecture.foreign_keys import Alias, Rules, Used
from ..architecture.names import Names
from ..errors import UsageError

PROJECTIONS: Final = {"relu": ("relu", False), "gated-gelu": ("gelu_new", True), "gated-silu": ("silu", True), "gelu": ("gelu", False)}
"""Value of feed_forward_proj -> (name of the activation's kernel, whether there is a gate)."""

LARGEST_DISTANCE: Final = 1 << 20
"""Largest `relative_attention_max_distance`: a table has an entry for every distance up to it."""


@dataclass(frozen=True, kw_only=True)
class T5Config(KeyedConfig):
    """Shape and hyperparameters of a T5; field names and meaning as in ``transformers.T5Config``.

    Args:
        vocab_size, d_model, d_kv, d_ff, num_heads: V, C, D, I and H.
        num_layers, num_decoder_layers: number of blocks of the encoder, and of the decoder; None for the same number.
        n_positions: usual length of sequences; a T5 has no limit, since biases depend on distances alone.
        relative_attention_num_buckets, relative_attention_max_distance: number of buckets of distances, and first distance of the last.
        dropout_rate: dropout probability everywhere.
        layer_norm_epsilon: term added to the mean of squares.
        initializer_factor: scale of initial weights.
        feed_forward_proj: one of `PROJECTIONS`.
        tie_word_embeddings: whether the head is the token embedding.
        scale_decoder_outputs: whether the head's input is scaled by d_model^-0.5; None for only if the head is tied.
        pad_token_id: id of padding.
        decoder_start_token_id: id before the first token of an output.
    """

    vocab_size: int = count(32128)
    d_model: int = count(512)
    d_kv: int = count(64)
    d_ff: int = count(2048)
    num_layers: int = depth(6)
    num_heads: int = count(8)
    num_decoder_layers: int | None = depth(6, None)
    n_positions: int = count(512, 512)
    relative_attention_num_buckets: int = count(32, 32)
    relative_attention_max_distance: int = count(128, 128, LARGEST_DISTANCE)
    dropout_rate: float = probability(0.1)
    layer_norm_epsilon: float = positive(1e-6, 1e-6)
    initializer_factor: float = positive(1.0, 1.0)
    feed_forward_proj: str = choice(PROJECTIONS, "relu")
    tie_word_embeddings: bool = switch(True)
    scale_decoder_outputs: bool | None = switch(None)
    pad_token_id: int | None = token(0)
    decoder_start_token_id: int | None = token(0)

    model_type: ClassVar[str] = "t5"
    title: ClassVar[str] = "T5"
    architecture: ClassVar[str] = "T5ForConditionalGeneration"
    positions_key: ClassVar[str] = "n_positions"
    layers_key: ClassVar[str] = "num_layers"
    width_key: ClassVar[str] = "d_model"
    heads_key: ClassVar[str] = "num_heads"
    inner_key: ClassVar[str] = "d_ff"
    example_key: ClassVar[str] = "d_model"
    dropouts: ClassVar[tuple[str, ...]] = ("dropout_rate",)
    unwritten: ClassVar[tuple[str, ...]] = ("scale_decoder_outputs",)
    objective: ClassVar[str] = "seq2seq"
    objectives: ClassVar[tuple[str, ...]] = ("seq2seq",)
    foreign: ClassVar[Rules] = {
        "hidden_size": Alias("d_model"),
        "num_attention_heads": Alias("num_heads"),
        "num_hidden_layers": Alias("num_layers"),
        "head_dim": Alias("d_kv"),
        "dense_act_fn": Used(),
        "is_gated_act": Used(),
    }

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that buckets can be divided: half of them are for single distances, and an encoder's are halved again for the two directions."""
        buckets, most = values["relative_attention_num_buckets"], values["relative_attention_max_distance"]
        if buckets < 4 or buckets % 4 or most <= buckets // 2:
            raise UsageError(
                f"relative_attention_num_buckets in {source} must be a multiple of 4, and relative_attention_max_distance above half of it, "
                f"got {buckets} and {most}",
                "write for example 32 and 128",
            )

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read a config. The start of an output is the id of padding by default; two further keys repeat ``feed_forward_proj``."""
        known = super().read(values, source)
        activation, has_gate = PROJECTIONS.get(str(known.get("feed_forward_proj", "relu")), (None, None))
        for key, said in {"dense_act_fn": activation, "is_gated_act": has_gate}.items():
            written = values.get(key)
            if said is not None and written is not None and (ACTIVATIONS.get(str(written)) if key == "dense_act_fn" else written) != said:
                raise UsageError(
                    f"{key} in {source} must be {said}, which feed_forward_proj {known.get('feed_forward_proj', 'relu')} implies, "
                    f"got {shown(written)}",
                    "remove it",
                )
        if known.get("decoder_start_token_id") is None:
            known["decoder_start_token_id"] = known.get("pad_token_id") or 0
        return known

    @property
    def longest(self) -> int | None:
        """Largest number of tokens of a sequence: None, since a T5 has no limit."""
        return None

    @property
    def n_layer(self) -> int:
        """Number of blocks of encoder and decoder."""
        return self.num_layers + self.num_decoder_blocks

    @property
    def num_decoder_blocks(self) -> int:
        """Number of blocks of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    def with_layers(self, count: int) -> Self:
        """Return the same config with `count` blocks in all, half of them (rounded down) in the encoder, and at least one in each stack."""
        return replace(self, num_layers=max(1, count // 2), num_decoder_layers=max(1, count - count // 2))

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.d_kv

    @property
    def num_inner_matrices(self) -> int:  # type: ignore[override]
        """Number of matrices of a feed-forward layer."""
        return 3 if PROJECTIONS[self.feed_forward_proj][1] else 2

    @property
    def initializer_range(self) -> float:
        """Standard deviation of most initial weights, which keeps the scale of their inputs."""
        return float(self.initializer_factor * self.d_model**-0.5)

    @property
    def names(self) -> Names:
        """Names and layouts of the model's weights in files."""
        has_gate = PROJECTIONS[self.feed_forward_proj][1]
        return Names(
            modules={
                "embed": "shared",
                "stack": "decoder",
                "blocks": "block",
                "attention": "layer.0.SelfAttention",
                "attention_norm": "layer.0.layer_norm",
                "cross": "layer.1.EncDecAttention",
                "cross_norm": "layer.1.layer_norm",
                "feed_forward": "layer.2.DenseReluDense",
                "feed_forward_norm": "layer.2.layer_norm",
                "out": "o",
                "relative": "relative_attention_bias",
                "gate": "wi_0",
                "up": "wi_1" if has_gate else "wi",
                "down": "wo",
                "norm": "final_layer_norm",
            },
            encoder_modules={"feed_forward": "layer.1.DenseReluDense", "feed_forward_norm": "layer.1.layer_norm"},
            prefix="",
            embedding="shared.weight",
            aliases={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
            dropped=("EncDecAttention.relative_attention_bias.weight",),
        )

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        is_scaled = self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        return Description(
            encoder=self._stack(self.num_layers, is_decoder=False),
            stack=self._stack(self.num_decoder_blocks, is_decoder=True),
            head=HeadShape(is_tied=self.tie_word_embeddings, std=self.initializer_factor, scale=self.d_model**-0.5 if is_scaled else 1.0),
        )

    def _stack(self, num_blocks: int, *, is_decoder: bool) -> StackShape:
        relative = RelativePositions(
            num_buckets=self.relative_attention_num_buckets, max_distance=self.relative_attention_max_distance, std=self.initializer_range
        )
        std, norm, p = self.initializer_range, NormShape(kind="rms", eps=self.layer_norm_epsilon), self.dropout_rate
        attention = self.attention_shape(
            scale=1.0,
            has_bias=False,
            has_out_bias=False,
            dropout=p,
            is_causal=is_decoder,
            relative=relative,
            std=std * self.d_kv**-0.5,
            out_std=self.initializer_factor * (self.num_heads * self.d_kv) ** -0.5,
        )
        activation, has_gate = PROJECTIONS[self.feed_forward_proj]
        out_std = self.initializer_factor * self.d_ff**-0.5
        feed_forward = self.feed_forward_shape(activation, has_gate=has_gate, has_bias=False, out_std=out_std, dropout=p)
        cross = replace(attention, is_causal=False, relative=None) if is_decoder else None
        block = BlockShape(attention=attention, feed_forward=feed_forward, norm=norm, dropout=p, cross=cross)
        return StackShape(blocks=(block,) * num_blocks, std=self.initializer_factor, dropout=p, drops_last=True, norm=norm)


_VERSION_1_1: Final[dict[str, Any]] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
PRESETS: Final[Mapping[str, T5Config]] = {
    "t5-small": T5Config.of_size(32128, 512, 2048, 6, 8, 512, d_kv=64),
    "t5-base": T5Config.of_size(32128, 768, 3072, 12, 12, 512, d_kv=64),
    "t5-v1.1-small": T5Config.of_size(32128, 512, 1024, 8, 6, 512, d_kv=64, **_VERSION_1_1),
    "t5-v1.1-base": T5Config.of_size(32128, 768, 2048, 12, 12, 512, d_kv=64, **_VERSION_1_1),
}
"""Name -> config: T5 small and base, and those of version 1.1."""
