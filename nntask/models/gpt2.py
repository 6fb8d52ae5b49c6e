"""GPT-2 (Radford et al., 2019), with the semantics of transformers' ``GPT2LMHeadModel``.

Letters::

    B  sequences of a minibatch    C  width of the residual stream (n_embd)     V  vocabulary
    T  tokens of a sequence        H  heads, each D = C / H features            P  longest sequence (n_positions)
                                   I  width of the feed-forward layer           L  blocks

Activations are cut along B, T and features; weights along both their axes. Heads lie beside each other, (B, T, H*D), and a tile holds whole
heads. q, k and v are three parameters, so that each can be tiled by heads; `gpt2_names` maps them to Hugging Face's fused one.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import select

from .. import functional
from ..autograd import Tensor, checkpoint
from ..errors import UsageError
from ..functional import Masks
from ..init import normal
from ..layers import Dropout, Embedding, LayerNorm, Linear
from ..module import Module, Parameter
from ..tiling import ModelTiling
from .config import GPT2Config


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

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = self.q(x), self.k(x), self.v(x)  # (B, T, C) @ (C, H*D) -> (B, T, H*D) each
        dropout = attention_ops.Dropout(self.p, masks.key, masks.stream(self.site)) if masks is not None and self.p else None
        o = functional.attention(  # softmax(q k^T * scale) v -> (B, T, H*D)
            q, k, v, head_size=self.head_size, scale=self.scale, dropout=dropout, flash=self.flash
        )
        del q, k, v
        return self.c_proj(o)  # (B, T, H*D) @ (H*D, C) -> (B, T, C)


class MLP(Module):
    """Feed-forward layer: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPT2Config, tiling: ModelTiling) -> None:
        width, inner = config.n_embd, config.inner_size
        self.c_fc = Linear(width, inner, (tiling.embd_tile, tiling.inner_tile), std=config.initializer_range, activation=config.activation)
        self.c_proj = Linear(inner, width, (tiling.inner_tile, tiling.embd_tile), std=_projection_std(config))

    def __call__(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(self.c_fc(x))  # activation((B, T, C) @ (C, I)) @ (I, C) -> (B, T, C)


class Block(Module):
    """One layer: x + attention(norm(x)), then the same with the feed-forward layer."""

    def __init__(self, config: GPT2Config, tiling: ModelTiling, layer: int, *, flash: bool) -> None:
        width, tile, eps = config.n_embd, tiling.embd_tile, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(width, tile, eps)
        self.attn = Attention(config, tiling, layer, flash=flash)
        self.attn_dropout = Dropout(config.resid_pdrop, 3 * layer + 2)
        self.ln_2 = LayerNorm(width, tile, eps)
        self.mlp = MLP(config, tiling)
        self.mlp_dropout = Dropout(config.resid_pdrop, 3 * layer + 3)

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        a = self.attn_dropout(self.attn(self.ln_1(x), masks), masks)  # (B, T, C)
        x, h = self.ln_2.after_add(x, a)  # x + a and its norm, (B, T, C) each
        del a
        return x + self.mlp_dropout(self.mlp(h), masks)  # (B, T, C)


class GPT2(Module):
    """A GPT-2 on a runtime.

    Args:
        config: shape and numbers.
        tiling: tile sizes.
        runtime: who computes.
        dtype: element type of parameters and activations.
        seed: of the first weights; None leaves them unwritten, for weights that are loaded.
        recompute: keep only the input of each block and compute the rest again in the backward pass.
        flash: attention without the full score matrix.
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
        self.config = config
        self.runtime = runtime
        self.recompute = recompute
        self.given_tiling = tiling
        tiling = tiling.resolve(config, 1 << 62, config.n_positions)
        width, std, row_tile = config.n_embd, config.initializer_range, (tiling.vocab_tile, tiling.embd_tile)
        self.wte = Embedding(config.vocab_size, width, row_tile, std=std)
        self.wpe = Embedding(config.n_positions, width, (tiling.seq_tile, tiling.embd_tile), std=std)
        self.embd_dropout = Dropout(config.embd_pdrop, 0)
        self.h = [Block(config, tiling, layer, flash=flash) for layer in range(config.n_layer)]
        self.ln_f = LayerNorm(width, tiling.embd_tile, config.layer_norm_epsilon)
        self.lm_head = self.wte.weight if config.tie_word_embeddings else Parameter((config.vocab_size, width), row_tile, normal(std))
        self.allocate(runtime, dtype, seed)
        self.dropout_key = TileTensor(runtime, (2,), (2,), np.uint64, kind="input", data_class="data", name="dropout key")
        self.dropout_key.write(np.array([seed or 0, 0], np.uint64))

    def input_tensors(self, batch: int, seq_len: int | None = None) -> tuple[TileTensor, TileTensor]:
        """Tokens and targets (B, T) int32, to be written before each step.

        Args:
            batch: B.
            seq_len: T, at most n_positions, which is the default.

        Raises:
            UsageError: a count is not positive or T is too long.
        """
        length, limit = self.config.n_positions if seq_len is None else seq_len, self.config.n_positions
        if batch < 1 or not 1 <= length <= limit:
            raise UsageError(
                f"a batch has at least 1 sequence of 1 to n_positions = {limit} tokens, got {batch} of {length}; lower the sequence length"
            )
        tile = (self.given_tiling.minibatch_tile, self.given_tiling.seq_tile)
        tokens, targets = (
            TileTensor(self.runtime, (batch, length), tile, np.int32, kind="input", data_class="data", name=name) for name in ("tokens", "targets")
        )
        return tokens, targets

    def position_tensor(self, batch: int) -> TileTensor:
        """(B,) int32 input for `next_logits`, cut like the sequences."""
        tile = (self.given_tiling.minibatch_tile,)
        return TileTensor(self.runtime, (batch,), tile, np.int32, kind="input", data_class="data", name="positions")

    def __call__(self, tokens: TileTensor, targets: TileTensor, *, reduction: str = "mean", scale: float = 1.0, minibatch: int = 0) -> Tensor:
        """The loss of predicting `targets` from `tokens`.

        Args:
            tokens: (B, T) int32.
            targets: (B, T) int32, usually the tokens one further; -1 is ignored (and counted by the mean).
            reduction: "mean" over the B*T tokens, or "sum".
            scale: factor on top; 1 / n for each of n equal minibatches makes their sum the mean over the batch.
            minibatch: number of this forward pass within the step; it chooses the dropout masks.

        Returns:
            (1,), a loss: call ``backward()`` on it.

        Raises:
            UsageError: an unknown reduction, or tokens and targets that do not fit the model.
        """
        if reduction not in ("mean", "sum"):
            raise UsageError(f'reduction must be "mean" or "sum", got {reduction!r}; choose one of them')
        if targets.shape != tokens.shape or targets.tile != tokens.tile:
            raise UsageError(f"tokens and targets need equal shapes and tiles, got {tokens!r} and {targets!r}; make both with input_tensors")
        if reduction == "mean":
            scale /= tokens.shape[0] * tokens.shape[1]
        x = self.hidden(tokens, minibatch)  # (B, T, C)
        return functional.linear_cross_entropy(x, self.lm_head, targets, scale=scale)  # (B, T, C) @ (V, C)^T -> (1,)

    def hidden(self, tokens: TileTensor, minibatch: int = 0) -> Tensor:
        """What the head sees: (B, T) int32 -> (B, T, C)."""
        if len(tokens.shape) != 2 or tokens.shape[1] > self.config.n_positions:
            raise UsageError(
                f"tokens must be (B, T) with T at most n_positions = {self.config.n_positions}, got {tokens.shape}; shorten the sequences"
            )
        masks = Masks(self.dropout_key, minibatch) if self.training else None
        x = functional.add_positions(self.wte(tokens), self.wpe.weight)  # (B, T, C) + (P, C)[:T] -> (B, T, C)
        x = self.embd_dropout(x, masks)
        for block in self.h:
            x = checkpoint(lambda x, block=block: block(x, masks), x) if self.recompute else block(x, masks)  # type: ignore[misc]
        return self.ln_f(x)  # (B, T, C)

    def logits(self, tokens: TileTensor) -> Tensor:
        """Scores of the token after each token: (B, T) int32 -> (B, T, V). Large: for training use the model itself."""
        return functional.linear(self.hidden(tokens), self.lm_head, None, transpose_w=True)  # (B, T, C) @ (V, C)^T -> (B, T, V)

    def next_logits(self, tokens: TileTensor, positions: TileTensor) -> Tensor:
        """Scores of the token after one chosen token of each sequence.

        Args:
            tokens: (B, T) int32; what follows the chosen token is ignored, any ids will do.
            positions: (B,) int32 input: the chosen token, from 0.

        Returns:
            (B, 1, V).
        """
        last = Tensor(select.select_rows(self.hidden(tokens).data, positions))  # (B, T, C) -> (B, 1, C)
        return functional.linear(last, self.lm_head, None, transpose_w=True)  # (B, 1, C) @ (V, C)^T -> (B, 1, V)


def _projection_std(config: GPT2Config) -> float:
    """Of layers that write to the residual stream: smaller by the root of their number (Radford et al., 2019, section 2.3)."""
    return config.initializer_range / sqrt(2 * config.n_layer)
