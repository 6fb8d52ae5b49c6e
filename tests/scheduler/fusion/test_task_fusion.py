"""Fused tasks of a recorded step: the same results, fewer tasks, graphs on addresses seen before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.late_gpu import COUNT, FILL, MIX, SPOIL, Gpu, Numbers, both, gpus, value

from scheduler import SCRATCH, Codelet, R, Runtime, TaskRuntime, W
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.api.inline_runtime import InlineRuntime
from scheduler.core.errors import HandleLost, TaskError
from scheduler.core.records import DataClass, HandleId, HandleRecord, HandleSpec
from scheduler.core.step_plan import StepPlan
from scheduler.drivers import cuda
from scheduler.drivers.gpu import NUM_STARTED, Flow
from scheduler.execution.trace import Trace
from scheduler.fusion.fused_tasks import MOST_GRAPHS, FusedKernels, Launch, Member, ScratchView, by_size, packed
from scheduler.fusion.launches import launches
from scheduler.fusion.task_fusion import fuse, fuse_if_it_fits
from scheduler.planning.device_share import largest_device_bytes
from scheduler.planning.evaluation import PlannedOrder
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


def test_single_tasks_stay() -> None:
    """They stay if the program asks for them."""
    (gpu,) = gpus(1, 0)
    assert results(Runtime(0, gpus=[gpu], gpu_memory=256 * PAGE, ram=512 * PAGE, graphs=False), 1) == eager(1)
    assert gpu.num_graphs == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_gpus", "can_capture"), [(1, True), (1, False), (2, True)])
def test_tasks_are_fused_if_tiles_move(seed: int, num_gpus: int, can_capture: bool) -> None:
    """A step over more data than the memory holds has the results of single tasks, in fewer tasks."""

    def run(runtime: Any) -> list[float]:
        chance = random.Random(seed)
        with runtime:
            kept = [runtime.handle(PAGE, Numbers(), name=f"kept {number}", kind="persistent") for number in range(60)]
            for number, handle in enumerate(kept):
                runtime.submit(FILL, [(handle, W)], {"value": float(number)})
            with runtime.record() as step:
                for first in range(0, 60, 2):
                    near = kept[first : first + 2]
                    through = runtime.handle(PAGE, Numbers(), name="through")
                    runtime.submit(FILL, [(through, W)], {"value": float(first)})
                    for salt in range(chance.randrange(1, 9)):
                        out, source = chance.sample([through, *near], 2)
                        runtime.submit(MIX, [(out, "RW"), (source, R)], {"salt": salt})
            for _ in range(4):
                step.replay()
            return [value(runtime, handle) for handle in kept]

    devices = gpus(num_gpus, seed)
    for gpu in devices:
        gpu.can_capture = can_capture
    memory = 32 // num_gpus * PAGE
    single = Runtime(0, gpus=gpus(num_gpus, seed), gpu_memory=memory, ram=512 * PAGE, graphs=False)
    fused = Runtime(0, gpus=devices, gpu_memory=memory, ram=512 * PAGE)
    assert run(fused) == run(single)
    stats = fused.stats()
    assert stats["tasks"] < 0.8 * single.stats()["tasks"]
    assert stats["evictions"] > 0


def test_who_watches_sees_single_tasks() -> None:
    """A callback of `on_task` that is there when the step is recorded."""
    names: set[str] = set()
    runtime = Runtime(0, gpus=gpus(1, 0), gpu_memory=256 * PAGE, ram=512 * PAGE)
    runtime.on_task(lambda task: names.add(task.name))
    results(runtime, 2, replays=1)
    assert names <= {"fill", "mix", "spoil"}


def capture(emit: Callable[[CapturingRuntime, list[Any]], None]) -> StepPlan:
    """The plan of what `emit` does with two pieces of kept data, for GPUs alone."""
    runtime = CapturingRuntime(has_gpus=True)
    kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2)]
    with runtime.record():
        emit(runtime, kept)
    for task in runtime.plan.tasks:
        task.kinds = ("cuda",)
    return runtime.plan


def make(nbytes: int, view: ScratchView, data_class: DataClass) -> HandleRecord:
    """A record for data of fused tasks."""
    return HandleRecord(HandleId(1000), HandleSpec(nbytes, nbytes, view, f"inner {data_class}", "temporary", data_class))


def passes(runtime: Any, kept: Sequence[Any], codelet: Codelet = MIX, count: int = 40) -> Any:
    """A pass that makes as many gradients, and updates of the kept data with them; returns what the pass ends with."""
    through, gradients = runtime.handle(PAGE, Numbers(), name="activations"), []
    runtime.submit(FILL, [(through, W)], {"value": 1.0})
    for number in range(count):
        gradients.append(runtime.handle(PAGE, Numbers(), name="d", data_class="gradients"))
        runtime.submit(FILL, [(gradients[-1], W)], {"value": float(number)})
        runtime.submit(codelet, [(through, "RW"), (kept[number % 2], R)], {"salt": number})
        runtime.submit(MIX, [(gradients[-1], "RW"), (through, R)], {"salt": number})
    for number, gradient in enumerate(gradients):
        runtime.submit(MIX, [(kept[number % 2], "RW"), (gradient, R)], {"salt": number})
    return through


def test_how_tasks_are_fused() -> None:
    """As many as the bytes of their data let; inner data becomes scratch, and modes are merged."""

    def emit(runtime: CapturingRuntime, kept: list[Any]) -> None:
        inner = runtime.handle(PAGE, Numbers())
        runtime.submit(MIX, [(kept[0], "RW"), (kept[1], R)], {"salt": 0})
        runtime.submit(FILL, [(inner, W)], {"value": 1.0})
        runtime.submit(MIX, [(kept[1], "RW"), (inner, R)], {"salt": 2})
        for salt in range(70):
            runtime.submit(MIX, [(kept[0], "RW")], {"salt": salt})

    plan = capture(emit)
    (found,) = fuse(plan, 3 * PAGE, make).tasks
    assert found.name == "mix and 72 more"
    assert [mode for _, mode in found.accesses] == ["RW", "RW", "SCRATCH"]
    assert [task.name for task in fuse(plan, 2 * PAGE, make).tasks] == ["mix", "fill", "mix", "mix and 69 more"]


def test_temporaries_of_many_sizes_count_one_by_one_if_tiles_move() -> None:
    """Those that die at once share no memory with later ones of another size, so a fused task has fewer of them than if they were packed."""

    def emit(runtime: CapturingRuntime, kept: list[Any]) -> None:
        through = runtime.handle(PAGE, Numbers(), name="through")
        runtime.submit(FILL, [(through, W)], {"value": 1.0})
        for number in range(2, 25):
            passing = runtime.handle(number * PAGE, Numbers(), name="passing")
            runtime.submit(FILL, [(passing, W)], {"value": 1.0})
            runtime.submit(MIX, [(through, "RW"), (passing, R)], {"salt": number})

    plan = capture(emit)
    moved, in_memory = fuse(plan, 26 * PAGE, make, moves=True), fuse(plan, 26 * PAGE, make)
    assert len(in_memory.tasks) == 1
    assert len(moved.tasks) > 4
    assert moved.largest_task() <= 26 * PAGE


def test_fused_tasks_keep_the_forecast() -> None:
    """Data leaves before the fused task of its next use, unless one fused task has both uses; it returns from a fused task of any replay."""

    def emit(runtime: CapturingRuntime, kept: list[Any]) -> None:
        for number in range(8):
            runtime.submit(MIX, [(kept[number // 4], "RW")], {"salt": number})

    plan = capture(emit)
    first, second = plan.uses
    plan.foresee({first: {0, 2}, second: {6}}, [[(-4, 0), (2, 4), (5, 6)]])
    fused = fuse(plan, PAGE, make, moves=True)
    assert len(fused.tasks) == 2
    assert [set(fused.uses[handle].leaves) for handle in (first, second)] == [{0}, set()]
    assert fused.returns == [[(-1, 0), (0, 1)]]


def test_devices_that_share_no_minibatches_are_judged_by_the_whole_step() -> None:
    """A step without partitions that fits two devices together, but not either alone, keeps its single tasks; with them it counts what is on each."""
    plan = capture(lambda runtime, kept: passes(runtime, kept))
    needed = plan.needed_bytes()
    found = PlannedOrder("submission", plan, {}, num_tasks=len(plan.tasks), last_bytes=0)
    assert fuse_if_it_fits(found, [needed - PAGE] * 2, 1 << 40, make) is found
    assert len(fuse_if_it_fits(found, [8 * needed] * 2, 1 << 40, make).plan.tasks) == 2
    uneven = plan.divided([int(at > 9) for at in range(len(plan.tasks))])
    assert largest_device_bytes(uneven, 2) > needed // 2


def test_the_last_tier_holds_what_fused_tasks_share() -> None:
    """It holds all that a fused task reads and all that it makes at once: single tasks stay where it holds only what is there between two of them."""

    def run(**options: Any) -> tuple[float, int]:
        with Runtime(0, gpus=gpus(1, 0), gpu_memory=512 * PAGE, **options) as runtime:
            kept = runtime.handle(PAGE, Numbers(), kind="persistent")
            runtime.submit(FILL, [(kept, W)], {"value": 1.0})
            with runtime.record() as step:
                first, second = ([runtime.handle(PAGE, Numbers()) for _ in range(20)] for _ in range(2))
                for number, handle in enumerate(first):
                    runtime.submit(FILL, [(handle, W)], {"value": float(number)})
                for number, handle in enumerate(second):
                    runtime.submit(FILL, [(handle, W)], {"value": 2.0}, priority=1)
                    runtime.submit(MIX, [(handle, "RW"), (first[number], R)], {"salt": number}, priority=1)
                for number, handle in enumerate(second):
                    runtime.submit(MIX, [(kept, "RW"), (handle, R)], {"salt": number})
                first, second = [], []
                del handle
            step.replay().wait()
            return value(runtime, kept), int(runtime.stats()["tasks"]) - 1

    single = run(ram=64 * PAGE, graphs=False)
    assert run(ram=64 * PAGE) == (single[0], 3)
    assert run(ram=30 * PAGE) == single


def test_what_updates_the_programs_data_is_apart() -> None:
    """All that comes before is one task, all from there on another; gradients between the two are data of one handle."""
    forward, update = fuse(capture(lambda runtime, kept: passes(runtime, kept) and None), 999 * PAGE, make).tasks
    assert (forward.name, update.name) == ("fill and 120 more", "mix and 39 more")
    shown = [[(handle.spec.name, handle.spec.nbytes // PAGE, mode) for handle, mode in task.accesses] for task in (forward, update)]
    assert shown[0] == [("inner gradients", 40, "W"), ("", 1, "R"), ("", 1, "R"), ("inner scratch", 1, "SCRATCH")]
    assert shown[1] == [("", 1, "RW"), ("inner gradients", 40, "R"), ("", 1, "RW")]


def test_tasks_that_start_together() -> None:
    """Those of one codelet that knows how, unless one is in the way: what they compute stays the same, bit by bit."""
    starts: list[int] = []

    def many(tasks: Sequence[tuple[Sequence[Any], Any]]) -> None:
        starts.append(len(tasks))
        for views, constants in tasks:
            MIX.cuda(*views, **constants)  # type: ignore[misc]

    codelet = replace(MIX, cuda_many=many)

    def run(runtime: Any, codelet: Codelet) -> list[float]:
        with runtime:
            kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(6)]
            for number, handle in enumerate(kept):
                runtime.submit(FILL, [(handle, W)], {"value": float(number)})
            with runtime.record() as step:
                for salt, (out, source) in enumerate(((0, 1), (2, 1), (3, 2), (4, 1), (5, 1), (1, 0), (2, 0))):
                    runtime.submit(codelet, [(kept[out], "RW"), (kept[source], R)], {"salt": salt})
                    if salt == 3:  # in nobody's way
                        runtime.submit(SPOIL, [(kept[3], "RW"), (runtime.handle(PAGE, Numbers()), SCRATCH)], {})
            for _ in range(5):
                step.replay()
            return [value(runtime, handle) for handle in kept]

    memory = {"gpu_memory": 256 * PAGE, "ram": 512 * PAGE}
    assert run(Runtime(0, gpus=gpus(1, 3), **memory), codelet) == run(Runtime(0, gpus=gpus(1, 4), graphs=False, **memory), MIX)
    assert set(starts) == {2, 3}


def test_a_launch_moves_at_most_once() -> None:
    """A launch moves to the end for one later task of its codelet, and not for another one, because its data stays allocated until it runs."""
    many = replace(MIX, cuda_many=lambda tasks: None)

    def emit(runtime: CapturingRuntime, kept: list[Any]) -> None:
        for number in range(4):
            slope, total = (runtime.handle(PAGE, Numbers(), name=f"{name} {number}") for name in ("slope", "total"))
            runtime.submit(FILL, [(slope, W)], {"value": 1.0})
            runtime.submit(FILL, [(total, W)], {"value": 0.0})
            runtime.submit(many, [(total, "RW"), (slope, R)], {"salt": number})

    found = [list(start.positions) for start in launches(capture(emit), 0, 12)]
    assert found == [[0], [1], [3], [4], [2, 5], [6], [7], [9], [10], [8, 11]]


def test_tasks_that_share_scratch_memory_start_apart() -> None:
    """Within a fused task a scratch handle is one piece of memory, which kernels that run side by side would take from each other."""
    starts: list[int] = []

    def many(tasks: Sequence[tuple[Sequence[Any], Any]]) -> None:
        starts.append(len(tasks))
        for views, constants in tasks:
            SPOIL.cuda(*views, **constants)  # type: ignore[misc]

    codelet = replace(SPOIL, cuda_many=many)
    with Runtime(0, gpus=gpus(1, 0), gpu_memory=256 * PAGE, ram=512 * PAGE) as runtime:
        kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(5)]
        for handle in kept:
            runtime.submit(FILL, [(handle, W)], {"value": 0.0})
        with runtime.record() as step:
            one, other, third = (runtime.handle(PAGE, Numbers(), data_class="scratch") for _ in range(3))
            for handle, room in zip(kept, (one, one, one, other, third), strict=True):
                runtime.submit(codelet, [(handle, "RW"), (room, SCRATCH)], {})
        step.replay()
        assert [value(runtime, handle) for handle in kept] == [COUNT] * 5
    assert starts == [3]


def test_a_kernel_that_fails_is_named() -> None:
    """Among those that are fused; what it was to update stays as it was, and the next replay runs."""
    is_broken = True

    def compute(out: Any, source: Any, *, salt: int) -> None:
        if is_broken and salt == 7:
            raise ValueError("planted")
        MIX.cuda(out, source, salt=salt)  # type: ignore[misc]

    def run(runtime: Any, codelet: Codelet) -> float:
        nonlocal is_broken
        with runtime:
            kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2)]
            for handle in kept:
                runtime.submit(FILL, [(handle, W)], {"value": 2.0})
            with runtime.record() as step:
                passes(runtime, kept, codelet)
            if codelet is not MIX:
                before = [value(runtime, handle) for handle in kept]
                ticket = step.replay()
                with pytest.raises(TaskError, match=r"raised ValueError: planted, in 'mix', task 24 of 121 that are fused"):
                    ticket.wait()
                assert ticket.changed_nothing
                assert [value(runtime, handle) for handle in kept] == before
                is_broken = False
            for _ in range(4):
                step.replay().wait()
            return value(runtime, kept[0]) + value(runtime, kept[1])

    memory = {"gpu_memory": 512 * PAGE, "ram": 1024 * PAGE}
    broken = run(Runtime(0, gpus=gpus(1, 0), **memory), replace(MIX, cuda=compute))
    assert broken == run(Runtime(0, gpus=gpus(1, 0), graphs=False, **memory), MIX)


def test_who_traces_sees_single_tasks() -> None:
    """Each with its own duration."""
    trace = Trace()
    results(Runtime(0, gpus=gpus(1, 0), gpu_memory=256 * PAGE, ram=512 * PAGE, trace=trace), 2, replays=1)
    assert {name for _, name, *_ in trace.tasks()} <= {"fill", "mix", "spoil"}


def test_addresses_stay() -> None:
    """From the third replay of an instance on every fused task starts a graph, although two replays are in flight and inputs arrive meanwhile."""
    (gpu,) = gpus(1, 5)
    with Runtime(0, gpus=[gpu], gpu_memory=512 * PAGE, ram=1024 * PAGE) as runtime:
        kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2)]
        given = [runtime.handle(PAGE, Numbers(), kind="input") for _ in range(3)]
        for handle in kept:
            runtime.submit(FILL, [(handle, W)], {"value": 2.0})
        with runtime.record() as step:
            for handle in given:
                runtime.submit(MIX, [(runtime.handle(PAGE, Numbers()), "W"), (handle, R)], {"salt": 1})
            left = passes(runtime, kept)
        before, graphs = None, []
        for number in range(20):
            for handle in given:
                with runtime.acquire(handle, "W") as view:
                    view[:] = number
            ticket = step.replay()
            if before is not None:
                before.read(left)
            before = ticket
            graphs.append(gpu.num_graphs)
        runtime.wait()
        assert gpu.num_graphs - graphs[9] >= 2 * 9


def test_inputs_arrive_while_a_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies wait for the kernel that used their bytes last, and not for the passes that were started since."""
    behind: list[int] = []
    hold = Flow.hold

    def note(self: Flow, stream: Any, number: int) -> None:
        behind.append(self.number - number)
        hold(self, stream, number)

    monkeypatch.setattr(Flow, "hold", note)
    with Runtime(0, gpus=gpus(1, 5), gpu_memory=512 * PAGE, ram=1024 * PAGE) as runtime:
        kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2)]
        given = runtime.handle(PAGE, Numbers(), kind="input")
        for handle in kept:
            runtime.submit(FILL, [(handle, W)], {"value": 2.0})
        with runtime.record() as step:
            runtime.submit(MIX, [(kept[0], "RW"), (given, R)], {"salt": 1})
            passes(runtime, kept)
        for number in range(9):
            with runtime.acquire(given, "W") as view:
                view[:] = number
            step.replay()
            runtime.wait()  # then all kernels of the pass have been started before the next copy is decided on
    assert behind[1:] == [1] * 8


