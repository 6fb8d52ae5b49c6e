"""The cache of keys and values that generation keeps: one pair of tile tensors per layer, which take memory tile by tile as a text grows.

Its tiles are data like any other: budgets count them, and what does not fit goes to the disk tier.

Letters: B sequences, w new tokens, P positions of the cache, G heads of keys and values, each D features.
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

if TYPE_CHECKING:
    from ..models.interface import ModelConfig
    from ..tiling.model_tiling import ModelTiling
    from .encoder_past import EncoderPast


class LayerPast(Protocol):
    """Keys and values that earlier passes left in one layer, however they are kept."""

    @property
    def across(self) -> EncoderPast | None:
        """What a decoder's layer sees of the source; None without an encoder."""

    def attend(
        self, q: TileTensor, k: TileTensor, v: TileTensor, *, head_size: int, scale: float, scoring: attention_ops.Scoring = attention_ops.UNCHANGED
    ) -> TileTensor:
        """Keep the new k and v (B, w, G*D), then attend from q (B, w, H*D) to positions up to each token's own -> (B, w, H*D)."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Keys and values that earlier passes left in one layer, and where this pass adds its own.

    Args:
        keys, values: (B, P, G*D).
        positions: (B, w) int32 of the new tokens; those of one sequence follow one another.
        written: tiles along P that any of the positions lies in. What the new tokens see ends with the last of them.
        sources: (B,) int32, the sequence that each sequence goes on from; None for itself.
        forked: tiles along P in which it matters from which one.
        window: of the layer, whose tiles in front of it may be gone.
        across: what a decoder's layer sees of the source; None without an encoder.
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
        """Bring each sequence the past it goes on from and keep the new k and v (B, w, G*D); then attend from q (B, w, H*D) to positions up to each
        token's own -> (B, w, H*D)."""
        if self.window is not None and self.window != scoring.window:
            raise UsageError(
                f"a layer attends through its cache's window, {self.window}, got {scoring.window}; give KVCache the windows of all layers"
            )
        tile = self.keys.tile[1]
        first = cache_ops.first_seen_tile(scoring.window, self.written, tile)
        if self.sources is not None:
            for kept in (self.keys, self.values):
                cache_ops.reorder_rows(kept, self.sources, range(max(first, self.forked.start), self.forked.stop))
        cache_ops.append(k, v, self.positions, self.keys, self.values, self.written)
        seen = range(first, self.written.stop)
        return cache_ops.cached_attention(q, self.keys, self.values, self.positions, seen, head_size=head_size, scale=scale, scoring=scoring)


@dataclass(frozen=True, slots=True)
class Past:
    """What a forward pass over new tokens knows of the tokens before them.

    Args:
        positions: (B, w) int32 of the new tokens.
        layers: one per block of the model.
        length: largest number of positions of a text, which is the same in every pass over the text.
    """

    positions: TileTensor
    layers: Sequence[LayerPast]
    length: int


class KVCache:
    """Keys and values of a batch of texts, or of several rows for each text, its beams.

    Args:
        config: of the model; of one with an encoder the layers are those of the decoder.
        tiling: of the model; seq_tile is the tile along the positions.
        runtime: owner of the data.
        batch: texts.
        length: P, most tokens of a text.
        dtype: element type of the model.
        num_beams: rows of a text, neighbours in one tile; B is `batch` times as many.
        windows: that of each layer, None for a layer that sees all; tiles that left a window are given back by `leave`.
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
            raise UsageError(f"a cache takes a window, or None, for each of {num_layers} layers, got {self._windows}; give it so many")
        self._left = [0] * num_layers
        self._across: list[EncoderPast | None] = [None] * num_layers
        self._runtime = runtime
        self._layers = [
            tuple(
                TileTensor(runtime, shape, tile, dtype, kind="persistent", data_class="activations", name=f"{what} of layer {layer}")
                for what in ("keys", "values")
            )
            for layer in range(num_layers)
        ]

    @property
    def last_position(self) -> int:
        """The last one there may be."""
        return self._layers[0][0].shape[1] - 1

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a window only."""
        return any(window is not None for window in self._windows)

    def grow(self, length: int) -> None:
        """Take memory for at least `length` positions, in whole tiles."""
        while self._grown * self.tile < length:
            for keys, values in self._layers:
                cache_ops.clear(keys, values, self._grown)
            self._grown += 1

    def leave(self, position: int) -> None:
        """Give back the memory of tiles that no token from `position` on sees: those in front of their layer's window. No text may write before it
        any more; to be called between steps, not while one is recorded."""
        written = range(position // self.tile, position // self.tile + 1)
        for number, (layer, window) in enumerate(zip(self._layers, self._windows, strict=True)):
            first = min(self._grown, cache_ops.first_seen_tile(window, written, self.tile))
            for tile in range(self._left[number], first):
                for tensor in layer:
                    tensor.forget(1, tile)
            self._left[number] = max(self._left[number], first)

    def attend_across(self, layers: Sequence[EncoderPast]) -> None:
        """Let every pass from now on see the sources of an encoder, which have as many rows."""
        self._across = list(layers)

    def inputs(self, num_tokens: int) -> tuple[TileTensor, TileTensor]:
        """Tokens and their positions (B, w) int32, to be written before each pass."""
        batch = self._layers[0][0].shape[0]
        tokens, positions = (
            TileTensor(self._runtime, (batch, num_tokens), (self._rows, num_tokens), np.int32, kind="input", data_class="data", name=name)
            for name in ("tokens", "positions")
        )
        return tokens, positions

    def sources(self) -> TileTensor:
        """An input (B,) int32: the row that each row goes on from, of its own text; to be written before the pass."""
        return TileTensor(self._runtime, self._layers[0][0].shape[:1], (self._rows,), np.int32, kind="input", data_class="data", name="sources")

    def past(self, positions: TileTensor, written: range, sources: TileTensor | None = None, shared: int = 0) -> Past:
        """What a pass over tokens at `positions` (B, w) needs.

        Args:
            written: the tiles along P that any of the positions lies in.
            sources: see `sources`; None where each row goes on from itself.
            shared: positions up to which all rows of a text are equal.
        """
        forked = range(shared // self.tile, written.stop)
        layers = zip(self._layers, self._windows, self._across, strict=True)
        found = [CachedLayer(keys, values, positions, written, sources, forked, window, across) for (keys, values), window, across in layers]
        return Past(positions, found, self.last_position + 1)

    def take(self, texts: KVCache) -> None:
        """Give all rows of each text what another cache has of it, as long as this one, with one row a text. That one gives its memory back layer by
        layer, and is of no use afterwards."""
        rows, batch = self.sources(), texts._layers[0][0].shape[0]
        rows.write(np.repeat(np.arange(batch, dtype=np.int32), rows.shape[0] // batch))
        for left, layer in zip(texts._left, self._layers, strict=True):
            for source, target in zip(texts._layers.pop(0), layer, strict=True):
                cache_ops.gather_rows(source, rows, target, range(left, texts._grown))
        self._grown, self._left = texts._grown, list(texts._left)
