"""Every family, with dropout and the batches of its objective: the same bits whatever runs the tasks and wherever data lie.

By default a family of each kind of stack is run by workers above a disk, and one with a grouped and normed attention on three with room; the others
and other machines are `long`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.transformers_oracle import CONFIGS, IDLE_EXPERTS, random_batch

from nntask.adapters.lora import LoRA, add_adapters
from nntask.engine.recorded import emit_training_step
from nntask.models.registry import build
from nntask.optim.optimizers import AdamW, decay_groups
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime, TaskRuntime
from scheduler.core.policies import POLICIES
from scheduler.core.step_plan import StepPlan

STEPS, MINIBATCHES, LANES = 2, 2, 2
IDLE, IDLE_ADAPTERS = "idle experts", "adapters of idle experts"


class FamilyJob:
    """A clipped step of a family's config with every dropout there is, recorded where the runtime records."""

    def __init__(self, runtime: TaskRuntime, name: str) -> None:
        is_idle = name in (IDLE, IDLE_ADAPTERS)
        self.config: Any = (IDLE_EXPERTS if is_idle else CONFIGS[name]).with_dropout(0.1)
        heads = 2 * self.config.n_head // self.config.n_kv_head  # those of two heads of keys
        self.model = build(
            self.config, ModelTiling(*((5, 2) if is_idle else (5, 6)), 24, 10 if name == IDLE_ADAPTERS else 31, heads, 40), runtime, seed=3
        )
        if name == IDLE_ADAPTERS:  # with two tiles inside each expert
            add_adapters(self.model, LoRA(3, 6.0, experts=True), seed=4)
        self.optimizer = AdamW(decay_groups(self.model, 0.1), 3e-3, max_norm=1.0)
        first = random_batch(self.config, 0)
        decoded = first.get("decoder_tokens")
        target_len = None if decoded is None else decoded.shape[1]
        self.inputs = [self.model.inputs(*first["tokens"].shape, tuple(first), target_len) for _ in range(MINIBATCHES)]
        self.step = None
        if isinstance(runtime, Runtime):
            with runtime.record() as self.step:
                self.outputs = self.emit()

    def emit(self) -> list[Any]:
        """Tensors of the losses and of the gradient norm."""
        losses, norm = emit_training_step(self.model, self.optimizer, self.inputs)
        assert norm is not None
        return [*losses, norm]

    def run(self) -> list[bytes]:
        """Bits of losses and norms of the steps, and of the weights after the last."""
        found = []
        for number in range(STEPS):
            for at, given in enumerate(self.inputs):
                batch = random_batch(self.config, MINIBATCHES * number + at)
                for name, tensor in given.items():
                    tensor.write(batch[name])
            self.model.dropout_key.write(np.array([3, number], np.uint64))
            self.optimizer.prepare(number + 1, 3e-3)
            if self.step is None:
                found.append(b"".join(output.read().tobytes() for output in self.emit()))
            else:
                ticket = self.step.replay()
                found.append(b"".join(ticket.read(output).tobytes() for output in self.outputs))
        return [*found, *(tensor.read().tobytes() for tensor in self.model.tensors().values())]


@cache
def truth(name: str) -> list[bytes]:
    """What running every task at once, in order, gives."""
    return FamilyJob(InlineRuntime(LANES), name).run()


def plan(name: str) -> StepPlan:
    """The step in submission order."""
    with Runtime(1, ram=1 << 28, lanes=LANES) as runtime:
        step = FamilyJob(runtime, name).step
        assert step is not None
        assert step.plan is not None
        return step.plan


SOON = ("gpt_neo", "bert classifier", "t5 gated")
"""Those with a disk that run by default: windows, labels, two stacks."""
ROOMY = "gemma3"
"""That which runs with room by default."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == ROOMY else pytest.mark.long) for name in CONFIGS])
@pytest.mark.parametrize(
    ("workers", "sims"),
    [pytest.param(1, 0, marks=pytest.mark.long), (3, 0), pytest.param(0, 2, marks=pytest.mark.long)],
    ids=["one", "three", "devices"],
)
def test_whoever_runs_the_tasks(name: str, workers: int, sims: int) -> None:
    """Losses, norms and weights on one worker, on three, and on two simulated devices."""
    with Runtime(workers, sim_gpus=sims, ram=1 << 28, lanes=LANES, **({"gpu_memory": 1 << 27} if sims else {})) as runtime:
        assert FamilyJob(runtime, name).run() == truth(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SOON else pytest.mark.long) for name in CONFIGS])
def test_wherever_data_lie(name: str, tmp_path: Path) -> None:
    """With a quarter of the memory and a disk below."""
    step = plan(name)
    ram = max(step.needed_bytes() // 4, step.largest_task())
    with Runtime(2, ram=ram, disk=tmp_path, lanes=LANES) as runtime:
        assert FamilyJob(runtime, name).run() == truth(name)
        stats = runtime.stats()
    assert stats["evictions"] > 0
    assert stats["moved_bytes"]["ram->disk"] > 0


@pytest.mark.parametrize("sims", [0, pytest.param(2, marks=pytest.mark.long)], ids=["disk", "devices"])
@pytest.mark.parametrize("sched", POLICIES)
@pytest.mark.parametrize("name", [IDLE, IDLE_ADAPTERS])
def test_idle_experts_under_every_policy(name: str, sched: str, sims: int, tmp_path: Path) -> None:
    """In a quarter of the memory, where most tasks of experts are skipped, also those of learnt ones and of learnt adapters."""
    step = plan(name)
    memory = max(step.needed_bytes() // 4, step.largest_task())
    where: dict[str, Any] = {"ram": 1 << 28, "gpu_memory": memory, "sim_gpus": sims} if sims else {"ram": memory, "disk": tmp_path}
    with Runtime(0 if sims else 2, lanes=LANES, sched=sched, **where) as runtime:
        assert FamilyJob(runtime, name).run() == truth(name)
        stats = runtime.stats()
    assert stats["evictions"] > 0
    conditional = [task for task in step.tasks if task.share < 1.0]
    assert {task.name for task in conditional} == {"expert_forward", "expert_backward"}
    assert 0.3 * STEPS * len(conditional) < stats["skipped_tasks"] < STEPS * len(conditional)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in (*SOON, ROOMY) else pytest.mark.long) for name in CONFIGS])
def test_the_runs_are_real(name: str) -> None:
    """Losses are numbers above 0, and every step differs."""
    found = truth(name)
    losses = np.frombuffer(found[0], np.float64, MINIBATCHES)
    assert np.isfinite(losses).all()
    assert (losses > 0).all()
    assert len(set(found[:STEPS])) == STEPS
