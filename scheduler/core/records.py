"""Plain records that the whole core shares: access modes, handles, replicas, tasks, workers, nodes, and their ids.

Records hold state and have no behaviour except printing themselves. Nothing here knows threads, clocks, arrays or devices. The fields ``view`` and
``codelet`` are opaque to the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, NewType

NodeId = NewType("NodeId", int)
WorkerId = NewType("WorkerId", int)
HandleId = NewType("HandleId", int)
TaskId = NewType("TaskId", int)

Mode = Literal["R", "W", "RW", "SCRATCH", "REDUX"]
R: Final = "R"
W: Final = "W"
RW: Final = "RW"
SCRATCH: Final = "SCRATCH"
REDUX: Final = "REDUX"

Kind = Literal["persistent", "temporary", "input"]
DataClass = Literal["parameters", "gradients", "optimizer", "activations", "scratch", "data"]
DATA_CLASSES: Final[tuple[DataClass, ...]] = ("parameters", "gradients", "optimizer", "activations", "scratch", "data")
WorkerKind = Literal["cpu", "cuda", "sim", "host"]
ReplicaState = Literal["reserved", "shared", "modified", "scratch"]
TaskState = Literal["waiting", "ready", "blocked", "fetching", "staged", "running", "done", "failed", "cancelled"]

PROGRAM: Final = "program"
"""Name of the tasks in which the program itself holds data."""

RAM: Final = NodeId(0)
"""The node of host memory, where CPU workers compute and the program acquires data."""

NEWEST: Final = -1
"""A kernel mark that means: the last kernel of the device that used these bytes is unknown, so it may be the newest one."""

FILE: Final = NodeId(1 << 16)
"""The node of the files that data comes from. It is read-only, has no budget or extents, and is not among a machine's memory nodes. Its id is the
largest, because copies come from the lowest node with valid data: a file is read only if the data is nowhere else."""

FILE_NAME: Final = "file"
"""Name of the node `FILE` in messages."""

MOST_SHOWN: Final = 40
"""Number of accesses of a task that messages name."""

ANY: Final = 1 << 60
"""A window that holds no task back."""

HOST: Final = WorkerId(-1)
"""The program itself, as the worker of its acquisitions; it runs any number of them at a time."""

SKIPPED: Final = 2
"""Value in `Replay.done` of a conditional task whose flag was 0."""

NEW: Final = TaskId(-1)
"""Id of a task that has not been submitted yet."""


@dataclass(slots=True, eq=False)
class Replica:
    """The bytes of one handle on one node.

    Attributes:
        offset: start of the extent in the node's memory, bytes.
        state: "reserved": no valid data yet; "shared": equal to every other valid replica; "modified": the only valid replica; "scratch": private
            working memory of one task, which its handle does not list.
        pins: number of tasks and copies that use the extent now; a pinned replica is never evicted.
        outgoing: number of copies out of it that are in progress; each is one of its pins.
        arriving: whether a copy into it is in progress.
        is_backing: whether it stays as long as its handle holds data anywhere: the extent on the last tier, or the extent in a file.
        is_ahead: whether it is the backing replica of a temporary that the planned order would not have created yet.
        since, last_use: event count of the machine when it was installed, and at its last use.
        kernel_mark: number of the mark that follows the last kernel of the node's device that used the extent, set by its driver; else `NEWEST`.
    """

    handle: HandleRecord
    node: NodeId
    offset: int
    state: ReplicaState = "reserved"
    pins: int = 0
    outgoing: int = 0
    arriving: bool = False
    is_backing: bool = False
    is_ahead: bool = False
    since: int = 0
    last_use: int = 0
    kernel_mark: int = NEWEST
    view: object | None = None


@dataclass(slots=True, eq=False)
class UseSchedule:
    """The uses of a handle in a recorded step, for eviction and prefetching.

    Attributes:
        positions: positions of the tasks that use the handle, ascending.
        modes: access mode of each of these tasks.
        is_conditional: whether all of these tasks are conditional.
        leaves: those of `positions` before which the handle is expected to leave the memory where tasks run, if known.
        replay: the replay that owns the handle; None for a handle that outlives replays, whose uses recur in the next one.
    """

    positions: Sequence[int]
    modes: Sequence[Mode]
    leaves: Set[int] = frozenset()
    replay: Replay | None = None
    is_conditional: bool = False


@dataclass(slots=True, eq=False)
class HandleSpec:
    """The static facts of a piece of data, which a handle of the program, its record and the instances of a recorded step share.

    Attributes:
        nbytes: exact size in bytes.
        size: size in the ledger: `nbytes` rounded up to pages.
        view: opaque; creates the argument of a kernel.
        name: name in reports and messages.
        kind: lifetime of the data: persistent, input or temporary.
        data_class: class of the data in reports of traffic.
    """

    nbytes: int
    size: int
    view: object
    name: str
    kind: Kind
    data_class: DataClass


@dataclass(slots=True, eq=False)
class HandleRecord:
    """One piece of data.

    Attributes:
        replicas: replica on each node that holds bytes for it.
        last_writer, readers: unfinished tasks that the next access must wait for.
        num_uses: number of accesses of unfinished tasks and of copies in progress.
        released: whether the program has no reference to it any more, so that it dies with its last use.
        flags: flags that the last task with `Condition.flags` wrote to it; None before.
        use_rate: recent share of its conditional uses that took place, the latest ones weighing most; negative before the first.
        lost: reason why its data does not exist any more, else None; `root` is the failure that started the chain of losses.
        use_schedule: its uses in the recorded step that used it last.
        preferred_offset: its offset where a task last freed bytes for it, used again if free, so that replays find the same addresses; -1 for none.
    """

    id: HandleId
    spec: HandleSpec
    replicas: dict[NodeId, Replica] = field(default_factory=dict)
    last_writer: Task | None = None
    readers: dict[Task, None] = field(default_factory=dict)
    num_uses: int = 0
    released: bool = False
    flags: bytes | None = None
    use_rate: float = -1.0
    lost: str | None = None
    root: str | None = None
    use_schedule: UseSchedule | None = None
    preferred_offset: int = -1

    def __repr__(self) -> str:
        return f"handle {self.id} {self.spec.name!r} ({self.spec.nbytes} B)"


class Condition(NamedTuple):
    """The part of a task in conditional execution: the flag on which it depends, or the flags that it writes.

    A task whose flag is 0 is skipped: it ends without memory or a worker as soon as it would be ready. Data that it accesses as RW keeps its value,
    and data that it accesses as W is lost.

    Attributes:
        guard: position of the access, of mode R, that has the flags; -1 for a task that always runs.
        number: number of the task's flag.
        share: expected fraction of executions in which the flag is set, for virtual time, for groups of tasks, and for eviction before the first use.
        flags: position of the access, of mode W or RW, to which the task writes flags, one byte each; -1 for none.
    """

    guard: int = -1
    number: int = 0
    share: float = 1.0
    flags: int = -1


@dataclass(slots=True, eq=False)
class TaskSpec:
    """The static facts of a task: its computation, its data, and who may run it. The two instances of a recorded task share them.

    Attributes:
        codelet: opaque; only `name` and `kinds` matter to the core.
        accesses: data as submitted or recorded; an instance of a recorded task has `Task.accesses` of its own.
        pin: the only worker that may run it, if the program has placed it by hand.
        condition: None for a task that always runs and writes no flags.
        model_key: codelet name and footprint, once a performance model has computed them.
        num_clones: number of recomputing tasks in a recorded task: of itself, or of the tasks fused into it, those that recompute results of other
            tasks of the step, at least in part.
        clone_share: fraction of the task's time that recomputation takes, as far as it is known.
        aside: whether a recorded task runs in host memory, on workers that stand aside.
        counts_skips: whether the kernel for CPUs returns a number of skipped tasks: of those fused into the task, the ones whose flag is 0.
        shared_seconds: duration of a recorded task if all workers shared it; known only where workers of several kinds share tasks, else 0.
        path_seconds: sum of `shared_seconds` along the longest path from the task to the end of the step, including the task.
    """

    codelet: object
    name: str
    kinds: tuple[WorkerKind, ...]
    accesses: tuple[tuple[HandleRecord, Mode], ...]
    constants: Mapping[str, object]
    priority: int = 0
    pin: WorkerId | None = None
    condition: Condition | None = None
    model_key: tuple[str, int] | None = None
    num_clones: int = 0
    clone_share: float = 0.0
    aside: bool = False
    counts_skips: bool = False
    shared_seconds: float = 0.0
    path_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Expected fraction of executions in which the task is not skipped."""
        return 1.0 if self.condition is None else self.condition.share


