"""Stories: the latest events, or those that concern one task or handle, as text for errors."""

from __future__ import annotations

from collections.abc import Iterable

from .dispatch import Dispatch
from .errors import Stalled
from .events import (
    CopyFailed,
    CopyFinished,
    Event,
    HandleAdopted,
    HandleChanged,
    HandleReleased,
    SourceAttached,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from .records import HandleRecord, Task

LENGTH = 20
"""Largest number of events in a story."""


def tell(history: Iterable[Event], subject: Task | HandleRecord | None = None) -> str:
    """Return the latest events that concern `subject` (all events if None), oldest first, as text."""
    lines = [line for event in history if (line := _line(event, subject)) is not None]
    about = "lately" if subject is None else f"story of {subject!r}"
    return "\n  ".join([f"{about}:", *(lines[-LENGTH:] or ["nothing is remembered"])])


def _line(event: Event, subject: Task | HandleRecord | None) -> str | None:
    if isinstance(event, TaskSubmitted | TaskFinished | TaskFailed):
        task = event.task
        if subject is None or subject is task or any(handle is subject for handle, _ in task.accesses):
            return f"{type(event).__name__}: {task!r} on worker {task.worker}"
    elif isinstance(event, CopyFinished):
        if subject is None or subject is event.source.handle:
            return f"CopyFinished: {event.source.handle!r} from node {event.source.node} to node {event.target.node}"
    elif isinstance(event, CopyFailed):
        if subject is None or subject is event.source.handle:
            return f"CopyFailed: {event.source.handle!r} from node {event.source.node} to node {event.target.node}: {event.error}"
    elif isinstance(event, HandleReleased | SourceAttached | HandleAdopted | HandleChanged):
        if subject is None or subject is event.handle:
            return f"{type(event).__name__}: {event.handle!r}"
    elif isinstance(event, StepStarted):
        return f"StepStarted: replay {event.replay.number} of {len(event.replay.tasks)} tasks"
    elif isinstance(event, WorkerJoined) and subject is None:
        return f"WorkerJoined: worker {event.worker.id} ({event.worker.kind}) on node {event.worker.node}"
    return None


def stalled(history: Iterable[Event], dispatch: Dispatch, num_unfinished: int) -> Stalled:
    """Return the error of a machine whose tasks wait although nothing is in progress."""
    kinds = sorted({worker.kind for worker in dispatch.joined})
    return Stalled(num_unfinished, dispatch.num_ready, kinds, tell(history))
