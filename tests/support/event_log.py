"""Event logs: everything that a machine was told, which another machine can be told once more. It must answer with the same actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, assert_never

from scheduler.core.events import (
    Action,
    CopyFailed,
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    MoveTile,
    ReportFailure,
    ReportStepDone,
    RunTask,
    StepStarted,
)
from scheduler.core.records import HandleRecord, NodeId, Replay
from scheduler.testing import FakeDriver, Wrong

Described = tuple[object, ...]


class EventLog:
    """The events of a machine over copies of all records, taken when an event first mentions them. It can be replayed once."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self._events: list[Callable[[], Event]] = []

    def add(self, event: Event) -> None:
        """Append an event; to be called before the machine handles it."""
        match event:
            case CopyFinished(source, target):
                self._events.append(self._of_copy(CopyFinished, source.handle, source.node, target.node))
            case CopyFailed(source, target, error):
                self._events.append(self._of_copy(CopyFailed, source.handle, source.node, target.node, error))
            case StepStarted(replay):
                self._events.append(self._of_step(replay))
            case _:
                copy = deepcopy(event, self._copies)
                self._events.append(lambda: copy)

    def _of_copy(
        self, kind: Callable[..., Event], handle: HandleRecord, source: NodeId, target: NodeId, *error: BaseException
    ) -> Callable[[], Event]:
        """Return a function for the event of a copy, whose replicas the other machine creates itself."""
        replicas = deepcopy(handle, self._copies).replicas
        return lambda: kind(replicas[source], replicas[target], *error)

    def _of_step(self, replay: Replay) -> Callable[[], Event]:
        copy, number, first_order = deepcopy(replay, self._copies), replay.number, replay.first_order

        def event() -> Event:
            copy.number, copy.first_order = number, first_order
            return StepStarted(copy)

        return event

    def events(self) -> Iterator[Event]:
        """Return the events in order."""
        return (event() for event in self._events)


class LoggedDriver(FakeDriver):
    """A driver that logs its events; the arguments are those of `FakeDriver`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.log = EventLog()
        self.actions: list[Described] = []
        super().__init__(*arguments, **options)

    def advance(self, event: Event) -> list[Action]:
        """Log the event and the machine's actions."""
        self.log.add(event)
        actions = super().advance(event)
        self.actions += map(describe, actions)
        return actions

    def check_log(self) -> None:
        """Check that a new machine answers the logged events with the same actions; afterwards the log is used up.

        Raises:
            Wrong: an action differs.
        """
        machine = self.fresh_machine()
        actions = [describe(action) for event in self.log.events() for action in machine.handle(event)]
        if actions != self.actions:
            position = next((i for i, (one, other) in enumerate(zip(actions, self.actions, strict=False)) if one != other), None)
            raise Wrong(f"{len(actions)} actions instead of {len(self.actions)}; the first of them that differs is number {position}")


def describe(action: Action) -> Described:
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
        case _:
            assert_never(action)
