"""Parts of a transformer as plain data: a config describes its model with them, and `transformer` builds it.

The parts are named as in the papers. A family is a config with a `description` and a table of names; it needs no module of its own.

Letters: C width of the residual stream, H heads of queries and G of keys and values with D features each, I width inside the feed-forward layer,
P positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """Layer norm (Ba et al., 2016) or RMS norm (Zhang and Sennrich, 2019).

    Args:
        kind: layer norm or RMS norm.
        eps: term added to the variance, or to the mean of squares.
        offset: added to the weight of an RMS norm, which begins at 1 - offset; 1 in Gemma.
    """

    kind: Literal["layer", "rms"]
    eps: float
    offset: float = 0.0

    def num_parameters(self, width: int) -> int:
        """Return the number of weights in a model of this width C."""
        return 2 * width if self.kind == "layer" else width


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativePositions:
    """Biases of scores by the distance between query and key, in buckets (Raffel et al., T5, 2020, section 2.1); all blocks share one table.

    Args:
        num_buckets: number of rows of the table (num_buckets, H).
        max_distance: distance from which on all share the last bucket.
        std: standard deviation of the initial table.
    """

    num_buckets: int
    max_distance: int
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention (Vaswani et al., 2017), with grouped queries if G < H (Ainslie et al., 2023).

    Args:
        num_heads, num_kv_heads, head_size: H, G and D.
        scale: factor of the scores, scale * q . k.
        has_bias: whether the projections to q, k and v have biases.
        has_out_bias: whether the projection of the result has one.
        dropout: probability for attention probabilities.
        is_causal: whether tokens see only the tokens before them and themselves.
        window: number of tokens that a token sees, itself included; None for all (Beltagy et al., Longformer, 2020).
        rotary: rotation of q and k by position; None for none.
        head_norm: norm of every head of q and k (Dehghani et al., 2023); None for none.
        has_joint_norm: whether that norm is one of all heads together (OLMoE, 2024).
        clip: largest magnitude of the features of q, k and v, before rotation; None for no limit.
        cap: soft cap of the scores, cap * tanh(scores / cap); None for none.
        relative: biases by distance; None for none.
        std, kv_std, out_std: standard deviations of the initial projections to q, to k and v, and of the result.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    has_bias: bool
    has_out_bias: bool
    std: float
    kv_std: float
    out_std: float
    dropout: float = 0.0
    is_causal: bool = True
    window: int | None = None
    rotary: Rotary | None = None
    head_norm: NormShape | None = None
    has_joint_norm: bool = False
    clip: float | None = None
    cap: float | None = None
    relative: RelativePositions | None = None

    def num_parameters(self, width: int) -> int:
        """Return the number of weights in a model of this width C, without the table of relative positions, which blocks share."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        biases = self.has_bias * (queries + 2 * keys) + self.has_out_bias * width
        norms = 0 if self.head_norm is None else queries + keys if self.has_joint_norm else 2 * self.head_size
        return 2 * width * (queries + keys) + biases + norms


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardShape:
    """The feed-forward layer: activation(x W1) W2, or with a gate (activation(x Wg) * (x W1)) W2 (Shazeer, 2020).

    Args:
        inner_size: I.
        activation: name of its kernel.
        has_gate: whether the layer has a gate.
        has_bias: whether the products have biases.
        dropout: dropout probability between the products; None if the family has no dropout there.
        std, out_std: standard deviations of the initial matrices before and after the activation.
    """

    inner_size: int
    activation: str
    has_gate: bool
    has_bias: bool
    std: float
    out_std: float
    dropout: float | None = None

    def num_parameters(self, width: int) -> int:
        """Return the number of weights in a model of this width C."""
        count = 2 if self.has_gate else 1
        return (count + 1) * width * self.inner_size + self.has_bias * (count * self.inner_size + width)

    def num_idle(self, width: int) -> int:
        """Return the number of weights that a token does not pass through, which is 0."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """Mixture of experts (Shazeer et al., 2017): each token passes through the feed-forward layers that a router chooses for it.

    Args:
        expert: shape of each expert; it has a gate with silu, and neither biases nor dropout.
        num_experts, num_chosen: E, and K of them for each token.
        renormalises: whether the router's probabilities of the chosen experts are divided by their sum.
        shared: feed-forward layer that all tokens pass through, with a gate of its own for each token (DeepSeekMoE, 2024); None for none.
        std: standard deviation of the router's initial matrix.
    """

    expert: FeedForwardShape
    num_experts: int
    num_chosen: int
    renormalises: bool
    std: float
    shared: FeedForwardShape | None = None

    def num_parameters(self, width: int) -> int:
        """Return the number of weights in a model of this width C."""
        shared = 0 if self.shared is None else self.shared.num_parameters(width) + width
        return self.num_experts * (width + self.expert.num_parameters(width)) + shared

    def num_idle(self, width: int) -> int:
        """Return the number of weights that a token does not pass through."""
        return (self.num_experts - self.num_chosen) * self.expert.num_parameters(width)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Attention and a feed-forward layer, or a mixture of them, around a residual stream.

    Args:
        norm: kind of all norms of the block.
        norms: places of the norms: "before" each layer; "after" the addition of its result (the first transformers, BERT); "around", before the layer
            and before the addition of its result (Gemma 3).
        is_parallel: whether both layers read the same stream (NeoX); the first norm serves both unless `has_two_norms`.
        dropout: dropout probability of the result of each layer; None if the family has no dropout there.
        cross: attention to the encoder's output, between the two layers; None for none.
    """

    attention: AttentionShape
    feed_forward: FeedForwardShape | MixtureShape
    norm: NormShape
    norms: Literal["before", "after", "around"] = "before"
    is_parallel: bool = False
    has_two_norms: bool = True
    dropout: float | None = None
    cross: AttentionShape | None = None

    def num_parameters(self, width: int) -> int:
        """Return the number of weights in a model of this width C."""
        num_norms = (4 if self.norms == "around" else 1 + self.has_two_norms) + (self.cross is not None)
        cross = 0 if self.cross is None else self.cross.num_parameters(width)
        return self.attention.num_parameters(width) + cross + self.feed_forward.num_parameters(width) + num_norms * self.norm.num_parameters(width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """Embeddings and blocks: an encoder or a decoder.

    Args:
        blocks: shape of each block.
        std: standard deviation of initial embeddings.
        num_positions: number of rows of the table of learned positions; None for no such table.
        first_position: row of the first token.
        num_token_types: number of kinds of tokens, the rows of a table; 0 for no such table.
        embedding_norm: norm of the sum of embeddings; None for none.
        embedding_scale: factor of token embeddings.
        dropout: dropout probability of embeddings and, with `drops_last`, of the result; None if the family has no dropout there.
        drops_last: whether the result drops out, too.
        norm: norm of the result; None for none.
    """

    blocks: tuple[BlockShape, ...]
    std: float
    num_positions: int | None = None
    first_position: int = 0
    num_token_types: int = 0
    embedding_norm: NormShape | None = None
    embedding_scale: float = 1.0
    dropout: float | None = None
    drops_last: bool = False
    norm: NormShape | None = None

    @property
    def rotaries(self) -> list[Rotary]:
        """Kinds of rotary positions, each once."""
        return list(dict.fromkeys(block.attention.rotary for block in self.blocks if block.attention.rotary is not None))

    def num_parameters(self, width: int) -> int:
        """Return the number of weights in a model of this width C, without token embeddings."""
        norms = sum(norm.num_parameters(width) for norm in (self.embedding_norm, self.norm) if norm is not None)
        relative = next(((block.attention.relative, block.attention.num_heads) for block in self.blocks if block.attention.relative), None)
        tables = ((self.num_positions or 0) + self.num_token_types) * width + (relative[0].num_buckets * relative[1] if relative else 0)
        return tables + norms + sum(block.num_parameters(width) for block in self.blocks)

    def num_idle(self, width: int) -> int:
        """Return the number of weights of experts that a token does not pass through, in a model of this width C."""
        return sum(block.feed_forward.num_idle(width) for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The head: the layers between the result of the last block and the scores of tokens or classes.

    Args:
        is_tied: whether the weight of the scores is the token embedding.
        std: standard deviation of the initial weight.
        has_bias: whether the scores have a bias for every token or class.
        scale: factor of the features before the scores.
        cap: soft cap of the scores, cap * tanh(scores / cap); None for none.
        transform: activation of a layer (C, C) before the scores; None for no such layer.
        transform_norm: norm after that layer; None for none.
        num_labels: number of classes of a classifier, which scores the first token alone; 0 for scores of tokens.
        dropout: dropout probability of a classifier's features; None if the family has no dropout there.
        drops_first: whether features drop out before the `transform` layer, too.
    """

    is_tied: bool
    std: float
    has_bias: bool = False
    scale: float = 1.0
    cap: float | None = None
    transform: str | None = None
    transform_norm: NormShape | None = None
    num_labels: int = 0
    dropout: float | None = None
    drops_first: bool = False

    def num_parameters(self, width: int, vocab_size: int) -> int:
        """Return the number of weights in a model of this width C, without the token embedding."""
        num_out = self.num_labels or vocab_size
        norm = 0 if self.transform_norm is None else self.transform_norm.num_parameters(width)
        return (0 if self.is_tied else num_out * width) + self.has_bias * num_out + (width * width + width if self.transform else 0) + norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A transformer.

    Args:
        stack: the only stack, or the decoder of a model with an encoder.
        encoder: stack whose output the decoder attends to; None for none.
        head: layers before the scores.
        has_rows_in: whether matrices are (in, out), as in GPT-2's files, instead of (out, in).
        balance: factor of the load-balancing loss of the mixtures of experts in training; 0 for none.
    """

    stack: StackShape
    head: HeadShape
    encoder: StackShape | None = None
    has_rows_in: bool = False
    balance: float = 0.0

    def num_parameters(self, width: int, vocab_size: int) -> int:
        """Return the number of weights of a model of width C with `vocab_size` token ids; a tied head counts once."""
        encoder = 0 if self.encoder is None else self.encoder.num_parameters(width)
        return vocab_size * width + self.stack.num_parameters(width) + encoder + self.head.num_parameters(width, vocab_size)
