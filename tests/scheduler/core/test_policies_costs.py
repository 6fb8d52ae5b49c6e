"""Policies that weigh costs: where they send a task, whom they let steal it, and what they say about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_tasks import plain_task
from support.search import search

from scheduler.core.events import StepStarted, TaskSubmitted
from scheduler.core.machine import Machine
from scheduler.core.memory.extents import PAGE
from scheduler.core.memory.memory_node import MemoryNode
from scheduler.core.performance_model import Boundless, Estimates
from scheduler.core.policies import POLICIES, DataAware, DataAwareSorted, ExpectedEnd, Policy, Reuse, explain
from scheduler.core.policies.expected import TRIALS
from scheduler.core.policies.reuse import PATIENCE
from scheduler.core.records import (
    HandleId,
    HandleRecord,
    HandleSpec,
    Mode,
    NodeId,
    R,
    Replay,
    ReplayPlan,
    Replica,
    Task,
    W,
    Worker,
    WorkerId,
    WorkerKind,
)
from scheduler.core.step_plan import RecordedTask, StepPlan, begin_replay
from scheduler.simulation.virtual_time import VirtualDriver

BOTH: tuple[WorkerKind, ...] = ("cpu", "sim")


class Nodes(Boundless):
    """Memory with little room and busy links."""

    def __init__(self, free: dict[int, int], queued: dict[tuple[int, int], int] | None = None) -> None:
        self.free = free
        self.queued = queued or {}

    def free_bytes(self, node: NodeId) -> int:
        """As told."""
        return self.free.get(node, 1 << 40)

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """As told."""
        return self.queued.get((source, target), 0)

    def below(self, node: NodeId) -> NodeId:
        """Host memory."""
        return NodeId(0)


def joined() -> list[Worker]:
    """A CPU worker and two devices."""
    return [Worker(WorkerId(at), "sim" if at else "cpu", NodeId(at), depth=2) for at in range(3)]


def estimates(cpu: float = 1.0, sim: float = 1.0, pages_per_second: float = 0.0) -> Estimates:
    """Seconds per task by kind, and the speed of every link."""
    transfer = (lambda source, target, nbytes: nbytes / PAGE / pages_per_second) if pages_per_second else None
    return Estimates(lambda task, kind: cpu if kind == "cpu" else sim, transfer)


def task(number: int, *nodes: int, modes: Sequence[Mode] = (R,), kinds: tuple[WorkerKind, ...] = BOTH, priority: int = 0) -> Task:
    """A task over one handle of a page per mode, valid on `nodes`."""
    accesses = []
    for at, mode in enumerate(modes):
        handle = HandleRecord(HandleId(number * 10 + at), HandleSpec(PAGE, PAGE, None, "", "temporary", "activations"))
        for node in nodes:
            handle.replicas[NodeId(node)] = Replica(handle, NodeId(node), 0, "shared")
        accesses.append((handle, mode))
    return plain_task(number, f"t{number}", kinds, accesses, priority=priority, order=number)


def staffed(make: Callable[[Estimates], Policy], given: Estimates) -> tuple[Policy, list[Worker]]:
    """A policy and its workers."""
    policy, workers = make(given), joined()
    for worker in workers:
        policy.join(worker)
    return policy, workers


def popped(policy: Policy, worker: Worker) -> int | None:
    """Number of the task the worker gets."""
    found = policy.pop(worker)
    return None if found is None else found.id


@pytest.mark.parametrize("make", [DataAware, DataAwareSorted, Reuse])
@pytest.mark.parametrize(("pages_per_second", "winner"), [(0.1, 1), (100.0, 0)])
def test_slow_links_keep_tasks_with_their_data_and_fast_ones_let_them_go(make: Callable, pages_per_second: float, winner: int) -> None:
    """The data is on device 1, but the CPU is five times faster: only a slow link is worth staying for."""
    policy, workers = staffed(make, estimates(cpu=1.0, sim=5.0, pages_per_second=pages_per_second))
    policy.push(task(0, 1), None)
    assert [popped(policy, workers[at]) for at in (2, 1 - winner)] == [None, None]
    assert popped(policy, workers[winner]) == 0


def test_dm_ignores_where_data_is() -> None:
    """dm sends the task to the faster worker whatever the link."""
    policy, workers = staffed(ExpectedEnd, estimates(cpu=1.0, sim=5.0, pages_per_second=0.1))
    policy.push(task(0, 1), None)
    assert popped(policy, workers[1]) is None
    assert popped(policy, workers[0]) == 0


def test_queued_seconds_count() -> None:
    """Devices twice as fast take two tasks for each of the CPU's."""
    policy, workers = staffed(ExpectedEnd, estimates(cpu=2.0, sim=1.0))
    for number in range(5):
        policy.push(task(number, kinds=("cpu", "sim")), None)
    assert [popped(policy, workers[at]) for at in (1, 2, 0, 1, 2, 0, 1, 2)] == [0, 1, 2, 3, 4, None, None, None]


