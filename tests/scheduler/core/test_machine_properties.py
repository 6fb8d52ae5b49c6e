"""The state machine against the sequential truth: random graphs, budgets, completion orders, failures, releases and recorded steps."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from support.event_log import LoggedDriver
from support.search import examples

from scheduler.core import dependencies as graph
from scheduler.core import machine as state_machine
from scheduler.core.errors import SchedulerError, TierFailed
from scheduler.core.events import Action
from scheduler.core.losses import Losses
from scheduler.core.machine import Machine
from scheduler.core.memory import coherence
from scheduler.core.memory import victim_selection as victims
from scheduler.core.memory.eviction_policies import EVICTION_POLICIES
from scheduler.core.memory.extents import ExtentAllocator
from scheduler.core.memory.replicas import Replicas
from scheduler.core.memory.transfers import Copies
from scheduler.core.policies import POLICIES, Pinned
from scheduler.core.records import ANY, FILE, RW, SCRATCH, Condition, HandleRecord, Mode, NodeId, R, Replica, Task, W, Worker
from scheduler.testing import FakeStep, Wrong

MODES: tuple[Mode, ...] = (R, W, RW)
LAYOUTS = (
    ((8,), (("cpu", 0, 1), ("cpu", 0, 1)), False),
    ((5,), (("cpu", 0, 1),), False),
    ((14, 6), (("cpu", 0, 1), ("sim", 1, 2)), False),
    ((12, 5, 7), (("cpu", 0, 1), ("sim", 1, 2), ("sim", 2, 2)), False),
    ((16, 4, 4), (("sim", 1, 2), ("sim", 2, 1)), False),
    ((12, 40), (("cpu", 0, 1), ("cpu", 0, 1)), True),
    ((12, 16), (("cpu", 0, 2),), True),
    ((12, 12, 40), (("cpu", 0, 1), ("sim", 1, 2)), True),
    ((12, 13, 12, 24), (("sim", 1, 2), ("sim", 2, 2)), True),
)
DISKS = (
    ((6, 30), (("cpu", 0, 1), ("cpu", 0, 1)), True),
    ((8, 18), (("cpu", 0, 2),), True),
    ((6, 5, 40), (("cpu", 0, 1), ("sim", 1, 2)), True),
    ((4, 5, 6, 30), (("sim", 1, 2), ("sim", 2, 2)), True),
    ((20,), (("cpu", 0, 1), ("cpu", 0, 1)), False),
    ((20, 5), (("sim", 1, 2),), False),
)


class Programs(RuleBasedStateMachine):
    """A random program against a fake driver."""

    collect = False

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        policy=st.sampled_from(sorted(POLICIES)),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        window=st.sampled_from((1, 3, 256)),
        roomy=st.booleans(),
        files=st.integers(0, 3),
    )
    def begin(self, layout: tuple, policy: str, eviction: str, window: int, roomy: bool, files: int) -> None:
        pages, workers, storage = layout
        pages = [page * (3 if roomy else 1) for page in pages]
        self.driver = LoggedDriver(pages, workers, policy, storage=storage, eviction=eviction, window=window, collect=self.collect)
        self.handles: list[HandleRecord] = [self.driver.handle(1 + at % 3) for at in range(4)]
        self.written: set[HandleRecord] = set()
        self.flags = self.driver.handle(1, "flags")
        for handle in self.handles[:files]:
            self.attach(handle)
        self.step: FakeStep | None = None
        self.num_salts = 0

    def accesses(self, picks: list[tuple[int, Mode]], handles: list[HandleRecord]) -> list[tuple[HandleRecord, Mode]]:
        """Distinct handles with modes; what was never written is written."""
        found: dict[HandleRecord, Mode] = {}
        for pick, mode in picks:
            handle = handles[pick % len(handles)]
            if handle not in found:
                found[handle] = mode if handle in self.written or mode == W else W
        self.written.update(handle for handle, mode in found.items() if mode != R)
        return list(found.items())

    def attach(self, handle: HandleRecord) -> None:
        """The handle's data lies in a file."""
        self.driver.attach(handle)
        self.written.add(handle)

    @rule(pages=st.integers(1, 3), in_file=st.booleans())
    def make_handle(self, pages: int, in_file: bool) -> None:
        if len(self.handles) < 8:
            self.handles.append(self.driver.handle(pages))
            if in_file:
                self.attach(self.handles[-1])

    @rule(
        picks=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(MODES)), min_size=1, max_size=4),
        scratch=st.integers(0, 2),
        priority=st.integers(0, 1),
        only=st.sampled_from([("cpu", "sim"), ("cpu", "sim"), ("cpu", "sim"), ("host",), ("cpu",), ("sim",)]),
        pin=st.sampled_from([None, None, None, 0, 1]),
        flag=st.sampled_from([None, None, None, 0, 1, 2, 3]),
    )
    def submit(self, picks: list[tuple[int, Mode]], scratch: int, priority: int, only: tuple, pin: int | None, flag: int | None) -> None:
        kinds = {worker.kind for worker in (self.driver.machine.program, *self.driver.machine.workers)}
        only = only if kinds.intersection(only) else ("cpu", "sim")
        accesses = self.accesses(picks[:1] if only == ("host",) else picks, self.handles)
        if scratch:
            accesses.append((self.driver.handle(scratch, "scratch"), SCRATCH))
            self.driver.handles[-1].released = True
        worker = next((worker for worker in self.driver.machine.workers if worker.id == pin), None)
        pin = pin if worker is not None and worker.kind in only else None
        condition = None
        if flag is not None and only != ("host",) and self.flags in self.written:
            condition = Condition(guard=len(accesses), number=flag)
            accesses.append((self.flags, R))
        self.driver.submit(*accesses, priority=priority, kinds=only if pin is None else (worker.kind,), pin=pin, condition=condition)

    @rule(mode=st.sampled_from((W, RW)))
    def write_flags(self, mode: Mode) -> None:
        self.driver.submit((self.flags, mode if self.flags in self.written else W), condition=Condition(flags=0))
        self.written.add(self.flags)

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if len(self.handles) > 2 and self.step is None:
            handle = self.handles.pop(which % len(self.handles))
            self.driver.release(handle)

    @rule(which=st.integers(0, 9), count=st.integers(1, 4), fails=st.integers(0, 30))
    @precondition(lambda self: hasattr(self, "driver") and self.driver.num_under_way)
    def end(self, which: int, count: int, fails: int) -> None:
        for _ in range(count):
            if self.driver.num_under_way:
                self.driver.end(which, ZeroDivisionError("planted") if fails == 30 else None)

    @rule(
        tasks=st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(MODES)), min_size=1, max_size=3), min_size=1, max_size=6),
        pins=st.one_of(st.just([]), st.lists(st.sampled_from([None, None, 0, 1]), max_size=6)),
        leaves=st.frozensets(st.integers(0, 5)),
        flags=st.lists(st.sampled_from([None, None, 0, 1, 2]), max_size=6),
    )
    def record(self, tasks: list, pins: list, leaves: frozenset, flags: list) -> None:
        if self.step is not None:
            return
        temporary, output = self.driver.handle(1, "tmp"), self.driver.handle(2, "out")
        shared = [handle for handle in self.handles if handle in self.written]
        recorded = [self.accesses(picks, [*shared, temporary, output]) for picks in tasks]
        self.written -= {temporary, output}
        recorded, conditions = self.conditional(recorded, flags)
        ids = {worker.id for worker in self.driver.machine.workers}
        pins = [pin if pin in ids else None for pin in pins]
        owned = {temporary: False, output: True, self.own_flags: False}
        self.step = self.driver.record(recorded, owned, pins=pins, leaves=leaves, conditions=conditions)
        for position, task in enumerate(self.step.plan.tasks):  # sums of these seconds are exact
            task.shared_seconds, task.path_seconds = (1 + position % 3) / 4, len(tasks) / 4

    def conditional(self, recorded: list, flags: list) -> tuple[list, dict[int, Condition]]:
        """Let tasks depend on flags that a first task of the step writes, from data that changes between replays."""
        self.own_flags = self.driver.handle(1, "own flags")
        if not any(flag is not None for flag in flags):
            return recorded, {}
        conditions = {0: Condition(flags=0)}
        source = next((handle for handle in self.handles if handle in self.written), None)
        tasks = [[(self.own_flags, W), *([(source, R)] if source is not None else [])]]
        for position, accesses in enumerate(recorded, 1):
            flag = flags[position - 1] if position <= len(flags) else None
            if flag is not None:
                conditions[position] = Condition(guard=len(accesses), number=flag)
            tasks.append([*accesses, (self.own_flags, R)] if flag is not None else accesses)
        return tasks, conditions

    @rule()
    @precondition(lambda self: getattr(self, "step", None) is not None)
    def replay(self) -> None:
        if self.step.can_replay:
            self.step.replay()

    @rule()
    @precondition(lambda self: getattr(self, "step", None) is not None and self.step.number > 1)
    def forget_step(self) -> None:
        self.step.release()
        self.step = None

    @invariant()
    def no_work_is_left_of_an_ended_replay(self) -> None:
        for replay, _ in self.step.instances if getattr(self, "step", None) is not None else ():
            assert replay.num_unfinished or (replay.pending_seconds == 0 and not any(replay.pending))

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.check()
            self.driver.check_log()


