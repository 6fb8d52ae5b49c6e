"""Event logs: the events of a machine as plain tuples, which can be replayed on a new machine.

A log holds everything that determines the actions of a machine (sizes, access modes, orders, completion order), but no codelets, views or times. A
replay must give the same actions in the same order, so a recorded failure is a unit test. Entries, with the first mention of a handle or instance:
    ("handle", id, nbytes, size, name, kind, data_class, released)
    ("task", id, name, kinds, ((handle, mode), ...), priority, order, pin, next_uses)
    ("instance", key, tasks, owned, shared, makes, passing, window, schedules, returns) ("step", key, number, first_order)
    ("finished", task) ("failed", task, message, has_begun) ("copied", handle, from, to) ("not copied", handle, from, to, message)
    ("joined", worker, kind, node, depth, aside) ("released", handle) ("attached", handle, scratch)
    ("adopted", handle, next_use, stays) ("changed", handle)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from .events import (
    Action,
    CopyFailed,
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    ForgetObject,
    HandleAdopted,
    HandleChanged,
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
from .records import DataClass, HandleId, HandleRecord, Kind, Mode, NodeId, Replay, SharedUse, Task, TaskId, UseSchedule, Worker, WorkerId, WorkerKind
from .step_plan import peaks_of, positions_by_partition

Entry = tuple[object, ...]
_Accesses = tuple[tuple[int, Mode], ...]
_Kinds = tuple[WorkerKind, ...]
_Schedule = tuple[Sequence[int], Sequence[Mode], Sequence[int]]
_PlannedTask = tuple[int, str, _Kinds, _Accesses, int, int, tuple[int, ...], bool, int, int | None, bool]
_Shared = tuple[int, tuple[int, ...], int | None, int | None, tuple[int, ...], int, bool, _Schedule]


class LoggedError(Exception):
    """The exception of a kernel, in the replay of a log."""


class EventLog:
    """A log that grows event by event; `entries` holds the entries added so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._handles: set[HandleId] = set()
        self._steps: dict[Replay, int] = {}

    def add(self, event: Event) -> None:
        """Append an event; to be called before the machine handles it."""
        match event:
            case TaskSubmitted(task):
                self._mention(handle for handle, _ in task.accesses)
                self.entries.append(
                    ("task", task.id, task.name, task.kinds, _plain(task), task.priority, task.order, task.pin, tuple(task.next_uses))
                )
            case StepStarted(replay):
                if replay not in self._steps:
                    self._enter_instance(replay)
                self.entries.append(("step", self._steps[replay], replay.number, replay.first_order))
            case TaskFinished(task):
                self.entries.append(("finished", task.id))
            case TaskFailed(task, error, has_begun):
                self.entries.append(("failed", task.id, str(error), has_begun))
            case CopyFinished(source, target):
                self.entries.append(("copied", source.handle.id, source.node, target.node))
            case CopyFailed(source, target, error):
                self.entries.append(("not copied", source.handle.id, source.node, target.node, str(error)))
            case WorkerJoined(worker):
                self.entries.append(("joined", worker.id, worker.kind, worker.node, worker.depth, worker.aside))
            case HandleReleased(handle):
                self._mention([handle])
                self.entries.append(("released", handle.id))
            case SourceAttached(handle, _, scratch):
                self._mention([handle])
                self.entries.append(("attached", handle.id, scratch))
            case HandleAdopted(handle, next_use, stays):
                self._mention([handle])
                self.entries.append(("adopted", handle.id, next_use, stays))
            case HandleChanged(handle):
                self.entries.append(("changed", handle.id))
            case _:
                assert_never(event)

    def _mention(self, handles: Iterable[HandleRecord]) -> None:
        for h in handles:
            if h.id not in self._handles:
                self._handles.add(h.id)
                self.entries.append(("handle", h.id, h.nbytes, h.size, h.name, h.kind, h.data_class, h.released))

    def _enter_instance(self, replay: Replay) -> None:
        key = self._steps[replay] = len(self._steps)
        self._mention(handle for task in replay.tasks for handle, _ in task.accesses)
        positions = {task: position for position, task in enumerate(replay.tasks)}
        tasks = tuple(
            (
                task.id,
                task.name,
                task.kinds,
                _plain(task),
                task.priority,
                task.num_predecessors,
                tuple(positions[t] for t in task.successors),
                task.is_exit,
                task.partition,
                task.pin,
                task.aside,
            )
            for task in replay.tasks
        )
        owned = tuple((handle.id, num_uses) for handle, num_uses in replay.owned)
        shared = tuple(
            (
                use.handle.id,
                tuple(positions[task] for task in use.first_readers),
                None if use.first_writer is None else positions[use.first_writer],
                None if use.last_writer is None else positions[use.last_writer],
                tuple(positions[task] for task in use.last_readers),
                use.num_uses,
                use.needs_data,
                _dump_schedule(use.use_schedule),
            )
            for use in replay.shared
        )
        schedules = tuple((handle.id, _dump_schedule(handle.use_schedule)) for handle, _ in replay.owned if handle.use_schedule is not None)
        self.entries.append(
            (
                "instance",
                key,
                tasks,
                owned,
                shared,
                tuple(replay.makes),
                tuple(replay.passing),
                replay.window,
                schedules,
                tuple(tuple(partition) for partition in replay.returns),
            )
        )


