"""The base class of language models: inputs, loss and scores. A subclass adds the layers between tokens and head.

Letters: B sequences of T tokens, C features of the residual stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import select

from ..errors import UsageError
from ..nn import functional
from ..nn.autograd import Tensor
from ..nn.functional import Masks
from ..nn.kv_cache import Past
from ..nn.module import Module, Parameter
from ..tiling.model_tiling import ModelTiling
from .interface import ModelConfig


class LanguageModel(Module):
    """Base class of language models; a subclass makes its layers, sets `lm_head` (V, C), calls `allocate` and defines `trunk`.

    Args:
        config: the model's shape and hyperparameters.
        tiling: tile sizes.
        runtime: the runtime that executes the tasks.
    """

    lm_head: Parameter

    def __init__(self, config: ModelConfig, tiling: ModelTiling, runtime: TaskRuntime) -> None:
        self.config = config
        self.runtime = runtime
        self.given_tiling = tiling

    def allocate(self, runtime: TaskRuntime, dtype: npt.DTypeLike, seed: int | None) -> None:
        """Create the tiles of every parameter with their initial values, and the key of the dropout masks; see `Module.allocate`."""
        super().allocate(runtime, dtype, seed)
        self.dropout_key = TileTensor(runtime, (2,), (2,), np.uint64, kind="input", data_class="data", name="dropout key")
        self.dropout_key.write(np.array([seed or 0, 0], np.uint64))

    def trunk(self, tokens: TileTensor, masks: Masks | None, past: Past | None = None) -> Tensor:
        """Features before the head: (B, T) int32 -> (B, T, C).

        Args:
            tokens: (B, T) int32.
            masks: the dropout masks of this forward pass; None without dropout.
            past: cached keys and values of the preceding tokens, to which the keys and values of these tokens are added; None where the sequences
                begin with these tokens.
        """
        raise NotImplementedError

    def input_tensors(self, batch: int, seq_len: int | None = None) -> tuple[TileTensor, TileTensor]:
        """Tokens and targets, (B, T) int32 each, which the program writes before each step.

        Args:
            batch: B, sequences.
            seq_len: T, tokens of a sequence, at most n_positions; None for n_positions.

        Raises:
            UsageError: a count is not positive or T is too long.
        """
        given = self.inputs(batch, seq_len)
        return given["tokens"], given["targets"]

    def inputs(
        self, batch: int, seq_len: int | None = None, names: Sequence[str] = ("tokens", "targets"), target_len: int | None = None
    ) -> dict[str, TileTensor]:
        """The tensors that a program writes before each step, by the names of a batch's arrays (`nntask.data.objectives`): factor (1,) fp32, the
        others (B, T) int32.

        Args:
            batch: B, sequences.
            seq_len: T, tokens of a sequence, at most n_positions; None for n_positions.
            names: which ones.
            target_len: of the arrays of a decoder, which this model does not have.

        Raises:
            UsageError: a count is not positive or T is too long.
        """
        length, limit = self.config.n_positions if seq_len is None else seq_len, self.config.n_positions
        if batch < 1 or not 1 <= length <= limit:
            raise UsageError(
                f"a batch has at least 1 sequence of 1 to {self.config.positions_key} = {limit} tokens, got {batch} of {length}; "
                "lower the sequence length"
            )
        tile = (self.given_tiling.minibatch_tile, self.given_tiling.seq_tile)
        given = {}
        for name in names:
            (shape, cut), dtype = (((1,), (1,)), np.float32) if name == "factor" else (((batch, length), tile), np.int32)
            given[name] = TileTensor(self.runtime, shape, cut, dtype, kind="input", data_class="data", name=name)
        return given

    def position_tensor(self, batch: int) -> TileTensor:
        """A (B,) int32 input for `next_logits`, tiled like the batch axis of the tokens."""
        tile = (self.given_tiling.minibatch_tile,)
        return TileTensor(self.runtime, (batch,), tile, np.int32, kind="input", data_class="data", name="positions")

    def __call__(
        self, tokens: TileTensor, targets: TileTensor, *, reduction: str = "mean", scale: float = 1.0, minibatch: int = 0, **others: TileTensor
    ) -> Tensor:
        """The loss of predicting `targets` from `tokens`.

        Args:
            tokens: (B, T) int32.
            targets: (B, T) int32, usually the tokens shifted by one; a target -1 adds no loss, but counts in the mean.
            reduction: "mean" over the B*T tokens, or "sum".
            scale: factor of the loss; 1 / n for each of n equal minibatches makes their sum the mean over the batch.
            minibatch: index of this forward pass within the step; it selects the dropout masks.
            others: arrays that this model does not take.

        Returns:
            (1,), the loss, whose ``backward()`` computes the gradients.

        Raises:
            UsageError: the reduction is unknown, or what is given does not fit the model.
        """
        if others:
            raise UsageError(
                f"a {self.config.model_type} learns from tokens and targets, got {', '.join(others)} besides; train it on sequences that are "
                "neither padded nor packed"
            )
        if reduction not in ("mean", "sum"):
            raise UsageError(f'reduction must be "mean" or "sum", got {reduction!r}; choose one of them')
        if targets.shape != tokens.shape or targets.tile != tokens.tile:
            raise UsageError(f"tokens and targets need equal shapes and tiles, got {tokens!r} and {targets!r}; make both with input_tensors")
        if reduction == "mean":
            scale /= tokens.shape[0] * tokens.shape[1]
        x = self.hidden(tokens, minibatch)  # (B, T, C)
        return functional.linear_cross_entropy(x, self.lm_head, targets, scale=scale)  # (B, T, C) @ (V, C)^T -> (1,)

    def hidden(self, tokens: TileTensor, minibatch: int = 0) -> Tensor:
        """Features before the head, for sequences without a past: (B, T) int32 -> (B, T, C).

        Raises:
            UsageError: the tokens have another rank, or sequences are too long.
        """
        if len(tokens.shape) != 2 or tokens.shape[1] > self.config.n_positions:
            raise UsageError(
                f"tokens must be (B, T) with T at most {self.config.positions_key} = {self.config.n_positions}, got {tokens.shape}; "
                "shorten the sequences"
            )
        return self.trunk(tokens, Masks(self.dropout_key, minibatch) if self.training else None)

    def logits(self, tokens: TileTensor) -> Tensor:
        """Scores of the next token after every token: (B, T) int32 -> (B, T, V). The result is large; training calls the model itself."""
        return functional.linear(self.hidden(tokens), self.lm_head, None, transpose_w=True)  # (B, T, C) @ (V, C)^T -> (B, T, V)

    def next_logits(self, tokens: TileTensor, positions: TileTensor) -> Tensor:
        """Scores of the token after one chosen token of each sequence.

        Args:
            tokens: (B, T) int32; ids after the chosen token have no effect.
            positions: (B,) int32 input: index of the chosen token in its sequence, from 0.

        Returns:
            (B, 1, V).
        """
        last = Tensor(select.select_rows(self.hidden(tokens).data, positions))  # (B, T, C) -> (B, 1, C)
        return functional.linear(last, self.lm_head, None, transpose_w=True)  # (B, 1, C) @ (V, C)^T -> (B, 1, V)

    def continued_logits(self, tokens: TileTensor, past: Past) -> Tensor:
        """Scores of the next token after each of w tokens that continue cached sequences: (B, w) int32 -> (B, w, V)."""
        return functional.linear(self.trunk(tokens, None, past), self.lm_head, None, transpose_w=True)  # (B, w, C) @ (V, C)^T -> (B, w, V)
