"""Candidate orders of a recorded step: always valid, and layer-major where the step repeats."""

from __future__ import annotations

from functools import partial
from time import process_time

from hypothesis import given
from hypothesis import strategies as st
from support.counted_calls import num_calls
from support.search import search
from support.toy_steps import PlanBuilder, toy_step

from scheduler.core.step_plan import StepPlan
from scheduler.planning.orders import candidates, named
from scheduler.planning.step_structure import structure_of


def check_topological(plan: StepPlan, order: list[int]) -> None:
    """Every position once, after all its predecessors; tasks of kind host stay in the order of submission."""
    assert sorted(order) == list(range(len(plan.tasks)))
    when = {position: at for at, position in enumerate(order)}
    assert all(when[before] < when[position] for position, waits in enumerate(plan.predecessors) for before in waits)
    assert [position for position in order if plan.tasks[position].kinds == ("host",)] == plan.turns


@search(150)
@given(st.data())
def test_every_candidate_of_any_graph_is_a_topological_order(data: st.DataObject) -> None:
    """Random tasks over persistent, input and temporary tiles: each candidate runs every task once after its predecessors, the same each time."""
    builder = PlanBuilder()
    tiles = [builder.tile(f"{kind} {at}", kind, pages=at + 1) for kind in ("persistent", "input", "temporary") for at in range(3)]
    modes = {"persistent": ("R", "W", "RW", "SCRATCH"), "input": ("R",), "temporary": ("R", "W", "RW", "SCRATCH")}
    for _ in range(data.draw(st.integers(0, 25))):
        chosen = data.draw(st.lists(st.sampled_from(tiles), max_size=4, unique=True))
        accesses = [(tile, data.draw(st.sampled_from(modes[tile.spec.kind]))) for tile in chosen]
        builder.label(data.draw(st.sampled_from(("forward", "update"))))
        builder.task(data.draw(st.sampled_from("abc")), *accesses, kind=data.draw(st.sampled_from(("cpu", "host"))))
    plan = builder.plan()
    found = candidates(plan)
    assert list(found)[:3] == ["submission", "eager-update", "layers"]
    for order in found.values():
        check_topological(plan, order)
    assert candidates(builder.plan()) == found


def test_tasks_of_kind_host_may_also_wait_for_each_other_by_their_data() -> None:
    """Such an edge counts once, so an update with another predecessor waits for that as well."""
    builder = PlanBuilder()
    first, second, state = (builder.tile(name, kind) for name, kind in (("x", "temporary"), ("z", "temporary"), ("state", "persistent")))
    builder.label("forward")
    builder.task("a", (first, "W"), kind="host")
    builder.task("c", (second, "W"))
    builder.label("update")
    builder.task("b", (first, "R"), (second, "R"), (state, "W"), kind="host")
    plan = builder.plan()
    for order in candidates(plan).values():
        check_topological(plan, order)


def users(plan: StepPlan, order: list[int], tile: str) -> list[str]:
    """Names of the tasks that touch a tile, in order."""
    return [plan.tasks[at].name for at in order if any(handle.spec.name == tile for handle, _ in plan.tasks[at].accesses)]


def tiles_of(plan: StepPlan, position: int) -> set[str]:
    """Names of what a task touches."""
    return {handle.spec.name for handle, _ in plan.tasks[position].accesses}


def test_layer_major_touches_each_weight_once_per_pass() -> None:
    """All minibatches read a weight in one run forward and one backward (the last layer's is the same run) and sum its gradient in one."""
    plan = toy_step()
    order = candidates(plan)["layers"]
    assert users(plan, order, "w2") == ["forward", "backward input"] * 4 + ["adam"]
    names = [plan.tasks[at].name for at in order]
    tiles = [{handle.spec.name for handle, _ in plan.tasks[at].accesses} for at in order]
    for weight, gradient in (("w0", "d0"), ("w1", "d1")):
        assert users(plan, order, weight) == ["forward"] * 4 + ["backward input"] * 4 + ["adam"]
        for name, tile in (("forward", weight), ("backward input", weight), ("backward weight", gradient)):
            run = [at for at in range(len(order)) if names[at] == name and tile in tiles[at]]
            assert run[-1] - run[0] == 3, f"{name} of {tile} is interrupted"
    assert [names.index("adam"), names[-1]] == [[at for at in range(len(order)) if "d2" in tiles[at]][-1], "adam"]