def test_an_idle_worker_steals_what_would_wait_longer() -> None:
    """Six seconds are queued on device 1; device 2 needs three for the last task, and four and five for the next, one too many."""
    policy, workers = staffed(DataAware, estimates(cpu=100.0, pages_per_second=0.5))
    thief = workers[2]
    thief.assigned = [task(90 + at) for at in range(9)]
    for number in range(6):
        policy.push(task(number, 1), None)
    thief.assigned = []
    stolen = []
    while (found := policy.pop(thief)) is not None:
        stolen.append(found.id)
        thief.assigned.append(found)
    assert stolen == [5, 4]
    assert [popped(policy, workers[at]) for at in (0, 1, 1, 1, 1, 1)] == [None, 0, 1, 2, 3, None]


def test_an_idle_worker_counts_only_its_own_work_when_it_steals() -> None:
    """The other CPU worker is busy for long, but not the thief, which ends the device's last task sooner."""
    policy = ExpectedEnd(estimates(cpu=3.0, sim=2.0))
    busy, thief, device = (Worker(WorkerId(at), kind, NodeId(kind == "sim"), depth=1) for at, kind in enumerate(("cpu", "cpu", "sim")))
    for worker in (busy, thief, device):
        policy.join(worker)
    busy.assigned = [task(90), task(91), task(92)]
    for number in range(2):
        policy.push(task(number), None)
    assert [popped(policy, thief), popped(policy, thief), popped(policy, device)] == [1, None, 0]


@pytest.mark.parametrize(("num_tasks", "taken"), [(4, None), (6, 2)])
def test_a_slow_worker_helps_while_the_rest_of_the_step_takes_longer(num_tasks: int, taken: int | None) -> None:
    """A CPU worker ends any of three ready tasks after the device would; both share all tasks of the step in 7/9 s each."""
    policy = ExpectedEnd(estimates(cpu=3.5, sim=1.0))
    slow, fast = (Worker(WorkerId(at), kind, NodeId(at), depth=1) for at, kind in enumerate(("cpu", "sim")))
    for worker in (slow, fast):
        policy.join(worker)
    tasks = [task(number) for number in range(num_tasks)]
    step = Replay(ReplayPlan(), tasks, [], [], [])
    for each in tasks:
        each.step, each.spec.shared_seconds, each.spec.path_seconds = step, 7 / 9, 7 / 9
    begin_replay(step, ())
    for each in tasks[:3]:
        policy.push(each, None)
    assert popped(policy, slow) == taken


def test_a_busy_worker_does_not_answer_for_an_idle_one() -> None:
    """Both share a kind and a node; the busy one has a free slot and would end the device's task too late, and the idle one ends it sooner."""
    machine = Machine([MemoryNode("ram", 64 * PAGE), MemoryNode("sim", 64 * PAGE)], ExpectedEnd(estimates(cpu=3.0, sim=2.0)))
    driver = VirtualDriver(machine, [("cpu", 0, 2), ("cpu", 0, 2), ("sim", 1, 1)], lambda task, kind: 1.0)
    tasks = [task(number, modes=(W,), kinds=kinds) for number, kinds in enumerate([("cpu",), BOTH, BOTH])]
    for each in tasks:
        driver.bring(TaskSubmitted(each))
    assert [each.worker for each in tasks] == [0, 2, 1]


class Unknown(Estimates):
    """Nothing has been measured."""

    def is_known(self, task: Task, kind: WorkerKind) -> bool:
        """Never."""
        return False


