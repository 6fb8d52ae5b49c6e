"""Settings are resolved once: what a run is made from is frozen, and its way from `train` to the loop goes in few circles."""

from __future__ import annotations

import dataclasses
import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from nntask.config.resolution import resolve
from nntask.config.run_config import RunConfig
from nntask.config.settings import CheckpointSettings, DataSettings, ModelSettings, ResourceSettings, RunSettings, TilingSettings, TrainSettings
from nntask.models.gpt2 import GPT2Config
from nntask.training.run import train

CONFIG = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
MOST_RETURNS = 10


def settings(folder: Path) -> TrainSettings:
    """A step of a small model over random tokens."""
    np.random.default_rng(0).integers(0, CONFIG.vocab_size, 2000).astype(np.uint16).tofile(folder / "train.bin")
    return TrainSettings(
        model=ModelSettings(config_path="small.json"),
        tiling=TilingSettings(batch=2),
        data=DataSettings(dataset="train.bin", dataset_path=str(folder)),
        run=RunSettings(steps=1, sample_tokens=0),
        checkpoints=CheckpointSettings(run_dir=str(folder / "run")),
        resources=ResourceSettings(ncpu=1, ram="64MiB"),
    )


def holds_a_run(value: object) -> bool:
    """Whether a value is a run or its settings, or has a run as its attribute `run`."""
    return isinstance(value, RunConfig | TrainSettings) or isinstance(getattr(value, "run", None), RunConfig)


def modules_on_the_way(run: RunConfig) -> list[str]:
    """Modules of the functions with an argument that `holds_a_run`, methods included, in the order of calls from `train` to the training loop."""
    found: list[str] = []

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event != "call" or not module.startswith("nntask") or found[-1:] == ["nntask.training.loop"]:
            return
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        is_loop = (module, code.co_name) == ("nntask.training.loop", "train")
        if is_loop or any(map(holds_a_run, given)):
            found.append(module)

    sys.setprofile(on_call)
    try:
        assert train(run) == 0
    finally:
        sys.setprofile(None)
    return [module for module, _ in groupby(found)]


def test_the_way_to_the_loop_goes_in_few_circles(tmp_path: Path) -> None:
    """Fewer than ten calls go back to a module that the run had left; it begins in `run` and gets to the loop.

    A call counts where one of its arguments is the run or its settings, or has the run (a session, an engine). Of 22 stops of this way, 9 are in
    modules that were left before; of the stops of calls that are given the run or its settings themselves, 3.
    """
    way = modules_on_the_way(resolve(settings(tmp_path), CONFIG))
    assert (way[0], way[-1]) == ("nntask.training.run", "nntask.training.loop")
    assert len(way) - len(set(way)) < MOST_RETURNS, way


def test_a_run_is_frozen_and_has_no_sizes_as_text(tmp_path: Path) -> None:
    """No field of it can be set; batch, tiles and budgets are numbers."""
    run = resolve(settings(tmp_path), CONFIG)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.step = run.step  # type: ignore[misc]
    assert (run.step.minibatch, run.step.num_minibatches) == (2, 1)
    assert all(isinstance(size, int) for size in dataclasses.astuple(run.model.tiling))
    assert run.machine.ram.nbytes == 64 << 20
