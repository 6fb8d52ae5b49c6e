"""Plain records the whole core shares: access modes, handles, replicas, tasks, workers, nodes, and the ids that name them.

Rules: records hold state and no behaviour beyond printing themselves; nothing here knows threads, clocks, arrays or devices. What a record
calls ``view`` or ``codelet`` is opaque to the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal, NewType

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

RAM: Final = NodeId(0)
"""The node of host memory, where CPU workers compute and the program borrows data."""

NEWEST: Final = -1
"""In the place of a kernel's mark: which kernel of a device used some bytes last is not known; it may be the newest one."""

FILE: Final = NodeId(1 << 16)
"""The node of the files that data comes from: read only, without budget or extents, and not among a machine's memory nodes. Above all of them,
because data is read from there when it is nowhere else."""

FILE_NAME: Final = "file"
"""What users call it."""

MOST_SHOWN: Final = 40
"""Accesses of a task that messages name."""

ANY: Final = 1 << 60
"""A window that holds nothing back."""

HOST: Final = WorkerId(-1)
"""The program itself, as the worker of its acquisitions; it runs any number of them at a time."""


@dataclass(slots=True, eq=False)
class Replica:
    """One handle's bytes on one node.

    Attributes:
        offset: where the extent begins in the node's memory, bytes.
        state: "reserved" holds no valid data yet; "shared" equals every other valid replica; "modified" is the only valid one;
            "scratch" is one task's private working memory, which its handle does not list.
        pins: tasks and copies that use the extent now; a pinned replica is never evicted.
        outgoing: copies out of it that are under way; each is one of its pins.
        arriving: whether a copy into it is under way.
        is_backing: whether it stays for as long as its handle holds data anywhere: the extent on the last tier, or the extent in a file.
        is_ahead: whether it is the backing replica of a temporary that the planned order would not have made yet.
        since, last_use: the machine's event count when it was installed and at the last use.
        kernel_mark: number of the mark behind the last kernel of the node's device that used the extent, set by its driver; else `NEWEST`.
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
    """When a recorded step uses a handle: what eviction and prefetching go by.

    Attributes:
        positions: of the tasks that use it, rising.
        modes: for each, what the task does with the handle.
        leaves: those of `positions` before which it is expected to leave the memory where tasks run, if that is known.
        replay: the replay that owns the handle; None for a handle that outlives replays, whose uses come again in the next one.
    """

    positions: Sequence[int]
    modes: Sequence[Mode]
    leaves: Set[int] = frozenset()
    replay: Replay | None = None


@dataclass(slots=True, eq=False)
class HandleRecord:
    """One piece of data.

    Attributes:
        nbytes: exact size; `size` is what the ledger counts (rounded up).
        replicas: the nodes that hold bytes for it.
        last_writer, readers: unfinished tasks that the next access must wait for.
        num_uses: accesses of unfinished tasks, plus copies under way.
        released: no program references it: it dies with its last use.
        lost: why its data does not exist any more, if so; `root` is the failure where that began.
        use_schedule: when the recorded step that used it last uses it.
        preferred_offset: offset that it had where a task last freed bytes for it: taken again if it is free, so that replays find the same addresses.
        next_use: order of the plain task that uses it next, where the submitter knows it.
    """

    id: HandleId
    nbytes: int
    size: int
    view: object
    name: str
    kind: Kind
    data_class: DataClass
    replicas: dict[NodeId, Replica] = field(default_factory=dict)
    last_writer: Task | None = None
    readers: dict[Task, None] = field(default_factory=dict)
    num_uses: int = 0
    released: bool = False
    lost: str | None = None
    root: str | None = None
    use_schedule: UseSchedule | None = None
    preferred_offset: int = -1
    next_use: int | None = None

    def __repr__(self) -> str:
        return f"handle {self.id} {self.name!r} ({self.nbytes} B)"


@dataclass(slots=True, eq=False)
class Task:
    """One execution of a codelet.

    Attributes:
        codelet: opaque; only `name` and `kinds` matter to the core.
        order: position in the order of submission; decides ties everywhere; of a recorded task, set anew in every replay.
        num_waiting: unfinished predecessors (an edge counts once each time it was added).
        successors: tasks waiting for this one; of a recorded task, those of the same replay.
        late_successors: of a recorded task, tasks outside its replay.
        replicas: one per access while admitted.
        num_arriving: inputs still on their way to `node`.
        step: the replay it belongs to.
        position: of a recorded task, its position in the step's planned order.
        partition: of a recorded task, the partition of the step, which belongs on one device; -1 for none.
        pin: the only worker that may run it, if the program has placed it by hand.
        aside: of a recorded task, whether it runs in host memory by workers that stand aside.
        num_predecessors: what `num_waiting` starts from in every replay.
        is_exit: whether a handle may remember it as an access, so that it must be unlinked when it ends.
        token: the waiter of the program, where the program waits for the task to run.
        model_key: codelet name and footprint, once a performance model has asked for them.
        next_uses: of a plain task, for each access the order of the plain task that uses the handle after this one, where the submitter knows it.
        num_clones: of a recorded task, how many it stands for, itself or those that are fused, that make again, if only in part, what others of the
            step have made.
        clone_share: their share of its time, as far as that is known.
    """

    id: TaskId
    codelet: object
    name: str
    kinds: tuple[WorkerKind, ...]
    accesses: tuple[tuple[HandleRecord, Mode], ...]
    constants: Mapping[str, object]
    priority: int = 0
    order: int = 0
    state: TaskState = "waiting"
    num_waiting: int = 0
    successors: list[Task] = field(default_factory=list)
    late_successors: list[Task] = field(default_factory=list)
    replicas: Sequence[Replica] = ()
    num_arriving: int = 0
    worker: WorkerId = HOST
    node: NodeId = RAM
    step: Replay | None = None
    position: int = 0
    partition: int = -1
    pin: WorkerId | None = None
    aside: bool = False
    num_predecessors: int = 0
    is_exit: bool = True
    token: object | None = None
    model_key: tuple[str, int] | None = None
    next_uses: Sequence[int] = ()
    num_clones: int = 0
    clone_share: float = 0.0

    @property
    def planned_node(self) -> NodeId | None:
        """The node where the plan wants the task, if it says so: policies that weigh data keep to it."""
        step = self.step
        return step.partition_nodes[self.partition] if step is not None and step.partition_nodes and self.partition >= 0 else None

    def __repr__(self) -> str:
        return f"task {self.id} {self.name}({data_of(self)})"


def data_of(task: Task) -> str:
    """The data of a task, for messages: of fused tasks, which may use that of a whole step, the beginning."""
    shown = ", ".join(f"{mode} {handle.name or handle.id}" for handle, mode in task.accesses[:MOST_SHOWN])
    return shown if len(task.accesses) <= MOST_SHOWN else f"{shown} and {len(task.accesses) - MOST_SHOWN} more"


@dataclass(slots=True, eq=False)
class Replay:
    """One of the two instances of a recorded step, and the replay it carries at present.

    Attributes:
        number: of the replay, from 0.
        num_unfinished: tasks of this replay that are neither done nor cancelled.
        failure: the first error of a task of this replay.
        updated: once a task of this replay has not run to its end, the first writer of each handle that the step reads before it writes it.
        behind: those of them that have missed their first write in this replay, and why: to its tasks they are lost, to all others they hold what
            they held before it.
        changed_nothing: of a replay that has failed and ended, whether all data that it was to update is as it was before.
        owned: handles that live and die within a replay of this instance, with the number of accesses a replay makes.
        window: its tasks this far beyond the oldest unfinished one are held back from the policy.
        partitions: the positions of each partition of the step, see `Task.planned_node`.
        partition_nodes: the node where each partition belongs; empty where the workers do not match the partitions.
        has_pins: whether any of its tasks is pinned.
        returns: of each partition, or of all tasks where there are none: (from, position) of the tasks that miss data which has left the memory
            where they run, in planned order; from that position on nothing else is expected to need the bytes for it.
        has_aside: whether any of its tasks runs aside.
        heads: of each partition, an index into its positions before which all tasks have ended.
        makes: for each position, the bytes of temporaries its task is the first to write.
        passing: for each position, the bytes of temporaries that exist while its task runs in the planned order, and of scratch where tasks run on
            the last tier.
        peaks: for each position and the end, the most of these bytes from there on.
        first_order: `order` of the first task of this replay.
        done: per position, whether its task has ended in this replay.
        frontier: the first position whose task has not.
    """

    tasks: list[Task]
    roots: list[Task]
    owned: list[tuple[HandleRecord, int]]
    shared: list[SharedUse]
    makes: Sequence[int] = ()
    passing: Sequence[int] = ()
    peaks: Sequence[int] = (0,)
    window: int = ANY
    partitions: Sequence[Sequence[int]] = ()
    partition_nodes: Sequence[NodeId] = ()
    has_pins: bool = False
    returns: Sequence[Sequence[tuple[int, int]]] = ()
    has_aside: bool = False
    heads: list[int] = field(default_factory=list)
    first_order: int = 0
    done: bytearray = field(default_factory=bytearray)
    frontier: int = 0
    number: int = 0
    num_unfinished: int = 0
    failure: BaseException | None = None
    updated: Mapping[HandleRecord, Task | None] = field(default_factory=dict)
    behind: dict[HandleRecord, str] = field(default_factory=dict)
    changed_nothing: bool = False


@dataclass(slots=True, eq=False)
class SharedUse:
    """How a recorded step uses a handle that outlives a replay.

    Attributes:
        first_readers: tasks that read it before the step writes it.
        first_writer, last_writer: the first and last task that write it.
        needs_data: whether the first access reads what was there before the step.
        last_readers: tasks that read it after the last write.
        num_uses: accesses of all tasks of the step.
        use_schedule: when.
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
    """Who runs tasks: one at a time, `depth` of them admitted ahead.

    Attributes:
        aside: whether it only gets tasks that devices may not run: then its memory is not one where the tasks of a step run.
    """

    id: WorkerId
    kind: WorkerKind
    node: NodeId
    depth: int
    aside: bool = False
    assigned: list[Task] = field(default_factory=list)
    running: Task | None = None
