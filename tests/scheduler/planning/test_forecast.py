"""The planner's virtual time: bounds that hold for any order, the machine's own virtual time beside it, and the choice by seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.toy_steps import PAGE, PlanBuilder, toy_step

from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.core.performance_model import Models
from scheduler.core.records import FILE, RAM, Condition, NodeId, Replica, W
from scheduler.core.step_plan import StepPlan
from scheduler.planning import AUTO, NONE, PlanningMachine, choose_plan
from scheduler.planning import forecast as forecasts
from scheduler.planning.forecast import Forecast, Foreseen, Pace, Spill
from scheduler.planning.machine_pace import pace_of
from scheduler.planning.ordered_step import SUBMISSION
from scheduler.planning.orders import candidates
from scheduler.planning.tile_traffic import Touches
from scheduler.simulation.virtual_time import Simulation, simulate

STEP = toy_step(layers=12, minibatches=6)
SECONDS = 0.01


def pace(rate: float, duplex: bool = True) -> Pace:
    """Equal tasks, links of `rate` pages per task."""
    nbytes = rate * PAGE / SECONDS
    return Pace(dict.fromkeys(STEP.tasks, SECONDS), nbytes, nbytes, duplex)


def near(rate: float) -> list[Pace]:
    """Links about as fast: a copy that ends a little sooner changes what the machine evicts, and with it the time of a step by a tenth."""
    return [pace(rate * factor) for factor in (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)]


def ordered(name: str) -> StepPlan:
    """The step in one of its orders."""
    return StepPlan([STEP.tasks[at] for at in candidates(STEP)[name]], STEP.owned)


def forecast(plan: StepPlan, budget: int, pace: Pace | None = None, *, only_files: bool = False) -> Forecast:
    """The forecast of a plan in its order."""
    return forecasts.forecast(Touches(plan), range(len(plan.tasks)), budget, pace, only_files=only_files)


def foresee(plan: StepPlan, budget: int) -> Foreseen:
    """What is foreseen of a plan in its order."""
    return forecasts.foresee(Touches(plan), range(len(plan.tasks)), budget)


def note(plan: StepPlan, budget: int) -> None:
    """Note in the plan what is foreseen, as choosing an order does."""
    found = foresee(plan, budget)
    plan.foresee(found.leaves, [found.returns])


def test_what_fits_takes_as_long_as_its_tasks() -> None:
    """Nothing moves, and the seconds of all tasks pass."""
    found = forecast(STEP, 1 << 40, pace(1.0))
    assert found.total == 0
    assert found.seconds == pytest.approx(len(STEP.tasks) * SECONDS)


def test_without_a_pace_there_are_no_seconds() -> None:
    """Bytes alone are forecast then."""
    assert forecast(STEP, STEP.needed_bytes() // 3).seconds == 0


def mixture(kit, num_tiles: int, share: float) -> StepPlan:  # type: ignore[no-untyped-def]
    """Sixteen weights of eight pages, each used by a conditional task for each tile of tokens; every tile has flags of its own."""
    runtime = CapturingRuntime()
    weights = [kit.filled(runtime, 1, f"weight {expert}", 8 * 512, kind="persistent") for expert in range(16)]
    total = kit.filled(runtime, 0, "total", 512, kind="persistent")
    with runtime.record():
        flags = [runtime.handle(16, lambda memory, offset: None, name="flags") for _ in range(num_tiles)]
        for handle in flags:
            runtime.submit(kit.plus, [(total, "R"), (handle, "W")], condition=Condition(flags=1))
        for expert, weight in enumerate(weights):
            for handle in flags:
                accesses = [(weight, "R"), (total, "RW"), (handle, "R")]
                runtime.submit(kit.plus, accesses, condition=Condition(guard=2, number=expert, share=share))
        flags.clear()
        del handle
    return runtime.plan


@pytest.mark.parametrize("num_tiles", [1, 2, 4, 8])
def test_conditional_tasks_count_with_their_share(num_tiles: int, kit) -> None:  # type: ignore[no-untyped-def]
    """A weight is read if any tile needs it, in forecasts and in virtual time, where tiles choose independently; other tasks count whole."""
    share, memory = 0.25, 3 * 8 * PAGE
    certain, likely = mixture(kit, num_tiles, 1.0), mixture(kit, num_tiles, share)
    results = []
    for plan in (certain, likely):
        rates = pace_of(plan, [("cpu", RAM)], NodeId(1), Models(), channels=1, task_seconds=lambda task, kind: 1.0)
        results.append(forecast(plan, memory, replace(rates, read=1e12, write=1e12)))
    chance = 1.0 - (1.0 - share) ** num_tiles
    assert results[1].read == pytest.approx(chance * 128 * PAGE, rel=0.1)
    assert results[0].read > 0.8 * 128 * PAGE
    assert [found.seconds for found in results] == pytest.approx([17 * num_tiles, (1 + 16 * share) * num_tiles], rel=1e-3)
    nodes, read = [("ram", memory), ("disk", 1 << 30)], 0
    for replays in range(2, 9):
        found = simulate(likely, workers=[("cpu", 0, 2)], nodes=nodes, policy="prio", duration=lambda task, kind: 1.0, storage=True, replays=replays)
        read += found.moved_bytes["disk->ram"] // 7
    assert read == pytest.approx(chance * 128 * PAGE, rel=0.25)  # of seven replays


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("rate", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("name", ["submission", "layers"])
def test_bounds(name: str, rate: float, duplex: bool) -> None:
    """At least the longer of computing and moving, at most one after the other."""
    speed = pace(rate, duplex)
    found = forecast(ordered(name), STEP.needed_bytes() // 3, speed)
    compute = len(STEP.tasks) * SECONDS
    reading, writing = found.read / speed.read, found.written / speed.write
    assert found.read > 0
    assert max(compute, max(reading, writing) if duplex else reading + writing) <= found.seconds * 1.05  # the step before may have fetched ahead
    assert found.seconds <= compute + reading + writing


@pytest.mark.parametrize("rate", [1.0, pytest.param(2.0, marks=pytest.mark.long), 4.0, 16.0])
@pytest.mark.parametrize("name", ["submission", "layers"])
def test_close_to_the_machine_in_virtual_time(name: str, rate: float) -> None:
    """The forecast is within 20 % of what the whole machine takes in the mean, from links that bind to links that do not."""
    plan, budget = ordered(name), STEP.needed_bytes() // 3
    speeds = near(rate)
    foreseen = [forecast(plan, budget, speed).seconds for speed in speeds]
    note(plan, budget)
    measured = [in_virtual_time(plan, budget, speed).seconds for speed in speeds]
    assert sum(foreseen) == pytest.approx(sum(measured), rel=0.2)
    assert all(0.6 * there <= here <= 1.6 * there for here, there in zip(foreseen, measured, strict=True))


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("name", ["submission", "eager-update", "layers", "turn:4/8"])
def test_a_disk_under_host_memory_is_as_slow_as_in_virtual_time(name: str, share: float) -> None:
    """A device over a host memory that holds a part, over a slow disk: near what the whole machine takes, which moves more, and beyond the links'."""
    plan, budget, links = ordered(name), STEP.needed_bytes() // 3, pace(16.0)
    room, disk = int(share * STEP.needed_bytes()), links.read / 16
    foreseen = forecast(plan, budget, replace(links, spill=Spill(room, disk, disk)))
    note(plan, budget)
    found = simulate(
        plan,
        workers=[("cpu", 1, 3)],
        nodes=[("ram", room), ("sim:0", budget), ("disk", 1 << 40)],
        policy="reuse",
        duration=lambda task, kind: SECONDS,
        transfer=lambda source, target, nbytes: nbytes / (disk / 4 if 2 in (source, target) else links.read),
        storage=True,
        channels=4,
        replays=3,
        ahead=True,
    )
    assert found.seconds / 2.5 <= foreseen.seconds <= 1.25 * found.seconds
    assert foreseen.seconds > forecast(plan, budget, links).seconds


