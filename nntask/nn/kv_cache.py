"""Cache of keys and values for generation: a pair of tile tensors per layer, which take memory tile by tile as a text grows.

Its tiles are ordinary data: they count against memory budgets, and tiles that do not fit go to the disk tier. Keys and values of an encoder's output
are computed once and attended to by every new token of a decoder.

Letters: B sequences, w new tokens, P positions of the cache, S positions of a source, H heads of queries, G of keys and values, D features each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import cache as cache_ops

from ..errors import UsageError
from .autograd import Tensor

if TYPE_CHECKING:
    from ..architecture.family_config import ModelConfig
    from ..tiling.model_tiling import ModelTiling


@dataclass(frozen=True, slots=True)
class EncoderPast:
    """Keys and values of the source in one layer of a decoder; attention to them leaves no tape.

    Args:
        keys, values: (B, S, G*D).
        documents: int32 document numbers of new tokens (B, w) and of the source (B, S); padding of the source has a number of its own.
    """

    keys: TileTensor
    values: TileTensor
    documents: tuple[TileTensor, TileTensor]

    def attend(self, q: Tensor, *, head_size: int, scale: float) -> Tensor:
        """Attend from q (B, w, H*D) to the source without its padding -> (B, w, H*D)."""
        scoring = attention_ops.Scoring(documents=self.documents)
        return Tensor(attention_ops.attention(q.data, self.keys, self.values, head_size=head_size, scale=scale, causal=False, scoring=scoring)[0])


class LayerPast(Protocol):
    """Keys and values that earlier passes left in one layer, in any form of storage."""

    @property
    def across(self) -> EncoderPast | None:
        """Keys and values of the source for a decoder's layer; None without an encoder."""

    def attend(
        self, q: TileTensor, k: TileTensor, v: TileTensor, *, head_size: int, scale: float, scoring: attention_ops.Scoring = attention_ops.UNCHANGED
    ) -> TileTensor:
        """Store the new k and v (B, w, G*D), then attend from q (B, w, H*D) to the positions up to each token's own -> (B, w, H*D)."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Keys and values that earlier passes left in one layer, and the place for those of this pass.

    Args:
        keys, values: (B, P, G*D).
        positions: (B, w) int32 of the new tokens; those of one sequence are consecutive.
        written: tiles along P that contain any of the positions. New tokens see positions up to the last of these tiles.
        sources: (B,) int32, index of the sequence that each sequence continues; None if each continues itself.
        forked: tiles along P in which the sequences of `sources` differ.
        window: window of the layer; tiles before it may be released.
        across: keys and values of the source for a decoder's layer; None without an encoder.
    """

    keys: TileTensor
    values: TileTensor
    positions: TileTensor
    written: range
    sources: TileTensor | None = None
    forked: range = range(0)
    window: int | None = None
    across: EncoderPast | None = None

    def attend(
        self, q: TileTensor, k: TileTensor, v: TileTensor, *, head_size: int, scale: float, scoring: attention_ops.Scoring = attention_ops.UNCHANGED
    ) -> TileTensor:
        """Copy to each sequence the past that it continues, store the new k and v (B, w, G*D), then attend from q (B, w, H*D) to the positions up to
        each token's own -> (B, w, H*D)."""
        if self.window is not None and self.window != scoring.window:
            raise UsageError(
                f"the window of attention must be that of the layer's cache, {self.window}, got {scoring.window}",
                "give KVCache the windows of all layers",
            )
        tile = self.keys.tile[1]
        first = cache_ops.first_seen_tile(scoring.window, self.written, tile)
        if self.sources is not None:
            for cached in (self.keys, self.values):
                cache_ops.reorder_rows(cached, self.sources, range(max(first, self.forked.start), self.forked.stop))
        cache_ops.append(k, v, self.positions, self.keys, self.values, self.written)
        seen = range(first, self.written.stop)
        return cache_ops.cached_attention(q, self.keys, self.values, self.positions, seen, head_size=head_size, scale=scale, scoring=scoring)


