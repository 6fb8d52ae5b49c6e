"""The share of one device, which is searched for all where a step has many tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest
from support.toy_steps import PAGE, toy_step, wide_step

from scheduler.core.step_plan import StepPlan
from scheduler.planning import AUTO, NONE, PlanningMachine, choose_plan
from scheduler.planning.device_share import order_of_all
from scheduler.planning.evaluation import PlanCandidate, evaluate
from scheduler.planning.forecast import Pace, Spill
from scheduler.planning.ordered_step import SUBMISSION, OrderedStep
from scheduler.planning.step_structure import structure_of


def pace(plan: StepPlan) -> Pace:
    """Computing that costs less than moving."""
    return Pace(dict.fromkeys(plan.tasks, 1e-3), read=PAGE / 1e-3, write=PAGE / 1e-3, duplex=True)


def short(plan: StepPlan, num_devices: int, part: float) -> dict[str, Any]:
    """Devices that hold a part of what the step needs together."""
    return {"memory": int(part * plan.needed_bytes()), "last": 1 << 40, "computes_on_last": False, "num_devices": num_devices, "pace": pace}


def searches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that is forecast from now on, whether it is a share; and shares are searched, however few tasks there are."""
    seen: list[bool] = []

    def watch(step: OrderedStep, *args: Any, **more: Any) -> list[PlanCandidate]:
        seen.append(step.is_share)
        return evaluate(step, *args, **more)

    for module in ("choice", "search"):
        monkeypatch.setattr(f"scheduler.planning.{module}.evaluate", watch)
    monkeypatch.setattr("scheduler.planning.choice.MOST_JUDGED", 0)
    return seen


def test_names_of_orders() -> None:
    """Those of all devices take D times as many minibatches through each layer."""
    assert [order_of_all(name, 4) for name in ("layers", "layers:2", "layers:1", "submission")] == ["layers", "layers:8", "layers:4", "submission"]


@pytest.mark.parametrize("minibatches", [2, 8])
def test_a_share_is_forecast_as_the_step_on_all_devices(minibatches: int) -> None:
    """In every order that both have: a device's own minibatches, and its part of the rest."""
    plan, num_devices = wide_step(minibatches=minibatches), 2
    repeated = structure_of(plan)
    given = short(plan, num_devices, 1 / 3)
    one = OrderedStep(plan, PlanningMachine(**given)).share()
    num_updates = sum(repeated.updates)
    assert num_updates > 0
    assert 2 * (len(one.plan.tasks) - num_updates) == len(plan.tasks) - num_updates
    whole = choose_plan(plan, AUTO, NONE, PlanningMachine(**given)).forecasts
    part = {each.order: each.forecast for each in evaluate(one, AUTO)} | {SUBMISSION: one.forecast(SUBMISSION)}
    assert {order_of_all(name, num_devices) for name in part} >= set(whole)
    for name, found in part.items():
        if (other := whole.get(order_of_all(name, num_devices))) is not None:
            assert found.seconds == pytest.approx(other.seconds, rel=0.1)
            assert found.total == pytest.approx(other.total, rel=0.1)


