"""Fused tasks of a recorded step: the same results, fewer tasks, graphs on addresses seen before; single tasks where memory is short."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.late_gpu import COUNT, FILL, MIX, SPOIL, Gpu, Numbers, gpus, value

from scheduler import SCRATCH, Codelet, R, Runtime, TaskRuntime, W
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.api.inline_runtime import InlineRuntime
from scheduler.core.records import HandleId, HandleRecord
from scheduler.drivers import cuda
from scheduler.drivers.gpu import Flow
from scheduler.planning.task_fusion import MOST_GRAPHS, MOST_TASKS, FusedKernels, ScratchView, _Member, _packed, fuse
from scheduler.storage.device import DeviceMemory
from scheduler.testing.gpu import FakeStream

PAGE = 8 * COUNT


def emit(runtime: TaskRuntime, kept: list[Any], seed: int) -> list[Any]:
    """A step over kept data and temporaries chosen by chance; what it leaves for the program."""
    chance = random.Random(seed)
    passing: list[Any] = []
    for salt in range(90):
        known = [*kept, *passing]
        action = chance.randrange(4)
        if action == 0:
            fresh = runtime.handle(PAGE, Numbers(), name="passing")
            runtime.submit(FILL, [(fresh, W)], {"value": float(salt)})
            passing.append(fresh)
            del passing[:-6]
        elif action == 1:
            room = runtime.handle(PAGE, Numbers(), name="room", data_class="scratch")
            runtime.submit(SPOIL, [(chance.choice(known), "RW"), (room, SCRATCH)], {})
        else:
            out, *inputs = chance.sample(known, min(len(known), chance.randrange(1, 4)))
            runtime.submit(MIX, [(out, "RW"), *((handle, R) for handle in inputs)], {"salt": salt})
    return passing[-2:]


def results(runtime: Any, seed: int, replays: int = 6, **options: bool) -> list[float]:
    """Kept data after some replays of one step, and what each left."""
    found = []
    with runtime:
        kept = [runtime.handle(PAGE, Numbers(), name=f"kept {number}", kind="persistent") for number in range(4)]
        for number, handle in enumerate(kept):
            runtime.submit(FILL, [(handle, W)], {"value": float(number)})
        with runtime.record(**options) as step:
            outputs = emit(runtime, kept, seed)
        for _ in range(replays):
            ticket = step.replay()
            for handle in outputs:
                with ticket.borrow(handle) as view:
                    found.append(float(view.sum()))
        assert step.num_tasks == 90
        return [*found, *(value(runtime, handle) for handle in kept)]


def eager(seed: int, replays: int = 6) -> list[float]:
    """The same without recording."""
    runtime, found = InlineRuntime(), []
    kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(4)]
    for number, handle in enumerate(kept):
        runtime.submit(FILL, [(handle, W)], {"value": float(number)})
    for _ in range(replays):
        found += [value(runtime, handle) for handle in emit(runtime, kept, seed)]
    return [*found, *(value(runtime, handle) for handle in kept)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_gpus", "can_capture"), [(1, True), (1, False), (2, True)])
def test_results_are_those_of_single_tasks(seed: int, num_gpus: int, can_capture: bool) -> None:
    """As graphs, where they cannot be recorded, and on two devices; kernels run late."""
    devices = gpus(num_gpus, seed)
    for gpu in devices:
        gpu.can_capture = can_capture
    runtime = Runtime(0, gpus=devices, gpu_memory=256 * PAGE, ram=512 * PAGE)
    assert results(runtime, seed) == eager(seed)
    assert (sum(gpu.num_graphs for gpu in devices) > 0) == can_capture


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_groups_on_cpus(seed: int, num_workers: int) -> None:
    """The same results, and not more tasks."""
    runtime = Runtime(num_workers, ram=512 * PAGE)
    assert results(runtime, seed, groups=True) == eager(seed)
    assert runtime.stats()["tasks"] <= 4 + 6 * 90


def tasks_of(runtime: Runtime, **options: bool) -> int:
    """Tasks that a step of 40 additions takes, one after another."""
    with runtime:
        kept = runtime.handle(PAGE, Numbers(), kind="persistent")
        runtime.submit(FILL, [(kept, W)], {"value": 1.0})
        with runtime.record(**options) as step:
            for _ in range(40):
                room = runtime.handle(PAGE, Numbers(), name="room", data_class="scratch")
                runtime.submit(SPOIL, [(kept, "RW"), (room, SCRATCH)], {})
        step.replay()
        assert value(runtime, kept) == 41 * COUNT
        return int(runtime.stats()["tasks"]) - 1


def test_groups_are_asked_for() -> None:
    """Else, beside devices, and where memory is short, tasks are single ones; so they are where a callback watches them."""
    assert tasks_of(Runtime(2, ram=512 * PAGE), groups=True) == 1
    assert tasks_of(Runtime(2, ram=512 * PAGE)) == 40
    assert tasks_of(Runtime(1, sim_gpus=1, ram=512 * PAGE), groups=True) == 40
    assert tasks_of(Runtime(2, ram=3 * PAGE), groups=True) == 40
    watched = Runtime(2, ram=512 * PAGE)
    watched.on_task(lambda task: None)
    assert tasks_of(watched, groups=True) == 40


@pytest.mark.parametrize("options", [{"graphs": False}, {"gpu_memory": 9 * PAGE}])
def test_single_tasks_stay(options: dict[str, Any]) -> None:
    """Where they are asked for, and where memory is short."""
    (gpu,) = gpus(1, 0)
    runtime = Runtime(0, gpus=[gpu], **{"gpu_memory": 256 * PAGE, "ram": 512 * PAGE, **options})
    assert results(runtime, 1) == eager(1)
    assert gpu.num_graphs == 0


def test_who_watches_sees_single_tasks() -> None:
    """A callback of `on_task` that is there when the step is recorded."""
    names: set[str] = set()
    runtime = Runtime(0, gpus=gpus(1, 0), gpu_memory=256 * PAGE, ram=512 * PAGE)
    runtime.on_task(lambda task: names.add(task.name))
    results(runtime, 2, replays=1)
    assert names <= {"fill", "mix", "spoil"}


def test_how_tasks_are_fused() -> None:
    """Up to 32 at a time; inner data becomes scratch, modes are merged, and the bytes of inner data are bounded."""
    runtime = CapturingRuntime(has_gpus=True)
    kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2)]
    with runtime.record():
        inner = runtime.handle(PAGE, Numbers())
        runtime.submit(FILL, [(inner, W)], {"value": 1.0})
        runtime.submit(MIX, [(kept[0], "RW"), (inner, R), (kept[1], R)], {"salt": 1})
        runtime.submit(MIX, [(kept[1], "RW"), (inner, R)], {"salt": 2})
        del inner
        for salt in range(70):
            runtime.submit(MIX, [(kept[0], "RW")], {"salt": salt})
    plan = runtime.plan

    def make(nbytes: int, view: ScratchView) -> HandleRecord:
        return HandleRecord(HandleId(1000), nbytes, nbytes, view, "", "temporary", "scratch")

    for task in plan.tasks:
        task.kinds = ("cuda",)
    found = fuse(plan, PAGE, 16 * PAGE, make)
    assert [task.name for task in found.tasks] == ["fill and 31 more", "mix and 31 more", "mix and 8 more"]
    first = dict(found.tasks[0].accesses)
    assert [first[handle.record] for handle in kept] == ["RW", "RW"]
    assert sorted(first.values()) == ["RW", "RW", "SCRATCH"]
    assert len(fuse(plan, 0, 16 * PAGE, make).tasks) == len(found.tasks) + 1
    assert MOST_TASKS == 32


def test_scratch_memory_of_more_tasks_than_are_fused() -> None:
    """One scratch handle for all tasks: each fused task has its own, as each task had."""

    def run(runtime: Any) -> float:
        with runtime:
            kept = runtime.handle(PAGE, Numbers(), kind="persistent")
            runtime.submit(FILL, [(kept, W)], {"value": 1.0})
            with runtime.record() as step:
                room = runtime.handle(PAGE, Numbers(), name="room", data_class="scratch")
                for _ in range(MOST_TASKS + 9):
                    runtime.submit(SPOIL, [(kept, "RW"), (room, SCRATCH)], {})
            for _ in range(3):
                step.replay()
            return value(runtime, kept)

    memory = {"gpu_memory": 256 * PAGE, "ram": 512 * PAGE}
    assert run(Runtime(0, gpus=gpus(1, 0), **memory)) == (1 + 3 * (MOST_TASKS + 9)) * COUNT


def test_a_graph_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are started one by one, and it is not tried again."""
    tried: list[object] = []

    def start(self: FakeStream, graph: object) -> None:
        tried.append(graph)
        raise RuntimeError("planted: out of memory")

    monkeypatch.setattr(FakeStream, "start", start)
    (gpu,) = gpus(1, 0)
    assert results(Runtime(0, gpus=[gpu], gpu_memory=256 * PAGE, ram=512 * PAGE), 3, replays=9) == eager(3, replays=9)
    assert 0 < len(tried) == len({id(graph) for graph in tried})


def test_graphs_of_few_sets_of_addresses_are_kept() -> None:
    """The oldest is given up."""
    gpu, started = Gpu(), []
    flow = Flow(gpu)
    gpu.enter(flow.stream)
    cuda._here.flow = flow
    fused = FusedKernels([_Member(Codelet("note", cuda=lambda place: gpu.later(lambda: started.append(place.address))), (0,), {})], [])
    for number in (*range(MOST_GRAPHS + 1), *range(MOST_GRAPHS + 1)):
        flow.begin()
        fused(DeviceMemory(number))
        flow.mark()
    flow.wait()
    assert started == [*range(MOST_GRAPHS + 1), *range(MOST_GRAPHS + 1)]
    assert len(fused._graphs) == MOST_GRAPHS


def test_inner_data_shares_offsets() -> None:
    """Pieces that do not exist at once may lie over each other; those that do, never."""
    spans = [(4, 0, 1), (2, 0, 5), (4, 2, 3), (1, 3, 4), (2, 4, 6)]
    offsets, nbytes = _packed(spans)
    assert offsets == [0, 4, 0, 6, 0]
    assert nbytes == 7