@dataclass(frozen=True, slots=True)
class Past:
    """Keys and values of earlier tokens for a forward pass over new tokens.

    Args:
        positions: (B, w) int32 of the new tokens.
        layers: one per block of the model.
        length: largest number of positions of a text, the same in every pass over the text.
    """

    positions: TileTensor
    layers: Sequence[LayerPast]
    length: int


def layers_of(
    config: ModelConfig, runtime: TaskRuntime, shape: Sequence[int], tile: Sequence[int], dtype: npt.DTypeLike
) -> list[tuple[TileTensor, TileTensor]]:
    """Return keys and values of this shape for each layer of a model, without memory."""

    def tensor(what: str, layer: int) -> TileTensor:
        return TileTensor(runtime, shape, tile, dtype, kind="persistent", data_class="activations", name=f"{what} of layer {layer}")

    return [(tensor("keys", layer), tensor("values", layer)) for layer in range(len(config.description.stack.blocks))]


class KVCache:
    """Keys and values of a batch of texts, with one row or several (beams) for each text.

    Args:
        config: configuration of the model; if the model has an encoder, the layers are the decoder's.
        tiling: tiling of the model; seq_tile is the tile along the positions.
        runtime: owner of the data.
        batch: number of texts.
        length: P, largest number of tokens of a text.
        dtype: element type of the model.
        num_beams: number of rows of each text, which are neighbours in one tile; B = batch * num_beams.
        windows: window of each layer, None for a layer that sees all positions; `leave` releases tiles that no window reaches.
    """

    def __init__(
        self,
        config: ModelConfig,
        tiling: ModelTiling,
        runtime: TaskRuntime,
        batch: int,
        length: int,
        dtype: npt.DTypeLike,
        *,
        num_beams: int = 1,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        cut = tiling.resolve(config, batch, length)
        width, group = config.n_kv_head * config.head_size, config.n_head // config.n_kv_head
        self._rows = cut.minibatch_tile * num_beams
        shape, tile = (batch * num_beams, length, width), (self._rows, cut.seq_tile, cut.head_tile // group * config.head_size)
        self.tile = cut.seq_tile
        self._grown = 0
        num_layers = len(config.description.stack.blocks)
        self._windows = [None] * num_layers if windows is None else list(windows)
        if len(self._windows) != num_layers:
            raise UsageError(f"a cache takes a window, or None, for each of {num_layers} layers, got {self._windows}", "give one for each")
        self._left = [0] * num_layers
        self._across: list[EncoderPast | None] = [None] * num_layers
        self._runtime = runtime
        self._layers = layers_of(config, runtime, shape, tile, dtype)

    @property
    def last_position(self) -> int:
        """Largest position that the cache holds."""
        return self._layers[0][0].shape[1] - 1

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a window only."""
        return any(window is not None for window in self._windows)

    def grow(self, length: int) -> None:
        """Allocate memory for at least `length` positions, in whole tiles."""
        while self._grown * self.tile < length:
            for keys, values in self._layers:
                cache_ops.clear(keys, values, self._grown)
            self._grown += 1

    def leave(self, position: int) -> None:
        """Release tiles that no token from `position` on sees, because they lie before their layer's window. No text may write before `position`
        afterwards. Call it between steps, not while a step is recorded."""
        written = range(position // self.tile, position // self.tile + 1)
        for number, (layer, window) in enumerate(zip(self._layers, self._windows, strict=True)):
            first = min(self._grown, cache_ops.first_seen_tile(window, written, self.tile))
            for tile in range(self._left[number], first):
                for tensor in layer:
                    tensor.forget(1, tile)
            self._left[number] = max(self._left[number], first)

    def attend_across(self, layers: Sequence[EncoderPast]) -> None:
        """Let every later pass attend to the sources of an encoder, which have one row for each row of the cache."""
        self._across = list(layers)

    def inputs(self, num_tokens: int) -> tuple[TileTensor, TileTensor]:
        """Return the tokens and their positions (B, w) int32, to be written before each pass."""
        batch = self._layers[0][0].shape[0]
        tokens, positions = (
            TileTensor(self._runtime, (batch, num_tokens), (self._rows, num_tokens), np.int32, kind="input", data_class="data", name=name)
            for name in ("tokens", "positions")
        )
        return tokens, positions

    def sources(self) -> TileTensor:
        """Return an input (B,) int32: the row, of the same text, that each row continues; to be written before the pass."""
        return TileTensor(self._runtime, self._layers[0][0].shape[:1], (self._rows,), np.int32, kind="input", data_class="data", name="sources")

    def past(self, positions: TileTensor, written: range, sources: TileTensor | None = None, shared: int = 0) -> Past:
        """Return the past for a pass over tokens at `positions` (B, w).

        Args:
            written: tiles along P that contain any of the positions.
            sources: input returned by the method `sources`; None if each row continues itself.
            shared: number of first positions at which all rows of a text are equal.
        """
        forked = range(shared // self.tile, written.stop)
        layers = zip(self._layers, self._windows, self._across, strict=True)
        layers_past = [CachedLayer(keys, values, positions, written, sources, forked, window, across) for (keys, values), window, across in layers]
        return Past(positions, layers_past, self.last_position + 1)

    def take(self, texts: KVCache) -> None:
        """Copy the past of each text, from a cache of the same length with one row a text, to all rows of that text in this one.

        The other cache releases its memory layer by layer and cannot be used afterwards."""
        rows, batch = self.sources(), texts._layers[0][0].shape[0]
        rows.write(np.repeat(np.arange(batch, dtype=np.int32), rows.shape[0] // batch))
        for left, layer in zip(texts._left, self._layers, strict=True):
            for source, target in zip(texts._layers.pop(0), layer, strict=True):
                cache_ops.gather_rows(source, rows, target, range(left, texts._grown))
        self._grown, self._left = texts._grown, list(texts._left)


def kept(x: TileTensor, num_beams: int = 1) -> TileTensor:
    """Copy keys or values x (texts, S, G*D) for all later tokens, with `num_beams` neighbouring rows of one tile for each text."""
    texts, _, _ = x.shape
    tile = x.tile[0] * num_beams
    rows = TileTensor(x.runtime, (texts * num_beams,), (tile,), np.int32, kind="input", data_class="data", name="sources")
    rows.write(np.repeat(np.arange(texts, dtype=np.int32), num_beams))
    shape = (texts * num_beams, *x.shape[1:])
    out = TileTensor(x.runtime, shape, (tile, *x.tile[1:]), x.dtype, kind="persistent", data_class="activations", name=f"kept {x.name}")
    cache_ops.gather_rows(x, rows, out, range(x.grid[1]))
    return out


def source_documents(keys: TileTensor, is_text: npt.NDArray[np.integer], num_tokens: int = 1) -> tuple[TileTensor, TileTensor]:
    """Return the document numbers of an `EncoderPast` over `keys` (B, S, G*D): (B, w) of w = `num_tokens` new tokens, and (B, S) of the source.

    Args:
        is_text: (texts, S), 1 where the source has text and 0 in its padding; each text has B / texts rows.
    """
    numbers = np.repeat(is_text, keys.shape[0] // len(is_text), axis=0).astype(np.int32)
    documents = []
    for values, tile in ((np.ones((len(numbers), num_tokens), np.int32), num_tokens), (numbers, keys.tile[1])):
        tensor = TileTensor(keys.runtime, values.shape, (keys.tile[0], tile), np.int32, kind="input", data_class="data", name="documents")
        tensor.write(values)
        documents.append(tensor)
    return documents[0], documents[1]
