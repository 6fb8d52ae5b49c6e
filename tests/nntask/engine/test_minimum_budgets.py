"""A GPT-2 at the planned minimum of every memory, the last tier included, with real threads: many steps end, with the same bits as with room."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.optim.optimizers import AdamW, decay_groups
from nntask.tiling.model_tiling import ModelTiling
from scheduler import DoesNotFit, Runtime, Step
from scheduler.core.step_plan import StepPlan
from tiles import TileTensor

FEW, STEPS, LENGTH, VOCAB = 12, 50, 8, 32
CONFIG = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
LAYOUTS = ("ram", "ram disk", "device", "device disk")


class Job:
    """A model of two minibatches a step, recorded."""

    def __init__(self, runtime: Runtime) -> None:
        self.model = GPT2(CONFIG, ModelTiling(minibatch_tile=1), runtime, seed=3)
        self.optimizer = AdamW(decay_groups(self.model, 0.1), 3e-3, max_norm=1.0)
        self.inputs = [self.model.input_tensors(1) for _ in range(2)]
        self.losses: list[TileTensor] = []
        self.step: Step
        with runtime.record("submission") as self.step:
            self.model.train()
            for number, (tokens, targets) in enumerate(self.inputs):
                loss = self.model(tokens, targets, scale=0.5, minibatch=number)
                loss.backward()
                self.losses.append(loss.data)
            self.optimizer.step()

    def train(self, steps: int) -> list[bytes]:
        """Bits of the losses of so many steps, two of them in flight."""
        found: list[bytes] = []
        previous = None
        for number, ids in enumerate(np.random.default_rng(7).integers(0, VOCAB, (steps, 2, 1, LENGTH + 1)).astype(np.int32)):
            for (tokens, targets), part in zip(self.inputs, ids, strict=True):
                tokens.write(part[:, :-1])
                targets.write(part[:, 1:])
            self.model.dropout_key.write(np.array([3, number], np.uint64))
            self.optimizer.prepare(number + 1, 3e-3)
            ticket = self.step.replay()
            if previous is not None:
                previous.wait()
                found.append(b"".join(previous.read(loss).tobytes() for loss in self.losses))
            previous = ticket
        assert previous is not None
        previous.wait()
        return [*found, b"".join(previous.read(loss).tobytes() for loss in self.losses)]


@cache
def with_room(steps: int = 1) -> tuple[StepPlan, list[bytes]]:
    """The step's plan, and the losses where everything fits."""
    with Runtime(1, ram=1 << 28) as runtime:
        job = Job(runtime)
        losses = job.train(steps)
        assert job.step.plan is not None
        return job.step.plan, losses


def machine(layout: str, workers: int, folder: Path, *, missing: int = 0, missing_last: int = 0) -> dict[str, Any]:
    """A runtime whose memories are at the minimum; or, where tasks run or on the last tier, so many bytes below it."""
    plan = with_room()[0]
    on_device, has_disk = layout.startswith("device"), layout.endswith("disk")
    options: dict[str, Any] = {"cpu_workers": workers}
    ram = plan.minimum_bytes(is_last=not has_disk, computes=not on_device)
    if on_device:
        options.update(cpu_workers=0, sim_gpus=workers, gpu_memory=plan.minimum_bytes(is_last=False, computes=True) - missing)
    elif has_disk:
        ram -= missing
    if has_disk:
        options["disk"] = (folder, plan.minimum_bytes(is_last=True, computes=False) - missing_last)
    else:
        ram -= missing_last
    return {"ram": ram, **options}


@pytest.mark.parametrize(
    ("layout", "workers", "steps"),
    [
        *((layout, 2, FEW) for layout in LAYOUTS),
        *(pytest.param(layout, workers, STEPS, marks=pytest.mark.long) for layout in LAYOUTS for workers in (1, 2, 4)),
    ],
)
def test_many_steps_end_at_the_minimum(layout: str, workers: int, steps: int, tmp_path: Path) -> None:
    """The ledger holds on every node, and the losses are the same bits."""
    with Runtime(**machine(layout, workers, tmp_path)) as runtime:
        assert Job(runtime).train(steps) == with_room(steps)[1]
        stats = runtime.stats()
    assert all(stats["peak_bytes"][name] <= stats["budget_bytes"][name] for name in stats["peak_bytes"])


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_page_less_where_tasks_run_is_refused_with_the_number(layout: str, tmp_path: Path) -> None:
    """While recording, before anything runs."""
    largest = with_room()[0].largest_task()
    with (
        pytest.raises(DoesNotFit, match=rf"needs {largest:,} B at once .* the {largest - 4096:,} B"),
        Runtime(**machine(layout, 2, tmp_path, missing=4096)) as runtime,
    ):
        Job(runtime)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_last_tier_that_is_too_small_ends_with_an_error(layout: str, tmp_path: Path) -> None:
    """The step's plan needs more than there is: a typed error instead of a wait without end."""
    needed = with_room()[0].minimum_bytes(is_last=True, computes=False)
    with pytest.raises(DoesNotFit, match=r"budget of [\d,]+ B"), Runtime(**machine(layout, 2, tmp_path, missing_last=needed // 3)) as runtime:
        Job(runtime).train(3)