@pytest.mark.parametrize(("salt", "starts", "is_kept"), [(0, False, True), (0, True, False), (1, False, False)])
def test_an_update_that_has_not_begun_loses_nothing(salt: int, starts: bool, is_kept: bool) -> None:
    """A GPU that refuses the first kernel of fused updates leaves what these write as it was; a later error says that all of it is lost."""
    (gpu,), is_broken = gpus(1, 0), True

    def compute(out: Any, source: Any, *, salt: int) -> None:
        if is_broken and salt == planted:
            if starts:
                gpu.later(lambda: None)
            error = RuntimeError("planted")
            setattr(error, NUM_STARTED, gpu.num_started)
            raise error
        MIX.cuda(out, source, salt=salt)  # type: ignore[misc]

    planted, update = salt, replace(MIX, cuda=compute)
    with Runtime(0, gpus=[gpu], gpu_memory=512 * PAGE, ram=1024 * PAGE) as runtime:
        kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2)]
        for handle in kept:
            runtime.submit(FILL, [(handle, W)], {"value": 2.0})
        with runtime.record() as step:
            made = runtime.handle(PAGE, Numbers(), name="gradient")
            runtime.submit(FILL, [(made, W)], {"value": 1.0})
            runtime.submit(MIX, [(made, "RW"), (kept[0], R)], {"salt": 5})
            for number, handle in enumerate(kept):
                runtime.submit(update, [(handle, "RW"), (made, R)], {"salt": number})
        ticket = step.replay()
        words = "in 'mix', task 2 of 2 that are fused, 1 of which had been started: what any of them writes is lost" if salt else "planted"
        with pytest.raises(TaskError, match=words):
            ticket.wait()
        assert ticket.changed_nothing == is_kept
        if not is_kept:
            with pytest.raises(HandleLost):
                value(runtime, kept[0])
            return
        assert [value(runtime, handle) for handle in kept] == [2.0 * COUNT] * 2
        is_broken = False
        step.replay().wait()
        assert value(runtime, kept[0]) != 2.0 * COUNT


