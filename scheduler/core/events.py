"""Events, which a driver reports to the machine (past tense), and actions, which the machine requests from its driver (imperative).

They are mutable classes with slots, because a few are created for every task and creating a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from .records import HandleRecord, NodeId, Replay, Replica, Task, Worker, WorkerId


@dataclass(slots=True, eq=False)
class TaskSubmitted:
    """A program submitted `task`; its accesses come after all earlier ones."""

    task: Task


@dataclass(slots=True, eq=False)
class StepStarted:
    """A recorded step begins another replay."""

    replay: Replay


@dataclass(slots=True, eq=False)
class TaskFinished:
    """The kernel of `task` returned. A task that writes flags has written `flags`, one byte each; None if their values are unknown."""

    task: Task
    flags: bytes | None = None


@dataclass(slots=True, eq=False)
class TaskFailed:
    """The kernel of `task` raised `error`. If the kernel has not begun, the data that it was to write is unchanged."""

    task: Task
    error: BaseException
    has_begun: bool = True


@dataclass(slots=True, eq=False)
class CopyFinished:
    """The bytes of `source` are in `target`."""

    source: Replica
    target: Replica


@dataclass(slots=True, eq=False)
class CopyFailed:
    """The bytes of `source` could not be read, or could not be written to `target`, because of `error`."""

    source: Replica
    target: Replica
    error: BaseException


@dataclass(slots=True, eq=False)
class WorkerJoined:
    """A worker is ready for tasks."""

    worker: Worker


@dataclass(slots=True, eq=False)
class HandleReleased:
    """The program dropped its last reference to the handle."""

    handle: HandleRecord


@dataclass(slots=True, eq=False)
class SourceAttached:
    """The data of `handle`, which no task uses, now lies at `source` in a file; readers need `scratch` bytes of host memory."""

    handle: HandleRecord
    source: object
    scratch: int = 0


Event = TaskSubmitted | StepStarted | TaskFinished | TaskFailed | CopyFinished | CopyFailed | WorkerJoined | HandleReleased | SourceAttached


@dataclass(slots=True, eq=False)
class RunTask:
    """Run `task` on `worker`: its replicas are in place."""

    worker: WorkerId
    task: Task


@dataclass(slots=True, eq=False)
class CopyTile:
    """Copy the bytes of `source` over `target`, another replica of the same handle."""

    source: Replica
    target: Replica


@dataclass(slots=True, eq=False)
class MoveTile:
    """Move `nbytes` bytes within a node before any other action there; source and target may overlap."""

    node: NodeId
    source_offset: int
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class DiscardExtent:
    """Return `nbytes` bytes of a storage node's file to the file system; they will never be read."""

    node: NodeId
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class ReportFailure:
    """Report that `task` failed with `error`, or was cancelled because of it."""

    task: Task
    error: BaseException


@dataclass(slots=True, eq=False)
class ReportStepDone:
    """Report that every task of the replay is done or cancelled."""

    replay: Replay
    number: int


Action = RunTask | CopyTile | MoveTile | DiscardExtent | ReportFailure | ReportStepDone
