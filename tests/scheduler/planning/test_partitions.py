"""Parts of a step: minibatches spread over devices, side by side where memory is short, their tasks on one device, their activations never moved."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from support.plain_tasks import plain_task

from scheduler.core.events import CopyFinished, Event, TaskFinished
from scheduler.core.memory.eviction_policies import FAR, Foresight
from scheduler.core.memory.extents import PAGE
from scheduler.core.performance_model import NO_ESTIMATES
from scheduler.core.policies import DataAwareSorted, Eager, Explained, Reuse
from scheduler.core.records import HandleId, HandleRecord, HandleSpec, Kind, Mode, NodeId, Replay, ReplayPlan, Replica, UseSchedule, Worker, WorkerId
from scheduler.core.step_plan import Label, RecordedTask, StepPlan
from scheduler.planning import AUTO, NONE, PlanningMachine, choose_plan
from scheduler.simulation.virtual_time import VirtualDriver, simulate

LAYERS = 4


def training_step(minibatches: int) -> StepPlan:
    """Forward, backward and update of a chain of layers, one minibatch after the other."""
    tasks: list[RecordedTask] = []
    owned: dict[HandleRecord, bool] = {}
    numbers = itertools.count()

    def tile(name: str, pages: int, kind: Kind = "temporary") -> HandleRecord:
        handle = HandleRecord(HandleId(next(numbers)), HandleSpec(pages * PAGE, pages * PAGE, None, name, kind, "activations"))
        if kind == "temporary":
            owned[handle] = False
        return handle

    def task(name: str, *accesses: tuple[HandleRecord, Mode]) -> None:
        tasks.append(RecordedTask(None, name, ("sim",), accesses, {}, 0, label=label))

    weights = [tile(f"w{at}", 8, "persistent") for at in range(LAYERS)]
    moments = [tile(f"m{at}", 8, "persistent") for at in range(LAYERS)]
    gradients = [tile(f"d w{at}", 8) for at in range(LAYERS)]
    for minibatch in range(minibatches):
        label = Label()
        data, copy = tile("input", 2, "input"), tile("copy", 2)
        task("copy input", (data, "R"), (copy, "W"))
        x = [copy]
        for at, weight in enumerate(weights):
            label = Label("forward", minibatch, f"layers.{at}")
            x.append(tile("x", 2))
            task("forward", (x[-2], "R"), (weight, "R"), (x[-1], "W"))
        dx, label = tile("dx", 2), Label("forward", minibatch)
        task("loss", (x[-1], "R"), (dx, "W"))
        for at in reversed(range(LAYERS)):
            label = Label("backward", minibatch, f"layers.{at}")
            task("gradient", (x[at], "R"), (dx, "R"), (gradients[at], "RW" if minibatch else "W"))
            before, dx = dx, tile("dx", 2)
            task("backward", (before, "R"), (weights[at], "R"), (dx, "W"))
    label = Label("update")
    for at, weight in enumerate(weights):
        task("update", (gradients[at], "R"), (moments[at], "RW"), (weight, "RW"))
    return StepPlan(tasks, owned)


@pytest.mark.parametrize(("minibatches", "devices", "expected"), [(4, 2, {0, 1}), (4, 4, {0, 1, 2, 3}), (4, 3, set()), (1, 2, set()), (2, 4, set())])
def test_minibatches_take_turns(minibatches: int, devices: int, expected: set[int]) -> None:
    """Each device gets as many minibatches; no parts where that leaves some with fewer, or without any."""
    plan = training_step(minibatches)
    order = choose_plan(plan, AUTO, NONE, PlanningMachine(memory=1 << 40, last=1 << 40, computes_on_last=False, num_devices=devices))
    assert set(order.plan.partitions) - {-1} == expected
    if expected:
        sizes = Counter(partition for partition in order.plan.partitions if partition >= 0)
        assert len(set(sizes.values())) == 1
        names = {task.name for task, partition in zip(order.plan.tasks, order.plan.partitions, strict=True) if partition < 0}
        assert names == {"copy input", "update"}


@pytest.mark.parametrize("memory", [1 << 40, 40 * PAGE])
@pytest.mark.parametrize("policy", ["dmdas", "reuse"])
def test_tasks_run_at_home_and_activations_stay(monkeypatch: pytest.MonkeyPatch, memory: int, policy: str) -> None:
    """Both with room for everything and under pressure, when the minibatches of both devices pass side by side."""
    order = choose_plan(training_step(4), AUTO, NONE, PlanningMachine(memory=2 * memory, last=1 << 40, computes_on_last=False, num_devices=2))
    assert order.name == "submission" if memory == 1 << 40 else order.name.startswith("layers")
    ran: list[tuple[NodeId, int]] = []
    moved: Counter[str] = Counter()
    bring = VirtualDriver.bring

    def watch(driver: VirtualDriver, event: Event) -> None:
        if isinstance(event, TaskFinished) and event.task.partition >= 0:
            ran.append((event.task.node, event.task.partition))
        elif isinstance(event, CopyFinished) and event.source.node and event.target.node:
            moved[event.source.handle.spec.name.split()[0].rstrip("0123456789")] += 1
        bring(driver, event)

    monkeypatch.setattr(VirtualDriver, "bring", watch)
    simulate(
        order.plan,
        workers=[("sim", 1, 3), ("sim", 2, 3)],
        nodes=[("ram", 1 << 40), ("sim:0", memory), ("sim:1", memory)],
        policy=policy,
        duration=lambda task, kind: 1.0,
        transfer=lambda source, target, nbytes: nbytes / PAGE / 100,
    )
    assert ran
    assert all(node == partition + 1 for node, partition in ran)
    assert set(moved) <= {"w", "m", "d", "copy"}


@pytest.mark.parametrize(
    ("devices", "minibatches", "order", "pages", "seconds", "hops"),
    [(2, 8, "layers", 40, 1.0, 1), (4, 8, "layers", 40, 1.0, 3), (4, 8, "layers", 80, 1.0, 3), (4, 16, "layers:4", 200, 0.1, 15)],
)
def test_a_sum_moves_no_more_than_it_has_to(
    monkeypatch: pytest.MonkeyPatch, devices: int, minibatches: int, order: str, pages: int, seconds: float, hops: int
) -> None:
    """It stays on a device for all minibatches there that add to it; nobody fetches it ahead of those that still add to it elsewhere."""
    plan = choose_plan(
        training_step(minibatches),
        order,
        NONE,
        PlanningMachine(memory=devices * 40 * PAGE, last=1 << 40, computes_on_last=False, num_devices=devices),
    ).plan
    moved: Counter[str] = Counter()
    bring = VirtualDriver.bring

    def watch(driver: VirtualDriver, event: Event) -> None:
        if isinstance(event, CopyFinished) and event.source.node and event.target.node:
            moved[event.source.handle.spec.name] += 1
        bring(driver, event)

    monkeypatch.setattr(VirtualDriver, "bring", watch)
    simulate(
        plan,
        workers=[("sim", 1 + at, 3) for at in range(devices)],
        nodes=[("ram", 1 << 40), *((f"sim:{at}", pages * PAGE) for at in range(devices))],
        policy="reuse",
        duration=lambda task, kind: seconds,
        transfer=lambda source, target, nbytes: nbytes / PAGE / 100,
        replays=1,
    )
    assert sum(moved[f"d w{at}"] for at in range(LAYERS)) <= LAYERS * (hops + 1)  # once more at most: to where it is used


@pytest.mark.parametrize(
    ("order", "expected"),
    [("submission", "01010101"), ("layers:2", "01010101"), ("layers:4", "00110011"), ("layers:6", "00011101"), ("layers", "00001111")],
)
def test_minibatches_side_by_side_are_neighbours_on_their_devices(order: str, expected: str) -> None:
    """Within a group; groups, and minibatches that pass one after the other, take turns."""
    plan = training_step(8)
    found = choose_plan(plan, order, NONE, PlanningMachine(memory=80 * PAGE, last=1 << 40, computes_on_last=False, num_devices=2))
    partition = {id(task): partition for task, partition in zip(found.plan.tasks, found.plan.partitions, strict=True)}
    assert "".join(str(partition[id(task)]) for task in plan.tasks if task.name == "loss") == expected


def test_what_leaves_either_device_is_foreseen() -> None:
    """Each device forecasts its own part; positions are those of the whole step."""
    order = choose_plan(training_step(4), AUTO, NONE, PlanningMachine(memory=80 * PAGE, last=1 << 40, computes_on_last=False, num_devices=2))
    leaving = Counter[int]()
    for handle, use in order.plan.uses.items():
        assert use.leaves <= set(use.positions)
        if handle in order.plan.owned:
            leaving.update(order.plan.partitions[at] for at in use.leaves)
    assert set(leaving) >= {0, 1}
    assert leaving[0] == leaving[1]


def test_devices_that_share_a_step_keep_more_of_their_memory() -> None:
    """They lend each other what they hold: with the share of one memory alone it would be 216 pages."""
    found = choose_plan(training_step(4), "layers", NONE, PlanningMachine(memory=80 * PAGE, last=1 << 40, computes_on_last=False, num_devices=2))
    assert found.moved_bytes == 168 * PAGE


def test_side_by_side_both_devices_work_under_pressure() -> None:
    """In submission order a window lets one minibatch through at a time; side by side both devices are busy most of the time."""
    order = choose_plan(training_step(8), AUTO, NONE, PlanningMachine(memory=80 * PAGE, last=1 << 40, computes_on_last=False, num_devices=2))
    found = simulate(
        order.plan,
        workers=[("sim", 1, 3), ("sim", 2, 3)],
        nodes=[("ram", 1 << 40), ("sim:0", 40 * PAGE), ("sim:1", 40 * PAGE)],
        policy="reuse",
        duration=lambda task, kind: 1.0,
        transfer=lambda source, target, nbytes: nbytes / PAGE / 100,
    )
    assert sum(found.busy_seconds) / (2 * found.seconds) > 0.9


@pytest.mark.parametrize(("policy", "expected"), [(DataAwareSorted, 2), (Reuse, 2), (Eager, None)])
def test_explained_placements_know_the_plan(policy: type[DataAwareSorted | Eager], expected: int | None) -> None:
    """Policies that keep to the plan say where it wants the task; the others do not go by it."""
    joined = [Worker(WorkerId(at), "sim", NodeId(at + 1), depth=2) for at in range(2)]
    watched = Explained(policy(), NO_ESTIMATES, joined, {"forward"}, 1)
    for worker in joined:
        watched.join(worker)
    task = plain_task(0, "forward", ("sim",), partition=1)
    task.step = Replay(ReplayPlan(partitions=[[], [0]]), [task], [], [], [], partition_nodes=(NodeId(1), NodeId(2)))
    watched.push(task, None)
    assert watched.pop(joined[1]) is task
    assert watched.placements[0].planned_node == expected


def test_what_other_devices_read_keeps_data_only_where_it_is_alone() -> None:
    """Of two devices, each with the data beside host memory: its own next read counts, or that somebody writes it first. Of the only one, any use."""
    backing, gpu, other = NodeId(0), NodeId(1), NodeId(2)
    modes: list[tuple[int, Mode]] = [(0, "R"), (1, "R"), (0, "R"), (1, "R"), (0, "RW"), (1, "RW"), (1, "R"), (-1, "RW")]
    handle = HandleRecord(HandleId(0), HandleSpec(PAGE, PAGE, None, "w", "persistent", "parameters"))
    tasks = [plain_task(at, "task", ("sim",), ((handle, mode),), position=at, partition=partition) for at, (partition, mode) in enumerate(modes)]
    replay = Replay(ReplayPlan(), tasks, [], [], [], partition_nodes=(gpu, other), done=bytearray(len(tasks)))
    for task in tasks:
        task.step = replay
    handle.use_schedule = UseSchedule(range(len(tasks)), [mode for _, mode in modes])
    for node in (backing, gpu, other):
        handle.replicas[node] = Replica(handle, node, 0, "shared")
    foresight = Foresight()
    foresight.replays = [replay]
    found = []
    for at in range(len(tasks)):
        replay.frontier = at
        found.append([foresight.next_use_of(handle.replicas[node]) for node in (gpu, other)])
        replay.done[at] = True
    worthless = (FAR, True)
    expected = [[(0, False), (1, False)], [(1, False), (0, False)], [(0, False), (1, False)], [(1, False), (0, False)], [(0, False), worthless]]
    assert found[:5] == expected
    assert found[5:] == [[worthless, (0, False)], [(1, False), (0, False)], [(0, False), (0, False)]]  # what belongs nowhere counts everywhere
    replay.done[:], replay.frontier = bytearray(len(tasks)), 1
    for node in (backing, other):
        del handle.replicas[node]
    assert foresight.next_use_of(handle.replicas[gpu]) == (0, False)
