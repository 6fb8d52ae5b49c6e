"""Training steps that the scripts of this folder plan, and the form in which they are called.

Each script has a dataclass of flags and a ``run(settings)`` that returns its figures, and the same figures as lines of text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from nntask import PRESETS, UsageError
from nntask.architecture import ModelConfig
from nntask.config import (
    ModelSettings,
    ResourceSettings,
    RunConfig,
    TilingSettings,
    TrainSettings,
    check_values,
    devices_of,
    imaginary_machine,
    resolve,
    retiled,
)
from nntask.hardware import MachineModel, coarse_tiling
from nntask.models import config_from_json
from nntask.planning import capture
from scheduler.machine import StepPlan
from wrappers.cli import guarded
from wrappers.cli.options import parse

Figures = tuple[dict[str, Any], list[str]]

STANDARD: Final = TrainSettings(
    model=ModelSettings(model="gpt2", seq_len=1024),
    tiling=TilingSettings(batch=8, minibatch=1, minibatch_tile=1, vocab_tile=6283),
)
"""``--model gpt2 --batch 8 --minibatch 1 --minibatch-tile 1 --vocab-tile 6283``: the job of the benchmarks of memory."""


def length_of(config: ModelConfig) -> int:
    """Return the default number of tokens per sequence: that of the standard job, or the model's longest."""
    return min(1024, config.n_positions)


def preset(name: str) -> ModelConfig:
    """Return the config of a preset.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f"--model must be a preset that nntask models lists, got {name!r}; use --model gpt2")
    return PRESETS[name]


def named(model: str, batch: int, minibatch: int = 1, seq_len: int | None = None) -> TrainSettings:
    """Return the settings of the standard job with another preset, batch or length; the tiles of another preset come from the table.

    Args:
        model: name of the preset.
        batch: sequences per step.
        minibatch: sequences per minibatch.
        seq_len: tokens per sequence; None for `length_of`.

    Raises:
        UsageError: there is no such preset.
    """
    length = length_of(preset(model)) if seq_len is None else seq_len
    tiling = STANDARD.tiling if model == "gpt2" else TilingSettings(minibatch_tile=1)
    return replace(STANDARD, model=ModelSettings(model=model, seq_len=length), tiling=replace(tiling, batch=batch, minibatch=minibatch))


def on_devices(
    model: ModelSettings, config_path: str, tiling: TilingSettings, ram: str, devices: str, link: str
) -> tuple[TrainSettings, ModelConfig, MachineModel]:
    """Return the settings of a job on imaginary devices, its model's config, and the machine.

    Args:
        model: model settings with the name of a preset, and a length or None for `length_of`.
        config_path: JSON file of a config instead of the preset; "" for none.
        ram: byte budget of RAM; "" for a boundless one.
        devices, link: arguments of `imaginary_machine`.

    Raises:
        UsageError: a flag is wrong.
        DataError: the config cannot be read.
    """
    config: ModelConfig = config_from_json(config_path) if config_path else preset(model.model or "")
    if model.seq_len is None:
        model = replace(model, seq_len=length_of(config))
    train = TrainSettings(model=model, tiling=tiling, resources=ResourceSettings(ram=ram))
    check_values(train)
    return train, config, imaginary_machine(devices, train.resources, link)


def captured(settings: TrainSettings, config: ModelConfig | None = None, target: MachineModel | None = None) -> StepPlan:
    """Return the step that `nntask train` would record with these settings. Arguments and errors are those of `run_of`."""
    return capture(run_of(settings, config, target)).plan


def run_of(settings: TrainSettings, config: ModelConfig | None = None, target: MachineModel | None = None) -> RunConfig:
    """Return the run of these settings.

    Args:
        settings: settings of the run.
        config: config of the model; None for the preset that the settings name.
        target: an imaginary machine, for coarse tiles; None for the tiles of the table.

    Raises:
        UsageError: a rule of `nntask train` is broken.
    """
    config = PRESETS[settings.model.model or ""] if config is None else config
    run = resolve(settings, config, machine=devices_of(settings.resources, settings.model.dtype, checks=False))
    if target is not None:
        run = retiled(run, coarse_tiling(config, run.step.minibatch, run.model.seq_len, target))
    return run


def main(settings: type[Any], run: Callable[[Any], Figures]) -> int:
    """Run a script on this process's command line and print its figures; returns the exit code."""

    def command() -> int:
        asked, _ = parse(settings, sys.argv[1:], f"python {sys.argv[0]}")
        figures, lines = run(asked)
        print(json.dumps(figures, indent=1) if asked.json else "\n".join(lines))
        return 0

    return guarded(command)