@pytest.mark.parametrize(("minibatches", "num_devices"), [(2, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("part", [1 / 6, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("step", [wide_step, partial(toy_step, layers=10)], ids=["wide", "toy"])
def test_all_devices_get_what_one_has_chosen(monkeypatch: pytest.MonkeyPatch, minibatches: int, num_devices: int, part: float, step: Any) -> None:
    """A plan of all tasks, about as fast by forecast as that of a search of the whole step; it can be asked for by its names.

    Shares of a dozen tasks do not stand for all: with three layers the toy step is 1.4 times as slow in one of these cases.
    """
    plan = step(minibatches=minibatches)
    given = short(plan, num_devices, part)
    whole = choose_plan(plan, AUTO, AUTO, PlanningMachine(**given))
    seen = searches(monkeypatch)
    found = choose_plan(plan, AUTO, AUTO, PlanningMachine(**given))
    assert True in seen
    assert found.seconds <= 1.05 * whole.seconds
    assert set(found.plan.partitions) == {-1, *range(num_devices)}
    again = choose_plan(plan, found.name, found.recompute, PlanningMachine(**given))
    assert (again.seconds, [task.name for task in again.plan.tasks]) == (found.seconds, [task.name for task in found.plan.tasks])
    assert sum(task.num_clones for task in found.plan.tasks) == len(found.plan.tasks) - len(plan.tasks)


def test_what_one_makes_again_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many layers of all minibatches; its groups are those of the whole step."""
    plan = wide_step(minibatches=8)
    whole = choose_plan(plan, AUTO, AUTO, PlanningMachine(**short(plan, 4, 1 / 3)))
    seen = searches(monkeypatch)
    found = choose_plan(plan, AUTO, AUTO, PlanningMachine(**short(plan, 4, 1 / 3)))
    assert seen.count(False) == 1
    assert found.recompute == found.recomputation.name == "layers.*.widen"
    assert [group.layers for group in found.recomputation.groups] == [group.layers for group in whole.recomputation.groups]
    assert sum(task.num_clones for task in found.plan.tasks) > 8


def test_what_fits_like_that_is_forecast_to_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all fits once something is made again, the figures are those of a search of the whole step."""
    plan = wide_step(minibatches=2)
    given = short(plan, 2, 0.96)
    whole = choose_plan(plan, AUTO, AUTO, PlanningMachine(**given))
    searches(monkeypatch)
    found = choose_plan(plan, AUTO, AUTO, PlanningMachine(**given))
    assert (found.recompute, found.name, found.moved_bytes) == (whole.recompute, whole.name, 0)
    assert 0 < found.seconds == pytest.approx(whole.seconds)


def test_where_a_share_does_not_stand_for_the_step_all_of_it_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches that do not divide, an order that is given, data that the tier below does not hold; nothing where it fits."""
    plan = wide_step(minibatches=4)
    seen = searches(monkeypatch)
    given = short(plan, 2, 1 / 3)

    def is_searched(order: str = AUTO, **changes: Any) -> bool:
        seen.clear()
        choose_plan(plan, order, AUTO, PlanningMachine(**{**given, **changes}))
        return seen.count(True) > 1

    assert is_searched()
    assert not is_searched("layers:2")
    assert not is_searched(num_devices=3)
    assert not is_searched(last=plan.needed_bytes() // 4)
    assert not is_searched(pace=lambda each: replace(pace(each), spill=Spill(plan.needed_bytes() // 4, 1e6, 1e6)))
    assert not choose_plan(plan, AUTO, AUTO, PlanningMachine(**{**given, "memory": 1 << 40})).forecasts
    assert choose_plan(plan, AUTO, AUTO, PlanningMachine(**given)).seconds < inf


def test_pinned_tasks_need_memory_as_well() -> None:
    """Of a step whose tasks are all pinned, each device has its part, so it does not fit where an unpinned one does not."""
    plan = toy_step(minibatches=4)
    pinned = StepPlan([replace(task, pin=0) for task in plan.tasks], plan.owned)
    for each in (plan, pinned):
        assert choose_plan(each, AUTO, NONE, PlanningMachine(**short(plan, 2, 1 / 3))).forecasts


def test_a_share_alone_takes_as_long_as_the_step_on_all_devices() -> None:
    """Where nothing waits for copies: a device executes its part of the updates, of which the share has all."""
    plan, num_devices = wide_step(minibatches=8), 4

    def slow_updates(each: StepPlan) -> Pace:
        return replace(pace(each), seconds={task: 5e-3 if task.name == "update" else 1e-3 for task in each.tasks})

    roomy = PlanningMachine(1 << 40, 1 << 40, False, num_devices, slow_updates)
    step = OrderedStep(plan, roomy)
    of_one = step.share().task_seconds
    assert of_one == pytest.approx(step.task_seconds, rel=0.1)
    assert of_one == pytest.approx(sum(slow_updates(plan).seconds.values()), rel=0.1)


def test_a_long_step_keeps_the_order_that_was_best_in_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of which few plans can be judged gets the same order as a short one, if that order is not among the likely ones."""
    plan = wide_step(10, 4)
    machine = PlanningMachine(**short(plan, 2, 0.7))
    chosen = choose_plan(plan, AUTO, AUTO, machine)
    monkeypatch.setattr("scheduler.planning.choice.JUDGED_TASKS", len(plan.tasks))
    long = choose_plan(plan, AUTO, AUTO, machine)
    assert (long.name, long.seconds) == ("layers:2", chosen.seconds)


@pytest.mark.parametrize("recompute", [AUTO, NONE])
def test_a_step_without_tasks_has_a_plan(recompute: str) -> None:
    """Nothing is divided by the number of tasks."""
    plan = StepPlan([], {})
    assert not choose_plan(plan, AUTO, recompute, PlanningMachine(1 << 20, 1 << 20, True)).plan.tasks


def test_a_step_without_values_to_recompute_says_so() -> None:
    """The remedy names no operation if there is none."""
    with pytest.raises(ValueError, match="none of its results can be recomputed, so use 'none'"):
        choose_plan(StepPlan([], {}), AUTO, "norm", PlanningMachine(1 << 20, 1 << 20, True))