class Revival:
    """New records and events made from the entries of a log."""

    def __init__(self) -> None:
        self._handles: dict[int, HandleRecord] = {}
        self._tasks: dict[int, Task] = {}
        self._steps: dict[int, Replay] = {}

    def events(self, entries: Iterable[Entry]) -> Iterator[Event]:
        """Return the events of a log, in order, over new records."""
        for kind, *rest in entries:
            event = getattr(self, f"_on_{str(kind).replace(' ', '_')}")(*rest)
            if event is not None:
                yield event

    def _on_handle(self, number: int, nbytes: int, size: int, name: str, kind: Kind, data_class: DataClass, released: bool) -> None:
        self._handles[number] = HandleRecord(HandleId(number), nbytes, size, None, name, kind, data_class, released=released)

    def _task(self, number: int, name: str, kinds: _Kinds, accesses: _Accesses, priority: int, order: int = 0) -> Task:
        plain = tuple((self._handles[handle], mode) for handle, mode in accesses)
        task = self._tasks[number] = Task(TaskId(number), None, name, kinds, plain, {}, priority, order)
        return task

    def _on_task(
        self, number: int, name: str, kinds: _Kinds, accesses: _Accesses, priority: int, order: int, pin: WorkerId | None, next_uses: tuple[int, ...]
    ) -> TaskSubmitted:
        task = self._task(number, name, kinds, accesses, priority, order)
        task.pin, task.next_uses = pin, next_uses
        return TaskSubmitted(task)

    def _on_instance(
        self,
        key: int,
        tasks: tuple[_PlannedTask, ...],
        owned: tuple[tuple[int, int], ...],
        shared: tuple[_Shared, ...],
        makes: tuple[int, ...],
        passing: tuple[int, ...],
        window: int,
        schedules: tuple[tuple[int, _Schedule], ...],
        returns: tuple[tuple[tuple[int, int], ...], ...],
    ) -> None:
        dying = [(self._handles[handle], uses) for handle, uses in owned]
        replay = self._steps[key] = Replay([], [], dying, [], makes, passing, peaks_of(passing), window, returns=returns)
        for handle, schedule in schedules:
            self._handles[handle].use_schedule = _load_schedule(schedule, replay)
        for position, (number, name, kinds, accesses, priority, waits, _, is_exit, partition, pin, aside) in enumerate(tasks):
            task = self._task(number, name, kinds, accesses, priority)
            task.num_waiting = task.num_predecessors = waits
            task.step, task.position, task.is_exit, task.partition = replay, position, is_exit, partition
            task.pin, task.aside = None if pin is None else WorkerId(pin), aside
            replay.tasks.append(task)
        for task, planned in zip(replay.tasks, tasks, strict=True):
            task.successors = [replay.tasks[after] for after in planned[6]]
        replay.has_pins = any(task.pin is not None for task in replay.tasks)
        replay.has_aside = any(task.aside for task in replay.tasks)
        replay.roots = [task for task in replay.tasks if not task.num_predecessors]
        replay.partitions = positions_by_partition([task.partition for task in replay.tasks])
        for handle, first_readers, first_writer, last_writer, last_readers, uses, needs_data, schedule in shared:
            replay.shared.append(
                SharedUse(
                    self._handles[handle],
                    [replay.tasks[index] for index in first_readers],
                    None if first_writer is None else replay.tasks[first_writer],
                    None if last_writer is None else replay.tasks[last_writer],
                    [replay.tasks[index] for index in last_readers],
                    uses,
                    needs_data,
                    _load_schedule(schedule),
                )
            )

    def _on_step(self, key: int, number: int, first_order: int) -> StepStarted:
        replay = self._steps[key]
        replay.number, replay.first_order = number, first_order
        return StepStarted(replay)

    def _on_finished(self, number: int) -> TaskFinished:
        return TaskFinished(self._tasks[number])

    def _on_failed(self, number: int, message: str, has_begun: bool) -> TaskFailed:
        return TaskFailed(self._tasks[number], LoggedError(message), has_begun)

    def _on_copied(self, number: int, source: NodeId, target: NodeId) -> CopyFinished:
        replicas = self._handles[number].replicas
        return CopyFinished(replicas[source], replicas[target])

    def _on_not_copied(self, number: int, source: NodeId, target: NodeId, message: str) -> CopyFailed:
        replicas = self._handles[number].replicas
        return CopyFailed(replicas[source], replicas[target], LoggedError(message))

    def _on_joined(self, number: int, kind: WorkerKind, node: NodeId, depth: int, aside: bool = False) -> WorkerJoined:
        return WorkerJoined(Worker(WorkerId(number), kind, node, depth, aside))

    def _on_released(self, number: int) -> HandleReleased:
        return HandleReleased(self._handles[number])

    def _on_attached(self, number: int, scratch: int) -> SourceAttached:
        return SourceAttached(self._handles[number], None, scratch)

    def _on_adopted(self, number: int, next_use: int, stays: bool) -> HandleAdopted:
        return HandleAdopted(self._handles[number], next_use, stays)

    def _on_changed(self, number: int) -> HandleChanged:
        return HandleChanged(self._handles[number])


