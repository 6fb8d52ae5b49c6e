"""Tile sizes of a run: from flags, or else from a table, in whole blocks of quantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..architecture.family_config import ModelConfig
from ..hf.model_directory import block_sizes
from ..tiling.model_tiling import ModelTiling, default_tiling
from ..tiling.tile_table import read_table, shape_of
from .init_from import initial_model
from .run_config import RunConfig
from .settings import TrainSettings, known
from .validation import rank_of

TILE_FLAGS: Final = ("minibatch_tile", "seq_tile", "embd_tile", "inner_tile", "head_tile", "vocab_tile")


def table_tiling(settings: TrainSettings, config: ModelConfig, device: str) -> ModelTiling:
    """Return the tile sizes of the tables for filled settings, in whole blocks of frozen weights that are quantised.

    Args:
        device: device class, a key of the built-in table.

    Raises:
        DataError: the file in --auto-tile is not a tile table.
    """
    cut = settings.tiling
    minibatch, length = cut.num_sequences, known(settings.model.seq_len)
    rows = read_table(cut.tile_table) if cut.tile_table and cut.auto_tile == "table" and open_tiles(settings) else {}
    row = rows.get(shape_of(config, minibatch, length)) or default_tiling(config, minibatch, length, device=device)
    return _in_blocks(settings, row, config).resolve(config, minibatch, length)


def _in_blocks(settings: TrainSettings, tiling: ModelTiling, config: ModelConfig) -> ModelTiling:
    """Return the tiling in whole blocks of the frozen weights, if these are quantised and any size is open."""
    if rank_of(settings) is None or not open_tiles(settings):
        return tiling
    directory = initial_model(settings.checkpoints.init_from).directory
    return tiling if directory is None else tiling.in_blocks(config, block_sizes(directory))


def in_tiles(settings: TrainSettings, tiling: ModelTiling, config: ModelConfig) -> tuple[TrainSettings, ModelTiling]:
    """Return filled settings whose open tile sizes are taken from `tiling`, and the resulting tiling. `auto_tile` and `tile_table` are reset."""
    cut = settings.tiling
    sizes = {name: getattr(tiling, name) if getattr(cut, name) is None else getattr(cut, name) for name in TILE_FLAGS}
    tiling = ModelTiling(**sizes).resolve(config, cut.num_sequences, known(settings.model.seq_len))
    sizes = {name: getattr(tiling, name) for name in TILE_FLAGS}
    return replace(settings, tiling=replace(cut, **sizes, auto_tile="table", tile_table="")), tiling


def open_tiles(settings: TrainSettings) -> list[str]:
    """Return the tile sizes that no flag sets."""
    return [name for name in TILE_FLAGS if getattr(settings.tiling, name) is None]


def retiled(run: RunConfig, tiling: ModelTiling) -> RunConfig:
    """Return the run with other tile sizes, except those that flags set."""
    given = run.tiles.given
    flags: dict[str, Any] = {name: given.get(name) for name in TILE_FLAGS}
    asked = replace(run.settings, tiling=replace(run.settings.tiling, **flags))
    settings, tiling = in_tiles(asked, _in_blocks(asked, tiling, run.model.config), run.model.config)
    return replace(run, settings=settings, model=replace(run.model, tiling=tiling))
