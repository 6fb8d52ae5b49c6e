"""One tiling and one count of lanes give one sequence of losses and norms, bit by bit, whatever runs the tasks and wherever data lie.

The cases of `FEW` run in `make test`; `ALL` has every value beside every other, as far as they were ever compared, and runs with the long tests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.training import COARSE, FAMILIES, VOCAB, Job

from nntask.tiling.model_tiling import ModelTiling
from scheduler import DoesNotFit, InlineRuntime, Runtime, Trace
from scheduler.core.policies import POLICIES
from scheduler.core.step_plan import StepPlan
from scheduler.planning.orders import candidates

ORDERS = ("auto", "submission", "eager-update", "layers", "layers:2", "turn:4/8", "forward")


@dataclass(frozen=True)
class Case:
    """What runs a job.

    Args:
        share: of the bytes that the step needs, where tasks run; ``minimum`` for what its hungriest task takes; empty for memory without end.
        disk: below a memory that is no larger than the one where tasks run.
        coarse: four minibatches in few tiles.
    """

    family: str = "gpt2"
    steps: int = 4
    workers: int = 2
    sims: int = 0
    lanes: int = 1
    share: str = ""
    disk: bool = False
    sched: str = "prio"
    evict: str = "next-use"
    prefetch: bool = True
    order: str = "auto"
    coarse: bool = False
    traced: bool = False

    def __str__(self) -> str:
        """What differs from the plainest case."""
        return " ".join(f"{each.name}={value}" for each in fields(self) if (value := getattr(self, each.name)) != each.default) or "plain"

    def shape(self) -> tuple[int, ModelTiling | None]:
        """Minibatches, and their tiling."""
        return (4, COARSE) if self.coarse else (2, None)


@cache
def truth(family: str, lanes: int, steps: int, minibatches: int = 2, tiling: ModelTiling | None = None) -> list[bytes]:
    """What running every task at once, in order, gives."""
    return Job(InlineRuntime(lanes), family, minibatches=minibatches, tiling=tiling).run(steps)


@cache
def plan(family: str, lanes: int, minibatches: int = 2, tiling: ModelTiling | None = None) -> StepPlan:
    """The step in submission order."""
    with Runtime(1, ram=1 << 28, lanes=lanes) as runtime:
        step = Job(runtime, family, order="submission", minibatches=minibatches, tiling=tiling).step
        assert step is not None
        assert step.plan is not None
        return step.plan


def budget(case: Case) -> int:
    """Bytes where tasks run."""
    if not case.share:
        return 1 << 28
    step = plan(case.family, case.lanes, *case.shape())
    return step.largest_task() if case.share == "minimum" else int(step.needed_bytes() * float(case.share))


def machine(case: Case, folder: Path) -> Runtime:
    """What the case asks for. Devices that are short of memory compute alone."""
    memory = budget(case)
    if not case.sims:
        options = {"ram": memory}
    elif case.share:
        options = {"sim_gpus": case.sims, "gpu_memory": memory, "ram": memory if case.disk else 1 << 28}
    else:
        options = {"sim_gpus": case.sims, "ram": memory}
    return Runtime(
        0 if case.sims and case.share else case.workers,
        disk=folder if case.disk else None,
        lanes=case.lanes,
        sched=case.sched,
        evict=case.evict,
        prefetch=case.prefetch,
        trace=Trace() if case.traced else None,
        **options,
    )


def short(share: str, **options: object) -> Case:
    """A case with a disk below a memory that is short."""
    return Case(share=share, disk=True, steps=2, **options)  # type: ignore[arg-type]


FEW = [
    Case(lanes=4, sims=1, sched="lws", traced=True),
    Case("llama", workers=4, lanes=4, sched="eager", traced=True),
    Case("gpt2 adapters", workers=1, lanes=4, sims=1, sched="reuse"),
    Case("llama adapters", lanes=4, sims=2, sched="dmda"),
    short("0.5", lanes=4, sched="dm"),
    short("0.25", sched="reuse", evict="fifo"),
    short("minimum", workers=4, evict="lru", sched="eager"),
    short("0.25", family="llama", sched="dmdas"),
    short("minimum", family="llama", order="layers", prefetch=False),
    *(short("0.25", coarse=True, order=order) for order in ("auto", "eager-update", "layers", "forward")),
    Case(sims=2, share="0.25", steps=2),
    short("minimum", sims=1),
]
ALL = [
    Case(workers=1, lanes=4, sched="eager"),
    Case("llama", lanes=4, sims=2, sched="dmdas"),
    Case(workers=1, lanes=4, sims=2),
    short("0.25", sched="lws", evict="lru"),
    short("0.25", lanes=4, sched="dmda", prefetch=False),
    Case("llama", sims=2, share="0.25", steps=2),
    *(
        Case(steps=20, workers=workers, sims=sims, lanes=4, sched=sched, traced=bool((workers + sims) % 2))
        for workers, sched, sims in itertools.product((1, 2, 4), ("eager", "prio", "lws"), (0, 1, 2))
    ),
    *(short(share, lanes=lanes) for share in ("0.5", "0.25", "minimum") for lanes in (1, 4)),
    *(short("0.25", coarse=True, order=order) for order in ORDERS),
    *(short("0.25", sched=sched) for sched in sorted(POLICIES) if sched != "prio"),
    *(short("0.25", evict=evict) for evict in ("lru", "fifo")),
    short("0.25", prefetch=False),
    *(Case(sims=sims, share=share, disk=disk, steps=3) for sims, share, disk in itertools.product((1, 2), ("0.5", "0.25", "minimum"), (False, True))),
    *(
        Case("llama", workers=workers, sched=sched, sims=sims, lanes=4)
        for workers, sched, sims in ((1, "prio", 0), (4, "eager", 0), (2, "lws", 1), (4, "dmdas", 2), (2, "reuse", 2))
    ),
    short("0.5", family="llama"),
    short("0.25", family="llama", sched="dmda", evict="lru"),
    Case("gpt2 adapters", workers=4, lanes=4, sched="eager"),
]
CASES = [*FEW, *(pytest.param(case, marks=pytest.mark.long) for case in ALL if case not in FEW)]


@pytest.mark.every
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_bit_identical(case: Case, tmp_path: Path) -> None:
    """The same bits as with every task at once, every memory within its budget, and nothing left on the disk."""
    minibatches, tiling = case.shape()
    assert case.order == "auto" or case.order in candidates(plan(case.family, case.lanes, minibatches, tiling))
    with machine(case, tmp_path) as runtime:
        job = Job(runtime, case.family, order=case.order, minibatches=minibatches, tiling=tiling)
        assert job.run(case.steps) == truth(case.family, case.lanes, case.steps, minibatches, tiling)
        stats = runtime.stats()
    assert all(stats["peak_bytes"][name] <= stats["budget_bytes"][name] for name in stats["peak_bytes"])
    assert not list(tmp_path.iterdir())
    assert bool(case.share) == (stats["evictions"] > 0)
    if case.disk and not case.sims:  # half in the memory of devices and half in RAM may be enough
        assert stats["moved_bytes"]["ram->disk"] > 0


def test_every_policy_runs_by_default() -> None:
    """In some case of `make test`, and every family, too."""
    assert {case.sched for case in FEW} == set(POLICIES)
    assert {case.family for case in FEW} == set(FAMILIES)


@pytest.mark.long
@pytest.mark.parametrize("gpu_memory", [1 << 18, 1 << 20])
def test_losses_do_not_change_under_eviction(gpu_memory: int) -> None:
    """Two simulated devices too small for the model, and no CPU worker, move tiles all the time."""
    with Runtime(0, sim_gpus=2, ram=1 << 28, gpu_memory=gpu_memory) as runtime:
        assert Job(runtime).run(20) == truth("gpt2", 1, 20)
        stats = runtime.stats()
    assert gpu_memory > 1 << 18 or stats["evictions"] > 0
    assert all(stats["peak_bytes"][f"sim:{i}"] <= gpu_memory for i in range(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_learn_something(family: str) -> None:
    """The runs compared are real: the loss begins where it must and moves, every step differs, and lanes matter."""
    found = truth(family, 4, 4)
    assert abs(np.frombuffer(found[0], np.float64, 2).sum() - np.log(VOCAB)) < 0.2
    assert len(set(found)) == len(found)
    assert found != truth(family, 1, 4)


def test_a_byte_less_than_the_hungriest_task_is_refused(tmp_path: Path) -> None:
    """The message names the task, what it needs and what there is."""
    ram = plan("gpt2", 1).largest_task() - 4096
    with pytest.raises(DoesNotFit, match=r"needs [\d,]+ B at once"), Runtime(2, ram=ram, disk=tmp_path) as runtime:
        Job(runtime).run(1)
