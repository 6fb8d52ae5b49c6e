"""Base class of language models: inputs, loss and scores. A subclass adds the layers between tokens and head.

Letters: B sequences of T tokens, C features of the residual stream, V vocabulary, S tokens of an encoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import QuantisedTensor, TileTensor
from tiles.ops import select

from ..architecture.config_checks import LARGEST_COUNT
from ..architecture.family_config import ModelConfig
from ..errors import UsageError
from ..nn import functional
from ..nn.autograd import Tensor
from ..nn.experts import Routed, balance_loss, sum_of_losses
from ..nn.functional import Masks
from ..nn.kv_cache import KVCache, Past
from ..nn.layers import Linear
from ..nn.module import Blocks, Module, Parameter
from ..tiling.model_tiling import ModelTiling

_OF_DECODER: Final = ("decoder_tokens", "targets")


@dataclass(frozen=True, slots=True)
class ExtraInputs:
    """Inputs of a forward pass in addition to tokens (B, T), all int32; None for absent ones.

    Args:
        documents: (B, T), numbers of documents, whose tokens do not see each other: of packed texts, or 1 for text and 0 for padding.
        token_types: (B, T), kinds of tokens.
        decoder_tokens: (B, T) of the decoder; tokens (B, S) and documents then belong to the encoder.
        positions: (B, T), positions of tokens in their texts, for models with a table of positions; None for 0 to T - 1.
    """

    documents: TileTensor | None = None
    token_types: TileTensor | None = None
    decoder_tokens: TileTensor | None = None
    positions: TileTensor | None = None


NO_EXTRAS: Final = ExtraInputs()


class LanguageModel(Module, ABC):
    """Base class of language models; a subclass creates its layers, sets `lm_head` (V, C), calls `allocate`, and defines `trunk` and `encode`.

    Args:
        config: the model's shape and hyperparameters.
        tiling: tile sizes.
        runtime: runtime that executes the tasks.

    Attributes:
        head_bias: (V,), added to the scores; None for none.
        head_cap: soft cap of the scores, head_cap * tanh(scores / head_cap); None for none.
        takes: names of the `ExtraInputs` that the model uses.
    """

    lm_head: Parameter
    head_bias: Parameter | None = None
    head_cap: float | None = None
    takes: tuple[str, ...] = ("documents",)

    def __init__(self, config: ModelConfig, tiling: ModelTiling, runtime: TaskRuntime) -> None:
        self.config = config
        self.runtime = runtime
        self.given_tiling = tiling

    def allocate(self, runtime: TaskRuntime, dtype: npt.DTypeLike, seed: int | None) -> None:
        """Create the tiles of every parameter with their initial values, as `Module.allocate` does, and the key of the dropout masks."""
        super().allocate(runtime, dtype, seed)
        self.dropout_key = TileTensor(runtime, (2,), (2,), np.uint64, kind="input", data_class="data", name="dropout key")
        self.dropout_key.write(np.array([seed or 0, 0], np.uint64))

    def constants(self) -> dict[str, TileTensor]:
        """Return the inputs of the model's steps that are not arrays of a batch, by name."""
        return {"dropout key": self.dropout_key}

    @property
    def tables(self) -> tuple[Parameter, ...]:
        """Token embedding and head, or the head alone if the model has no token embedding."""
        return (self.lm_head,)

    def hold_blocks(self, blocks: Mapping[str, Blocks]) -> None:
        """Store weights in blocks from now on, frozen, with tiles that are not written yet; for weights that are then attached to files.

        A weight in 16-bit blocks keeps this format if operations gain from it (`QuantisedTensor.gains`). Otherwise it is converted to floats.

        Args:
            blocks: name -> format. Only matrices of layers, the token embedding and the head may be quantised.

        Raises:
            UsageError: another weight is quantised, or a tile is not a whole number of blocks.
        """
        layers = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, Linear)}
        parameters = self.named_parameters()
        for name, how in blocks.items():
            is_allowed = name in layers or any(parameters[name] is table for table in self.tables)
            if not how.block_format.is_quantised and not (
                is_allowed and QuantisedTensor.gains(parameters[name].data, how.block_format, is_turned=how.is_turned)
            ):
                continue
            if not is_allowed:
                raise UsageError(f"{name} is quantised, and only matrices of layers, the token embedding and the head may be", "keep it as floats")
            try:
                parameters[name].hold(how)
            except ValueError as error:
                raise UsageError(f"{error} (tile sizes are --embd-tile, --inner-tile and, times the size of a head, --head-tile)") from error

    @abstractmethod
    def trunk(
        self,
        tokens: TileTensor,
        masks: Masks | None,
        past: Past | None = None,
        given: ExtraInputs = NO_EXTRAS,
        routed: list[Routed] | None = None,
    ) -> Tensor:
        """Return the features before the head: (B, T) int32 -> (B, T, C), or (B, 1, C) of a classifier.

        Args:
            tokens: (B, T) int32; (B, S) for a model with an encoder, whose decoder has the T tokens.
            masks: dropout masks of this forward pass; None without dropout.
            past: cached keys and values of the preceding tokens, to which the keys and values of these tokens are added; None if the sequences begin
                with these tokens.
            given: further inputs.
            routed: list that receives the routing of each mixture of experts; None if it is not needed.
        """

    def input_tensors(self, batch: int, seq_len: int | None = None) -> tuple[TileTensor, TileTensor]:
        """Return tokens and targets, (B, T) int32 each, which the program writes before each step; `inputs` creates other inputs."""
        given = self.inputs(batch, seq_len)
        return given["tokens"], given["targets"]

    def inputs(
        self, batch: int, seq_len: int | None = None, names: Sequence[str] = ("tokens", "targets"), target_len: int | None = None
    ) -> dict[str, TileTensor]:
        """Return the tensors that a program writes before each step, by the names of a batch's arrays (`nntask.data.objectives`): factor is (1,)
        fp32, the others are int32, (B, T), or (B, 1) for the targets of a classifier.

        Args:
            batch: B, number of sequences.
            seq_len: T, number of tokens of a sequence, or S of an encoder, at most n_positions; None for n_positions.
            names: names of the tensors.
            target_len: T of a decoder; None for S.

        Raises:
            UsageError: a count is not positive or a length is too long.
        """
        length, limit = self.config.n_positions if seq_len is None else seq_len, self.config.longest or LARGEST_COUNT
        lengths = dict.fromkeys(names, length)
        if "decoder_tokens" in names:
            lengths.update(dict.fromkeys(_OF_DECODER, target_len or length))
        elif self.config.num_labels and self.config.objective == "classify":
            lengths["targets"] = 1
        for each in lengths.values():
            if batch < 1 or not 1 <= each <= limit:
                raise UsageError(
                    f"a batch has at least 1 sequence of 1 to {self.config.positions_key} = {limit} tokens, got {batch} of {each}",
                    "lower the sequence length",
                )
        tile = (self.given_tiling.minibatch_tile, self.given_tiling.seq_tile)
        tensors = {}
        for name in names:
            (shape, cut), dtype = (((1,), (1,)), np.float32) if name == "factor" else (((batch, lengths[name]), tile), np.int32)
            tensors[name] = TileTensor(self.runtime, shape, cut, dtype, kind="input", data_class="data", name=name)
        return tensors

    def position_tensor(self, batch: int) -> TileTensor:
        """Return a (B,) int32 input for `next_logits`, tiled like the batch axis of the tokens."""
        tile = (self.given_tiling.minibatch_tile,)
        return TileTensor(self.runtime, (batch,), tile, np.int32, kind="input", data_class="data", name="positions")

    def __call__(
        self,
        tokens: TileTensor,
        targets: TileTensor,
        *,
        factor: TileTensor | None = None,
        reduction: str = "mean",
        scale: float = 1.0,
        share: float = 1.0,
        minibatch: int = 0,
        **given: TileTensor,
    ) -> Tensor:
        """Return the loss of predicting `targets` from `tokens`.

        Args:
            tokens: (B, T) int32.
            targets: (B, T) int32, usually the tokens shifted by one; (B, 1) for a classifier. A target -1 adds no loss, but counts in the mean.
            factor: (1,) fp32, factor of the sum of the losses instead of the mean's: 1 / number of targets that count.
            reduction: "mean" over the targets, or "sum".
            scale: factor of the loss; 1 / n for each of n equal minibatches makes their sum the mean over the batch.
            share: part of the batch that is in this minibatch, the factor of the load-balancing loss of mixtures of experts. That loss is added in
                training if the config asks for it.
            minibatch: index of this forward pass within the step; it selects the dropout masks.
            given: fields of `ExtraInputs`.

        Returns:
            (1,), the loss, whose ``backward()`` computes the gradients.

        Raises:
            UsageError: the reduction is unknown, or the inputs do not fit the model.
        """
        if reduction not in ("mean", "sum"):
            raise UsageError(f'reduction must be "mean" or "sum", got {reduction!r}', "choose one of them")
        inputs, balance = self._given(given), self.config.description.balance if self.training else 0.0
        routed: list[Routed] | None = [] if balance else None
        x = self.hidden(tokens, minibatch, inputs, routed)  # (B, T, C)
        if targets.shape != x.shape[:2] or targets.tile[0] != tokens.tile[0]:
            raise UsageError(
                f"targets must be {x.shape[:2]} with tiles of {tokens.tile[0]} sequences, one for each score, got {targets!r} with {tokens!r}",
                "make both with inputs",
            )
        if reduction == "mean" and factor is None:
            scale /= targets.shape[0] * targets.shape[1]
        loss = functional.linear_cross_entropy(  # (B, T, C) @ (V, C)^T -> (1,)
            x, self.lm_head, targets, scale=scale, bias=self.head_bias, factor=factor, cap=self.head_cap
        )
        return sum_of_losses(loss, balance_loss(routed, inputs.documents, scale=balance * share)) if routed else loss

    def _given(self, arrays: dict[str, TileTensor]) -> ExtraInputs:
        """Return the further inputs, if the model uses all of them.

        Raises:
            UsageError: the model does not use one of them, or lacks one.
        """
        kind = self.config.model_type
        if unknown := [name for name in arrays if name not in self.takes]:
            raise UsageError(
                f"a {kind} takes tokens, targets, factor, {', '.join(self.takes)}, got {', '.join(unknown)} besides",
                "leave that out, or use a model that takes it",
            )
        if "decoder_tokens" in self.takes and "decoder_tokens" not in arrays:
            raise UsageError(f"a {kind} has an encoder and a decoder, and decoder_tokens are missing", "give tokens of both")
        return ExtraInputs(**arrays)

    def hidden(self, tokens: TileTensor, minibatch: int = 0, given: ExtraInputs = NO_EXTRAS, routed: list[Routed] | None = None) -> Tensor:
        """Return the features before the head, for sequences without a past: (B, T) int32 -> (B, T, C).

        Raises:
            UsageError: the tokens have another rank, or sequences are too long.
        """
        limit = self.config.longest or LARGEST_COUNT
        if len(tokens.shape) != 2 or tokens.shape[1] > limit:
            raise UsageError(
                f"tokens must be (B, T) with T at most {self.config.positions_key} = {limit}, got {tokens.shape}", "shorten the sequences"
            )
        return self.trunk(tokens, Masks(self.dropout_key, minibatch) if self.training else None, given=given, routed=routed)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores of features: (B, T, C) -> (B, T, V)."""
        y = functional.linear(x, self.lm_head, self.head_bias, transpose_w=True)  # (B, T, C) @ (V, C)^T -> (B, T, V)
        return y if self.head_cap is None else functional.capped(y, self.head_cap)

    def logits(self, tokens: TileTensor, **given: TileTensor) -> Tensor:
        """Return the scores of the next token after every token: (B, T) int32 -> (B, T, V). The result is large; to train, call the model itself."""
        return self.scores(self.hidden(tokens, given=self._given(given)))

    def next_logits(self, tokens: TileTensor, positions: TileTensor, **given: TileTensor) -> Tensor:
        """Return the scores of the token after one chosen token of each sequence, or of a masked token.

        Args:
            tokens: (B, T) int32; ids after the chosen token have no effect on a decoder.
            positions: (B,) int32 input: index of the chosen token in its sequence, from 0; in the decoder's sequence if there is an encoder.
            given: fields of `ExtraInputs`.

        Returns:
            (B, 1, V).
        """
        x = self.hidden(tokens, given=self._given(given))  # (B, T, C)
        return self.scores(Tensor(select.select_rows(x.data, positions)))  # (B, T, C) -> (B, 1, C) -> (B, 1, V)

    @property
    def start(self) -> int | None:
        """Id that a decoder's text begins with if an encoder reads the prompt; None for a model without an encoder."""
        if self.config.description.encoder is None:
            return None
        start: int | None = getattr(self.config, "decoder_start_token_id", None)
        return 0 if start is None else start

    def cache(self, batch: int, length: int, num_beams: int = 1) -> KVCache:
        """Return an empty `KVCache` for `batch` texts of at most `length` tokens, with the windows of all layers."""
        windows = [block.attention.window for block in self.config.description.stack.blocks]
        return KVCache(self.config, self.given_tiling, self.runtime, batch, length, self.lm_head.dtype, num_beams=num_beams, windows=windows)

    @abstractmethod
    def encode(self, tokens: TileTensor, documents: TileTensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the sources for each layer of the decoder, for a model with an encoder.

        Args:
            tokens: (B, S) int32.
            documents: (B, S) int32, 1 for text and 0 for padding.

        Returns:
            2 x (B, S, G*D) for each layer.
        """

    def continued_logits(self, tokens: TileTensor, past: Past) -> Tensor:
        """Return the scores of the next token after each of w tokens that continue cached sequences: (B, w) int32 -> (B, w, V)."""
        return self.scores(self.trunk(tokens, None, past))
