"""Machines that exchange data do not wait for each other indefinitely, in planned orders of their own, at the planned minimum and above.

Two or three machines without any network replay steps of their own. Some tasks of kind host are ends of exchanges: the receiving end may end once the
sending end runs, and the sending end once the receiving end has ended, as on a cluster (`nntask.optim.sharded`). Everything else ends in any order.
More cases: ``NNTASK_EXCHANGE_CASES=20000 pytest --hypothesis-profile=many tests/scheduler/core/test_exchanges.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from support.drawn_steps import DrawnStep
from support.search import search

from scheduler.core.dispatch import Dispatch
from scheduler.core.errors import TaskError
from scheduler.core.events import Action
from scheduler.core.memory.extents import PAGE
from scheduler.core.policies import POLICIES
from scheduler.core.records import ANY, RAM, HandleRecord, Mode, R, Task, W
from scheduler.core.step_plan import RecordedTask, StepPlan
from scheduler.core.story import standstill
from scheduler.planning import orders
from scheduler.testing import FakeDriver, FakeStep

NUM_CASES = int(os.environ.get("NNTASK_EXCHANGE_CASES", "600"))

# (nodes, workers as (kind, node), whether the last node is a disk)
LAYOUTS = (
    (1, (("cpu", 0),), False),
    (1, (("cpu", 0),) * 3, False),
    (2, (("cpu", 0),), True),
    (2, (("cpu", 0),) * 2, True),
    (2, (("sim", 1),), False),
    (3, (("sim", 1),), True),
    (3, (("cpu", 0), ("sim", 1)), True),
)


class Hang(AssertionError):
    """No task or copy of any machine can end, although tasks are left."""


@dataclass
class Member:
    """One of the machines that exchange data.

    Attributes:
        ends: number of the exchange that each task of the recorded step is an end of, by its position in submission order.
        ended: (replay, number) of the exchanges whose end here has ended.
    """

    driver: FakeDriver
    drawn: DrawnStep
    ends: dict[int, int] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    step: FakeStep | None = None

    def submit(self, accesses: list[tuple[HandleRecord, Mode]], number: int) -> None:
        """Add an end of an exchange to the step."""
        self.ends[len(self.drawn.tasks)] = number
        self.drawn.tasks.append(accesses)

    def record(self, window: int, seed: int | None) -> None:
        """Record the step, in the order of submission or in a random planned order."""
        recorded = [
            RecordedTask(
                None,
                f"r{at}",
                ("host",) if at in self.ends else ("cpu", "sim"),
                tuple(accesses),
                {"salt": 1000 + at, "exchange": self.ends.get(at)},
                0,
            )
            for at, accesses in enumerate(self.drawn.tasks)
        ]
        plan = StepPlan(recorded, self.drawn.owned, window=window)
        if seed is not None:
            chance = Random(seed)
            rank = chance.sample(range(len(recorded)), len(recorded))
            updates = [chance.random() < 0.3 and len(before) > 0 for before in plan.predecessors]
            for position in reversed(range(len(recorded))):  # only updates follow an update
                updates[position] &= all(updates[after] for after in plan.successors[position])
            positions = orders.arrange(plan, updates, lambda position: (rank[position],))
            plan = StepPlan([plan.tasks[position] for position in positions], plan.owned, window=window)
        self.step = FakeStep(self.driver, plan)

    def exchange_of(self, task: Task) -> tuple[int, int] | None:
        """Return the exchange that a task is an end of, as (replay, number)."""
        number = task.spec.constants.get("exchange")
        return None if task.step is None or not isinstance(number, int) else (task.step.number, number)

    def end(self, task: Task) -> None:
        """End a running task."""
        exchange = self.exchange_of(task)
        self.driver.end(self.driver.running.index(task))
        if exchange is not None:
            self.ended.add(exchange)


@dataclass
class Cluster:
    """Machines that exchange data; `routes` are the members that send and receive each exchange."""

    members: list[Member]
    routes: list[tuple[int, int]]

    def may_end(self, which: int, task: Task) -> bool:
        """Whether a running task may end: other tasks always, ends of exchanges by the rule of the module."""
        member = self.members[which]
        exchange = member.exchange_of(task)
        if exchange is None:
            return True
        source, target = self.routes[exchange[1]]
        if which == source:
            return exchange in self.members[target].ended
        peer = self.members[source]
        return any(peer.exchange_of(other) == exchange for other in peer.driver.running)

    def steps(self) -> list[Callable[[], None]]:
        """Return what may happen next: the end of a task or copy."""
        possible: list[Callable[[], None]] = []
        for which, member in enumerate(self.members):
            driver = member.driver
            possible += [lambda member=member, task=task: member.end(task) for task in driver.running if self.may_end(which, task)]  # type: ignore[misc]
            first = len(driver.running)
            possible += [lambda driver=driver, at=first + at: driver.end(at) for at in range(len(driver.copying))]  # type: ignore[misc]
        return possible


Item = tuple[int, int, int, int, int, int]


def draw(layouts: Sequence[tuple], items: Sequence[Item], pages: Sequence[Sequence[int]], policy: str, window: int, seeds: Sequence) -> Cluster:
    """Return machines with these numbers of pages, and steps drawn from items (member, what, a, b, pages, peer); above 7, `what` is an exchange."""
    members = []
    for (_, workers, storage), budget in zip(layouts, pages, strict=True):
        driver = FakeDriver(budget, [(kind, node, 1 + (kind == "sim")) for kind, node in workers], policy, storage=storage, window=window)
        drawn = DrawnStep(driver)
        drawn.begin([1, 2, 1], 1, 0, 0)
        members.append(Member(driver, drawn))
    routes: list[tuple[int, int]] = []
    for who, what, a, b, size, peer in items:
        source = who % len(members)
        drawn = members[source].drawn
        if what < 8:
            drawn.add(what, a, b, size)
            continue
        target = (source + 1 + peer % (len(members) - 1)) % len(members)
        sent, receiver = drawn.readable[-1 - a % len(drawn.readable)], members[target]
        members[source].submit([(sent, R)], len(routes))
        own = receiver.drawn.readable[-1 - b % len(receiver.drawn.readable)]
        received = receiver.drawn.new(sent.spec.size // PAGE, f"from {source}")
        receiver.submit([(received, W), *([(own, R)] if b % 2 else [])], len(routes))
        receiver.drawn.readable.append(received)
        routes.append((source, target))
    for member, seed in zip(members, seeds, strict=True):
        member.record(window, seed)
    return Cluster(members, routes)


def prepare(layouts: Sequence[tuple], items: Sequence[Item], extras: Sequence[int], policy: str, window: int, seeds: Sequence) -> Cluster:
    """Return machines with so many pages more than the minimum on each node."""
    pages = []
    for member, (num_nodes, workers, storage) in zip(
        draw(layouts, items, [[64] * layout[0] for layout in layouts], policy, window, seeds).members, layouts, strict=True
    ):
        assert member.step is not None
        plan, busy, last = member.step.plan, {node for _, node in workers}, num_nodes - 1 if storage else 0
        least = [plan.minimum_bytes(is_last=node == last, computes=node in busy) for node in range(num_nodes)]
        least[0] = max(least[0], plan.largest_task(aside=True))
        pages.append([nbytes // PAGE + extras[node] for node, nbytes in enumerate(least)])
    return draw(layouts, items, pages, policy, window, seeds)


def run(cluster: Cluster, chance: Random, replays: int) -> None:
    """Replay the steps, each machine at its own pace with two replays in flight; anything that may end ends, in random order.

    Raises:
        Hang: nothing may end, but tasks are left.
    """
    for member in cluster.members:
        assert member.step is not None
        for handle in [*member.drawn.persistent, *member.drawn.inputs]:
            if handle in member.step.plan.uses:
                member.driver.submit((handle, W), kinds=("host",))
                member.driver.drain(chance.randrange)
    while True:
        startable = [member for member in cluster.members if member.step and member.step.number < replays and member.step.can_replay]
        possible = cluster.steps()
        if startable and (chance.random() < 0.3 or not possible):
            member = chance.choice(startable)
            for handle in member.drawn.inputs:
                member.driver.submit((handle, W), kinds=("host",))
            assert member.step is not None
            member.step.replay()
        elif possible:
            chance.choice(possible)()
        elif any(member.driver.machine.num_unfinished for member in cluster.members):
            raise Hang([repr(task) for member in cluster.members for task in member.driver.running])
        else:
            return


ITEMS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.integers(0, 1)),
    min_size=3,
    max_size=18,
)
EXTRA = st.sampled_from((0, 0, 0, 0, 1, 2, 3, 5))


@given(
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=3),
    items=ITEMS,
    extras=st.lists(EXTRA, min_size=4, max_size=4),
    policy=st.sampled_from(sorted(POLICIES)),
    window=st.sampled_from((0, 1, 3, ANY)),
    seeds=st.lists(st.one_of(st.none(), st.integers(0, 1 << 30)), min_size=3, max_size=3),
    replays=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@search(NUM_CASES, phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
def test_machines_that_exchange_data_end_at_the_planned_minimum(
    layouts: list[tuple], items: list[Item], extras: list[int], policy: str, window: int, seeds: list, replays: int, seed: int
) -> None:
    """Nothing is refused, nothing hangs, the ledgers hold, and the values are those of sequential execution."""
    cluster = prepare(layouts, items, extras, policy, window, seeds[: len(layouts)])
    run(cluster, Random(seed), replays)
    for member in cluster.members:
        assert [str(ended.error) for ended in member.driver.runs if ended.error is not None] == []
        member.driver.check()


def out_of_turn(self: Dispatch, actions: list[Action]) -> None:
    """`Dispatch.take_turns` that admits an exchange as soon as it is ready."""
    for task in [task for task in self.turns if task.state == "ready"]:
        self._assign(task, self.host, actions)


@pytest.mark.parametrize(("owner", "name", "bug"), [(Dispatch, "take_turns", out_of_turn), (orders, "pairwise", lambda turns: [])])
def test_exchanges_without_one_sequence_are_noticed(owner: object, name: str, bug: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """If exchanges are admitted out of turn, or if planned orders move them, machines at their minimum wait for each other sooner or later."""

    def first_hang() -> int | None:
        for seed in range(40):
            chance = Random(seed)
            items = [(at, chance.choice((0, 1, 2, 8, 9)), chance.randrange(10), chance.randrange(10), 1 + chance.randrange(4), 0) for at in range(10)]
            try:
                run(prepare([LAYOUTS[seed % 2]] * 2, items, [0] * 4, "eager", ANY, [seed, seed + 1]), chance, 2)
            except Hang:
                return seed
        return None

    assert first_hang() is None
    monkeypatch.setattr(owner, name, bug)
    assert first_hang() is not None


def test_exchanges_behind_one_that_fails_have_their_turns() -> None:
    """An exchange whose data is lost has no turn; the exchange after it is admitted, and holds nothing until it is the next one."""
    driver = FakeDriver([16], [("cpu", 0, 1)])
    source, others = driver.handle(1, "source"), [driver.handle(1, f"received {at}") for at in range(3)]
    accesses: list[list[tuple[HandleRecord, Mode]]] = [[(source, W)], [(source, R)], *([(other, W)] for other in others)]
    tasks = [RecordedTask(None, f"r{at}", ("cpu",) if at == 0 else ("host",), tuple(each), {"salt": at}, 0) for at, each in enumerate(accesses)]
    step = FakeStep(driver, StepPlan(tasks, dict.fromkeys([source, *others], False)))
    for fails in (False, True, False):
        step.replay()
        assert ([task.spec.name for task in driver.running], driver.machine.memory.used(RAM)) == (["r0"], PAGE)
        machine = driver.machine
        report = standstill(machine.stalls.dispatch, machine.stalls.copying, machine.memory.name_of, machine.num_unfinished)
        assert len(re.findall(r"r[234]\(W .*\) waits for its turn after task \d+ r1\(R source'\)\n", report + "\n")) == 3
        driver.end(0, ZeroDivisionError("planted") if fails else None)
        assert [task.spec.name for task in driver.running] == (["r2", "r3", "r4"] if fails else ["r1", "r2", "r3", "r4"])
        driver.drain()
    assert [type(ended.error) for ended in driver.runs if ended.error is not None] == [ZeroDivisionError, TaskError]
    driver.check()