@dataclass(slots=True, eq=False)
class Task:
    """One execution of a codelet; a recorded task has two, each of which runs in every second replay.

    Attributes:
        accesses: (handle, mode) of each argument of the kernel.
        order: position in the order of submission, which decides all ties; for a recorded task, set anew in every replay.
        num_waiting: number of unfinished predecessors (an edge counts once for each time it was added).
        successors: tasks that wait for this one; for a recorded task, those of the same replay.
        late_successors: tasks outside the replay that wait for this recorded task; a list once there is one.
        replicas: one replica per access while the task is admitted.
        num_arriving: number of inputs on their way to `node`.
        step: the replay of a recorded task, else None.
        position: position of a recorded task in the step's planned order.
        partition: partition of the step that a recorded task belongs to, which runs on one device; -1 for none.
        num_predecessors: value of `num_waiting` at the start of every replay.
        is_exit: whether a handle may remember it as an access, so that it must be unlinked when it ends.
        token: the waiter of the program, if the program waits for the task to run.
    """

    id: TaskId
    spec: TaskSpec
    accesses: tuple[tuple[HandleRecord, Mode], ...]
    order: int = 0
    state: TaskState = "waiting"
    num_waiting: int = 0
    successors: list[Task] = field(default_factory=list)
    late_successors: list[Task] | tuple[()] = ()
    replicas: Sequence[Replica] = ()
    num_arriving: int = 0
    worker: WorkerId = HOST
    node: NodeId = RAM
    step: Replay | None = None
    position: int = 0
    partition: int = -1
    num_predecessors: int = 0
    is_exit: bool = True
    token: object | None = None

    @property
    def planned_node(self) -> NodeId | None:
        """The node that the plan chose for the task, else None; policies that weigh data respect it."""
        step = self.step
        return step.partition_nodes[self.partition] if step is not None and step.partition_nodes and self.partition >= 0 else None

    def __repr__(self) -> str:
        return f"task {self.id} {self.spec.name}({data_of(self)})"


