"""GPT-2 (Radford et al., 2019), with the semantics of transformers' ``GPT2LMHeadModel``.

Letters::

    B  sequences of a minibatch    C  width of the residual stream (n_embd)     V  vocabulary
    T  tokens of a sequence        H  heads, each D = C / H features            P  longest sequence (n_positions)
                                   I  width of the feed-forward layer           L  blocks

Activations are tiled along B, T and features; weights along both their axes. The heads are adjacent columns, (B, T, H*D), and a tile holds whole
heads. q, k and v are three parameters, so that each can be tiled by heads; `gpt2_names` maps them to Hugging Face's fused parameter.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import attention as attention_ops

from ..nn import functional
from ..nn.autograd import Tensor, checkpoint
from ..nn.functional import Masks
from ..nn.initializers import normal
from ..nn.kv_cache import LayerPast, Past
from ..nn.layers import Dropout, Embedding, LayerNorm, Linear
from ..nn.module import Module, Parameter
from ..tiling.model_tiling import ModelTiling
from .gpt2_config import GPT2Config
from .language import LanguageModel


class Attention(Module):
    """Causal self-attention: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPT2Config, tiling: ModelTiling, layer: int, *, flash: bool) -> None:
        width, std = config.n_embd, config.initializer_range
        heads = tiling.head_tile * config.head_size
        self.head_size = config.head_size
        self.flash = flash
        self.scale = 1 / sqrt(config.head_size) if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.p, self.site = config.attn_pdrop, 3 * layer + 1
        self.q = Linear(width, width, (tiling.embd_tile, heads), std=std)
        self.k = Linear(width, width, (tiling.embd_tile, heads), std=std)
        self.v = Linear(width, width, (tiling.embd_tile, heads), std=std)
        self.c_proj = Linear(width, width, (heads, tiling.embd_tile), std=_projection_std(config))

    def __call__(self, x: Tensor, masks: Masks | None, past: LayerPast | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = self.q(x, masks), self.k(x, masks), self.v(x, masks)  # (B, T, C) @ (C, H*D) -> (B, T, H*D) each
        dropout = attention_ops.Dropout(self.p, masks.key, masks.stream(self.site)) if masks is not None and self.p else None
        o = functional.attention(  # softmax(q k^T * scale) v -> (B, T, H*D)
            q, k, v, head_size=self.head_size, scale=self.scale, dropout=dropout, flash=self.flash, past=past
        )
        del q, k, v
        return self.c_proj(o, masks)  # (B, T, H*D) @ (H*D, C) -> (B, T, C)


class MLP(Module):
    """Feed-forward layer: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPT2Config, tiling: ModelTiling) -> None:
        width, inner = config.n_embd, config.inner_size
        self.c_fc = Linear(width, inner, (tiling.embd_tile, tiling.inner_tile), std=config.initializer_range, activation=config.activation)
        self.c_proj = Linear(inner, width, (tiling.inner_tile, tiling.embd_tile), std=_projection_std(config))

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(self.c_fc(x, masks), masks)  # activation((B, T, C) @ (C, I)) @ (I, C) -> (B, T, C)


class Block(Module):
    """One block: x + attention(norm(x)), then x + mlp(norm(x)), both with dropout on the added branch."""

    def __init__(self, config: GPT2Config, tiling: ModelTiling, layer: int, *, flash: bool) -> None:
        width, tile, eps = config.n_embd, tiling.embd_tile, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(width, tile, eps)
        self.attn = Attention(config, tiling, layer, flash=flash)
        self.attn_dropout = Dropout(config.resid_pdrop, 3 * layer + 2)
        self.ln_2 = LayerNorm(width, tile, eps)
        self.mlp = MLP(config, tiling)
        self.mlp_dropout = Dropout(config.resid_pdrop, 3 * layer + 3)

    def __call__(self, x: Tensor, masks: Masks | None, past: LayerPast | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        a = self.attn_dropout(self.attn(self.ln_1(x), masks, past), masks)  # (B, T, C)
        x, h = self.ln_2.after_add(x, a)  # x + a and its norm, (B, T, C) each
        del a
        return x + self.mlp_dropout(self.mlp(h, masks), masks)  # (B, T, C)


class GPT2(LanguageModel):
    """A GPT-2 on a runtime.

    Args:
        config: the model's shape and hyperparameters.
        tiling: tile sizes.
        runtime: the runtime that executes the tasks.
        dtype: element type of parameters and activations.
        seed: seed of the initial weights; None leaves the weights unwritten, to be loaded.
        recompute: whether the forward pass keeps only the input of each block and the backward pass computes the other activations again.
        flash: whether attention avoids the full matrix of scores.
    """

    def __init__(
        self,
        config: GPT2Config,
        tiling: ModelTiling,
        runtime: TaskRuntime,
        *,
        dtype: npt.DTypeLike = np.float32,
        seed: int | None = 0,
        recompute: bool = False,
        flash: bool = True,
    ) -> None:
        super().__init__(config, tiling, runtime)
        self.recompute = recompute
        tiling = tiling.resolve(config, 1 << 62, config.n_positions)
        width, std, row_tile = config.n_embd, config.initializer_range, (tiling.vocab_tile, tiling.embd_tile)
        self.wte = Embedding(config.vocab_size, width, row_tile, std=std)
        self.wpe = Embedding(config.n_positions, width, (tiling.seq_tile, tiling.embd_tile), std=std)
        self.embd_dropout = Dropout(config.embd_pdrop, 0)
        self.h = [Block(config, tiling, layer, flash=flash) for layer in range(config.n_layer)]
        self.ln_f = LayerNorm(width, tiling.embd_tile, config.layer_norm_epsilon)
        self.lm_head = self.wte.weight if config.tie_word_embeddings else Parameter((config.vocab_size, width), row_tile, normal(std))
        self.allocate(runtime, dtype, seed)

    def trunk(self, tokens: TileTensor, masks: Masks | None, past: Past | None = None) -> Tensor:
        """Features before the head: (B, T) int32 -> (B, T, C)."""
        x = self.wte(tokens)  # (B, T, C)
        x = functional.add_positions(x, self.wpe.weight) if past is None else x + self.wpe(past.positions)  # + (P, C)[positions] -> (B, T, C)
        x = self.embd_dropout(x, masks)
        for block, before in zip(self.h, past.layers if past is not None else [None] * len(self.h), strict=True):
            x = (
                checkpoint(lambda x, block=block, before=before: block(x, masks, before), x)  # type: ignore[misc]
                if self.recompute
                else block(x, masks, before)
            )
        return self.ln_f(x)  # (B, T, C)


def _projection_std(config: GPT2Config) -> float:
    """Initial standard deviation of layers that add to the residual stream: initializer_range / sqrt(2 L) (Radford et al., 2019, section 2.3)."""
    return config.initializer_range / sqrt(2 * config.n_layer)