def test_a_plain_task_that_has_not_begun_loses_what_it_was_to_write() -> None:
    """Nobody may take what it was before for what the task should have made of it."""
    (gpu,) = gpus(1, 0)

    def refuse(out: Any) -> None:
        error = RuntimeError("planted")
        setattr(error, NUM_STARTED, gpu.num_started)
        raise error

    with Runtime(0, gpus=[gpu], gpu_memory=512 * PAGE, ram=1024 * PAGE) as runtime:
        kept = runtime.handle(PAGE, Numbers(), kind="persistent")
        runtime.submit(FILL, [(kept, W)], {"value": 2.0})
        runtime.submit(Codelet("update", cuda=refuse), [(kept, "RW")], {})
        with pytest.raises(TaskError, match="planted"):
            runtime.wait()
        with pytest.raises(HandleLost):
            value(runtime, kept)


@pytest.mark.parametrize("graphs", [True, False])
def test_what_fused_tasks_make_again_is_counted(graphs: bool) -> None:
    """As of single tasks, and some of the time with it."""
    widen = both("widen", lambda out, source: np.multiply(source, 3.0, out=out))
    with Runtime(0, gpus=gpus(1, 0), gpu_memory=512 * PAGE, ram=1024 * PAGE, graphs=graphs) as runtime:
        kept, given = (runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(2))
        for handle in (kept, given):
            runtime.submit(FILL, [(handle, W)], {"value": 2.0})
        with runtime.record(recompute="widen") as step:
            made = runtime.handle(PAGE, Numbers(), name="made")
            runtime.submit(widen, [(made, W), (given, R)], {})
            for salt in range(9):
                passing = runtime.handle(PAGE, Numbers(), name="passing")
                runtime.submit(FILL, [(passing, W)], {"value": 3.0})
                runtime.submit(MIX, [(kept, "RW"), (passing, R), *([(made, R)] if salt in (0, 8) else [])], {"salt": salt})
            del made, passing
        for _ in range(5):
            step.replay()
        runtime.wait()
        stats = runtime.stats()
    assert stats["recomputed_tasks"] == 5
    assert 0 < stats["recompute_seconds"] < stats["busy_seconds"]["cuda:0"]


