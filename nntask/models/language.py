"""What every language model here shares: its inputs, its loss and its scores. A model adds what lies between tokens and head.

Letters: B sequences of T tokens, C features of the residual stream, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import select

from .. import functional
from ..autograd import Tensor
from ..cache import Past
from ..errors import UsageError
from ..functional import Masks
from ..module import Module, Parameter
from ..tiling import ModelTiling
from .interface import ModelConfig


class LanguageModel(Module):
    """Base of models on a runtime; a subclass makes its parts, sets `lm_head` (V, C), calls `allocate` and defines `trunk`.

    Args:
        config: shape and numbers.
        tiling: tile sizes.
        runtime: who computes.
    """

    lm_head: Parameter

    def __init__(self, config: ModelConfig, tiling: ModelTiling, runtime: TaskRuntime) -> None:
        self.config = config
        self.runtime = runtime
        self.given_tiling = tiling

    def allocate(self, runtime: TaskRuntime, dtype: npt.DTypeLike, seed: int | None) -> None:
        """Tiles and first values of every parameter, and the key of the dropout masks; see `Module.allocate`."""
        super().allocate(runtime, dtype, seed)
        self.dropout_key = TileTensor(runtime, (2,), (2,), np.uint64, kind="input", data_class="data", name="dropout key")
        self.dropout_key.write(np.array([seed or 0, 0], np.uint64))

    def trunk(self, tokens: TileTensor, masks: Masks | None, past: Past | None = None) -> Tensor:
        """What the head sees: (B, T) int32 -> (B, T, C).

        Args:
            past: keys and values of the tokens before these, to which theirs are added; None where the sequences begin here.
        """
        raise NotImplementedError

    def input_tensors(self, batch: int, seq_len: int | None = None) -> tuple[TileTensor, TileTensor]:
        """Tokens and targets (B, T) int32, to be written before each step.

        Args:
            batch: B.
            seq_len: T, at most the config's n_positions, which is the default.

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
                f"tokens must be (B, T) with T at most {self.config.positions_key} = {self.config.n_positions}, got {tokens.shape}; "
                "shorten the sequences"
            )
        return self.trunk(tokens, Masks(self.dropout_key, minibatch) if self.training else None)

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

    def continued_logits(self, tokens: TileTensor, past: Past) -> Tensor:
        """Scores of the token after each of some tokens that continue cached ones: (B, w) int32 -> (B, w, V)."""
        return functional.linear(self.trunk(tokens, None, past), self.lm_head, None, transpose_w=True)  # (B, w, C) @ (V, C)^T -> (B, w, V)
