"""LLaMA (Touvron et al., 2023; Llama 3, 2024), with the semantics of transformers' ``LlamaForCausalLM``.

Letters::

    B  sequences of a minibatch    C  width of the residual stream (hidden_size)      V  vocabulary
    T  tokens of a sequence        H  heads of queries, each D features (head_dim)    P  longest sequence
    L  blocks                      G  heads of keys and values: H / G queries share one
                                   I  width of the feed-forward layer (intermediate_size)

Activations are tiled along B, T and features; weights along both their axes. The heads are adjacent columns, (B, T, H*D) and (B, T, G*D). A tile of
queries holds whole groups of heads that share a head of keys and values, and the corresponding tile of keys holds exactly these shared heads.
Matrices are (out, in), as Hugging Face stores them, so that tiles map onto files without transposition; `llama_names` translates the names.
"""

from __future__ import annotations

from math import pi

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import elementwise

from ..nn import functional
from ..nn.autograd import Tensor, checkpoint
from ..nn.functional import Masks
from ..nn.initializers import normal
from ..nn.kv_cache import LayerPast, Past
from ..nn.layers import Embedding, RMSNorm, TransposedLinear
from ..nn.module import Module, Parameter
from ..tiling.model_tiling import ModelTiling
from .language import LanguageModel
from .llama_config import LlamaConfig

Angles = tuple[TileTensor, TileTensor]
"""Cosines and sines of the rotary angles, (T, D / 2) each, or (B, T, D / 2) where each sequence has positions of its own."""