def test_groups_follow_one_another_and_the_turn_is_minibatch_major() -> None:
    """layers:2 finishes two minibatches before the next two begin; in a turn order the last layer runs forward and back per minibatch."""
    plan = toy_step(layers=8)
    found = structure_of(plan)
    assert found.num_minibatches == 4
    orders = candidates(plan)
    groups = [found.minibatch[at] // 2 for at in orders["layers:2"] if found.minibatch[at] >= 0]
    assert groups == sorted(groups)
    turn = orders["turn:1/8"]
    assert users(plan, turn, "w7") == ["forward", "backward input"] * 4 + ["adam"]
    assert users(plan, turn, "w0") == ["forward"] * 4 + ["backward input"] * 4 + ["adam"]


def test_an_order_that_is_asked_for_need_not_be_a_candidate() -> None:
    """A group of all minibatches or more is no group, a shallow step has every turn all the same, and one minibatch has no groups."""
    plan = toy_step(layers=2)
    found = structure_of(plan)
    orders = candidates(plan)
    assert named(plan, found, "layers:4") == named(plan, found, "layers:1000") == orders["layers"]
    three = named(plan, found, "layers:3")
    assert three is not None
    assert three not in orders.values()
    check_topological(plan, three)
    turns = [name for name in (f"turn:{part}/8" for part in range(1, 8)) if name not in orders]
    assert turns
    assert all(named(plan, found, name) in orders.values() for name in turns)
    for name in ("layers:0", "layers:", "turn:8/8", "turn:1/4", "foo"):
        assert named(plan, found, name) is None
    one = toy_step(minibatches=1)
    assert named(one, structure_of(one), "layers:2") == named(one, structure_of(one), "layers")


def test_forward_is_minibatch_major_up_to_the_loss() -> None:
    """Each minibatch goes forward through all layers and through the last one back alone; gradients are summed in one go."""
    plan = toy_step(layers=8)
    order = candidates(plan)["forward"]
    found = structure_of(plan)
    steps = [(found.minibatch[at], plan.tasks[at].name) for at in order if found.minibatch[at] >= 0]
    forward = [minibatch for minibatch, name in steps if name == "forward"]
    assert forward == sorted(forward)
    assert users(plan, order, "w7") == ["forward", "backward input"] * 4 + ["adam"]
    assert users(plan, order, "w0") == ["forward"] * 4 + ["backward input"] * 4 + ["adam"]
    sums = [at for at, position in enumerate(order) if plan.tasks[position].name == "backward weight" and "d0" in tiles_of(plan, position)]
    assert sums[-1] - sums[0] == 3, "the sum of a gradient is interrupted"


def test_eager_update_moves_only_updates_and_as_early_as_they_can() -> None:
    """What is no update keeps its place among the others; each update follows its last predecessor, other updates aside."""
    plan = toy_step()
    order = candidates(plan)["eager-update"]
    found = structure_of(plan)
    assert {plan.tasks[at].name for at, update in enumerate(found.updates) if update} == {"squares", "adam"}
    rest = [at for at in order if not found.updates[at]]
    assert rest == sorted(rest)
    when = {position: at for at, position in enumerate(order)}
    for position, update in enumerate(found.updates):
        if update:
            latest = max(when[before] for before in plan.predecessors[position])
            assert all(found.updates[at] for at in order[latest + 1 : when[position]])


def test_recomputed_layers_run_in_the_backward_pass() -> None:
    """A forward task that runs again for the backward pass is not mistaken for a minibatch, nor done early."""
    plan = toy_step(recompute=True)
    assert structure_of(plan).num_minibatches == 4
    order = candidates(plan)["layers"]
    last_loss = max(at for at, position in enumerate(order) if plan.tasks[position].name == "loss")
    for weight in ("w0", "w1"):
        assert users(plan, order[:last_loss], weight) == ["forward"] * 4
        assert users(plan, order[last_loss:], weight).count("forward") == 4


def test_a_step_of_one_minibatch_is_left_in_order() -> None:
    """Without repetition nothing but updates moves."""
    plan = toy_step(minibatches=1)
    orders = candidates(plan)
    assert list(orders) == ["submission", "eager-update", "layers"]
    assert orders["layers"] == orders["eager-update"]


def test_twenty_thousand_tasks_take_little_time() -> None:
    """The work on a task does not grow with the step, and all candidates of a long step take little more than to write the step down."""
    begin = process_time()
    plan, built = toy_step(layers=100, minibatches=65), process_time()
    assert len(candidates(plan)) > 10
    assert process_time() - built < 20 * (built - begin)
    assert len(plan.tasks) > 19_500
    shorter = [toy_step(layers=100, minibatches=minibatches) for minibatches in (4, 16)]
    few, many = (num_calls(partial(candidates, each)) / len(each.tasks) for each in shorter)
    assert many < 1.5 * few
