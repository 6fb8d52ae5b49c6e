"""Stories: the latest events, or those that concern one task or handle, as text for errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from .dispatch import Dispatch
from .errors import Stalled
from .events import (
    CopyFailed,
    CopyFinished,
    Event,
    HandleReleased,
    SourceAttached,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from .records import HandleRecord, NodeId, Replica, Task

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
    elif isinstance(event, HandleReleased | SourceAttached):
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


def standstill(dispatch: Dispatch, copying: Mapping[Replica, object], name_of: Callable[[NodeId], str], num_unfinished: int) -> str:
    """Return which tasks run, which wait, and why, as text; at most `LENGTH` lines of each kind.

    Args:
        copying: copies in progress by the replica that they write.
        name_of: function that returns the name of a memory node.
        num_unfinished: number of unfinished tasks.
    """
    running = [f"{task!r} on worker {worker.id} ({worker.kind})" for worker in dispatch.joined if (task := worker.running) is not None]
    running += [f"{task!r} in the program" for task in dispatch.host.assigned if task.state == "running"]
    copies = [f"{target.handle!r} to {name_of(target.node)}" for target in copying]
    waiting = [f"{task!r} waits for {cause}" for task, cause in _waiting(dispatch, name_of)]
    if dispatch.num_ready:
        waiting.append(f"{dispatch.num_ready} ready tasks wait for a worker that may take them")
    lines = [f"{num_unfinished} tasks are unfinished"]
    for title, entries in (("running", running), ("being copied", copies), ("waiting", waiting)):
        lines += [f"{title}:", *(f"  {entry}" for entry in entries[:LENGTH] or ["nothing"])]
        if len(entries) > LENGTH:
            lines.append(f"  and {len(entries) - LENGTH} more")
    return "\n".join(lines)


def _waiting(dispatch: Dispatch, name_of: Callable[[NodeId], str]) -> Iterator[tuple[Task, str]]:
    """Yield the tasks that hold or ask for memory, those held back, and those that wait for one of them or for a running one, with the cause."""
    admitted, blocked = list(dispatch.admitted()), list(chain.from_iterable(dispatch.blocked))
    held_back = [task for _, _, task, _ in dispatch.throttled]
    for task in admitted:
        if task.state == "fetching":
            arriving = [repr(replica.handle) for replica in task.replicas if replica.arriving]
            yield task, f"the copy of {' and '.join(arriving) or 'its data'} to {name_of(task.node)}"
        elif task.state == "staged":
            yield task, f"worker {task.worker}, which runs another task"
    for task in blocked:
        yield task, f"{sum(handle.spec.size for handle, _ in task.accesses):,} B in {name_of(task.node)}"
    for task in held_back:
        yield task, "earlier tasks of the planned order"
    for task in dispatch.turns:
        if task.state == "ready" and task not in held_back:
            yield task, f"its turn after {dispatch.turns[0]!r}"
    causes: dict[Task, list[Task]] = {}
    for before in (*admitted, *blocked, *held_back):
        for after in dict.fromkeys(chain(before.successors, before.late_successors)):
            causes.setdefault(after, []).append(before)
    for task, befores in causes.items():
        yield task, " and ".join(map(repr, befores))
