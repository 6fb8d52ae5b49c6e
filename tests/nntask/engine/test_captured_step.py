"""The step that is checked before memory is taken is the one that runs."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.plans import shape_of
from support.training import GPT, LLAMA

from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, OptimizerSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.engine.opening import runtime_for
from nntask.engine.recorded import RecordedEngine
from nntask.planning.memory_fit import capture

TILES: Final = {"minibatch_tile": 1, "seq_tile": 9, "embd_tile": 16, "inner_tile": 50, "vocab_tile": 25}
STEPS: Final[dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "gpt2": (GPT, {}, {}, {}),
    "llama": (LLAMA, {}, {}, {}),
    "one minibatch": (GPT, {}, {"minibatch": 4}, {}),
    "lanes, recomputation, clipping": (GPT, {}, {"lanes": 2}, {"grad_clip": 1.0}),
    "bf16, stored scores": (LLAMA, {"dtype": "bf16", "attention": "stored"}, {}, {}),
    "adapters": (LLAMA, {}, {}, {"train": "lora:2", "lora_dropout": 0.1}),
    "sgd": (GPT, {}, {}, {"optimizer": "sgd", "momentum": 0.9}),
}
"""Model, and fields of the settings of model, tiling and optimizer."""


@pytest.mark.parametrize("name", STEPS)
def test_the_check_looks_at_the_step_that_runs(name: str) -> None:
    """What is captured before memory is taken is, task by task, what the engine records."""
    config, model, tiling, optimizer = STEPS[name]
    settings = TrainSettings(
        model=ModelSettings(config_path="small.json", **model),
        tiling=TilingSettings(**{"batch": 4, "minibatch": 2, **TILES, **tiling}),
        optimizer=OptimizerSettings(**optimizer),
        resources=ResourceSettings(ncpu=1, ram="1GiB", order="submission", recompute="block" if "recomputation" in name else "auto"),
    )
    run = resolve(settings, config)
    captured = capture(run).plan
    with runtime_for(run) as runtime:
        recorded = RecordedEngine(run, runtime).step.plan
        assert recorded is not None
        assert shape_of(captured) == shape_of(recorded)
    assert len(captured.tasks) > 100
