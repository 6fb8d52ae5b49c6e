"""Blocks of transformers, built from their shapes: attention and a feed-forward layer around the residual stream.

Letters::

    B  sequences of a minibatch    C  width of the residual stream           V  vocabulary
    T  tokens of a sequence        H  heads of queries, each D features      P  longest sequence
    S  tokens of an encoder        G  heads of keys and values: H / G queries share one
                                   I  width inside the feed-forward layer

Heads are adjacent columns; a tile of queries holds whole groups of heads that share a head of keys and values. `names.Names.modules` has a name in
files for each attribute here. Places with dropout are numbered in the order of construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiles import TileTensor
from tiles.ops import attention as attention_ops

from ..architecture.description import AttentionShape, BlockShape, FeedForwardShape, MixtureShape, NormShape
from ..architecture.rotary import Rotary
from ..nn import functional
from ..nn.autograd import Tensor
from ..nn.experts import LowRankExperts, Routed, mixture, routed
from ..nn.functional import Masks, RelativeBias
from ..nn.kv_cache import EncoderPast, LayerPast
from ..nn.layers import Dropout, Embedding, HeadNorm, LayerNorm, Linear, RMSNorm, are_joined, joined, projections
from ..nn.module import Module, in_module
from ..tiling.model_tiling import ModelTiling

Angles = tuple[TileTensor, TileTensor]
"""Cosines and sines of the rotary angles, (T, R / 2) each for R features that turn; (B, T, R / 2) if each sequence has positions of its own."""


@dataclass(frozen=True, slots=True)
class Construction:
    """Settings that all modules of a model are constructed with.

    Args:
        tiling: tile sizes, none of them -1.
        width: C.
        names: attribute -> name in the family's files.
        has_rows_in: whether matrices are (in, out) instead of (out, in).
        flash: whether attention avoids the full matrix of scores.
        library: whether the attention library of the runtime's devices may compute attention.
        sites: numbers for the places with dropout.
    """

    tiling: ModelTiling
    width: int
    names: Mapping[str, str]
    has_rows_in: bool
    flash: bool
    library: bool = False
    sites: Iterator[int] = field(default_factory=itertools.count)

    def linear(self, num_in: int, num_out: int, tile: tuple[int, int], *, std: float, has_bias: bool, activation: str | None = None) -> Linear:
        """Return a product with a matrix in the layout of the family's files."""
        return Linear(num_in, num_out, tile, std=std, has_bias=has_bias, activation=activation, has_rows_in=self.has_rows_in)

    def norm(self, shape: NormShape) -> LayerNorm | RMSNorm:
        """Return a norm of the residual stream."""
        if shape.kind == "layer":
            return LayerNorm(self.width, self.tiling.embd_tile, shape.eps)
        return RMSNorm(self.width, self.tiling.embd_tile, shape.eps, shape.offset)

    def dropout(self, p: float | None) -> Dropout:
        """Return dropout at the next place; None, for a family without dropout there, takes no number."""
        return Dropout(0.0, -1) if p is None else Dropout(p, next(self.sites))


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Inputs that all blocks share in one forward pass.

    Args:
        masks: dropout masks; None without dropout.
        angles: cosines and sines for each kind of rotary positions.
        documents: (B, T) int32, numbers of documents, which do not see each other; None for one document.
        bias: bias of scores by distance; None for none.
        encoded: (B, S, C), the encoder's output, which a decoder attends to; None without one.
        across_documents: (B, T) and (B, S) int32, numbers of documents of a decoder's and of the encoder's tokens; None if all tokens see all.
        positions: (B, T) int32, positions of tokens in their texts, or rows of the table that do not begin at 0; None for its first T rows.
        token_types: (B, T) int32; None if the model has none.
        routed: list that receives the routing of each mixture of experts, for their load-balancing loss; None without that loss.
    """

    masks: Masks | None
    angles: Mapping[Rotary, Angles]
    documents: TileTensor | None = None
    bias: RelativeBias | None = None
    encoded: Tensor | None = None
    across_documents: tuple[TileTensor, TileTensor] | None = None
    positions: TileTensor | None = None
    token_types: TileTensor | None = None
    routed: list[Routed] | None = None


class Attention(Module):
    """Attention to the tokens of the same sequence or of an encoder: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: AttentionShape, made: Construction, *, has_table: bool = False) -> None:
        self.names, self.shape, self.flash, self.library = made.names, shape, made.flash, made.library
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size  # H*D, G*D
        query_tile, embd_tile = made.tiling.head_tile * shape.head_size, made.tiling.embd_tile
        key_tile = query_tile * shape.num_kv_heads // shape.num_heads
        self.site = next(made.sites)
        self.q = made.linear(made.width, queries, (embd_tile, query_tile), std=shape.std, has_bias=shape.has_bias)
        self.k = made.linear(made.width, keys, (embd_tile, key_tile), std=shape.kv_std, has_bias=shape.has_bias)
        self.v = made.linear(made.width, keys, (embd_tile, key_tile), std=shape.kv_std, has_bias=shape.has_bias)
        self.out = made.linear(queries, made.width, (query_tile, embd_tile), std=shape.out_std, has_bias=shape.has_out_bias)
        norm, relative = shape.head_norm, shape.relative
        self.q_norm = None if norm is None else self._norm(norm, queries, query_tile)
        self.k_norm = None if norm is None else self._norm(norm, keys, key_tile)
        self.relative = None
        if relative is not None and has_table:
            self.relative = Embedding(relative.num_buckets, shape.num_heads, (-1, made.tiling.head_tile), std=relative.std)

    def _norm(self, norm: NormShape, width: int, tile: int) -> RMSNorm:
        """Return the norm of queries or keys, each head by itself or all together."""
        if self.shape.has_joint_norm:
            return RMSNorm(width, tile, norm.eps, norm.offset)
        return HeadNorm(self.shape.head_size, norm.eps, norm.offset)

    def __call__(self, x: Tensor, given: ForwardPass, past: LayerPast | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        shape, masks = self.shape, given.masks
        projected = projections([self.q, self.k, self.v], x, masks)  # (B, T, C) -> (B, T, H*D), (B, T, G*D), (B, T, G*D)
        q = self._placed(next(projected), self.q_norm, given)
        k = self._placed(next(projected), self.k_norm, given)
        v = self._clipped(next(projected))
        o = self._attended(  # (B, T, H*D)
            q, k, v, masks, past=past, causal=shape.is_causal, window=shape.window, documents=given.documents, bias=given.bias, cap=shape.cap
        )
        del q, k, v
        return self.out(o, masks)  # (B, T, H*D) -> (B, T, C)

    @in_module
    def across(self, x: Tensor, given: ForwardPass, kept: EncoderPast | None) -> Tensor:
        """Attend to the encoder's output, (B, T, C) and (B, S, C) -> (B, T, C), or to its keys and values that an earlier pass kept."""
        shape, masks, encoded = self.shape, given.masks, given.encoded
        if kept is not None:
            return self.out(kept.attend(self.q(x, masks), head_size=shape.head_size, scale=shape.scale), masks)  # (B, T, C) -> (B, T, C)
        assert encoded is not None  # a decoder has an encoder
        q, (k, v) = self.q(x, masks), self.of_source(encoded, masks)  # (B, T, H*D), (B, S, G*D), (B, S, G*D)
        o = self._attended(q, k, v, masks, causal=False, documents=given.across_documents)  # (B, T, H*D)
        del q, k, v
        return self.out(o, masks)  # (B, T, H*D) -> (B, T, C)

    def of_source(self, encoded: Tensor, masks: Masks | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of the encoder's output: (B, S, C) -> 2 x (B, S, G*D)."""
        return self.k(encoded, masks), self.v(encoded, masks)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks | None, **how: Any) -> Tensor:
        """Return softmax(q k^T * scale) v -> (B, T, H*D), with further arguments of `functional.attention`."""
        p = self.shape.dropout
        dropout = attention_ops.Dropout(p, masks.key, masks.stream(self.site)) if masks is not None and p else None
        size, scale = self.shape.head_size, self.shape.scale
        return functional.attention(q, k, v, head_size=size, scale=scale, dropout=dropout, flash=self.flash, library=self.library, **how)

    def _placed(self, x: Tensor, norm: RMSNorm | None, given: ForwardPass) -> Tensor:
        """Return queries or keys, normed head by head, clipped, and rotated by their positions: (B, T, H*D) -> (B, T, H*D)."""
        rotary = self.shape.rotary
        x = self._clipped(x if norm is None else norm(x))
        return x if rotary is None else functional.rotary(x, *given.angles[rotary], self.shape.head_size, rotary.size)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.shape.clip is None else functional.clamped(x, self.shape.clip)


class FeedForward(Module):
    """Feed-forward layer: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: FeedForwardShape, made: Construction) -> None:
        self.names, self.activation = made.names, shape.activation
        width, inner, tile = made.width, shape.inner_size, (made.tiling.embd_tile, made.tiling.inner_tile)
        self.gate = made.linear(width, inner, tile, std=shape.std, has_bias=shape.has_bias) if shape.has_gate else None
        activation = None if shape.has_gate else shape.activation
        self.up = made.linear(width, inner, tile, std=shape.std, has_bias=shape.has_bias, activation=activation)
        self.dropout = made.dropout(shape.dropout)
        self.down = made.linear(inner, width, tile[::-1], std=shape.out_std, has_bias=shape.has_bias)

    def __call__(self, x: Tensor, given: ForwardPass) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        masks = given.masks
        if self.gate is None and (masks is None or not self.dropout.p) and are_joined(self.up, self.down):
            return joined(self.up, self.down, x)
        if self.gate is None:
            h = self.up(x, masks)  # activation((B, T, C) @ W) -> (B, T, I)
        else:
            h = functional.gated(self.gate(x, masks), self.up(x, masks), self.activation)  # activation((B, T, C) @ W) * the same -> (B, T, I)
        return self.down(self.dropout(h, masks), masks)  # (B, T, I) -> (B, T, C)

    def layers(self) -> list[Linear]:
        """Return the layers of the gate, if there is one, before the activation and after it."""
        return [layer for layer in (self.gate, self.up, self.down) if layer is not None]


class Mixture(Module):
    """Mixture of experts: (B, T, C) -> (B, T, C). Adapters leave its router alone, and its experts unless asked for."""

    def __init__(self, shape: MixtureShape, made: Construction) -> None:
        self.names, self.shape = made.names, shape
        width, tile, count = made.width, made.tiling.embd_tile, shape.num_experts
        self.router = made.linear(width, count, (tile, count), std=shape.std, has_bias=False)
        self.experts = [FeedForward(shape.expert, made) for _ in range(count)]
        self.shared = self.shared_gate = None
        if shape.shared is not None:
            self.shared = FeedForward(shape.shared, made)
            self.shared_gate = made.linear(width, 1, (tile, 1), std=shape.std, has_bias=False)
        for layer in (self.router, *self.expert_layers()):
            layer.takes_adapter = False

    def __call__(self, x: Tensor, given: ForwardPass) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        routing = routed(self.router(x), self.shape.num_chosen, renormalises=self.shape.renormalises)  # (B, T, C) @ (E, C)^T -> (B, T, E)
        if given.routed is not None:
            given.routed.append(routing)
        y = None
        if self.shared is not None and self.shared_gate is not None:  # sigmoid((B, T, C) @ (1, C)^T) * (B, T, C) -> (B, T, C)
            y = functional.row_gated(self.shared_gate(x), self.shared(x, given))
        return mixture(x, routing, [tuple(layer.weight for layer in expert.layers()) for expert in self.experts], y, self._adapters())  # (B, T, C)

    def expert_layers(self) -> list[Linear]:
        """Return the layers of all experts, those of one expert after another."""
        return [layer for expert in self.experts for layer in expert.layers()]

    def _adapters(self) -> LowRankExperts | None:
        """Return the adapters of the experts; None without any."""
        adapters = [layer.lora for layer in self.expert_layers() if layer.lora is not None]
        if not adapters:
            return None
        of_experts = zip(adapters[::3], adapters[1::3], adapters[2::3], strict=True)
        return LowRankExperts([(gate.A, gate.B, up.B, down.A, down.B) for gate, up, down in of_experts], adapters[0].scale)


class Block(Module):
    """Attention and a feed-forward layer around the residual stream: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: BlockShape, made: Construction, *, has_table: bool = False) -> None:
        self.names, self.shape = made.names, shape
        is_around = shape.norms == "around"
        self.attention_norm = made.norm(shape.norm)
        self.attention = Attention(shape.attention, made, has_table=has_table)
        self.attention_end_norm = made.norm(shape.norm) if is_around else None
        self.attention_dropout = made.dropout(shape.dropout)
        if shape.cross is not None:
            self.cross_norm = made.norm(shape.norm)
            self.cross = Attention(shape.cross, made)
            self.cross_dropout = made.dropout(shape.dropout)
        self.feed_forward_norm = made.norm(shape.norm) if shape.has_two_norms else None
        kind = shape.feed_forward
        self.feed_forward = Mixture(kind, made) if isinstance(kind, MixtureShape) else FeedForward(kind, made)
        self.feed_forward_end_norm = made.norm(shape.norm) if is_around else None
        self.feed_forward_dropout = made.dropout(shape.dropout)

    def __call__(self, x: Tensor, given: ForwardPass, past: LayerPast | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.shape.is_parallel:
            return self._beside(x, given, past)
        if self.shape.norms == "after":
            return self._normed_after(x, given, past)
        a = self.attention_dropout(_normed(self.attention(self.attention_norm(x), given, past), self.attention_end_norm), given.masks)  # (B, T, C)
        if self.shape.cross is not None:
            x, h = self.cross_norm.after_add(x, a)
            a = self.cross_dropout(self.cross.across(h, given, None if past is None else past.across), given.masks)
            del h
        assert self.feed_forward_norm is not None  # only parallel layers share one
        x, h = self.feed_forward_norm.after_add(x, a)  # x + a and its norm, (B, T, C) each
        del a
        return x + self.feed_forward_dropout(_normed(self.feed_forward(h, given), self.feed_forward_end_norm), given.masks)  # (B, T, C)

    def _beside(self, x: Tensor, given: ForwardPass, past: LayerPast | None) -> Tensor:
        """Return x + attention(norm(x)) + feed_forward(norm(x)) (Wang and Komatsuzaki, GPT-J, 2021)."""
        h = self.attention_norm(x)
        a = self.attention_dropout(self.attention(h, given, past), given.masks)
        h = h if self.feed_forward_norm is None else self.feed_forward_norm(x)
        return x + a + self.feed_forward_dropout(self.feed_forward(h, given), given.masks)

    def _normed_after(self, x: Tensor, given: ForwardPass, past: LayerPast | None) -> Tensor:
        """Return x = norm(x + attention(x)), then norm(x + feed_forward(x)) (Vaswani et al., 2017)."""
        assert self.feed_forward_norm is not None  # only parallel layers share one
        _, x = self.attention_norm.after_add(x, self.attention_dropout(self.attention(x, given, past), given.masks))
        _, x = self.feed_forward_norm.after_add(x, self.feed_forward_dropout(self.feed_forward(x, given), given.masks))
        return x


def _normed(x: Tensor, norm: LayerNorm | RMSNorm | None) -> Tensor:
    return x if norm is None else norm(x)
