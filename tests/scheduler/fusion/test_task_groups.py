"""Which tasks run as one: what leads to one task alone, as long as every worker keeps something to do; all edges are kept."""

from __future__ import annotations

import random

import pytest
from support.late_gpu import COUNT, FILL, MIX, Numbers

from scheduler import Codelet, Handle, R, Runtime, W
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.core.records import DataClass, HandleRecord
from scheduler.core.step_plan import StepPlan
from scheduler.fusion import task_groups
from scheduler.fusion.fused_tasks import PlannedLaunch, ScratchView, join
from scheduler.fusion.task_groups import grouped

PAGE = 8 * COUNT


@pytest.fixture(autouse=True)
def no_small_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of these tests are pages, and stand for much."""
    monkeypatch.setattr(task_groups, "FORK_BYTES", 0)


class Graph:
    """Tasks that make one piece of data each out of some others."""

    def __init__(self) -> None:
        self.runtime, self.made = CapturingRuntime(), list[Handle]()
        self._recording = self.runtime.record()
        self._recording.__enter__()

    def task(self, *before: int, nbytes: int = PAGE) -> int:
        """A task that reads what these have made; its number."""
        out = self.runtime.handle(nbytes, Numbers(nbytes // 8))
        if before:
            self.runtime.submit(FILL, [(out, W), *((self.made[each], R) for each in before)], {})
        else:
            self.runtime.submit(FILL, [(out, W)], {})
        self.made.append(out)
        return len(self.made) - 1

    def plan(self) -> StepPlan:
        """The captured step, which leaves nothing behind."""
        self.made.clear()
        self._recording.__exit__(None, None, None)
        return self.runtime.plan


def layer(graph: Graph, norm: int, num_heads: int) -> int:
    """A block of a transformer behind its norm, cut into tiles of heads; the norm behind it."""
    queries, keys, values = ([graph.task(norm) for _ in range(num_heads)] for _ in range(3))
    kept = [graph.task(*pair) for pair in zip(keys, values, strict=True)]
    seen = [graph.task(*pair) for pair in zip(queries, kept, strict=True)]
    total = graph.task(*(graph.task(each) for each in seen))
    return graph.task(total, norm)


def tasks_of(plan: StepPlan, num_workers: int) -> list[list[int]]:
    """Tasks of all groups."""
    return [list(group.tasks) for group in grouped(plan, num_workers)]


def test_blocks_of_a_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group for each tile of heads where there are as many as workers, and one for what is between blocks, unless that is made again."""
    graph = Graph()
    norm = graph.task(graph.task())
    for _ in range(2):
        norm = layer(graph, norm, 2)
    heads, other = [2, 4, 6, 8, 10, 12], [3, 5, 7, 9, 11, 13]
    plan = graph.plan()
    found = grouped(plan, 2)
    assert [list(group.tasks) for group in found[:2]] == [[0, 1, *heads], [0, 1, *other]]
    assert [set(group.clones) for group in found[:2]] == [set(), {0, 1}]
    assert len(found) == 5
    assert tasks_of(plan, 1) == [list(range(len(plan.tasks)))]
    assert [len(tasks) for tasks in tasks_of(plan, 4)][:4] == [3, 3, 5, 5]
    monkeypatch.setattr(task_groups, "CHEAP_BYTES", PAGE)
    assert tasks_of(plan, 2)[:4] == [[0, 1], heads, other, [14, 15]]
    assert [len(tasks) for tasks in tasks_of(plan, 4)][1:5] == [1, 1, 3, 3]