@pytest.mark.parametrize("name", ["submission", "layers"])
def test_a_disk_under_a_host_memory_with_room_changes_nothing(name: str) -> None:
    """The same bytes and the same seconds, to the last bit."""
    plan, budget, links = ordered(name), STEP.needed_bytes() // 3, pace(2.0)
    assert forecast(plan, budget, replace(links, spill=Spill(1 << 40, 1.0, 1.0))) == forecast(plan, budget, links)


def in_virtual_time(plan: StepPlan, budget: int, speed: Pace) -> Simulation:
    """What the whole machine takes, on one device below which there is plenty."""
    return simulate(
        plan,
        workers=[("cpu", 1, 3)],
        nodes=[("ram", 1 << 40), ("sim:0", budget)],
        policy="reuse",
        duration=lambda task, kind: SECONDS,
        transfer=lambda source, target, nbytes: nbytes / speed.read,
        replays=3,
        ahead=True,
    )


@pytest.mark.parametrize("name", ["submission", "layers"])
def test_what_leaves_is_what_is_fetched_again(name: str) -> None:
    """Departures account for the bytes read: each is followed by a read, unless the next use overwrites."""
    plan, budget = ordered(name), STEP.needed_bytes() // 3
    left = foresee(plan, budget).leaves
    read = 0
    for handle, positions in left.items():
        assert positions <= set(plan.uses[handle].positions)
        read += sum(handle.spec.size for at in positions if dict(plan.tasks[at].accesses)[handle] != W)
    assert read == forecast(plan, budget).read > 0
    assert foresee(plan, 1 << 40) == Foreseen({}, [])


