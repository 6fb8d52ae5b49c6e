"""A fake driver for tests of the machine, without threads or time, over small real buffers.

`FakeDriver` holds a `Machine`; a test submits tasks and chooses which running task or copy ends next. Every handle holds one 64-bit number, written
into each page of its extent, so that overlapping extents, early evictions and stale replicas show as wrong numbers. A task's inputs are read when it
starts and once more when it ends, and must be equal. Data that a task will overwrite is filled with garbage when it starts. The source of a copy must
not change while the copy is in progress.

After every event `machine.validate()` runs, and every task is checked against `TASK_TRANSITIONS`. `FakeDriver.check` compares the final buffers with
`truth`, which runs the same tasks one after another in submission order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from ..core.actions import carry_out
from ..core.events import (
    Action,
    CopyFailed,
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    HandleReleased,
    MoveTile,
    ReportFailure,
    ReportStepDone,
    RunTask,
    SourceAttached,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from ..core.memory.eviction_policies import DEFAULT_EVICTION
from ..core.memory.extents import PAGE
from ..core.records import (
    ANY,
    FILE,
    RW,
    SCRATCH,
    SKIPPED,
    Condition,
    HandleId,
    HandleRecord,
    HandleSpec,
    Mode,
    NodeId,
    R,
    Replay,
    Replica,
    Task,
    TaskId,
    TaskSpec,
    Worker,
    WorkerId,
    WorkerKind,
)
from ..core.step_plan import RecordedTask, StepPlan
from .machines import REACHABLE, collect_inside, fresh_machine
from .sequential import Run, Wrong, check_results, flags_of, mix

GARBAGE: Final = 0xDEADBEEFDEADBEEF
CPU: Final[tuple[WorkerKind, ...]] = ("cpu", "sim")


class FakeDriver:
    """A machine whose tasks and copies end when the test decides.

    Args:
        pages: budget of each node in pages, host memory first.
        workers: (kind, node, depth) of each worker.
        policy: name of a scheduling policy.
        storage: whether the last node is a file instead of memory.
        eviction: name of the machine's eviction policy.
        window: window of recorded steps.
        prefetch: whether the machine moves data ahead.
        collect: whether to force a garbage collection inside every handler of the machine.
    """

    def __init__(
        self,
        pages: Sequence[int],
        workers: Sequence[tuple[WorkerKind, int, int]],
        policy: str = "prio",
        *,
        storage: bool = False,
        eviction: str = DEFAULT_EVICTION,
        window: int = ANY,
        prefetch: bool = True,
        collect: bool = False,
    ) -> None:
        self.fresh_machine = partial(fresh_machine, pages, policy, storage=storage, eviction=eviction, prefetch=prefetch)
        self.window = window
        self.machine = self.fresh_machine()
        self.memory: list[dict[int, int]] = [{} for _ in self.machine.memory.names]  # the number in each page, by its offset
        self.runs: list[Run] = []
        self.running: list[Task] = []
        self.copying: dict[CopyTile, int] = {}
        self.handles: list[HandleRecord] = []
        self.inbox: list[HandleRecord] = []
        self.unreadable: set[HandleRecord] = set()
        self.files: dict[HandleRecord, int] = {}
        self.steps_done: list[tuple[Replay, int]] = []
        self._current: dict[Task, Run] = {}
        self._states: dict[Task, str] = {}
        self._num_tasks = self._num_replays = 0
        if collect:
            collect_inside(self.machine)
        for number, (kind, node, depth) in enumerate(workers):
            self.bring(WorkerJoined(Worker(WorkerId(number), kind, NodeId(node), depth)))

    def handle(self, pages: int = 1, name: str = "") -> HandleRecord:
        """Return a new handle of `pages` pages."""
        number = HandleId(len(self.handles))
        record = HandleRecord(number, HandleSpec(pages * PAGE - 8, pages * PAGE, None, name or f"h{number}", "temporary", "activations"))
        self.handles.append(record)
        return record

    def submit(
        self,
        *accesses: tuple[HandleRecord, Mode],
        salt: int = 0,
        priority: int = 0,
        kinds: tuple[WorkerKind, ...] = CPU,
        pin: int | None = None,
        condition: Condition | None = None,
    ) -> Run:
        """Submit a plain task, pinned to a worker if `pin` is given. Flags are the bytes of the number in a handle (`flags_in`)."""
        number = self._take_numbers(1)
        spec = TaskSpec(None, f"t{number}", kinds, tuple(accesses), {}, priority, None if pin is None else WorkerId(pin), condition)
        task = Task(TaskId(number), spec, spec.accesses, order=number)
        run = self._enter(task, salt or number)
        self.bring(TaskSubmitted(task))
        return run

    def attach(self, handle: HandleRecord, scratch: int = 0) -> None:
        """Declare that the handle's data lies in a file; its number depends on the handle."""
        self.files[handle] = mix(handle.id + 1, [len(self.files)])
        self.bring(SourceAttached(handle, self.files[handle], scratch))

    def release(self, handle: HandleRecord) -> None:
        """Drop the program's reference to a handle; the machine learns of it at the next event, as from a finalizer."""
        self.inbox.append(handle)

    def record(
        self,
        tasks: Sequence[Sequence[tuple[HandleRecord, Mode]]],
        owned: Mapping[HandleRecord, bool],
        kinds: tuple[WorkerKind, ...] = CPU,
        *,
        num_urgent: int = 0,
        partitions: Sequence[int] = (),
        pins: Sequence[int | None] = (),
        leaves: frozenset[int] = frozenset(),
        conditions: Mapping[int, Condition] = MappingProxyType({}),
    ) -> FakeStep:
        """Capture tasks over handles; `owned` and `partitions` are those of `StepPlan`.

        Args:
            tasks: accesses of each task.
            kinds: kinds of workers that may run them.
            num_urgent: number of first tasks that precede all others, like copies of inputs.
            pins: for each task, the worker that must run it, or None; empty for no pins.
            leaves: positions of tasks before which all of their data is expected to leave.
            conditions: conditions of tasks by position.
        """
        recorded = [
            RecordedTask(None, f"r{number}", kinds, tuple(accesses), {"salt": 1000 + number}, int(number < num_urgent), None, conditions.get(number))
            for number, accesses in enumerate(tasks)
        ]
        for task, pin in zip(recorded, pins, strict=False):
            task.pin = None if pin is None else WorkerId(pin)
        plan = StepPlan(recorded, owned, window=self.window, partitions=partitions)
        plan.foresee({handle: leaves.intersection(use.positions) for handle, use in plan.uses.items()})
        return FakeStep(self, plan)

    def start(self, replay: Replay, number: int) -> None:
        """Start a replay."""
        self._drain_inbox()
        replay.number = number
        replay.first_order = self._take_numbers(len(replay.tasks))
        for task in replay.tasks:
            salt = task.spec.constants["salt"]
            assert isinstance(salt, int)
            self._enter(task, salt, self._num_replays)
        self._num_replays += 1
        self.bring(StepStarted(replay))

    def _enter(self, task: Task, salt: int, replay: int | None = None) -> Run:
        run = self._current[task] = Run(task, task.accesses, salt, replay)
        self.runs.append(run)
        return run

    def _take_numbers(self, count: int) -> int:
        self._num_tasks += count
        return self._num_tasks - count

    def bring(self, event: Event) -> None:
        """Bring one event, after the inbox, and execute the machine's actions."""
        self._drain_inbox()
        self._bring(event)

    def _drain_inbox(self) -> None:
        while self.inbox:
            self._bring(HandleReleased(self.inbox.pop(0)))

    def _bring(self, event: Event) -> None:
        for action in self.advance(event):
            carry_out(action, self)
        self.machine.validate()
        self._check_files()
        self._check_transitions()

    def advance(self, event: Event) -> list[Action]:
        """Return the machine's actions after an event."""
        return self.machine.handle(event)

    def copy_tile(self, action: CopyTile) -> None:
        """Start the copy: its target holds garbage until it ends."""
        self.copying[action] = self.load(action.source)
        self._store(action.target, GARBAGE)

    def move_tile(self, action: MoveTile) -> None:
        """Move pages within a node, which must be idle."""
        if self.num_under_way:
            raise Wrong("tiles were moved while a task or copy was in progress")
        memory, distance = self.memory[action.node], action.offset - action.source_offset
        pages = range(action.source_offset, action.source_offset + action.nbytes, PAGE)
        memory.update({page + distance: memory.get(page, 0) for page in pages})

    def discard_extent(self, action: DiscardExtent) -> None:
        """Fill the pages with zeros, as a file system would."""
        self.memory[action.node].update(dict.fromkeys(range(action.offset, action.offset + action.nbytes, PAGE), 0))

    def report_failure(self, action: ReportFailure) -> None:
        """Note that the task has ended without results."""
        run = self._current[action.task]
        run.error, run.ended = action.error, True

    def report_step_done(self, action: ReportStepDone) -> None:
        """Note the replay."""
        self.steps_done.append((action.replay, action.number))

    def run_task(self, action: RunTask) -> None:
        """Start the task: read its inputs, and fill the data that it overwrites with garbage."""
        task = action.task
        run = self._current[task]
        if run.ended or task in self.running:
            raise Wrong(f"{task!r} was started twice")
        if task.spec.pin is not None and task.worker != task.spec.pin:
            raise Wrong(f"{task!r} is pinned to worker {task.spec.pin} and was started on worker {task.worker}")
        self.running.append(task)
        run.started = True
        run.before = [self.load(r) for (_, mode), r in zip(task.accesses, task.replicas, strict=True) if mode == R or mode == RW]
        for (_, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode != R and mode != RW:
                self._store(replica, GARBAGE)

    @property
    def num_under_way(self) -> int:
        """Number of running tasks and copies in progress."""
        return len(self.running) + len(self.copying)

    def end(self, which: int, error: BaseException | None = None) -> None:
        """End one of the running tasks or copies, chosen by number; a task may fail, and so may a copy that reads or writes a file."""
        which %= self.num_under_way
        if which >= len(self.running):
            self._end_copy(list(self.copying)[which - len(self.running)], error)
            return
        task = self.running.pop(which)
        run = self._current[task]
        now = [self.load(r) for (_, mode), r in zip(task.accesses, task.replicas, strict=True) if mode == R or mode == RW]
        if now != run.before:
            raise Wrong(f"the inputs of {task!r} changed while it ran: {run.before} became {now}")
        if error is not None:
            self.bring(TaskFailed(task, error))
            return
        run.ended = True
        for position, ((_, mode), replica) in enumerate(zip(task.accesses, task.replicas, strict=True)):
            if mode != R:
                self._store(replica, GARBAGE if mode == SCRATCH else mix(run.salt + position, now))
        self.bring(TaskFinished(task, flags_of(task, self.load)))

    def _end_copy(self, copy: CopyTile, error: BaseException | None) -> None:
        value = self.copying.pop(copy)
        if error is not None and (self.is_read(copy) or copy.target.node == self.machine.memory.tier):
            if self.is_read(copy):
                self.unreadable.add(copy.source.handle)
            self.bring(CopyFailed(copy.source, copy.target, error))
            return
        if self.load(copy.source) != value:
            raise Wrong(f"{copy.source.handle!r} changed while it was copied")
        self._store(copy.target, value)
        self.bring(CopyFinished(copy.source, copy.target))

    def is_read(self, copy: CopyTile) -> bool:
        """Return whether a copy reads a file: one of the program's, or the disk tier."""
        return copy.source.node in (FILE, self.machine.memory.tier)

    def finish(self, run: Run, error: BaseException | None = None) -> None:
        """End one task, which must be running; it may fail."""
        self.end(self.running.index(run.task), error)

    def arrive(self, handle: HandleRecord, node: int, error: BaseException | None = None) -> None:
        """End the copy of a handle to a node, which must be in progress; it may fail if it reads or writes a file."""
        self.end(len(self.running) + [(copy.target.handle, copy.target.node) for copy in self.copying].index((handle, NodeId(node))), error)

    @property
    def routes(self) -> list[tuple[str, int, int]]:
        """Copies in progress as (name of the handle, source, target), oldest first."""
        return [(copy.source.handle.spec.name, copy.source.node, copy.target.node) for copy in self.copying]

    def drain(self, choose: Callable[[int], int] = lambda number: 0) -> None:
        """End all tasks and copies, in the order that `choose` picks."""
        while self.num_under_way:
            self.end(choose(self.num_under_way))

    def load(self, replica: Replica) -> int:
        """Return the number in a replica.

        Raises:
            Wrong: its pages disagree, so something else has written there.
        """
        if replica.node == FILE:
            return self.files[replica.handle]
        memory = self.memory[replica.node]
        values = {memory.get(page, 0) for page in range(replica.offset, replica.offset + replica.handle.spec.size, PAGE)}
        if len(values) != 1:
            raise Wrong(f"the pages of {replica.handle!r} on node {replica.node} disagree: {sorted(values)}")
        return values.pop()

    def _store(self, replica: Replica, value: int) -> None:
        self.memory[replica.node].update(dict.fromkeys(range(replica.offset, replica.offset + replica.handle.spec.size, PAGE), value))

    def _check_files(self) -> None:
        found = [handle for handle in self.handles if FILE in handle.replicas]
        cold = sum(len(handle.replicas) == 1 for handle in found)
        counted = self.machine.memory.num_in_files
        if (len(found), cold) != counted:
            raise Wrong(f"{len(found)} handles are in files, {cold} nowhere else, but {counted[0]} and {counted[1]} were counted")

    def _check_transitions(self) -> None:
        for task, run in list(self._current.items()):
            before, now = self._states.get(task, "waiting"), task.state
            if now != before and now not in REACHABLE[before] and task.step is None:
                raise Wrong(f"{task!r} went from {before} to {now}")
            self._states[task] = now
            if not run.started and (now == "done" if task.step is None else task.step.done[task.position] == SKIPPED):
                run.ended = True  # no action reports that a task was skipped
            if run.ended and task.step is None:
                del self._current[task], self._states[task]

    def check(self) -> None:
        """Check at the end that everything has ended, with the outcomes of a sequential run, and that the buffers hold its results.

        Raises:
            Wrong: an outcome or a buffer differs.
        """
        self._drain_inbox()
        if self.machine.num_unfinished or any(not run.ended for run in self.runs):
            raise Wrong(f"tasks never ended: {[run.task for run in self.runs if not run.ended]}")
        check_results(self.runs, self.unreadable, self.files, self.load)


class FakeStep:
    """A recorded step of a `FakeDriver`: two instances, with at most two replays in progress."""

    def __init__(self, driver: FakeDriver, plan: StepPlan) -> None:
        self.driver, self.plan = driver, plan
        self.instances: list[tuple[Replay, dict[HandleRecord, HandleRecord]]] = []
        self.number = 0

    @property
    def can_replay(self) -> bool:
        """Whether fewer than two replays are in progress."""
        return self.number < 2 or not self.instances[self.number % 2][0].num_unfinished

    def replay(self) -> dict[HandleRecord, HandleRecord]:
        """Start the next replay; return the instance's own records."""
        if len(self.instances) <= self.number % 2:
            first = self.driver._take_numbers(len(self.plan.tasks))
            self.instances.append(self.plan.instantiate(self._clone, first, computes_on_last=self.driver.machine.computes_on_last))
        replay, twins = self.instances[self.number % 2]
        self.driver.start(replay, self.number)
        self.number += 1
        return twins

    def release(self) -> None:
        """Drop the program's references to the step."""
        for _, twins in self.instances:
            for twin in twins.values():
                self.driver.release(twin)

    def _clone(self, handle: HandleRecord) -> HandleRecord:
        return self.driver.handle(handle.spec.size // PAGE, f"{handle.spec.name}'")