def test_small_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker runs what reads little, although others have nothing to do."""
    monkeypatch.setattr(task_groups, "CHEAP_BYTES", 0)
    graph = Graph()
    first = graph.task()
    graph.task(graph.task(first), graph.task(first))
    plan = graph.plan()
    assert tasks_of(plan, 4) == [[0], [1], [2], [3]]
    monkeypatch.setattr(task_groups, "FORK_BYTES", 3 * PAGE)
    assert tasks_of(plan, 4) == [[0], [1], [2], [3]]
    monkeypatch.setattr(task_groups, "FORK_BYTES", 4 * PAGE)
    assert tasks_of(plan, 4) == [[0, 1, 2, 3]]
    monkeypatch.setattr(task_groups, "MOST_BYTES", 3 * PAGE)
    assert tasks_of(plan, 1) == [[0], [1], [2], [3]]


def test_who_reads_what_is_made_again() -> None:
    """What reads it behind a group that makes it for itself comes after the one that makes it for all."""
    graph = Graph()
    first = graph.task()
    middle = [graph.task(first) for _ in range(2)]
    graph.task(middle[1], first)
    found = grouped(graph.plan(), 2)
    assert [(list(group.tasks), set(group.clones)) for group in found] == [([0, 1], set()), ([0, 2, 3], {0})]


def test_what_groups_make_again_is_counted() -> None:
    """As of all fused tasks, with its share of their time."""
    with Runtime(2, ram=64 * PAGE) as runtime:
        with runtime.record(groups=True) as step:
            first, *middle, last = (runtime.handle(PAGE, Numbers()) for _ in range(4))
            runtime.submit(FILL, [(first, W)], {"value": 1.0})
            for each in middle:
                runtime.submit(FILL, [(each, W), (first, R)], {"value": 2.0})
            runtime.submit(FILL, [(last, W), (middle[1], R), (first, R)], {"value": 3.0})
            del first, middle
        for _ in range(3):
            step.replay()
        runtime.wait()
        stats = runtime.stats()
    assert (stats["tasks"], stats["recomputed_tasks"]) == (3 * 2, 3)
    assert 0 < stats["recompute_seconds"] < stats["busy_seconds"]["cpu:0"] + stats["busy_seconds"]["cpu:1"]


def test_tasks_that_make_again_in_part_count_with_their_share() -> None:
    """However small that is, alone and fused."""
    runtime = CapturingRuntime()
    with runtime.record():
        made = [runtime.handle(PAGE, Numbers()) for _ in range(3)]
        for handle, again in zip(made, (0.3, 0.6, 0.0), strict=True):
            runtime.submit(Codelet("make", cpu=lambda out: None, again=again), [(handle, W)], {})
    plan = runtime.plan
    assert [(task.num_clones, task.clone_share) for task in plan.tasks] == [(1, 0.3), (1, 0.6), (0, 0.0)]

    def no_scratch(nbytes: int, view: ScratchView, data_class: DataClass) -> HandleRecord:
        raise AssertionError("nothing lies inside")

    for others, count, share in ((set[int](), 2, 0.3), ({2}, 3, 1.9 / 3)):
        fused = join(plan, [PlannedLaunch([number]) for number in range(3)], set(), no_scratch, {}, clones=others)
        assert (fused.num_clones, fused.clone_share) == (count, pytest.approx(share))


def test_what_is_not_made_again() -> None:
    """What writes data that outlives the step, or is overwritten, or has many behind it."""
    runtime = CapturingRuntime()
    kept = runtime.handle(PAGE, Numbers(), kind="persistent")
    with runtime.record():
        one, two, three = (runtime.handle(PAGE, Numbers()) for _ in range(3))
        runtime.submit(MIX, [(one, W), (kept, "RW")], {"salt": 0})
        runtime.submit(MIX, [(two, W), (one, R)], {"salt": 0})
        runtime.submit(MIX, [(three, W), (one, R)], {"salt": 0})
    assert tasks_of(runtime.plan, 2) == [[0], [1], [2]]
    graph = Graph()
    first = graph.task()
    for _ in range(5):
        graph.task(first)
    plan = graph.plan()
    assert tasks_of(plan, 2) == [[each] for each in range(6)]
    assert tasks_of(plan, 3) == [[0, 1], *([0, each] for each in range(2, 6))]


def test_chains_keep_what_waits_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that two others wait for ends its group."""
    monkeypatch.setattr(task_groups, "CHEAP_TASKS", 0)
    graph = Graph()
    first = graph.task()
    graph.task(graph.task(first))
    graph.task(graph.task(first))
    assert tasks_of(graph.plan(), 2) == [[0], [1, 2], [3, 4]]


def test_what_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have a largest size, and tasks of another priority are no part of one."""
    graph = Graph()
    last = graph.task()
    for _ in range(9):
        last = graph.task(last)
    plan = graph.plan()
    assert len(tasks_of(plan, 2)) == 1
    monkeypatch.setattr(task_groups, "MOST_TASKS", 4)
    assert max(map(len, tasks_of(plan, 2))) <= 4
    plan.tasks[1].priority = 1
    assert [len(tasks) for tasks in tasks_of(plan, 2)][:3] == [1, 1, 4]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps(seed: int) -> None:
    """Every task is in one group, and no group waits for a later one."""
    chance = random.Random(seed)
    runtime = CapturingRuntime()
    kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(3)]
    with runtime.record():
        known = list(kept)
        for salt in range(60):
            fresh = runtime.handle(PAGE, Numbers())
            inputs = chance.sample(known, min(len(known), chance.randrange(1, 4)))
            if chance.random() < 0.5:
                runtime.submit(FILL, [(fresh, W)], {"value": 0.0})
                runtime.submit(MIX, [(fresh, "RW"), *((handle, R) for handle in inputs)], {"salt": salt})
                known.append(fresh)
            else:
                runtime.submit(MIX, [(inputs[0], "RW"), *((handle, R) for handle in inputs[1:])], {"salt": salt})
    plan = runtime.plan
    for num_workers in (1, 2, 4):
        groups = grouped(plan, num_workers)
        assert sorted(at for group in groups for at in group.tasks if at not in group.clones) == list(range(len(plan.tasks)))
        where = {at: number for number, group in enumerate(groups) for at in group.tasks if at not in group.clones}
        for number, group in enumerate(groups):
            own = {at for at in group.tasks if at in group.clones}
            for at in group.tasks:
                assert all(each in own or where[each] <= number for each in plan.predecessors[at])
