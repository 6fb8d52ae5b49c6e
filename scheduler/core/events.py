"""What the world tells the machine (past tense) and what the machine asks of the world (imperative).

Plain mutable slots classes: creating a frozen dataclass costs three times as much, and these are made once per task.
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
    """The kernel of `task` returned."""

    task: Task


@dataclass(slots=True, eq=False)
class TaskFailed:
    """The kernel of `task` raised `error`; where it has not begun, what it should have written is as it was."""

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
    """The bytes of `source` could not be read, or not be written to `target`, because of `error`."""

    source: Replica
    target: Replica
    error: BaseException


@dataclass(slots=True, eq=False)
class WorkerJoined:
    """A worker is ready for tasks."""

    worker: Worker


@dataclass(slots=True, eq=False)
class HandleReleased:
    """No program references the handle any more."""

    handle: HandleRecord


@dataclass(slots=True, eq=False)
class SourceAttached:
    """From now on the data of `handle`, which no task uses, is what lies at `source` in a file; readers need `scratch` bytes of host memory."""

    handle: HandleRecord
    source: object
    scratch: int = 0


@dataclass(slots=True, eq=False)
class HandleAdopted:
    """The data of `handle`, whose size was not known before, is in host memory, in a buffer of its own: counted from now on.

    `next_use` is the order of the task that uses it next; `stays` says that it never leaves host memory, because the program holds it.
    """

    handle: HandleRecord
    next_use: int = 0
    stays: bool = False


@dataclass(slots=True, eq=False)
class HandleChanged:
    """A task that was to read adopted data has changed it in place: what was written of it to the tier, or is on its way there, is out of date."""

    handle: HandleRecord


Event = (
    TaskSubmitted
    | StepStarted
    | TaskFinished
    | TaskFailed
    | CopyFinished
    | CopyFailed
    | WorkerJoined
    | HandleReleased
    | SourceAttached
    | HandleAdopted
    | HandleChanged
)


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
    """Move `nbytes` bytes within a node now, before anything else happens; source and target may overlap."""

    node: NodeId
    source_offset: int
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class DiscardExtent:
    """Give the file system back `nbytes` bytes of a storage node's file; nothing will read them."""

    node: NodeId
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class ReportFailure:
    """`task` failed with `error`, or was cancelled because of it."""

    task: Task
    error: BaseException


@dataclass(slots=True, eq=False)
class ReportStepDone:
    """Every task of the replay is done or cancelled."""

    replay: Replay
    number: int


@dataclass(slots=True, eq=False)
class ForgetObject:
    """Let go of what holds the bytes of `handle` on a counted node: they are not counted any more."""

    node: NodeId
    handle: HandleRecord


Action = RunTask | CopyTile | MoveTile | DiscardExtent | ReportFailure | ReportStepDone | ForgetObject
