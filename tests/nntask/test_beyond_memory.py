"""Beyond memory: the same bits within any budget, the ledger within it always, and refusal where nothing can be done."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from test_determinism import BATCH, CONFIG, TILING, losses, truth

from nntask.models.gpt2 import GPT2
from nntask.optim import AdamW, decay_groups
from nntask.tiling import ModelTiling
from nntask.trainer.recorded import emit_training_step
from scheduler import DoesNotFit, InlineRuntime, Runtime
from scheduler.core.orders import candidates
from scheduler.core.policies import POLICIES
from scheduler.core.steps import StepPlan

STEPS = 3
MINIBATCHES = 4
COARSE = ModelTiling(minibatch_tile=1, embd_tile=16)
"""With four minibatches a step in these tiles has every kind of order. In the tiles of `losses` nothing is found that repeats, since tasks that
make less than a page count as making nothing; and two minibatches are too few for ``layers:G``."""
ORDERS = ("auto", "submission", "eager-update", "layers", "layers:2", "turn:4/8", "forward")


@cache
def plan(lanes: int, minibatches: int = 2, tiling: ModelTiling = TILING) -> StepPlan:
    """The step that `losses` trains with, in submission order."""
    with Runtime(1, ram=1 << 28, lanes=lanes) as runtime:
        model = GPT2(CONFIG, tiling, runtime, seed=3)
        optimizer = AdamW(decay_groups(model, 0.1), 3e-3, max_norm=1.0)
        inputs = [model.input_tensors(BATCH // minibatches) for _ in range(minibatches)]
        with runtime.record() as step:
            outputs = emit_training_step(model, optimizer, inputs)
        del outputs
        assert step.plan is not None
        return step.plan


def budget(share: str, lanes: int) -> int:
    """Bytes of memory: a fraction of what the step needs, or as little as its hungriest task takes."""
    return plan(lanes).largest_task() if share == "minimum" else int(plan(lanes).needed_bytes() * float(share))


CASES = [
    *[{"share": share, "lanes": lanes} for share in ("0.5", "0.25", "minimum") for lanes in (1, 4)],
    *[{"share": "0.25", "sched": sched} for sched in sorted(POLICIES)],
    *[{"share": "0.25", "evict": evict} for evict in ("lru", "fifo")],
    {"share": "0.25", "prefetch": False},
    {"share": "minimum", "workers": 4, "evict": "lru", "sched": "eager"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_losses_are_the_same_bits_with_a_disk_below(case: dict, tmp_path: Path) -> None:
    """RAM at a fraction of what the step needs, a disk tier below it, every policy and eviction policy."""
    options = dict(case)
    lanes = options.pop("lanes", 1)
    ram = budget(options.pop("share"), lanes)
    with Runtime(options.pop("workers", 2), ram=ram, disk=tmp_path, lanes=lanes, **options) as runtime:
        assert losses(runtime, STEPS) == truth(lanes)[:STEPS]
        stats = runtime.stats()
    assert stats["peak_bytes"]["ram"] <= ram
    assert stats["evictions"] > 0
    assert stats["moved_bytes"]["ram->disk"] > 0
    assert not list(tmp_path.iterdir())


@cache
def truth_of_orders() -> list[tuple[bytes, bytes]]:
    """What running every task at once, in order, gives in four minibatches."""
    return losses(InlineRuntime(1), STEPS, minibatches=MINIBATCHES, tiling=COARSE)


@pytest.mark.parametrize("order", ORDERS)
def test_losses_are_the_same_bits_in_every_order(order: str, tmp_path: Path) -> None:
    """Four minibatches in a quarter of the RAM that they need, a disk tier below it, in each kind of order that the step has."""
    step = plan(1, MINIBATCHES, COARSE)
    assert order == "auto" or order in candidates(step)
    with Runtime(2, ram=step.needed_bytes() // 4, disk=tmp_path) as runtime:
        assert losses(runtime, STEPS, order, MINIBATCHES, COARSE) == truth_of_orders()
        assert runtime.stats()["evictions"] > 0


@pytest.mark.parametrize("sim_gpus", [1, 2])
@pytest.mark.parametrize("share", [pytest.param("0.5", marks=pytest.mark.long), "0.25", "minimum"])
@pytest.mark.parametrize("disk", [False, True])
def test_losses_are_the_same_bits_on_small_devices(share: str, sim_gpus: int, disk: bool, tmp_path: Path) -> None:
    """Simulated devices at a fraction of what the step needs, over RAM or over RAM as small as they are and a disk."""
    memory = budget(share, 1)
    ram = memory if disk else 1 << 28
    with Runtime(0, sim_gpus=sim_gpus, gpu_memory=memory, ram=ram, disk=tmp_path if disk else None) as runtime:
        assert losses(runtime, STEPS) == truth(1)[:STEPS]
        stats = runtime.stats()
    assert all(stats["peak_bytes"][name] <= stats["budget_bytes"][name] for name in stats["peak_bytes"])
    assert stats["evictions"] > 0


def test_a_byte_less_than_the_hungriest_task_is_refused(tmp_path: Path) -> None:
    """The message names the task, what it needs and what there is."""
    with pytest.raises(DoesNotFit, match=r"needs [\d,]+ B at once"), Runtime(2, ram=budget("minimum", 1) - 4096, disk=tmp_path) as runtime:
        losses(runtime)