def describe(action: Action) -> Entry:
    """Return an action as a plain tuple, which is equal for equal actions of different machines."""
    match action:
        case RunTask(worker, task):
            return ("run", worker, task.id, tuple((replica.node, replica.offset) for replica in task.replicas))
        case CopyTile(source, target):
            return ("copy", source.handle.id, source.node, source.offset, target.node, target.offset)
        case MoveTile(node, source_offset, offset, nbytes):
            return ("move", node, source_offset, offset, nbytes)
        case DiscardExtent(node, offset, nbytes):
            return ("discard", node, offset, nbytes)
        case ReportFailure(task, error):
            return ("failure", task.id, str(error))
        case ReportStepDone(_, number):
            return ("step done", number)
        case ForgetObject(node, handle):
            return ("forget", node, handle.id)
        case _:
            assert_never(action)


def _plain(task: Task) -> tuple[tuple[int, str], ...]:
    return tuple((handle.id, mode) for handle, mode in task.accesses)


def _dump_schedule(use_schedule: UseSchedule) -> _Schedule:
    return tuple(use_schedule.positions), tuple(use_schedule.modes), tuple(sorted(use_schedule.leaves))


def _load_schedule(schedule: _Schedule, replay: Replay | None = None) -> UseSchedule:
    positions, modes, leaves = schedule
    return UseSchedule(positions, modes, frozenset(leaves), replay)
