"""Transformers built from their descriptions: embeddings, stacks of `blocks`, a head. The letters are those of `blocks`.

Modules and parameters have the names of the family's files: `names.Names.modules` has one for each attribute of the classes here and in `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import elementwise

from ..architecture.description import HeadShape, StackShape
from ..architecture.family_config import ModelConfig
from ..architecture.rotary import Rotary
from ..nn import functional
from ..nn.autograd import Tensor
from ..nn.experts import Routed
from ..nn.functional import Masks, RelativeBias
from ..nn.initializers import constant, normal
from ..nn.kv_cache import Past
from ..nn.layers import Embedding
from ..nn.module import Module, Parameter
from ..tiling.model_tiling import ModelTiling
from .blocks import Angles, Block, Construction, ForwardPass
from .language import NO_EXTRAS, ExtraInputs, LanguageModel


class Stack(Module):
    """Blocks between embedded tokens and the head: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: StackShape, made: Construction) -> None:
        self.names, self.shape = made.names, shape
        rows, types, tile = shape.num_positions, shape.num_token_types, made.tiling.embd_tile
        self.positions = None if rows is None else Embedding(rows, made.width, (made.tiling.seq_tile, tile), std=shape.std)
        self.token_types = Embedding(types, made.width, (-1, tile), std=shape.std) if types else None
        self.embedding_norm = None if shape.embedding_norm is None else made.norm(shape.embedding_norm)
        self.dropout = made.dropout(shape.dropout)
        self.blocks = [Block(block, made, has_table=layer == 0) for layer, block in enumerate(shape.blocks)]
        self.norm = None if shape.norm is None else made.norm(shape.norm)
        self.last_dropout = made.dropout(shape.dropout if shape.drops_last else None)

    def __call__(self, x: Tensor, given: ForwardPass, past: Past | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = self.dropout(self._embedded(x, given, past), given.masks)
        first = self.blocks[0].attention
        if first.relative is not None and first.shape.relative is not None:
            shape = first.shape.relative
            given = replace(given, bias=RelativeBias(first.relative.weight, not first.shape.is_causal, shape.max_distance))
        for block, before in zip(self.blocks, past.layers if past is not None else [None] * len(self.blocks), strict=True):
            with x.data.runtime.block():
                x = block(x, given, before)
        return self.last_dropout(x if self.norm is None else self.norm(x), given.masks)

    def _embedded(self, x: Tensor, given: ForwardPass, past: Past | None) -> Tensor:
        """Return token embeddings plus those of positions and kinds of tokens: (B, T, C) -> (B, T, C)."""
        if self.shape.embedding_scale != 1:
            x = functional.scaled(x, self.shape.embedding_scale)
        if self.positions is not None:  # + (P, C)[positions] -> (B, T, C)
            at = given.positions if past is None else past.positions
            x = functional.add_positions(x, self.positions.weight) if at is None else x + self.positions(at, self.shape.first_position)
        if self.token_types is not None and given.token_types is not None:
            x = x + self.token_types(given.token_types)
        return x if self.embedding_norm is None else self.embedding_norm(x)


class HeadLayers(Module):
    """Layers between the last block and the scores: (B, T, C) -> (B, T, C), or (B, 1, C) for a classifier."""

    def __init__(self, shape: HeadShape, made: Construction) -> None:
        self.names, self.shape = made.names, shape
        width, tile = made.width, made.tiling.embd_tile
        self.first_dropout = made.dropout(shape.dropout if shape.drops_first else None)
        self.transform = None
        if shape.transform is not None:
            self.transform = made.linear(width, width, (tile, tile), std=shape.std, has_bias=True, activation=shape.transform)
        self.transform_norm = None if shape.transform_norm is None else made.norm(shape.transform_norm)
        self.dropout = made.dropout(shape.dropout)

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(B, T, C) -> (B, T, C), or (B, 1, C)."""
        x = self.first_dropout(functional.first_token(x) if self.shape.num_labels else x, masks)
        if self.transform is not None:
            x = self.transform(x, masks)  # activation((B, T, C) @ (C, C)) -> (B, T, C)
        x = self.dropout(x if self.transform_norm is None else self.transform_norm(x), masks)
        return x if self.shape.scale == 1 else functional.scaled(x, self.shape.scale)


class Transformer(LanguageModel):
    """Model of a config on a runtime.

    Args:
        config: the model's shape and hyperparameters, of a family here.
        tiling: tile sizes.
        runtime: runtime that executes the tasks.
        dtype: element type of parameters and activations.
        seed: seed of the initial weights; None leaves the weights unwritten, to be loaded.
        flash: whether attention avoids the full matrix of scores.
        library: whether the attention library of the runtime's devices may compute attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        tiling: ModelTiling,
        runtime: TaskRuntime,
        *,
        dtype: npt.DTypeLike = np.float32,
        seed: int | None = 0,
        flash: bool = True,
        library: bool = False,
    ) -> None:
        super().__init__(config, tiling, runtime)
        described, width = config.description, config.n_embd
        self.described, self.names = described, config.names.modules
        cut = tiling.resolve(config, 1 << 62, config.n_positions)
        construction = Construction(cut, width, self.names, described.has_rows_in, flash, library)
        head, row_tile = described.head, (cut.vocab_tile, cut.embd_tile)
        self.embed = Embedding(config.vocab_size, width, row_tile, std=described.stack.std)
        self.encoder = None
        if described.encoder is not None:
            self.encoder = Stack(described.encoder, replace(construction, names={**self.names, **config.names.encoder_modules}))
        self.stack = Stack(described.stack, construction)
        self.head = HeadLayers(head, construction)
        num_out = head.num_labels or config.vocab_size
        self.lm_head = self.embed.weight if head.is_tied else Parameter((num_out, width), row_tile, normal(head.std))
        self.head_bias = Parameter((num_out,), row_tile[:1], constant(0.0)) if head.has_bias else None
        self.head_cap = head.cap
        has = {"positions": described.stack.num_positions is not None, "token_types": described.stack.num_token_types, "decoder_tokens": self.encoder}
        self.takes = ("documents", *(name for name, is_there in has.items() if is_there))
        self.allocate(runtime, dtype, seed)
        self._frequencies = {
            (rotary, is_long): self._frequencies_of(rotary, dtype, is_long=is_long)
            for rotary in described.stack.rotaries
            for is_long in ([False, True] if rotary.has_two_tables else [False])
        }
        self._constants: dict[tuple[Any, ...], TileTensor] = {}

    @property
    def tables(self) -> tuple[Parameter, ...]:
        """Token embedding and head."""
        return (self.embed.weight, self.lm_head)

    def constants(self) -> dict[str, TileTensor]:
        """Return the key of the dropout masks, the frequencies of rotary positions, and constants of the batches of a shape, by name."""
        frequencies = {f"rotary frequencies {number}": tensor for number, tensor in enumerate(self._frequencies.values())}
        of_batches = {f"{name} of {shape} in tiles of {tile}": tensor for (name, shape, tile), tensor in self._constants.items()}
        return {**super().constants(), **frequencies, **of_batches}

    def _frequencies_of(self, rotary: Rotary, dtype: npt.DTypeLike, *, is_long: bool) -> TileTensor:
        angle_dtype, shape = np.float64 if np.dtype(dtype) == np.float64 else np.float32, (rotary.size // 2,)
        found = TileTensor(self.runtime, shape, shape, angle_dtype, kind="input", data_class="data", name="rotary frequencies")
        found.write(rotary.frequencies(is_long=is_long).astype(angle_dtype))
        return found

    def inputs(
        self, batch: int, seq_len: int | None = None, names: Sequence[str] = ("tokens", "targets"), target_len: int | None = None
    ) -> dict[str, TileTensor]:
        """Return the tensors that `LanguageModel.inputs` does; the first call for a shape also writes the constants of its batches."""
        found = super().inputs(batch, seq_len, names, target_len)
        self._constants_of(found["tokens"], ExtraInputs(**{name: found[name] for name in found if name in self.takes}))
        return found

    def trunk(
        self,
        tokens: TileTensor,
        masks: Masks | None,
        past: Past | None = None,
        given: ExtraInputs = NO_EXTRAS,
        routed: list[Routed] | None = None,
    ) -> Tensor:
        """Return the features before the head: (B, T) int32 -> (B, T, C), or (B, 1, C) of a classifier."""
        shared = replace(self._pass(tokens, masks, past, given), routed=routed)
        if self.encoder is not None and past is None:
            assert given.decoder_tokens is not None  # has been checked
            encoded = self.encoder(self.embed(tokens), replace(shared, across_documents=None), None)  # (B, S, C)
            tokens, shared = given.decoder_tokens, replace(shared, encoded=encoded, documents=None)
            del encoded
        return self.head(self.stack(self.embed(tokens), shared, past), masks)

    def encode(self, tokens: TileTensor, documents: TileTensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the sources for each block of the decoder: (B, S) int32 -> 2 x (B, S, G*D) each."""
        assert self.encoder is not None  # has been checked
        x = self.encoder(self.embed(tokens), self._pass(tokens, None, None, ExtraInputs(documents)), None)  # (B, S, C)
        return [block.cross.of_source(x, None) for block in self.stack.blocks]

    def _pass(self, tokens: TileTensor, masks: Masks | None, past: Past | None, given: ExtraInputs) -> ForwardPass:
        """Return the inputs that blocks share in a forward pass."""
        length, tile = tokens.shape[1], tokens.tile[1]
        frequencies = {r: self._frequencies[r, r.is_long(past.length if past else length)] for r in self.described.stack.rotaries}
        if past is not None:  # 2 x (B, T, R / 2)
            return ForwardPass(masks, {r: _scaled(r, elementwise.rotary_angles_at(f, past.positions)) for r, f in frequencies.items()})
        angles = {r: _scaled(r, elementwise.rotary_angles(f, length, tile)) for r, f in frequencies.items()}  # 2 x (T, R / 2)
        return ForwardPass(masks, angles, given.documents, **self._constants_of(tokens, given))

    def _constants_of(self, tokens: TileTensor, given: ExtraInputs) -> dict[str, Any]:
        """Return the fields of `ForwardPass` that are inputs or the same for all batches of a shape."""
        stack, fields = self.described.stack, dict[str, Any]()
        if given.decoder_tokens is not None and given.documents is not None:
            fields["across_documents"] = (self._constant("text", given.decoder_tokens, 1), given.documents)
        if given.positions is not None:
            fields["positions"] = given.positions
        elif stack.first_position:
            fields["positions"] = self._constant("positions", tokens, np.arange(tokens.shape[1]))
        if stack.num_token_types:
            fields["token_types"] = self._constant("token types", tokens, 0) if given.token_types is None else given.token_types
        return fields

    def _constant(self, name: str, like: TileTensor, values: npt.ArrayLike) -> TileTensor:
        """Return an int32 tensor of the shape and tiles of another one; the first call writes it."""
        key = (name, like.shape, like.tile)
        if key not in self._constants:
            found = TileTensor(self.runtime, like.shape, like.tile, np.int32, kind="input", data_class="data", name=name)
            found.write(np.ascontiguousarray(np.broadcast_to(values, like.shape), np.int32))
            self._constants[key] = found
        return self._constants[key]


def _scaled(rotary: Rotary, angles: Angles) -> Angles:
    """Multiply cosines and sines by the factor of their scaling, if that is not 1."""
    factor = 1.0 if rotary.scaling is None else rotary.scaling.angle_factor
    return angles if factor == 1 else (elementwise.scale(angles[0], factor), elementwise.scale(angles[1], factor))
