"""What a task is expected to cost on a worker, term by term, and why a policy would choose one.

    total = queueing + execution + transfer + eviction                                                        [seconds]
    execution   the task on that kind of worker
    transfer    the bytes it reads and its node lacks, each over the link from where they are
    queueing    until worker and links are free: queued tasks run while queued copies move, so the longer of the two
    eviction    what exceeds the node's free bytes (inputs, outputs and scratch) has to be written one tier down first

A copy that is under way counts as present, as does data that a task queued for the same node is going to bring (`promised`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from ..performance_model import Estimates
from ..records import RW, SCRATCH, HandleRecord, NodeId, R, Task, Worker, WorkerId, WorkerKind


@dataclass(slots=True)
class Move:
    """What it takes to bring a task's data to a node.

    Attributes:
        nbytes: to be copied.
        transfer_seconds: for these, over idle links.
        wait_seconds: until what the links carry already has arrived.
        eviction_seconds: of the write-backs that free its bytes.
        brings: the handles to be copied, and those that were promised.
    """

    nbytes: int
    transfer_seconds: float
    wait_seconds: float
    eviction_seconds: float
    brings: list[HandleRecord]


@dataclass(slots=True)
class Candidate:
    """One worker for a task: what each part of waiting for it costs, in seconds."""

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


class WorkerGroup:
    """Workers of one kind on one node: to them any task costs the same, so they are interchangeable."""

    def __init__(self, kind: WorkerKind, node: NodeId) -> None:
        self.kind = kind
        self.node = node
        self.workers: list[Worker] = []

    def assigned_seconds(self, estimates: Estimates) -> float:
        """Seconds of the tasks the workers hold, per worker."""
        return sum(assigned_seconds(worker, estimates) for worker in self.workers) / len(self.workers)


def find_move(task: Task, node: NodeId, estimates: Estimates, promised: Container[HandleRecord] = ()) -> Move:
    """What the task misses on a node; data that no task has written yet is not missed."""
    memory = estimates.memory
    nbytes = taken = 0
    transfer = wait = 0.0
    brings: list[HandleRecord] = []
    for handle, mode in task.accesses:
        if mode == SCRATCH:
            taken += handle.size
            continue
        replica = handle.replicas.get(node)
        if replica is None:
            taken += handle.size
        elif replica.state != "reserved" or replica.arriving:
            continue
        if mode != R and mode != RW:
            continue
        brings.append(handle)
        if handle not in promised:
            source = nearest(handle)
            if source is not None:
                nbytes += handle.nbytes
                transfer += estimates.transfer_seconds(source, node, handle.nbytes)
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
    """Where a copy would come from: the lowest node with valid data, as in `coherence.best_source`."""
    return min((replica.node for replica in handle.replicas.values() if replica.state != "reserved"), default=None)


def missing_bytes(task: Task, node: NodeId) -> int:
    """Bytes the task reads that are neither on the node nor on their way."""
    nbytes = 0
    for handle, mode in task.accesses:
        if mode == R or mode == RW:
            replica = handle.replicas.get(node)
            if replica is None or (replica.state == "reserved" and not replica.arriving):
                nbytes += handle.nbytes
    return nbytes


def assigned_seconds(worker: Worker, estimates: Estimates) -> float:
    """Seconds of the tasks the worker holds; the one it runs counts in full, since there is no clock here."""
    return sum(estimates.task_seconds(task, worker.kind) for task in worker.assigned)


def explain(task: Task, workers: Iterable[Worker], estimates: Estimates) -> list[Candidate]:
    """What the task would cost now on each worker that can run it, cheapest first, ties by worker.

    Where data lies is read from the task's handles. Queues that a policy keeps are not counted; a policy's own `explain` does that.
    """
    found = []
    for worker in workers:
        if worker.kind in task.kinds:
            move = find_move(task, worker.node, estimates)
            queueing = max(assigned_seconds(worker, estimates), move.wait_seconds)
            execution = estimates.task_seconds(task, worker.kind)
            found.append(
                Candidate(worker.id, worker.kind, worker.node, execution, move.transfer_seconds, queueing, move.eviction_seconds, move.nbytes)
            )
    return sorted(found, key=lambda candidate: (candidate.total, candidate.worker))
