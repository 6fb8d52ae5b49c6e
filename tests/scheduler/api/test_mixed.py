"""Steps whose tasks run on CPU workers and on devices: who runs what, how well, the same bits again, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.late_gpu import COUNT, Numbers, Place, _here, gpus

from scheduler import RW, CapturingRuntime, Codelet, Handle, R, Runtime
from scheduler.api.recording import RecordingError
from scheduler.core.records import ANY, WorkerKind
from scheduler.core.step_plan import StepPlan
from scheduler.planning.urgency import by_urgency, on_kinds
from scheduler.simulation import simulate

TILE = 8 * COUNT
SPEEDS = {"product": (12.0, 1.0), "other": (3.0, 1.0), "scalar": (1.0, 2.0)}
"""Name of a kernel -> its seconds on a CPU worker and on a device."""


def _on_cpu(out: np.ndarray, other: np.ndarray) -> None:
    out += other / 3


def _on_gpu(out: Place, other: Place) -> None:
    _here.gpu.later(lambda: np.add(out.numbers(), other.numbers() * (1 / 3), out=out.numbers()))


ROUNDS_DIFFERENTLY = Codelet("round", cpu=_on_cpu, cuda=_on_gpu)
"""Kernels whose results differ by rounding, as those of CPUs and GPUs do."""


@contextmanager
def run(*, mixed: bool = True, num_cpu: int = 2) -> Iterator[Runtime]:
    """A runtime with two fake GPUs."""
    with Runtime(num_cpu, gpus=gpus(2, 0), ram=400 * TILE, gpu_memory=400 * TILE, mixed=mixed) as runtime:
        yield runtime


def tiles_of(runtime: Runtime) -> list[Handle]:
    """Eight tiles of thirds."""
    tiles = [runtime.handle(TILE, Numbers(), name=f"x{at}", kind="persistent") for at in range(8)]
    for at, tile in enumerate(tiles):
        with runtime.acquire(tile, "W") as view:
            view[:] = np.arange(COUNT) / (at + 3)
    return tiles


def submit_rounds(runtime: Runtime, tiles: list[Handle]) -> None:
    """48 tasks, each of which adds a neighbour."""
    for distance in range(1, 7):
        for at, tile in enumerate(tiles):
            runtime.submit(ROUNDS_DIFFERENTLY, [(tile, RW), (tiles[(at + distance) % len(tiles)], R)])


def trained(runtime: Runtime, kinds: list[WorkerKind] | None = None, steps: int = 1) -> tuple[bytes, list[WorkerKind]]:
    """The tiles after some steps, and the kinds of workers of the last."""
    tiles = tiles_of(runtime)
    with runtime.record(kinds=kinds) as step:
        submit_rounds(runtime, tiles)
    for _ in range(steps):
        step.replay().wait()
    values = b""
    for tile in tiles:
        with runtime.acquire(tile, "R") as view:
            values += view.tobytes()
    return values, step.kinds


def test_tasks_with_two_kernels_run_on_gpus_alone_unless_mixed() -> None:
    """By default results do not depend on the schedule."""
    with run(mixed=False) as runtime:
        _, kinds = trained(runtime)
        assert set(kinds) == {"cuda"}
        assert runtime.policy_name == "reuse"


def test_a_mixed_step_tries_both_kinds_and_can_be_repeated_with_the_same_bits() -> None:
    """Unknown durations are measured on both kinds; the recorded kinds give the same bits on other numbers of workers, all on GPUs other ones."""
    with run() as runtime:
        assert runtime.policy_name == "dmdas"
        values, kinds = trained(runtime)
    assert set(kinds) == {"cpu", "cuda"}
    for num_cpu, mixed in ((1, True), (3, False)):
        with run(num_cpu=num_cpu, mixed=mixed) as runtime:
            assert trained(runtime, kinds) == (values, kinds)
    with run() as runtime:
        assert trained(runtime, ["cuda"] * len(kinds))[0] != values


def test_kinds_must_be_those_of_the_step() -> None:
    """The number of tasks and the kernels of each are checked before anything runs."""
    with run() as runtime:
        for kinds, message in (
            (["cuda"] * 3, "each of the 48 tasks of the step, got 3"),
            (["sim"] * 48, "task 0 of the step, round, runs on cpu, cuda here, got 'sim'"),
        ):
            with pytest.raises(RecordingError, match=message):
                trained(runtime, kinds)  # type: ignore[arg-type]
        with pytest.raises(RecordingError, match="wait for its ticket first"):
            trained(runtime, steps=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_workers": 2}, r"got 2 CPU workers and 0 devices"),
        ({"cpu_workers": 0, "sim_gpus": 1}, r"got 0 CPU workers and 1 devices"),
        ({"cpu_workers": 2, "sim_gpus": 1, "aside": True}, r"got 2 CPU workers that stand aside"),
        ({"cpu_workers": 2, "sim_gpus": 1, "sched": "prio"}, r"got 'prio'; use auto, dm, dmda, dmdas"),
    ],
)
def test_mixed_needs_two_kinds_of_workers_and_a_policy_that_compares_them(options: dict[str, Any], message: str) -> None:
    """The rule, the values, and what to change."""
    with pytest.raises(ValueError, match=message):
        Runtime(**options, ram=1 << 20, mixed=True)


def _nothing(*tiles: object) -> None:
    """A kernel of virtual time."""


def _graph(name: str) -> StepPlan:
    """A small step: independent tasks, a fork and its join, or a factorisation of 3 x 3 tiles."""
    runtime = CapturingRuntime()
    codelets = {kernel: Codelet(kernel, cpu=_nothing) for kernel in SPEEDS}
    tiles = [runtime.handle(TILE, lambda memory, offset: None, name=f"x{at}", kind="persistent") for at in range(9)]
    with runtime.record():
        if name == "fork":
            runtime.submit(codelets["scalar"], [(tiles[0], RW)])
        if name == "factorisation":
            for k in range(3):
                runtime.submit(codelets["scalar"], [(tiles[4 * k], RW)])
                for i in range(k + 1, 3):
                    runtime.submit(codelets["product"], [(tiles[4 * k], R), (tiles[3 * i + k], RW)])
                for i in range(k + 1, 3):
                    for j in range(k + 1, i + 1):
                        reads = [(tiles[3 * row + k], R) for row in sorted({i, j})]
                        runtime.submit(codelets["other" if i == j else "product"], [*reads, (tiles[3 * i + j], RW)])
        else:
            for at in range(1, 8):
                reads = [(tiles[0], R)] if name == "fork" else []
                runtime.submit(codelets["product" if at % 3 else "other"], [*reads, (tiles[at], RW)])
        if name == "fork":
            runtime.submit(codelets["scalar"], [*((tile, R) for tile in tiles[1:8]), (tiles[8], RW)])
    return runtime.plan


def _chains(num: int, length: int) -> StepPlan:
    """A step of chains of products."""
    runtime = CapturingRuntime()
    product = Codelet("product", cpu=_nothing)
    tiles = [runtime.handle(TILE, lambda memory, offset: None, name=f"x{at}", kind="persistent") for at in range(num)]
    with runtime.record():
        for tile in tiles * length:
            runtime.submit(product, [(tile, RW)])
    return runtime.plan


def _seconds(plan: StepPlan, policy: str, num_cpu: int = 2) -> float:
    """Virtual seconds of a step on CPU workers and a device; a copy takes a twentieth of the fastest kernel."""
    rows = [SPEEDS[task.name] for task in plan.tasks]
    return simulate(
        by_urgency(plan, {task: 1 / (num_cpu / cpu + 1 / device) for task, (cpu, device) in zip(plan.tasks, rows, strict=True)}),
        workers=[*[("cpu", 0, 1)] * num_cpu, ("sim", 1, 3)],
        nodes=[("ram", 100 * TILE), ("device", 100 * TILE)],
        policy=policy,
        duration=lambda task, kind: 0.0 if task.step is None else rows[task.position][kind == "sim"],
        transfer=lambda source, target, nbytes: 0.05,
        replays=1,
    ).seconds


@pytest.mark.parametrize(
    ("name", "limit"),
    [("independent", 1.05), pytest.param("fork", 1.05, marks=pytest.mark.long), pytest.param("factorisation", 1.11, marks=pytest.mark.long)],
)
def test_the_step_takes_hardly_longer_than_the_best_assignment(name: str, limit: float) -> None:
    """Of all assignments of tasks to kinds, by brute force; a policy looks one task ahead, which costs more on a graph with few ready tasks."""
    plan = _graph(name)
    assignments = itertools.product(("cpu", "sim"), repeat=len(plan.tasks))
    best = min(_seconds(on_kinds(plan, kinds, ("cpu", "sim")), "dmdas") for kinds in assignments)
    assert _seconds(plan, "dmdas") <= limit * best


@pytest.mark.parametrize("policy", ["dm", "dmda", "dmdas"])
def test_cpu_workers_help_although_they_end_later_than_the_device_would(policy: str) -> None:
    """The device ends any of 14 chained products sooner than a CPU worker would, but all of them later than both together."""
    num_cpu, (cpu, device) = 8, SPEEDS["product"]
    step = _chains(14, 30)
    assert _seconds(step, policy, num_cpu) <= 1.12 * len(step.tasks) / (num_cpu / cpu + 1 / device)


def test_urgency_is_the_longest_path_after_the_priority_of_the_program() -> None:
    """A task before a long path comes first, unless the program says otherwise."""
    plan = _graph("fork")
    assert plan.window == ANY
    changed = by_urgency(plan, {task: SPEEDS[task.name][0] for task in plan.tasks})
    by_priority = sorted(range(len(plan.tasks)), key=lambda position: -changed.tasks[position].priority)
    assert (by_priority[0], by_priority[-1]) == (0, len(plan.tasks) - 1)
    plan.tasks[-1].priority = 1
    changed = by_urgency(plan, {task: SPEEDS[task.name][0] for task in plan.tasks})
    assert max(range(len(plan.tasks)), key=lambda position: changed.tasks[position].priority) == len(plan.tasks) - 1