class CollectingPrograms(Programs):
    """The same with garbage collections inside every handler."""

    collect = True


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int, *, shrink: bool = True) -> None:
    """Run so many random programs of so many steps, the same ones every time."""
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.search
def test_random_programs_end_as_the_sequential_truth() -> None:
    """Whatever the completion order, budgets, failures and replays: everything ends, values are those of sequential execution."""
    run(Programs, examples(150), 40)


@pytest.mark.search
def test_random_programs_end_where_some_tiles_are_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where a tile of a page is tiny beside most memories."""
    monkeypatch.setattr(victims, "TINY", 4)
    run(Programs, examples(50), 40)


def failing_disk(chance: Random) -> LoggedDriver:
    """A random program with a recorded step, over a disk and files that fail to give back, now and then, and a disk that perhaps fails to take."""
    pages, workers, storage = chance.choice(DISKS)
    policy, eviction = chance.choice(sorted(POLICIES)), chance.choice(sorted(EVICTION_POLICIES))
    driver = LoggedDriver(pages, workers, policy, storage=storage, eviction=eviction, window=chance.choice((1, 3, ANY)))
    handles = [driver.handle(1 + at % 2) for at in range(8)]
    for handle in handles:
        if chance.random() < 0.4:
            driver.attach(handle)
        else:
            driver.submit((handle, W))
    temporary, output = driver.handle(1, "tmp"), driver.handle(2, "out")
    recorded = [[(handles[at], R), (handles[at + 1], RW), (temporary, W if at == 0 else RW)] for at in range(6)]
    recorded.append([(temporary, R), (output, W)])
    leaves = frozenset(chance.sample(range(7), chance.randrange(5)))
    step = driver.record(recorded, {temporary: False, output: True}, leaves=leaves)
    reads, writes = chance.choice((0.05, 0.3)), chance.choice((0.0, 0.0, 0.02))
    for _ in range(100):
        if chance.random() < 0.1 and step.can_replay:
            step.replay()
        elif chance.random() < 0.4:
            driver.submit(*((handle, chance.choice(MODES)) for handle in chance.sample(handles, chance.randrange(1, 3))))
        elif driver.num_under_way:
            which = chance.randrange(driver.num_under_way)
            copy = [*[None] * len(driver.running), *driver.copying][which]
            odds = 0.01 if copy is None else reads if driver.is_read(copy) else writes
            driver.end(which, TierFailed("data", "tier", "planted", reads=False) if chance.random() < odds else None)
    driver.drain(chance.randrange)
    return driver


@pytest.mark.search
def test_a_disk_that_fails_costs_what_it_lost_and_no_more() -> None:
    """Everything ends, what ran has read the right values, and only what the disk did not give back, and what follows from it, is missing."""
    num_unreadable = 0
    number = examples(150)
    for seed in range(number):
        driver = failing_disk(Random(seed))
        driver.check()
        driver.check_log()
        num_unreadable += len(driver.unreadable)
    assert num_unreadable > number // 2


@pytest.mark.search
def test_garbage_collections_inside_every_handler_change_nothing() -> None:
    """A collection may run anywhere in the machine; finalizers only reach the inbox."""
    run(CollectingPrograms, examples(40), 30)


def no_write_after_read(task: Task) -> None:
    """`graph.link` without edges from readers to the next writer."""
    for handle, mode in task.accesses:
        if mode != SCRATCH and handle.last_writer is not None:
            graph._edge(handle.last_writer, task)
        if mode == R:
            handle.readers[task] = None
        elif mode != SCRATCH:
            handle.readers = {}
            handle.last_writer = task


def takes_copies_for_backing(handle: HandleRecord, mode: Mode, last: NodeId) -> bool:
    """`coherence.wants_backing` that is content with what was read from a file."""
    return last not in handle.replicas and (mode != R or FILE not in handle.replicas)


honest_drop = Replicas.drop


def keep_files(self: Replicas, replica: Replica, actions: list[Action]) -> None:
    """`Replicas.drop` that goes on believing in a file after a write."""
    if replica.node != FILE:
        honest_drop(self, replica, actions)


honest_allocate = ExtentAllocator.allocate


def allocate_twice(self: ExtentAllocator, size: int, wanted: int = -1) -> int | None:
    """`ExtentAllocator.allocate` that hands an extent out twice."""
    offset = honest_allocate(self, size, wanted)
    if offset is not None:
        self._bins.setdefault(size, {})[offset] = None
    return offset


def keep_half_updated(self: Losses, task: Task, handle: HandleRecord, reason: str, actions: list[Action]) -> bool:
    """`Losses._keep_stale` that does not ask what earlier tasks of the replay have done to the data."""
    if task.step is None or handle.lost is not None or coherence.best_source(handle, None) is None:
        return False
    if handle not in task.step.stale:
        self.count += 1
    task.step.stale[handle] = reason
    return True


def keep_for_all(self: Losses, task: Task, handle: HandleRecord, reason: str, actions: list[Action]) -> bool:
    """`Losses._keep_stale` after which the rest of the replay reads what has missed an update."""
    use = None if task.step is None else task.step.updated.get(handle)
    return use is not None and use.first_writer is task and handle.lost is None


honest_lose = Losses.lose


def keep_if_skipped(self: Losses, handle: HandleRecord, reason: str, actions: list[Action], root: str | None = None) -> None:
    """`Losses.lose` after which data that a skipped task was to overwrite keeps its old value."""
    if not reason.endswith("was skipped"):
        honest_lose(self, handle, reason, actions, root)


honest_ready = Machine._make_ready


def never_skip(self: Machine, task: Task, worker: Worker | None, actions: list[Action]) -> None:
    """`Machine._make_ready` that ignores flags."""
    for handle, _ in task.accesses:
        handle.flags = None
    honest_ready(self, task, worker, actions)


MUTANTS = {
    "only tasks that a worker takes leave the pending ones": [(state_machine, "leave_pending", lambda task, replay: None)],
    "flags decide although their data is lost": [(Losses, "is_lost", lambda self, handle, replay: False)],
    "data that a skipped task was to overwrite keeps its value": [(Losses, "lose", keep_if_skipped)],
    "flags are ignored": [(Machine, "_make_ready", never_skip)],
    "no write-after-read edge": [(graph, "link", no_write_after_read)],
    "evicts pinned replicas": [
        (victims, "is_unused", lambda replica: replica.state != "scratch"),
        (victims, "is_droppable", lambda replica: True),
    ],
    "no invalidation on write": [(Replicas, "invalidate_others", lambda self, task, actions: None)],
    "hands an extent out twice": [(ExtentAllocator, "allocate", allocate_twice)],
    "drops dirty data without writing it back": [(coherence, "is_needed", lambda replica: False)],
    "lost data stays readable": [
        (Losses, "cancels", lambda self, task: False),
        (Replicas, "drop_unpinned", lambda self, handle, actions: None),
    ],
    "pinned tasks go to any worker": [(Pinned, "push", lambda self, task, worker: self.policy.push(task, worker))],
    "a copy of a file passes for a backing replica": [(coherence, "wants_backing", takes_copies_for_backing)],
    "a file outlives a write": [(Replicas, "drop", keep_files)],
    "a cancelled task loses what it should have updated": [(Losses, "_keep_stale", lambda self, *_: False)],
    "a replay reads what has missed an update of its own": [(Losses, "_keep_stale", keep_for_all)],
    "half of the updates of a replay pass for none": [(Losses, "_keep_stale", keep_half_updated)],
    "a copy keeps no pin": [(Copies, "wait_for", lambda self, target, task: None)],
}


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_die(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug is noticed by the property test: a wrong value, a broken invariant or an impossible event."""
    for owner, name, bug in MUTANTS[mutant]:
        monkeypatch.setattr(owner, name, bug)
    with pytest.raises((Wrong, SchedulerError, KeyError, ValueError, AssertionError)):
        run(Programs, 4000, 40, shrink=False)  # ends at the first that notices, of 600 mostly