def test_workers_of_several_gpus_share_fused_kernels() -> None:
    """Each records and starts graphs of its own addresses, while those of others are dropped: no call is lost, and no more graphs are kept."""
    gpu, num_threads, rounds = Gpu(), 4, 200
    started: list[list[int]] = [[] for _ in range(num_threads)]
    here = threading.local()
    codelet = Codelet("note", cuda=lambda place: here.started.append(place.address))
    fused = FusedKernels([Launch([Member(codelet, (0,), {})], None)], [])

    def work(number: int) -> None:
        here.started, cuda._here.flow = started[number], Flow(gpu)
        gpu.enter(cuda._here.flow.stream)
        for turn in range(rounds):
            fused(DeviceMemory(number << 20 | turn % 7))

    gpu.can_capture = False  # then each call runs the kernels by themselves, recorded or not
    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) == rounds for each in started] == [True] * num_threads
    assert len(fused._graphs) <= MOST_GRAPHS


def test_scratch_memory_of_more_tasks_than_are_fused() -> None:
    """One scratch handle for all tasks: each fused task has its own, as each task had."""

    def run(runtime: Any) -> float:
        with runtime:
            kept = runtime.handle(PAGE, Numbers(), kind="persistent")
            runtime.submit(FILL, [(kept, W)], {"value": 1.0})
            with runtime.record() as step:
                room = runtime.handle(PAGE, Numbers(), name="room", data_class="scratch")
                for _ in range(41):
                    runtime.submit(SPOIL, [(kept, "RW"), (room, SCRATCH)], {})
            for _ in range(3):
                step.replay()
            return value(runtime, kept)

    memory = {"gpu_memory": 256 * PAGE, "ram": 512 * PAGE}
    assert run(Runtime(0, gpus=gpus(1, 0), **memory)) == (1 + 3 * 41) * COUNT


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
    fused = FusedKernels([Launch([Member(Codelet("note", cuda=lambda place: gpu.later(lambda: started.append(place.address))), (0,), {})], None)], [])
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
    assert packed(spans) == ([(0, 0), (0, 4), (0, 0), (0, 6), (0, 0)], [7])
    assert by_size(spans) == ([(0, 0), (1, 0), (0, 0), (2, 0), (3, 0)], [4, 2, 1, 2])


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12))
def test_live_data_never_overlaps(pieces: list[tuple[int, int, int]]) -> None:
    """Both layouts separate data whose live ranges intersect."""
    spans = [(size, first, first + length) for size, first, length in pieces]
    for positions, sizes in (packed(spans), by_size(spans)):
        for own, (size, first, last) in enumerate(spans):
            number, offset = positions[own]
            assert offset + size <= sizes[number]
            for rank, (other, begin, end) in enumerate(spans):
                if rank != own and positions[rank][0] == number and first <= end and begin <= last:
                    assert offset + size <= positions[rank][1] or positions[rank][1] + other <= offset
