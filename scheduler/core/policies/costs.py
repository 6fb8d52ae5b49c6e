"""Expected cost of a task on a worker, term by term.

    total = queueing + execution + transfer + eviction                                                        [seconds]
    execution   the task on that kind of worker
    transfer    the bytes that it reads and its node lacks, each over the link from their source
    queueing    until worker and links are free: queued tasks run while queued copies move, so the longer of the two
    eviction    write-back to the tier below of the bytes that exceed the node's free bytes (inputs, outputs and scratch)

A copy in progress counts as present, and so does data that a task queued for the same node will bring (`promised`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from ..performance_model import Estimates
from ..records import RW, SCRATCH, HandleRecord, NodeId, R, Replay, Task, Worker, WorkerId, WorkerKind


@dataclass(slots=True)
class Move:
    """The copies and evictions that bring a task's data to a node.

    Attributes:
        nbytes: bytes to copy.
        transfer_seconds: time to copy them over idle links.
        wait_seconds: time until the copies that the links already carry have arrived.
        eviction_seconds: time of the write-backs that free memory for the task.
        brings: handles to copy, including promised ones.
    """

    nbytes: int
    transfer_seconds: float
    wait_seconds: float
    eviction_seconds: float
    brings: list[HandleRecord]


@dataclass(slots=True)
class Candidate:
    """One worker for a task, with the terms of the expected cost in seconds."""

    worker: WorkerId
    kind: WorkerKind
    node: NodeId
    execution: float
    transfer: float
    queueing: float
    eviction: float
    missing_bytes: int

    @property
    def total(self) -> float:
        """Seconds from now until the task has ended."""
        return self.execution + self.transfer + self.queueing + self.eviction


class WorkLeft:
    """The tasks of the present replays that no worker has begun, in seconds if all workers shared each of them (`TaskSpec.shared_seconds`)."""

    def __init__(self) -> None:
        self._left: dict[Replay, tuple[int, float]] = {}  # number of the replay, seconds

    def seconds(self, replay: Replay) -> float:
        """Return the seconds of one replay."""
        number, seconds = self._left.get(replay, (-1, 0.0))
        if number != replay.number:
            seconds = sum(task.spec.shared_seconds for task in replay.tasks)
            self._left = {replay: left for replay, left in self._left.items() if replay.num_unfinished}
            self._left[replay] = replay.number, seconds
        return seconds

    def begin(self, task: Task) -> None:
        """Subtract a task that a worker begins."""
        if task.step is not None and task.spec.shared_seconds:
            self._left[task.step] = task.step.number, self.seconds(task.step) - task.spec.shared_seconds

    def has_slack(self, task: Task, seconds: float) -> bool:
        """Return whether a task of a recorded step does not become critical if it ends in `seconds`.

        Then the longest path that begins after it ends no later than the other remaining work of the step.
        """
        spec = task.spec
        return task.step is not None and spec.path_seconds > 0 and seconds + spec.path_seconds - spec.shared_seconds <= self.seconds(task.step)


class WorkerGroup:
    """Workers of one kind on one node, which are interchangeable because any task costs the same on each."""

    def __init__(self, kind: WorkerKind, node: NodeId) -> None:
        self.kind = kind
        self.node = node
        self.workers: list[Worker] = []

    def assigned_seconds(self, estimates: Estimates) -> float:
        """Return the seconds per worker of the tasks that the workers hold."""
        return sum(assigned_seconds(worker, estimates) for worker in self.workers) / len(self.workers)


def find_move(task: Task, node: NodeId, estimates: Estimates, promised: Container[HandleRecord] = ()) -> Move:
    """Return the copies and evictions that the task needs on a node; data that no task has written yet needs no copy."""
    memory = estimates.memory
    nbytes = taken = 0
    transfer = wait = 0.0
    brings: list[HandleRecord] = []
    for handle, mode in task.accesses:
        if mode == SCRATCH:
            taken += handle.spec.size
            continue
        replica = handle.replicas.get(node)
        if replica is None:
            taken += handle.spec.size
        elif replica.state != "reserved" or replica.arriving:
            continue
        if mode != R and mode != RW:
            continue
        brings.append(handle)
        if handle not in promised:
            source = nearest(handle)
            if source is not None:
                nbytes += handle.spec.nbytes
                transfer += estimates.transfer_seconds(source, node, handle.spec.nbytes)
                queued = memory.queued_bytes(source, node)
                if queued:
                    wait = max(wait, estimates.transfer_seconds(source, node, queued))
    eviction = 0.0
    if taken:
        excess = taken - memory.free_bytes(node)
        if excess > 0:
            eviction = estimates.transfer_seconds(node, memory.below(node), excess)
    return Move(nbytes, transfer, wait, eviction, brings)


def nearest(handle: HandleRecord) -> NodeId | None:
    """Return the source of a copy: the lowest node with valid data, as in `coherence.best_source`; None if there is none."""
    return min((replica.node for replica in handle.replicas.values() if replica.state != "reserved"), default=None)


def missing_bytes(task: Task, node: NodeId) -> int:
    """Return the bytes that the task reads and that are neither on the node nor on their way."""
    nbytes = 0
    for handle, mode in task.accesses:
        if mode == R or mode == RW:
            replica = handle.replicas.get(node)
            if replica is None or (replica.state == "reserved" and not replica.arriving):
                nbytes += handle.spec.nbytes
    return nbytes


def assigned_seconds(worker: Worker, estimates: Estimates) -> float:
    """Return the seconds of the tasks that the worker holds; the running one counts in full, since the core has no clock."""
    return sum(estimates.task_seconds(task, worker.kind) for task in worker.assigned)


def explain(task: Task, workers: Iterable[Worker], estimates: Estimates) -> list[Candidate]:
    """Return the present cost of the task on each worker that can run it, cheapest first, ties by worker.

    The handles of the task know where its data is. Queues of a policy are not counted; the policy's own `explain` counts them.
    """
    candidates = []
    for worker in workers:
        if worker.kind in task.spec.kinds:
            move = find_move(task, worker.node, estimates)
            queueing = max(assigned_seconds(worker, estimates), move.wait_seconds)
            execution = estimates.task_seconds(task, worker.kind)
            candidates.append(
                Candidate(worker.id, worker.kind, worker.node, execution, move.transfer_seconds, queueing, move.eviction_seconds, move.nbytes)
            )
    return sorted(candidates, key=lambda candidate: (candidate.total, candidate.worker))
