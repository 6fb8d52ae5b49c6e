"""Policies as pure queues: what they promise under every sequence of pushes and pops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_tasks import plain_task
from support.search import search

from scheduler.core.memory.extents import PAGE
from scheduler.core.policies import POLICIES, Eager, LocalityStealing, Policy, Prio, policy_of
from scheduler.core.records import HandleId, HandleRecord, HandleSpec, NodeId, Replica, Task, Worker, WorkerId, WorkerKind

CPU = Worker(WorkerId(0), "cpu", NodeId(0), depth=1)
CPU2 = Worker(WorkerId(1), "cpu", NodeId(0), depth=1)
SIM = Worker(WorkerId(2), "sim", NodeId(1), depth=2)


def task(number: int, priority: int = 0, kinds: tuple[WorkerKind, ...] = ("cpu", "sim"), on: int | None = None) -> Task:
    """A task; `on` is the node that holds its data."""
    handle = HandleRecord(HandleId(number), HandleSpec(PAGE, PAGE, None, "", "temporary", "activations"))
    if on is not None:
        handle.replicas[NodeId(on)] = Replica(handle, NodeId(on), 0, "modified")
    return plain_task(number, f"t{number}", kinds, ((handle, "R"),), priority=priority, order=number)


@pytest.mark.parametrize("name", POLICIES)
@given(
    pushes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([("cpu", "sim"), ("cpu",), ("sim",)]), st.sampled_from([None, 0, 1])), max_size=30),
    order=st.randoms(use_true_random=False),
)
@search(60)
def test_every_task_comes_out_once_at_a_worker_that_can_run_it(name: str, pushes: list, order) -> None:  # type: ignore[no-untyped-def]
    """Nothing is lost, doubled or given to the wrong kind; the length is right; an idle worker finds work if there is any for it."""
    policy = POLICIES[name]()
    for worker in (CPU, CPU2, SIM):
        policy.join(worker)
    inside: set[Task] = set()
    for number, (priority, kinds, on) in enumerate(pushes):
        new = task(number, priority, kinds, on)
        policy.push(new, order.choice([None, CPU, SIM]))
        inside.add(new)
        if order.random() < 0.4:
            take(policy, order.choice([CPU, CPU2, SIM]), inside)
    while inside:
        before = len(inside)
        for worker in (CPU, SIM):
            take(policy, worker, inside)
        assert len(inside) < before
    assert policy.pop(CPU) is policy.pop(SIM) is None


def take(policy: Policy, worker: Worker, inside: set[Task]) -> None:
    """Pop once and hold the result against what is inside."""
    assert len(policy) == len(inside)
    found = policy.pop(worker)
    if found is None:
        assert not any(worker.kind in task.spec.kinds for task in inside)
    else:
        assert worker.kind in found.spec.kinds
        inside.remove(found)


def test_eager_is_first_in_first_out_across_kinds() -> None:
    """The oldest ready task comes first, whatever kinds can run it."""
    policy = Eager()
    for number, kinds in enumerate([("cpu", "sim"), ("cpu",), ("cpu", "sim"), ("cpu",)]):
        policy.push(task(number, kinds=kinds), None)  # type: ignore[arg-type]
    assert [found.id for _ in range(4) if (found := policy.pop(CPU))] == [0, 1, 2, 3]


def test_prio_takes_the_most_urgent_then_the_oldest() -> None:
    """Priority first, submission order second, across kinds."""
    policy = Prio()
    policy.push(task(0, 1), None)
    policy.push(task(1, 5, ("cpu",)), None)
    policy.push(task(3, 5), None)
    policy.push(task(2, 5), None)
    assert [found.id for _ in range(4) if (found := policy.pop(CPU))] == [1, 2, 3, 0]


def test_stealing_keeps_tasks_where_their_data_is() -> None:
    """A worker takes its own newest task; a task joins the node of its data; an idle worker steals the oldest of the longest queue."""
    policy = LocalityStealing()
    for worker in (CPU, CPU2, SIM):
        policy.join(worker)
    for number in range(4):
        policy.push(task(number, on=1), CPU)
    policy.push(task(4, on=0), CPU)
    policy.push(task(5, on=0), CPU)
    found = [policy.pop(SIM), policy.pop(CPU), policy.pop(CPU2), policy.pop(CPU2)]
    assert [one.id for one in found if one] == [3, 5, 0, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_tasks_may_come_before_workers(name: str) -> None:
    """Tasks pushed to a policy without workers are kept for those who join, also when only some kinds can run them."""
    policy = POLICIES[name]()
    for number, kinds in enumerate([("cpu",), ("sim",), ("cpu", "sim")]):
        policy.push(task(number, kinds=kinds), None)  # type: ignore[arg-type]
    policy.join(CPU)
    assert {found.id for _ in range(2) if (found := policy.pop(CPU))} == {0, 2}
    assert policy.pop(CPU) is None
    assert len(policy) == 1
    policy.join(SIM)
    found = policy.pop(SIM)
    assert found is not None
    assert found.id == 1


def test_auto_looks_at_devices_and_pressure() -> None:
    """CPU workers keep to the order; devices weigh transfers; under pressure what is resident decides."""
    assert [policy_of("auto", devices) for devices in range(4)] == ["prio", "reuse", "reuse", "reuse"]
    assert [policy_of("dmda", devices) for devices in range(2)] == ["dmda", "dmda"]