def data_of(task: Task) -> str:
    """Return the data of a task for messages: at most `MOST_SHOWN` accesses, since fused tasks may use the data of a whole step."""
    shown = ", ".join(f"{mode} {handle.spec.name or handle.id}" for handle, mode in task.accesses[:MOST_SHOWN])
    return shown if len(task.accesses) <= MOST_SHOWN else f"{shown} and {len(task.accesses) - MOST_SHOWN} more"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The static facts of the replays of a recorded step, which its two instances share.

    Attributes:
        makes: for each position, the bytes of temporaries that its task is the first to write.
        passing: for each position, the bytes of temporaries that exist while its task runs in the planned order, and of scratch if tasks run on the
            last tier.
        peaks: for each position and the end, the largest value of `passing` from there on.
        window: tasks of the replay that are at least this far beyond the oldest unfinished one are held back from the policy.
        partitions: positions of the tasks of each partition of the step, see `Task.planned_node`.
        returns: for each partition, or once without partitions, pairs (start, position) in planned order: the task at `position` uses data that has
            left its worker's memory, and from position `start` on that memory is expected to have free bytes for the data.
        has_pins: whether any of its tasks is pinned.
        has_aside: whether any of its tasks runs aside.
    """

    makes: Sequence[int] = ()
    passing: Sequence[int] = ()
    peaks: Sequence[int] = (0,)
    window: int = ANY
    partitions: Sequence[Sequence[int]] = ()
    returns: Sequence[Sequence[tuple[int, int]]] = ()
    has_pins: bool = False
    has_aside: bool = False


@dataclass(slots=True, eq=False)
class Replay:
    """One of the two instances of a recorded step, and the state of its current replay.

    Attributes:
        owned: handles that are created and die within a replay of this instance, with the number of their accesses in a replay.
        partition_nodes: node of each partition; empty if the workers do not match the partitions.
        heads: for each partition, an index into its positions before which all tasks have ended.
        returned: for each entry of `ReplayPlan.returns`, the number of its pairs that this replay has handled.
        first_order: `order` of the first task of this replay.
        done: for each position, whether its task has ended in this replay: 0 if not, `SKIPPED` if it was skipped, else 1.
        pending: for each position, 1 until a worker takes its task, or the task ends without one (`dispatch.leave_pending`).
        pending_seconds: sum of `TaskSpec.shared_seconds` over the pending tasks.
        frontier: first position whose task has not ended.
        number: number of the replay, from 0.
        num_unfinished: number of tasks of this replay that are neither done nor cancelled.
        failure: first error of a task of this replay.
        updated: once a task of this replay has failed or was cancelled, the use of each handle that the step reads before it writes it.
        stale: handles of `updated` whose first write in this replay was cancelled, with the reason. They are lost within the replay, and unchanged
            outside it.
        changed_nothing: whether a replay that has failed and ended left all data that it was to update unchanged.
        turns: tasks of kind host, which are admitted in this order (`Dispatch.take_turns`).
    """

    plan: ReplayPlan
    tasks: list[Task]
    roots: list[Task]
    owned: list[tuple[HandleRecord, int]]
    shared: list[SharedUse]
    partition_nodes: Sequence[NodeId] = ()
    turns: Sequence[Task] = ()
    heads: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    first_order: int = 0
    done: bytearray = field(default_factory=bytearray)
    pending: bytearray = field(default_factory=bytearray)
    pending_seconds: float = 0.0
    frontier: int = 0
    number: int = 0
    num_unfinished: int = 0
    failure: BaseException | None = None
    updated: Mapping[HandleRecord, SharedUse] = field(default_factory=dict)
    stale: dict[HandleRecord, str] = field(default_factory=dict)
    changed_nothing: bool = False


@dataclass(slots=True, eq=False)
class SharedUse:
    """The use of a handle that outlives replays in a recorded step.

    Attributes:
        first_readers: tasks that read it before the step writes it.
        first_writer, last_writer: first and last task that write it.
        needs_data: whether the first access reads the value from before the step.
        last_readers: tasks that read it after the last write.
        num_uses: number of accesses by all tasks of the step.
        use_schedule: positions of its uses.
    """

    handle: HandleRecord
    first_readers: list[Task]
    first_writer: Task | None
    last_writer: Task | None
    last_readers: list[Task]
    num_uses: int
    needs_data: bool
    use_schedule: UseSchedule


@dataclass(slots=True, eq=False)
class Worker:
    """A worker: it runs one task at a time, and holds at most `depth` admitted ones.

    Attributes:
        aside: whether it only gets tasks that devices may not run; its memory does not count as one where the tasks of a step run.
    """

    id: WorkerId
    kind: WorkerKind
    node: NodeId
    depth: int
    aside: bool = False
    assigned: list[Task] = field(default_factory=list)
    running: Task | None = None
