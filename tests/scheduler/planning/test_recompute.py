"""Values that are made again: which can be, from what, and what a planner chooses. Random graphs are in test_no_hang."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from support.counted_calls import num_calls
from support.toy_steps import PAGE, PlanBuilder, toy_step, wide_step

from scheduler.core.codelet import Codelet, Tail
from scheduler.core.records import HandleRecord
from scheduler.core.step_plan import RecordedTask, StepPlan
from scheduler.planning import AUTO, BLOCK, NONE, PlanningMachine, as_asked, choose_plan, last_tier_bytes, most_again
from scheduler.planning.choice import NEAR, ORDERS, OTHERS
from scheduler.planning.evaluation import MARGIN
from scheduler.planning.forecast import Pace
from scheduler.planning.ordered_step import OrderedStep
from scheduler.planning.recompute import Recomputation, Values
from scheduler.planning.value_groups import all_groups, groups_of


def tasks_of(plan: StepPlan) -> list[str]:
    """Each task as "name: what it reads > what it writes"."""

    def names(task: RecordedTask, *, read: bool) -> str:
        return " ".join(handle.spec.name for handle, mode in task.accesses if (mode == "R") is read)

    return [f"{task.name}: {names(task, read=True)} > {names(task, read=False)}" for task in plan.tasks]


def again(builder: PlanBuilder, *handles: HandleRecord) -> StepPlan:
    """The step that makes these again."""
    plan = builder.plan()
    return Recomputation(handles=set(handles)).apply(Values(plan))


def far(builder: PlanBuilder, x: HandleRecord, count: int = 3) -> HandleRecord:
    """A chain of tasks after x, which makes what comes later late."""
    for _ in range(count):
        before, x = x, builder.tile("far")
        builder.task("far", (before, "R"), (x, "W"))
    return x


def test_a_value_is_made_again_where_it_is_wanted_and_the_first_one_dies_early() -> None:
    """By a clone of its writer before its late reader; what it reads is the same."""
    builder = PlanBuilder()
    w, a, b, c, out = builder.tile("w", "persistent"), builder.tile("a"), builder.tile("b"), builder.tile("c"), builder.tile("out")
    builder.task("make", (w, "R"), (a, "W"))
    builder.task("double", (a, "R"), (b, "W"))
    builder.task("use", (b, "R"), (c, "W"))
    last = far(builder, c)
    builder.task("join", (a, "R"), (b, "R"), (last, "R"), (out, "W"))
    found = again(builder, b)
    assert tasks_of(found)[-2:] == ["double: a > b", "join: a b far > out"]
    assert found.uses[b].positions == [1, 2]
    (late,) = {handle for handle, mode in found.tasks[-1].accesses if handle.spec.name == "b" and mode == "R"}
    assert late is not b
    assert found.owned[late] is False


def test_what_a_clone_reads_is_made_again_too() -> None:
    """A chain: what is not kept, and what is dead by then; each once, though two want it."""
    builder = PlanBuilder()
    w, a, b, c, d = builder.tile("w", "persistent"), builder.tile("a"), builder.tile("b"), builder.tile("c"), builder.tile("d")
    builder.task("one", (w, "R"), (a, "W"))
    builder.task("two", (a, "R"), (b, "W"))
    builder.task("three", (b, "R"), (c, "W"))
    builder.task("four", (b, "R"), (d, "W"))
    last = far(builder, d)
    builder.task("join", (c, "R"), (d, "R"), (last, "R"), (builder.tile("out"), "W"))
    found = again(builder, c, d)
    assert tasks_of(found)[-5:] == ["one: w > a", "two: a > b", "three: b > c", "four: b > d", "join: c d far > out"]


def test_sums_are_made_again_as_a_whole() -> None:
    """The task that begins a sum and those that add to it, with what they make beside it."""
    builder = PlanBuilder()
    w, total, side = builder.tile("w", "persistent"), builder.tile("total"), builder.tile("side")
    builder.task("begin", (w, "R"), (total, "W"))
    builder.task("add", (w, "R"), (total, "RW"), (side, "W"))
    last = far(builder, total)
    builder.task("join", (total, "R"), (last, "R"), (builder.tile("out"), "W"))
    found = again(builder, total)
    assert tasks_of(found)[-3:] == ["begin: w > total", "add: w > total side", "join: total far > out"]
    assert tasks_of(again(builder, side)) == tasks_of(builder.plan())  # nobody reads it


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_work_on_a_value_does_not_grow_with_its_production(is_kept: bool) -> None:
    """Results of many tasks that add to one sum are one production, worked out once, also if it must not be cloned. The gradients of all experts of
    a layer are such results."""

    def work(num_tasks: int) -> float:
        builder = PlanBuilder()
        w, total = builder.tile("w", "input" if is_kept else "persistent"), builder.tile("total")
        sides = [builder.tile("side") for _ in range(num_tasks)]
        for side in sides:
            builder.task("add", (w, "R"), (total, "W" if side is sides[0] else "RW"), (side, "W"))
        for side in sides:
            builder.task("use", (side, "R"), (total, "R"), (builder.tile("end"), "W"))
        values = Values(builder.plan())
        count = num_calls(lambda: [values.of(side) for side in sides])
        assert {values.of(side) is None for side in sides} == {is_kept}
        return count / num_tasks

    assert work(64) < 1.5 * work(16)


def test_nothing_is_cloned_that_could_differ_or_be_felt() -> None:
    """Outputs, data that outlives the step, updates in place, sums that are read unfinished, waits for others, copies of the program's inputs, and
    what reads data that is overwritten in between or comes later."""
    builder = PlanBuilder()
    w, given, copy = builder.tile("w", "persistent"), builder.tile("given", "input"), builder.tile("copy")
    out, updated, partial, awaited, stale, pair = (builder.tile(name) for name in ("out", "updated", "partial", "awaited", "stale", "pair"))
    second, late = builder.tile("second"), builder.tile("late")
    builder.owned[out] = True
    builder.task("copy", (given, "R"), (copy, "W"))
    builder.task("make", (w, "R"), (out, "W"))
    builder.task("make", (w, "R"), (updated, "W"))
    builder.task("peek", (updated, "R"), (builder.tile("seen"), "W"))
    builder.task("update", (updated, "RW"))
    builder.task("begin", (w, "R"), (partial, "W"))
    builder.task("begin", (w, "R"), (builder.tile("x"), "W"), (partial, "RW"), (w, "RW"))
    builder.task("wait", (w, "R"), (awaited, "W"))
    builder.tasks[-1].kinds = ("host",)
    builder.task("make", (w, "R"), (stale, "W"))
    builder.task("make", (copy, "R"), (pair, "W"), (second, "W"))
    last = far(builder, stale)
    builder.task("overwrite", (last, "R"), (w, "W"))
    handles = [copy, out, updated, partial, awaited, stale, pair]
    for handle in handles:
        builder.task("join", (handle, "R"), (builder.tile("end"), "W"))
    builder.task("later", (last, "R"), (late, "W"))
    builder.task("add", (late, "R"), (second, "RW"))
    values = Values(builder.plan())
    found = {handle.name for handle in handles if (value := values.of(handle)) is not None and value.wanted}
    assert found == set()


def test_the_tail_of_a_task_is_enough() -> None:
    """What makes one result from the other, with its own constants; the other is kept."""
    builder = PlanBuilder()
    x, w, pre, y = builder.tile("x", "persistent"), builder.tile("w", "persistent"), builder.tile("pre"), builder.tile("y")
    activation = Codelet("activation", cpu=print)
    both = Codelet("both", cpu=print, tail=Tail(activation, reads=(-2,), writes=(-1,), constants=("kind",)))
    builder.task("both", (x, "R"), (w, "R"), (pre, "W"), (y, "W"))
    builder.tasks[-1] = replace(builder.tasks[-1], codelet=both, constants={"kind": "gelu", "trans": True})
    last = far(builder, y)
    builder.task("join", (y, "R"), (pre, "R"), (last, "R"), (builder.tile("out"), "W"))
    clone = again(builder, y).tasks[-2]
    assert (clone.name, clone.codelet, clone.constants) == ("activation", activation, {"kind": "gelu"})
    assert [(handle.spec.name, mode) for handle, mode in clone.accesses] == [("pre", "R"), ("y", "W")]
    assert tasks_of(again(builder, y, pre))[-2:] == ["both: x w > pre y", "join: y pre far > out"]


def test_blocks_keep_what_others_read() -> None:
    """Also what they read themselves, and what is wanted within the block."""
    builder = PlanBuilder()
    w = builder.tile("w", "persistent")
    x = [builder.tile("x0")]
    inner = []
    builder.task("embed", (w, "R"), (x[0], "W"))
    for block in range(2):
        inner.append(builder.tile(f"inner{block}"))
        x.append(builder.tile(f"x{block + 1}"))
        builder.task("inner", (x[-2], "R"), (inner[-1], "W"))
        builder.task("outer", (inner[-1], "R"), (x[-2], "R"), (x[-1], "W"))
        for task in builder.tasks[-2:]:
            task.label = task.label._replace(block=block)
    dx = far(builder, x[-1], 6)
    for block in (1, 0):
        before, dx = dx, builder.tile("dx")
        builder.task("backward", (x[block], "R"), (inner[block], "R"), (before, "R"), (dx, "W"))
    assert tasks_of(as_asked(builder.plan(), BLOCK))[-4:] == [
        "inner: x1 > inner1",
        "backward: x1 inner1 far > dx",
        "inner: x0 > inner0",
        "backward: x0 inner0 dx > dx",
    ]


def test_names_of_operations() -> None:
    """With a share of their layers, the first ones; unknown ones are named with those that there are."""
    plan = toy_step(layers=8, minibatches=2)
    assert as_asked(plan, NONE) is plan
    (group,) = (group for group in all_groups(Values(plan)) if group.op == "forward")
    assert [len(layer) for layer in group.layers] == [2] * len(group.layers)
    clones = len(as_asked(plan, "forward").tasks) - len(plan.tasks)
    half = len(as_asked(plan, " forward:0.5").tasks) - len(plan.tasks)
    assert clones > half > 0
    for share in ("1.5", "0", "-1", "nan", "half"):
        with pytest.raises(ValueError, match=f"a share of an operation's layers must be above 0 and at most 1, got '{share}'; for example 0.5"):
            as_asked(plan, f"forward:{share}")
    with pytest.raises(ValueError, match=r"no results of 'glue' to recompute; name some of .*forward"):
        as_asked(plan, "forward,glue")


def pace(plan: StepPlan) -> Pace:
    """Computing that costs less than moving."""
    return Pace(dict.fromkeys(plan.tasks, 1e-3), read=PAGE / 1e-3, write=PAGE / 1e-3, duplex=True)


def test_what_can_only_be_made_from_its_like_is_kept() -> None:
    """The residual stream, whose every sum needs the one before."""
    groups = groups_of(Values(wide_step()), pace)
    assert [group.name for group in groups] == ["layers.*.widen"]


@pytest.mark.parametrize("order", [AUTO, "submission"])
def test_a_planner_makes_again_what_is_dear_to_move(order: str) -> None:
    """Faster than without by its own forecast; a step that fits is left alone, and one that only fits like that is not refused."""
    plan = wide_step()
    roomy = {"memory": 1 << 40, "last": 1 << 40, "computes_on_last": False, "pace": pace}
    assert choose_plan(plan, order, AUTO, PlanningMachine(**roomy)).plan.tasks == plan.tasks
    short = {**roomy, "memory": plan.needed_bytes() // 3}
    kept, chosen = (choose_plan(plan, order, each, PlanningMachine(**short)) for each in (NONE, AUTO))
    assert chosen.recompute.startswith("layers.*.widen")
    assert chosen.seconds < 0.9 * kept.seconds
    assert chosen.recomputation.seconds_without == kept.seconds
    assert choose_plan(plan, order, chosen.recompute, PlanningMachine(**short)).seconds == chosen.seconds
    least = min(last_tier_bytes(each, computes=True) for each in most_again(plan))
    fitting = choose_plan(plan, order, AUTO, PlanningMachine(memory=least, last=least, computes_on_last=True, pace=pace))
    assert last_tier_bytes(fitting.plan, computes=True) <= least < last_tier_bytes(plan, computes=True)
    assert fitting.recomputation.seconds_without == inf
    assert [group.seconds for group in fitting.recomputation.groups] == [group.seconds for group in chosen.recomputation.groups]  # not bytes


def test_a_mix_with_which_everything_fits_moves_nothing() -> None:
    """Its forecast is that of its own tasks, not of the step that it replaces."""
    plan = wide_step()
    found = choose_plan(plan, AUTO, AUTO, PlanningMachine(memory=int(0.6 * plan.needed_bytes()), last=1 << 40, computes_on_last=False, pace=pace))
    assert found.recompute.startswith("layers.*.widen")
    assert found.plan.needed_bytes() <= int(0.6 * plan.needed_bytes())
    assert (found.name, found.moved_bytes, found.seconds) == ("submission", 0, pytest.approx(1e-3 * len(found.plan.tasks)))
    assert found.seconds < (found.recomputation.seconds_without or 0)


def test_clones_are_marked_in_any_order() -> None:
    """What makes a value again says so, and nothing else does."""
    plan = wide_step()
    assert not any(task.num_clones for task in plan.tasks)
    found = choose_plan(
        plan, "layers", "widen", PlanningMachine(memory=plan.needed_bytes() // 3, last=1 << 40, computes_on_last=False, pace=pace)
    ).plan
    clones = [task for task in found.tasks if task.num_clones]
    assert {task.name for task in clones} == {"widen"}
    assert len(clones) == len(found.tasks) - len(plan.tasks) > 0


def test_moving_is_preferred_where_links_are_fast() -> None:
    """Clones are not worth their seconds there."""
    plan = wide_step()
    fast = {"memory": plan.needed_bytes() // 3, "last": 1 << 40, "computes_on_last": False}
    found = choose_plan(plan, AUTO, AUTO, PlanningMachine(**fast, pace=lambda plan: replace(pace(plan), read=1e15, write=1e15)))
    assert (found.recompute, len(found.plan.tasks)) == (NONE, len(plan.tasks))


@pytest.mark.parametrize(("num_devices", "again"), [(1, "layers.*.widen:0.67"), (2, NONE)])
def test_what_copies_may_cost_beside_a_forecast_counts_on_one_device(num_devices: int, again: str) -> None:
    """Where tasks alone take as long as the step, and a recomputation would hardly cost anything."""
    plan = wide_step()

    def cheap(each: StepPlan) -> Pace:
        seconds = {task: (1e-5 if task.name == "widen" else 1e-3) / num_devices for task in each.tasks}
        return Pace(seconds, read=PAGE / 6e-5, write=PAGE / 6e-5, duplex=True)

    short: dict[str, Any] = {"memory": int(0.7 * plan.needed_bytes()), "last": 1 << 40, "computes_on_last": False, "pace": cheap}
    kept = choose_plan(plan, AUTO, NONE, PlanningMachine(**short, num_devices=num_devices))
    assert sum(cheap(plan).seconds.values()) > MARGIN * kept.seconds > 0
    assert choose_plan(plan, AUTO, AUTO, PlanningMachine(**short, num_devices=num_devices)).recompute == again


def test_a_judge_has_the_last_word() -> None:
    """Among steps that are forecast to be about as fast; one that refuses all of them, or a step that fits, leaves the choice to forecasts."""
    plan = wide_step()
    short: dict[str, Any] = {"memory": plan.needed_bytes() // 2, "last": 1 << 40, "computes_on_last": False, "pace": pace}
    plain = choose_plan(plan, AUTO, AUTO, PlanningMachine(**short))
    seen: list[StepPlan] = []

    def likes_the_last(planned: StepPlan) -> float:
        seen.append(planned)
        return 100.0 - len(seen)

    found = choose_plan(plan, AUTO, AUTO, PlanningMachine(**short, judge=likes_the_last))
    assert 2 <= len(seen) <= ORDERS + 2 + OTHERS
    assert tasks_of(seen[0]) == tasks_of(plain.plan)
    assert (found.plan, found.judged_seconds) == (seen[-1], 100.0 - len(seen))
    assert found.seconds <= NEAR * plain.seconds
    again = choose_plan(plan, found.name, found.recompute, PlanningMachine(**short))  # as a run asks for what was chosen
    assert tasks_of(again.plan) == tasks_of(found.plan)
    refused = choose_plan(plan, AUTO, AUTO, PlanningMachine(**short, judge=lambda planned: inf))
    assert (refused.name, refused.recompute, refused.judged_seconds) == (plain.name, plain.recompute, 0)
    given = choose_plan(plan, plain.name, NONE, PlanningMachine(**short, judge=pytest.fail))
    assert (given.name, given.recompute) == (plain.name, NONE)
    assert not choose_plan(plan, AUTO, AUTO, PlanningMachine(**{**short, "memory": 1 << 40}, judge=pytest.fail)).forecasts


@pytest.mark.parametrize("gain", [0.005, 0.02])
def test_of_orders_judged_equal_the_one_with_fewest_bytes_is_chosen(gain: float) -> None:
    """An order that moves more bytes must be faster by more than 1 % in virtual time, which leaves out what copies cost the processors."""
    plan = toy_step()
    short: dict[str, Any] = {"memory": int(plan.needed_bytes() / 1.5), "last": 1 << 40, "computes_on_last": False, "pace": pace}
    judged: list[str] = []

    def likes_more_bytes(planned: StepPlan) -> float:
        tasks = tasks_of(planned)
        name = next(name for name, order in orders.items() if tasks == order)
        judged.append(name)
        return 1.0 - gain * (name == most)

    step = OrderedStep(plan, PlanningMachine(**short))
    nbytes = {name: step.forecast(name).total for name in step.names()}
    orders = {name: tasks_of(step.planned(name)) for name in nbytes}
    most = ""
    choose_plan(plan, AUTO, NONE, PlanningMachine(**short, judge=likes_more_bytes))
    least, most = min(judged, key=nbytes.__getitem__), max(judged, key=nbytes.__getitem__)
    assert nbytes[least] < nbytes[most]
    chosen = choose_plan(plan, AUTO, NONE, PlanningMachine(**short, judge=likes_more_bytes))
    assert chosen.name == (least if gain < 0.01 else most)


def test_each_plan_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a step of which few plans can be judged, whose best order is a likely one as well."""
    plan, seen = toy_step(), list[list[str]]()
    monkeypatch.setattr("scheduler.planning.choice.JUDGED_TASKS", 2 * len(plan.tasks))

    def judge(planned: StepPlan) -> float:
        seen.append([f"{task!r}" for task in planned.tasks])
        return float(len(seen))

    short: dict[str, Any] = {"memory": int(plan.needed_bytes() / 1.5), "last": 1 << 40, "computes_on_last": False, "pace": pace}
    assert choose_plan(plan, AUTO, AUTO, PlanningMachine(**short, judge=judge)).name == "turn:1/8"
    assert len(seen) == 2
    assert seen[0] != seen[1]