class Attention(Module):
    """Causal self-attention with grouped queries (Ainslie et al., 2023) and rotary embeddings: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: LlamaConfig, tiling: ModelTiling, layer: int, *, flash: bool) -> None:
        width, size, std, has_bias = config.n_embd, config.head_size, config.initializer_range, config.attention_bias
        queries, keys = config.n_head * size, config.n_kv_head * size  # H*D, G*D
        query_tile = tiling.head_tile * size
        key_tile = query_tile * config.n_kv_head // config.n_head
        self.head_size, self.flash = size, flash
        self.p, self.site = config.attention_dropout, layer
        self.q_proj = TransposedLinear(width, queries, (tiling.embd_tile, query_tile), std=std, has_bias=has_bias)
        self.k_proj = TransposedLinear(width, keys, (tiling.embd_tile, key_tile), std=std, has_bias=has_bias)
        self.v_proj = TransposedLinear(width, keys, (tiling.embd_tile, key_tile), std=std, has_bias=has_bias)
        self.o_proj = TransposedLinear(queries, width, (query_tile, tiling.embd_tile), std=std, has_bias=has_bias)

    def __call__(self, x: Tensor, angles: Angles, masks: Masks | None, past: LayerPast | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q = functional.rotary(self.q_proj(x, masks), *angles, self.head_size)  # (B, T, C) @ (H*D, C)^T -> (B, T, H*D)
        k = functional.rotary(self.k_proj(x, masks), *angles, self.head_size)  # (B, T, C) @ (G*D, C)^T -> (B, T, G*D)
        v = self.v_proj(x, masks)  # (B, T, C) @ (G*D, C)^T -> (B, T, G*D)
        dropout = attention_ops.Dropout(self.p, masks.key, masks.stream(self.site)) if masks is not None and self.p else None
        o = functional.attention(  # softmax(q k^T / sqrt(D)) v -> (B, T, H*D)
            q, k, v, head_size=self.head_size, scale=self.head_size**-0.5, dropout=dropout, flash=self.flash, past=past
        )
        del q, k, v
        return self.o_proj(o, masks)  # (B, T, H*D) @ (C, H*D)^T -> (B, T, C)


class MLP(Module):
    """Feed-forward layer with a gate (SwiGLU; Shazeer, 2020): (B, T, C) -> (B, T, C)."""

    def __init__(self, config: LlamaConfig, tiling: ModelTiling) -> None:
        width, inner, std, has_bias = config.n_embd, config.inner_size, config.initializer_range, config.mlp_bias
        self.gate_proj = TransposedLinear(width, inner, (tiling.embd_tile, tiling.inner_tile), std=std, has_bias=has_bias)
        self.up_proj = TransposedLinear(width, inner, (tiling.embd_tile, tiling.inner_tile), std=std, has_bias=has_bias)
        self.down_proj = TransposedLinear(inner, width, (tiling.inner_tile, tiling.embd_tile), std=std, has_bias=has_bias)

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        gated = functional.gated(self.gate_proj(x, masks), self.up_proj(x, masks), "silu")  # silu((B, T, C) @ (I, C)^T) * the same -> (B, T, I)
        return self.down_proj(gated, masks)  # (B, T, I) @ (C, I)^T -> (B, T, C)


class Block(Module):
    """One block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, tiling: ModelTiling, layer: int, *, flash: bool) -> None:
        width, tile, eps = config.n_embd, tiling.embd_tile, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, tile, eps)
        self.self_attn = Attention(config, tiling, layer, flash=flash)
        self.post_attention_layernorm = RMSNorm(width, tile, eps)
        self.mlp = MLP(config, tiling)

    def __call__(self, x: Tensor, angles: Angles, masks: Masks | None, past: LayerPast | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        a = self.self_attn(self.input_layernorm(x), angles, masks, past)  # (B, T, C)
        x, h = self.post_attention_layernorm.after_add(x, a)  # x + a and its norm, (B, T, C) each
        del a
        return x + self.mlp(h, masks)  # (B, T, C)


class Llama(LanguageModel):
    """A LLaMA on a runtime.

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
        config: LlamaConfig,
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
        self.embed_tokens = Embedding(config.vocab_size, width, row_tile, std=std)
        self.layers = [Block(config, tiling, layer, flash=flash) for layer in range(config.n_layer)]
        self.norm = RMSNorm(width, tiling.embd_tile, config.rms_norm_eps)
        self.lm_head = self.embed_tokens.weight if config.tie_word_embeddings else Parameter((config.vocab_size, width), row_tile, normal(std))
        self.allocate(runtime, dtype, seed)
        angle_dtype = np.float64 if np.dtype(dtype) == np.float64 else np.float32
        shape = (config.head_size // 2,)
        self.frequencies = TileTensor(runtime, shape, shape, angle_dtype, kind="input", data_class="data", name="rotary frequencies")
        self.frequencies.write(rotary_frequencies(config).astype(angle_dtype))

    def trunk(self, tokens: TileTensor, masks: Masks | None, past: Past | None = None) -> Tensor:
        """Features before the head: (B, T) int32 -> (B, T, C)."""
        if past is None:
            angles = elementwise.rotary_angles(self.frequencies, tokens.shape[1], tokens.tile[1])  # 2 x (T, D / 2)
        else:
            angles = elementwise.rotary_angles_at(self.frequencies, past.positions)  # 2 x (B, T, D / 2)
        x = self.embed_tokens(tokens)  # (B, T, C)
        for block, before in zip(self.layers, past.layers if past is not None else [None] * len(self.layers), strict=True):
            x = (
                checkpoint(lambda x, block=block, before=before: block(x, angles, masks, before), x)  # type: ignore[misc]
                if self.recompute
                else block(x, angles, masks, before)
            )
        return self.norm(x)  # (B, T, C)


def rotary_frequencies(config: LlamaConfig) -> npt.NDArray[np.float32]:
    """Rotary frequencies, (D / 2,) fp32: radians per position of feature pair i, theta^(-2i / D), scaled as the config says.

    All arithmetic is in fp32, as in transformers: at position 100,000 the last digit of a frequency is a visible angle.
    """
    size = config.head_size
    plain = (1 / np.float32(config.rope_theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return plain
    factor = np.float32(scaling.factor)
    if scaling.rope_type == "linear":
        return plain / factor
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert isinstance(low, float) and isinstance(high, float) and isinstance(original, int)  # noqa: PT018 - llama3, as the config has checked
    wavelengths = 2 * pi / plain  # positions per turn
    share = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # weight of the unscaled frequency: 1 for short wavelengths, 0 for long ones
    blended: npt.NDArray[np.float32] = ((1 - share) * plain / factor + share * plain).astype(np.float32)
    return blended
