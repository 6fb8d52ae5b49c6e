"""The step that is checked before memory is taken is the one that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from support.plans import shape_of
from support.training import GPT, LLAMA

from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, OptimizerSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.engine.opening import runtime_for
from nntask.engine.recorded import PlannedStep, RecordedEngine
from nntask.models import registry
from nntask.models.gpt2 import GPT2
from nntask.planning.memory_fit import capture
from scheduler import RecordingError, TaskRuntime
from scheduler.planning import SUBMISSION, PlannedOrder
from tiles import TileTensor

TILES: Final = {"minibatch_tile": 1, "seq_tile": 9, "embd_tile": 16, "inner_tile": 50, "vocab_tile": 25}
STEPS: Final[dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "gpt2": (GPT, {}, {}, {}),
    "llama": (LLAMA, {}, {}, {}),
    "one minibatch": (GPT, {}, {"minibatch": 4}, {}),
    "lanes, recomputation, clipping": (GPT, {}, {"lanes": 2}, {"grad_clip": 1.0}),
    "bf16, stored scores": (LLAMA, {"dtype": "bf16", "attention": "stored"}, {}, {}),
    "adapters": (LLAMA, {}, {}, {"train": "lora:2", "lora_dropout": 0.1}),
    "sgd": (GPT, {}, {}, {"optimizer": "sgd", "momentum": 0.9}),
    "muon": (GPT, {}, {}, {"optimizer": "muon"}),
    "8 bits": (replace(GPT, n_embd=48), {}, {}, {"optimizer": "adamw8bit"}),
}
"""Model, and fields of the settings of model, tiling and optimizer."""


@pytest.mark.parametrize("name", STEPS)
def test_the_check_looks_at_the_step_that_runs(name: str) -> None:
    """What is captured before memory is taken is, task by task, what the engine records, and what it runs if it gets that."""
    config, model, tiling, optimizer = STEPS[name]
    settings = TrainSettings(
        model=ModelSettings(config_path="small.json", **model),
        tiling=TilingSettings(**{"batch": 4, "minibatch": 2, **TILES, **tiling}),
        optimizer=OptimizerSettings(**optimizer),
        resources=ResourceSettings(ncpu=1, ram="1GiB", order="submission", recompute="block" if "recomputation" in name else "auto"),
    )
    run = resolve(settings, config)
    captured = capture(run)
    assert captured.symbols is not None
    with runtime_for(run) as runtime:
        recorded = RecordedEngine(run, runtime).step.plan
        assert recorded is not None
        assert shape_of(captured.plan) == shape_of(recorded)
        planned = PlannedOrder(SUBMISSION, captured.plan, {}, num_tasks=len(captured.plan.tasks))
        assert RecordedEngine(run, runtime, planned=PlannedStep(planned, captured.symbols)).step.plan is captured.plan
    assert len(captured.plan.tasks) > 100


class _Forgetful(GPT2):
    """A family that reads a table of its own and does not name it."""

    def allocate(self, runtime: TaskRuntime, dtype: npt.DTypeLike, seed: int | None) -> None:
        """Create the table, too."""
        super().allocate(runtime, dtype, seed)
        self.table = TileTensor(runtime, (2,), (2,), np.uint64, kind="input", data_class="data", name="table")
        self.table.write(np.zeros(2, np.uint64))
        self.dropout_key, self.named = self.table, self.dropout_key

    def constants(self) -> dict[str, TileTensor]:
        """Return the key alone."""
        return {"dropout key": self.named}


def test_a_family_that_forgets_a_table_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of the table and of a task that reads it, before any task of the step runs."""
    monkeypatch.setitem(registry.FAMILIES, "gpt2", replace(registry.FAMILIES["gpt2"], model=_Forgetful))
    run = resolve(TrainSettings(tiling=TilingSettings(batch=2, minibatch=2, **TILES), resources=ResourceSettings(ncpu=1, ram="1GiB")), GPT)
    captured = capture(run)
    assert captured.symbols is not None
    planned = PlannedStep(PlannedOrder(SUBMISSION, captured.plan, {}), captured.symbols)
    with runtime_for(run) as runtime, pytest.raises(RecordingError, match=r"'table\[0\]' \(16 B\), which copy input uses, has none; bind it"):
        RecordedEngine(run, runtime, planned=planned)
