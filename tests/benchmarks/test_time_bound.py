"""The lower bound on seconds (`benchmarks/bounds/time_bound.py`): worked out by hand, beside the bound on bytes, and below steps in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from support.access_traces import UNIT, traces
from support.bounds import AccessTrace, byte_bound, time_bound
from support.drawn_steps import STEPS, DrawnStep
from support.search import search
from support.toy_steps import PlanBuilder

from scheduler.core.codelet import Codelet, Tail
from scheduler.core.memory.extents import PAGE
from scheduler.core.records import Task
from scheduler.core.step_plan import RecordedTask, StepPlan
from scheduler.planning import AUTO, NONE, Pace, PlanningMachine, Values, candidates, choose_plan
from scheduler.planning.recompute import Recomputation
from scheduler.simulation import simulate
from scheduler.testing import FakeDriver

pytest.importorskip("scipy.optimize")

BOUNDLESS = 1 << 50

CHAIN: list[list[tuple[int, str]]] = [[(0, "W")], [(1, "W")], [(1, "R")], [(0, "R")]]
"""A value that is away while another one is made and read."""
FAN: list[list[tuple[int, str]]] = [[(0, "W"), (1, "W")], [(2, "W")], [(2, "R")], [(0, "R"), (1, "R")]]
"""Two values that one task makes, away while a larger one is made and read."""


Remade = time_bound.Remade


def step_of(accesses: list[list[tuple[int, str]]], sizes: list[int], copy: float, remade: list[Remade | None], productions: list[float]) -> Any:
    """A trace of temporaries of so many units, and its cost: 4 seconds of tasks, copies of so many seconds a unit in each direction."""
    trace = AccessTrace(accesses, [units * UNIT for units in sizes], [False] * len(sizes), [0] * len(accesses))
    seconds = [copy * units for units in sizes]
    return trace, time_bound.StepCost(4.0, seconds, seconds, remade, productions)


MADE, NOT = Remade(3, (0,)), None
CASES: list[Any] = [
    pytest.param(CHAIN, [1, 1], 2, 100.0, [MADE, NOT], [2.0], 4, id="everything fits"),
    pytest.param(CHAIN, [1, 1], 1, 3.0, [MADE, NOT], [2.0], 4, id="copies are hidden behind tasks"),
    pytest.param(CHAIN, [1, 1], 1, 10.0, [NOT, NOT], [2.0], 10, id="what cannot be made again moves"),
    pytest.param(CHAIN, [1, 1], 1, 10.0, [Remade(2, (0,)), NOT], [2.0], 10, id="nor is it made again elsewhere"),
    pytest.param(CHAIN, [1, 1], 1, 10.0, [MADE, NOT], [2.0], 5, id="half is made again: 4 + 2 r = 10 (1 - r)"),
    pytest.param(CHAIN, [1, 1], 1, 1e6, [MADE, NOT], [2.0], 6, id="all is made again, which is cheaper than any copy"),
    pytest.param(CHAIN, [1, 1], 1, 10.0, [MADE, NOT], [60.0], 9.142857, id="a seventieth is: 4 + 60 r = 10 (1 - r)"),
    pytest.param(FAN, [1, 1, 2], 2, 10.0, [MADE, MADE, NOT], [4.0], 20 / 3, id="one run makes both: 4 + 4 r = 20 (1 - r)"),
    pytest.param(FAN, [1, 1, 2], 2, 1e6, [Remade(3, (0,)), Remade(3, (1,)), NOT], [1.0, 2.0], 7, id="two runs, if each makes one"),
    pytest.param(FAN, [1, 1, 2], 2, 1e6, [Remade(3, (0, 1)), Remade(3, (1,)), NOT], [1.0, 2.0], 6, id="the tail is not needed beside the whole"),
    pytest.param(FAN, [1, 1, 2], 3, 1e6, [Remade(3, (0, 1)), Remade(3, (1,)), NOT], [1.0, 2.0], 5, id="with room for one, the tail makes the other"),
]


@pytest.mark.parametrize(("accesses", "sizes", "units", "copy", "remade", "productions", "seconds"), CASES)
def test_known_bounds(accesses: Any, sizes: Any, units: int, copy: float, remade: Any, productions: Any, seconds: float) -> None:
    """Seconds that are worked out by hand."""
    trace, cost = step_of(accesses, sizes, copy, remade, productions)
    assert time_bound.least_seconds(trace, units * UNIT, cost) == pytest.approx(seconds, rel=1e-4)


def test_directions_that_share_a_link_add_up() -> None:
    """4 + 2 r = 2 x 10 (1 - r)."""
    trace, cost = step_of(CHAIN, [1, 1], 10.0, [MADE, NOT], [2.0])
    assert time_bound.least_seconds(trace, UNIT, replace(cost, duplex=False)) == pytest.approx(60 / 11, rel=1e-5)


def test_a_position_beyond_the_memory_is_refused() -> None:
    """As by the bound on bytes; and a step that costs nothing takes no time."""
    trace, cost = step_of(CHAIN, [1, 1], 0.0, [NOT, NOT], [])
    with pytest.raises(ValueError, match=r"position 0 alone needs 1,048,576 B"):
        time_bound.least_seconds(trace, UNIT - 1, cost)
    assert time_bound.least_seconds(trace, UNIT, replace(cost, tasks=0.0)) == 0


@search(100)
@given(traces(), st.integers(1, 4))
def test_it_agrees_with_the_bound_on_bytes(trace: AccessTrace, units: int) -> None:
    """Where tasks take no time and nothing is made again: the same on a shared link; on two links at least half of it, and in one direction no more
    than what the least bytes of both come to there."""
    capacity = units * UNIT
    assume(max(trace.needed()) <= capacity)
    bound, sizes, nothing = byte_bound.lower_bound(trace, capacity), [float(size) for size in trace.sizes], [0.0] * len(trace.sizes)
    cost = time_bound.StepCost(0.0, sizes, sizes, [None] * len(sizes), [])
    near = {"rel": 1e-5, "abs": 1.0}
    assert time_bound.least_seconds(trace, capacity, replace(cost, duplex=False)) == pytest.approx(bound.total, **near)
    assert bound.total / 2 - 1 <= time_bound.least_seconds(trace, capacity, cost) <= max(bound.bytes_in, bound.bytes_out) * (1 + 1e-5) + 1
    assert time_bound.least_seconds(trace, capacity, replace(cost, store=nothing)) <= bound.bytes_in * (1 + 1e-5) + 1
    assert time_bound.least_seconds(trace, capacity, replace(cost, load=nothing)) <= bound.bytes_out * (1 + 1e-5) + 1


def timed(plan: StepPlan, speed: float) -> time_bound.TimedStep:
    """A step with a second a page for copies in each direction, and so many for each page that a task touches."""
    return time_bound.TimedStep(plan, lambda planned: {task: seconds_of(task, speed) for task in planned.tasks}, pages_of, pages_of)


def pages_of(nbytes: int) -> float:
    """Bytes in pages."""
    return nbytes / PAGE


def seconds_of(task: RecordedTask | Task, speed: float) -> float:
    """Seconds of a task, which are the same of its clones."""
    return speed * sum(pages_of(handle.spec.nbytes) for handle, _ in task.accesses)


@given(
    numbers=STEPS,
    again=st.integers(0, (1 << 30) - 1),
    extra=st.sampled_from((0, 1, 2, 4)),
    speed=st.sampled_from((0.01, 0.1, 1.0)),
    order=st.sampled_from((AUTO, AUTO, "submission", "eager-update", "layers")),
)
@search(400, suppress_health_check=list(HealthCheck))
def test_no_planned_step_is_faster(numbers: Any, again: int, extra: int, speed: float, order: str) -> None:
    """Random steps with random values made again, in virtual time: the slowest of four replays takes at least the bound of their order. The first two
    do not count, which find all data in host memory; of the others some leave to the next what they would have to copy."""
    sizes, num_inputs, _, adds = numbers
    driver = FakeDriver([64], [("cpu", 0, 1)], "prio")
    drawn = DrawnStep(driver)
    drawn.begin(sizes, num_inputs, 0, 0)
    for add in adds:
        drawn.add(*add)
    plan = driver.record(drawn.tasks, drawn.owned, ("cpu", "sim")).plan
    made_again = Recomputation(handles={handle for at, handle in enumerate(drawn.owned) if again >> at & 1 and handle in plan.uses}).apply(
        Values(plan)
    )
    memory = made_again.minimum_bytes(is_last=False, computes=True) + extra * PAGE

    def pace(planned: StepPlan) -> Pace:
        return Pace({task: seconds_of(task, speed) for task in planned.tasks}, PAGE, PAGE, duplex=True)

    chosen = choose_plan(made_again, order, NONE, PlanningMachine(memory=memory, last=BOUNDLESS, computes_on_last=False, pace=pace))
    positions = time_bound.order_in(plan, chosen)
    assert sorted(positions) == list(range(len(plan.tasks)))
    bound = timed(plan, speed).least_seconds(positions, memory)
    taken = [
        simulate(
            chosen.plan,
            workers=[("sim", 1, 1)],
            nodes=[("ram", BOUNDLESS), ("gpu:0", memory)],
            policy="prio",
            duration=lambda task, kind: seconds_of(task, speed) if task.step is not None else 0.0,
            transfer=lambda source, target, nbytes: pages_of(nbytes),
            replays=1 + number,
        ).seconds
        for number in range(6)
    ]
    assert bound <= 1.0001 * max(taken[2:])
    assert bound <= 1.0001 * timed(plan, speed).least_seconds(positions, memory, again=False)


def pair_step(*, is_away: bool = True) -> tuple[PlanBuilder, Any, Any]:
    """A task that makes two values, of which its tail makes one from the other; both are wanted after a chain, which reads that other unless it is
    away."""
    builder = PlanBuilder()
    w, pre, y = builder.tile("w", "persistent"), builder.tile("pre"), builder.tile("y")
    both = Codelet("both", cpu=print, tail=Tail(Codelet("activation", cpu=print), reads=(-2,), writes=(-1,), constants=()))
    builder.task("both", (w, "R"), (pre, "W"), (y, "W"))
    builder.tasks[-1] = replace(builder.tasks[-1], codelet=both)
    x = y
    for _ in range(3):
        before, x = x, builder.tile("far", pages=6)
        builder.task("far", (before, "R"), (x, "W"), *([] if is_away else [(pre, "R")]))
    builder.task("join", (y, "R"), (pre, "R"), (x, "R"), (builder.tile("out"), "W"))
    return builder, pre, y


@pytest.mark.parametrize(
    ("is_away", "pages", "again"),
    [
        pytest.param(False, 18, 0, id="all stays: 14 pages that are touched, 2 of y and 2 of w"),
        pytest.param(False, 16, 4, id="y from pre: a tail that touches 4 pages"),
        pytest.param(True, 18, 0, id="all stays: 12 pages that are touched, 2 of y, of pre and of w"),
        pytest.param(True, 16, 3, id="half of both from w: half of a task that touches 6 pages"),
        pytest.param(True, 14, 6, id="both from w"),
    ],
)
def test_what_is_made_again_costs_the_seconds_of_its_production(is_away: bool, pages: int, again: int) -> None:
    """Of the tail where that is enough; copies are dear here."""
    plan = pair_step(is_away=is_away)[0].plan()
    order, step = range(len(plan.tasks)), timed(plan, 1e-4)
    assert step.least_seconds(order, pages * PAGE) - step.tasks == pytest.approx(again * 1e-4, rel=0.02, abs=1e-9)
    assert (step.least_seconds(order, pages * PAGE, again=False) > 1) == (again > 0)


def test_the_order_of_a_planned_step_leaves_clones_out() -> None:
    """Every candidate of a step that makes values again is an order of the step that makes none."""
    builder, pre, y = pair_step()
    plan = builder.plan()
    again = Recomputation(handles={pre, y}).apply(Values(plan))
    assert len(again.tasks) == 1 + len(plan.tasks)
    for name in candidates(again):
        chosen = choose_plan(again, name, NONE, PlanningMachine(memory=14 * PAGE, last=BOUNDLESS, computes_on_last=False))
        assert time_bound.order_in(plan, chosen) == list(range(len(plan.tasks)))