@pytest.mark.parametrize("name", ["layers", pytest.param("turn:2/8", marks=pytest.mark.long)])
def test_writing_early_what_will_leave_saves_time_and_costs_no_bytes(name: str) -> None:
    """Where links are short, a plan that knows what leaves takes less time than the same plan without that."""
    plan, budget, speeds = ordered(name), STEP.needed_bytes() // 3, near(1.0)
    before = [in_virtual_time(plan, budget, speed) for speed in speeds]
    note(plan, budget)
    after = [in_virtual_time(plan, budget, speed) for speed in speeds]
    assert sum(each.seconds for each in after) <= 0.9 * sum(each.seconds for each in before)
    assert sum(sum(each.moved_bytes.values()) for each in after) <= 1.02 * sum(sum(each.moved_bytes.values()) for each in before)


def test_orders_are_compared_in_seconds() -> None:
    """Those of the forecast, and a share of those of the copies."""
    asked = []

    def speed(plan: StepPlan) -> Pace:
        asked.append(plan)
        return pace(1.0)

    roomy = choose_plan(STEP, AUTO, NONE, PlanningMachine(1 << 40, 1 << 40, False, pace=speed))
    assert (roomy.name, roomy.seconds, asked) == (SUBMISSION, 0.0, [])
    chosen = choose_plan(STEP, AUTO, NONE, PlanningMachine(STEP.needed_bytes() // 3, 1 << 40, False, pace=speed))
    assert len(asked) == 1
    found = chosen.forecasts[chosen.name]
    assert found.cost > found.seconds > 0
    assert found.cost == min(other.cost for other in chosen.forecasts.values())


def test_only_files_leave_a_memory_with_nothing_below(kit) -> None:  # type: ignore[no-untyped-def]
    """What is only read from files comes again in every step that has no room for it; nothing is written."""
    runtime = CapturingRuntime()
    handles = [kit.handle(runtime, str(at), count=512, kind="persistent") for at in range(20)]
    for handle in handles[:10]:
        handle.record.replicas[FILE] = Replica(handle.record, FILE, 0, "shared", is_backing=True)
    with runtime.record():
        for a, b in zip(handles[:10], handles[10:], strict=True):
            runtime.submit(kit.add, [(b, "RW"), (a, "R")])
    for room, read in ((30, 0), (15, 10 * 4096)):
        found = forecast(runtime.plan, room * 4096, only_files=True)
        assert found.written == 0
        assert (found.read > 0) == (read > 0)
        assert found.read <= read
    assert forecast(runtime.plan, 15 * 4096).written > 0


def test_parts_take_as_long_as_one_of_them() -> None:
    """Two devices share the tasks alike: together they take half as long."""
    speed = Pace(dict.fromkeys(STEP.tasks, SECONDS / 2), 1e12, 1e12, True)
    found = choose_plan(
        STEP, "layers", NONE, PlanningMachine(memory=1 << 40, last=1 << 40, computes_on_last=False, num_devices=2, pace=lambda plan: speed)
    )
    assert set(found.plan.partitions) == {-1, 0, 1}
    assert found.seconds == pytest.approx(len(STEP.tasks) * SECONDS / 2, rel=0.05)


@pytest.mark.parametrize("replays", [3, 5, 7])
def test_what_returns_is_fetched_from_afar_in_every_replay(replays: int) -> None:
    """Data that one large task has pushed out comes back behind hundreds of small ones, over a link as slow as 250 of them; in later replays, too.

    Every other step begins before the one before it has ended, so odd replays are compared.
    """
    builder = PlanBuilder()
    state, hog = builder.tile("state", "persistent", 64), builder.tile("hog", pages=128)
    x = builder.tile("x")
    builder.task("large", (hog, "W"), (x, "W"))
    builder.task("end", (hog, "R"), (x, "R"))
    for _ in range(400):
        before, x = x, builder.tile("x")
        builder.task("small", (before, "R"), (x, "W"))
    builder.task("update", (x, "R"), (state, "RW"))
    plan, budget = StepPlan(builder.tasks, builder.owned, window=256), 180 * PAGE
    found = foresee(plan, budget)
    assert found.leaves == {state: {402}}
    seconds = []
    for returns in ([found.returns], [[(402, 402)]]):
        plan.foresee(found.leaves, returns)
        done = simulate(
            plan,
            workers=[("cpu", 1, 3)],
            nodes=[("ram", 1 << 40), ("sim:0", budget)],
            policy="reuse",
            duration=lambda task, kind: SECONDS,
            transfer=lambda source, target, nbytes: 250 * SECONDS if nbytes == state.spec.nbytes else 0.0,
            replays=replays,
            ahead=True,
        )
        seconds.append(done.seconds / SECONDS)
    assert seconds[0] < seconds[1] - 100
