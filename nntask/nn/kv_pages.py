"""Keys and values of texts that come and go, in pages of a pool: a pair of tile tensors per layer, which take memory tile by tile as pages are used.

A pass takes rows of one token each. A table, which is an input, lists the pages of each row's text. So one recorded step serves any texts, whatever
their lengths and the pages they share (Kwon et al., PagedAttention, 2023). Tiles of pages are ordinary data: they count against memory budgets, and
tiles that do not fit go to the disk tier.

Letters: R rows, N pages of T positions, M pages of the longest text, G heads of keys and values, each D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import pages as page_ops

from .kv_cache import EncoderPast, Past, layers_of

if TYPE_CHECKING:
    from ..architecture.family_config import ModelConfig
    from ..tiling.model_tiling import ModelTiling

_TILE_TOKENS: Final = 1024
"""Number of positions in a tile, in whole pages."""


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Keys and values of one layer in pages, and the place for those of this pass.

    Args:
        keys, values: (N, T, G*D).
        positions: (R, 1) int32 of the new tokens.
        table: (R, M) int32, pages of each row's text; negative for unused entries.
        tiles: tiles that contain the pages of the table.
    """

    keys: TileTensor
    values: TileTensor
    positions: TileTensor
    table: TileTensor
    tiles: range
    across: EncoderPast | None = None

    def attend(
        self, q: TileTensor, k: TileTensor, v: TileTensor, *, head_size: int, scale: float, scoring: attention_ops.Scoring = attention_ops.UNCHANGED
    ) -> TileTensor:
        """Store the new k and v (R, 1, G*D) in the pages of each row, then attend from q (R, 1, H*D) to the positions up to each token's own."""
        page_ops.append(k, v, self.positions, self.table, self.keys, self.values, self.tiles)
        where = (self.positions, self.table, self.tiles)
        return page_ops.attention(q, self.keys, self.values, *where, head_size=head_size, scale=scale, scoring=scoring)


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of a pass, all int32, to be written before it.

    Attributes:
        tokens, positions: (R, 1).
        table: (R, M).
    """

    tokens: TileTensor
    positions: TileTensor
    table: TileTensor


class KVPages:
    """Keys and values of all texts.

    Args:
        config: configuration of the model.
        tiling: tiling of the model.
        runtime: owner of the data.
        num_pages: N.
        length: T, positions of a page.
        most: M, pages of the longest text.
        longest: largest number of positions of a text.
        dtype: element type of the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        tiling: ModelTiling,
        runtime: TaskRuntime,
        *,
        num_pages: int,
        length: int,
        most: int,
        longest: int,
        dtype: npt.DTypeLike,
    ) -> None:
        group = config.n_head // config.n_kv_head
        width, cut = config.n_kv_head * config.head_size, tiling.resolve(config, 1, length)
        self.num_pages, self.length, self.most, self._longest = num_pages, length, most, longest
        tile = (min(num_pages, max(1, _TILE_TOKENS // length)), length, cut.head_tile // group * config.head_size)
        self.pages_per_tile, self.num_grown = tile[0], 0
        self._runtime = runtime
        self._layers = layers_of(config, runtime, (num_pages, length, width), tile, dtype)

    @property
    def tensors(self) -> list[TileTensor]:
        """Return all keys and values."""
        return [tensor for layer in self._layers for tensor in layer]

    @property
    def num_tiles(self) -> int:
        """Number of tiles that may take memory."""
        return self._layers[0][0].grid[0]

    def grow(self, num_pages: int) -> None:
        """Allocate memory for at least the first `num_pages` pages, in whole tiles."""
        while self.num_grown * self.pages_per_tile < num_pages:
            for keys, values in self._layers:
                page_ops.clear(keys, values, self.num_grown)
            self.num_grown += 1

    def inputs(self, rows: int) -> RowInputs:
        """Return the inputs of a pass over `rows` rows."""
        shapes = {"tokens": (rows, 1), "positions": (rows, 1), "table": (rows, self.most)}
        made = {name: TileTensor(self._runtime, shape, shape, np.int32, kind="input", data_class="data", name=name) for name, shape in shapes.items()}
        return RowInputs(**made)

    def past(self, given: RowInputs, num_tiles: int | None = None) -> Past:
        """Return the past of a pass, which sees the first `num_tiles` tiles, by default those that have memory now."""
        tiles = range(self.num_grown if num_tiles is None else num_tiles)
        layers = [PagedLayer(keys, values, given.positions, given.table, tiles) for keys, values in self._layers]
        return Past(given.positions, layers, self._longest)
