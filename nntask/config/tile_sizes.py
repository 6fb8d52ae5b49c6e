"""Tile sizes of a run: those that flags give, and for the others those of a table, in whole blocks of quantised weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..hf.model_directory import block_sizes
from ..models.interface import ModelConfig
from ..tiling.model_tiling import ModelTiling, default_tiling
from ..tiling.tile_table import read_table, shape_of
from .run_config import RunConfig
from .settings import TrainSettings, known
from .validation import rank_of

TILE_FLAGS: Final = ("minibatch_tile", "seq_tile", "embd_tile", "inner_tile", "head_tile", "vocab_tile")


def table_tiling(settings: TrainSettings, config: ModelConfig, device: str) -> ModelTiling:
    """Return the tile sizes that the tables have for filled settings, in whole blocks of the weights that adapters learn beside.

    Args:
        device: device class, a key of the built-in table.

    Raises:
        DataError: --tile-table is no such table.
    """
    cut = settings.tiling
    minibatch, length = cut.minibatch, known(settings.model.seq_len)
    rows = read_table(cut.tile_table) if cut.tile_table and cut.auto_tile == "table" and open_tiles(settings) else {}
    row = rows.get(shape_of(config, minibatch, length)) or default_tiling(config, minibatch, length, device=device)
    return _in_blocks(settings, row, config).resolve(config, minibatch, length)


def _in_blocks(settings: TrainSettings, tiling: ModelTiling, config: ModelConfig) -> ModelTiling:
    """A tiling of whole blocks of the weights that adapters learn beside, if it is to be chosen."""
    if rank_of(settings) is None or not settings.checkpoints.init_from or not open_tiles(settings):
        return tiling
    return tiling.in_blocks(config, block_sizes(Path(settings.checkpoints.init_from)))


def in_tiles(settings: TrainSettings, tiling: ModelTiling, config: ModelConfig) -> tuple[TrainSettings, ModelTiling]:
    """Filled settings with the sizes of `tiling` where none was given; where they came from matters no longer. And the tiling itself."""
    cut = settings.tiling
    sizes = {name: getattr(tiling, name) if getattr(cut, name) is None else getattr(cut, name) for name in TILE_FLAGS}
    tiling = ModelTiling(**sizes).resolve(config, cut.minibatch, known(settings.model.seq_len))
    sizes = {name: getattr(tiling, name) for name in TILE_FLAGS}
    return replace(settings, tiling=replace(cut, **sizes, auto_tile="table", tile_table="")), tiling


def open_tiles(settings: TrainSettings) -> list[str]:
    """Tile sizes that no flag gives."""
    return [name for name in TILE_FLAGS if getattr(settings.tiling, name) is None]


def retiled(run: RunConfig, tiling: ModelTiling) -> RunConfig:
    """The run in other tiles, but for the sizes that flags give."""
    given = run.tiles.given
    flags: dict[str, Any] = {name: given.get(name) for name in TILE_FLAGS}
    asked = replace(run.settings, tiling=replace(run.settings.tiling, **flags))
    settings, tiling = in_tiles(asked, _in_blocks(asked, tiling, run.model.config), run.model.config)
    return replace(run, settings=settings, model=replace(run.model, tiling=tiling))
