"""The training steps that benchmarks capture: the standard job of the claims about memory, and variations of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nntask.models.config import PRESETS
from nntask.models.interface import ModelConfig
from nntask.trainer.fitting import capture
from nntask.trainer.imagined import with_coarse_tiles
from nntask.trainer.places import Target
from nntask.trainer.prepare import with_tiles
from nntask.trainer.rules import resolve
from nntask.trainer.settings import ModelSettings, TilingSettings, TrainSettings
from scheduler.core.steps import StepPlan

STANDARD: Final = TrainSettings(
    model=ModelSettings(model="gpt2", seq_len=1024),
    tiling=TilingSettings(batch=8, minibatch=1, minibatch_tile=1, vocab_tile=6283),
)
"""``--model gpt2 --batch 8 --minibatch 1 --minibatch-tile 1 --vocab-tile 6283``: the job that the claims about memory are measured on."""


def length_of(config: ModelConfig) -> int:
    """Tokens per sequence where none are asked for: the standard job's, or as many as the model takes."""
    return min(1024, config.n_positions)


def captured(settings: TrainSettings, config: ModelConfig | None = None, target: Target | None = None) -> StepPlan:
    """The step that `nntask train` would record with these settings.

    Args:
        config: of the model; the preset that the settings name unless given.
        target: an imaginary machine, for coarse tiles; None for the table's.

    Raises:
        UsageError: a rule of `nntask train` is broken.
    """
    config = PRESETS[settings.model.model or "tiny"] if config is None else config
    settings = resolve(settings, config)
    if target is not None:
        settings = with_coarse_tiles(settings, config, target)
    settings, tiling = with_tiles(settings, config)
    return capture(settings, config, tiling)


def named(model: str, batch: int, minibatch: int = 1, seq_len: int | None = None) -> TrainSettings:
    """The standard job with another preset, batch or length; another preset's tiles come from the table.

    Args:
        seq_len: None for the standard one, or as many as the model takes.

    Raises:
        UsageError: there is no such preset.
    """
    from nntask.errors import UsageError

    if model not in PRESETS:
        raise UsageError(f"--model must be one of {', '.join(PRESETS)}, got {model!r}; use --model gpt2")
    length = length_of(PRESETS[model]) if seq_len is None else seq_len
    tiling = STANDARD.tiling if model == "gpt2" else TilingSettings(minibatch_tile=1)
    return replace(STANDARD, model=ModelSettings(model=model, seq_len=length), tiling=replace(tiling, batch=batch, minibatch=minibatch))