@pytest.mark.parametrize("make", [ExpectedEnd, DataAware, DataAwareSorted])
def test_an_unknown_duration_is_measured_by_a_few_trials_on_each_kind(make: Callable) -> None:
    """The first tasks of a codelet go to each kind in turn, whatever the guess, and no idle worker takes them; tasks of one kind need no trial."""
    policy, workers = staffed(make, Unknown(lambda task, kind: 1000.0 if kind == "cpu" else 1.0))
    same = [task(number) for number in range(12)]
    for each in same:
        each.spec.name = "t"
        policy.push(each, None)
    on_cpu = []
    while (found := policy.pop(workers[0])) is not None:
        on_cpu.append(found.id)
    assert on_cpu == list(range(TRIALS))
    policy.push(task(20, kinds=("sim",)), None)
    assert sorted(popped(policy, worker) or 0 for worker in (*[workers[1]] * 8, workers[2])) == [*range(TRIALS, 12), 20]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_without_a_task_for_a_worker_is_not_asked_for_its_equals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four idle workers cost one question an event, not sixty-four."""
    policy = POLICIES[name](estimates(cpu=1000.0, sim=1.0))
    machine = Machine([MemoryNode("ram", 64 * PAGE), MemoryNode("sim", 64 * PAGE)], policy)
    driver = VirtualDriver(machine, [("sim", 1, 1), *[("cpu", 0, 1)] * 64], lambda task, kind: 1.0)
    asked = []
    pop = policy.pop
    monkeypatch.setattr(policy, "pop", lambda worker: (asked.append(worker.id), pop(worker))[1])
    for number in range(3):
        driver.bring(TaskSubmitted(task(number, modes=(W,), kinds=("sim",))))
    asked.clear()
    driver.run()
    assert len([worker for worker in asked if worker]) <= 3


def test_a_link_that_is_busy_costs_its_queue() -> None:
    """Equal devices: the task goes where the link is free; so does one whose data is promised there already."""
    given = estimates(cpu=100.0, pages_per_second=1.0)
    given.memory = Nodes({}, {(0, 1): 3 * PAGE})
    policy, workers = staffed(DataAware, given)
    first = task(0, 0)
    policy.push(first, None)
    policy.push(plain_task(1, "", BOTH, first.accesses, order=1), None)
    assert [popped(policy, workers[2]), popped(policy, workers[2])] == [0, 1]


def test_a_full_node_costs_its_evictions() -> None:
    """Two pages to write where one is free: one has to be moved out first."""
    given = estimates(cpu=100.0, pages_per_second=1.0)
    given.memory = Nodes({1: PAGE, 2: 2 * PAGE})
    new = task(0, modes=(W, W))
    policy, workers = staffed(DataAware, given)
    policy.push(new, None)
    assert popped(policy, workers[1]) is None
    assert [(each.worker, each.eviction) for each in explain(new, workers, given)] == [(2, 0.0), (1, 1.0), (0, 0.0)]
    assert popped(policy, workers[2]) == 0


def test_dmdas_queues_by_priority_then_order() -> None:
    """dmda is first in, first out; dmdas is not."""
    for make, expected in ((DataAware, [3, 1, 2, 0]), (DataAwareSorted, [2, 0, 1, 3])):
        policy, workers = staffed(make, estimates())
        for number, priority in ((3, 0), (1, 0), (2, 5), (0, 0)):
            policy.push(task(number, priority=priority, kinds=("cpu",)), None)
        assert [popped(policy, workers[0]) for _ in range(4)] == expected


def test_explain_adds_up() -> None:
    """Execution, transfer, queueing and eviction of every worker that can run the task, cheapest first; the policy adds its queues."""
    given = estimates(cpu=4.0, sim=1.0, pages_per_second=1.0)
    given.memory = Nodes({2: 0}, {(0, 2): 5 * PAGE})
    policy, workers = DataAware(given), joined()
    for worker in workers:
        policy.join(worker)
    workers[1].assigned = [task(9)]
    one = task(0, 0, modes=(R, R))
    seen = [(each.worker, each.execution, each.transfer, each.queueing, each.eviction, each.missing_bytes) for each in explain(one, workers, given)]
    assert seen == [(0, 4.0, 0.0, 0.0, 0.0, 0), (1, 1.0, 2.0, 1.0, 0.0, 2 * PAGE), (2, 1.0, 2.0, 5.0, 2.0, 2 * PAGE)]
    assert [each.total for each in explain(one, workers, given)] == [4.0, 4.0, 10.0]
    policy.push(task(1, kinds=("cpu",)), None)
    assert [(each.worker, each.total) for each in policy.explain(one)] == [(1, 4.0), (0, 8.0), (2, 10.0)]
    assert explain(task(2, kinds=("cuda",)), workers, given) == []


def test_reuse_takes_what_misses_least_and_loses_patience() -> None:
    """The resident task comes first however late in line; a task passed over too often comes out all the same."""
    policy, workers = staffed(Reuse, estimates(pages_per_second=100.0))
    kinds: tuple[WorkerKind, ...] = ("sim",)
    workers[2].assigned = [task(990 + at) for at in range(99)]  # everything goes to device 1
    for number, nodes, modes in ((0, 0, (R,)), (1, 0, (R, R)), (2, 1, (R,)), (3, 1, (R,))):
        policy.push(task(number, nodes, modes=modes, kinds=kinds), None)
    assert [popped(policy, workers[1]) for _ in range(3)] == [2, 3, 0]
    numbers = []
    for number in range(4, 6 + PATIENCE):
        policy.push(task(number, 1, kinds=kinds), None)
        numbers.append(popped(policy, workers[1]))
    assert numbers.index(1) == PATIENCE
    assert numbers[:PATIENCE] == list(range(4, 4 + PATIENCE))


@pytest.mark.parametrize("name", POLICIES)
@given(
    speeds=st.tuples(st.floats(0.01, 100.0), st.floats(0.01, 100.0)),
    link=st.sampled_from((0.0, 0.01, 1.0)),
    tasks=st.lists(
        st.tuples(st.sampled_from([BOTH, BOTH, ("cpu",), ("sim",)]), st.lists(st.integers(0, 2), max_size=2), st.integers(0, 1)), max_size=25
    ),
    dice=st.randoms(use_true_random=False),
)
@search(60)
def test_all_tasks_are_run_once_and_workers_never_idle(name: str, speeds: tuple, link: float, tasks: list, dice) -> None:  # type: ignore[no-untyped-def]
    """Whatever the costs, somebody holds a task while any is left, and each comes out once, at a worker that can run it."""
    given = estimates(*speeds, link)
    given.memory = Nodes({1: PAGE})
    policy, workers = staffed(POLICIES[name], given)
    waiting = [task(at, *nodes, modes=(R,) if nodes else (W,), kinds=kinds, priority=urgency) for at, (kinds, nodes, urgency) in enumerate(tasks)]
    inside: set[Task] = set()
    while waiting or inside or any(worker.assigned for worker in workers):
        for _ in range(dice.randint(0, 6)):
            if waiting:
                inside.add(waiting[0])
                policy.push(waiting.pop(0), dice.choice([None, *workers]))
        for worker in workers:
            while len(worker.assigned) < worker.depth and (found := policy.pop(worker)) is not None:
                assert worker.kind in found.spec.kinds
                inside.remove(found)
                worker.assigned.append(found)
        assert len(policy) == len(inside)
        busy = [worker for worker in workers if worker.assigned]
        assert busy or not inside
        if busy:
            dice.choice(busy).assigned.pop(0)
    assert all(policy.pop(worker) is None for worker in workers)


def matmul(n: int) -> StepPlan:
    """C = A B over n x n tiles of one page, tile by tile of C."""
    a, b, c = (
        {at: HandleRecord(HandleId(0), HandleSpec(PAGE, PAGE, None, name, "persistent", "data")) for at in product(range(n), repeat=2)}
        for name in "abc"
    )
    tasks = [
        RecordedTask(None, "gemm", ("sim",), ((a[i, k], R), (b[k, j], R), (c[i, j], "RW" if k else W)), {}, 0)
        for i, j, k in product(range(n), repeat=3)
    ]
    return StepPlan(tasks, {})


def run(plan: StepPlan, policy: Policy, given: Estimates, budgets: Sequence[int]) -> tuple[int, float]:
    """Pages moved and seconds of one replay on two devices."""
    machine = Machine([MemoryNode(f"node {at}", pages * PAGE) for at, pages in enumerate(budgets)], policy)
    driver = VirtualDriver(machine, [("sim", 1, 2), ("sim", 2, 2)], given.task_seconds, transfer=given.transfer_seconds)
    for number, handle in enumerate(plan.uses):
        driver.bring(TaskSubmitted(plain_task(number, "load", ("host",), ((handle, W),), order=number - 1000)))
        driver.run()
    replay, _ = plan.instantiate(lambda handle: handle, 1000)
    driver.bring(StepStarted(replay))
    driver.run()
    assert not replay.num_unfinished
    return sum(machine.memory.moved_bytes.values()) // PAGE, driver.now


def test_reuse_moves_fewer_bytes_than_eager_under_a_budget() -> None:
    """Two devices that hold a fifth of the tiles each: data first saves a quarter of the bytes at least, and time."""
    results = {}
    for name in ("eager", "reuse"):
        given = estimates(sim=0.25, pages_per_second=4.0)
        results[name] = run(matmul(8), POLICIES[name](given), given, (400, 36, 36))
    assert results["reuse"][0] < 0.75 * results["eager"][0]
    assert results["reuse"][1] < results["eager"][1]
