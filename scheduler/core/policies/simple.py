"""Policies without estimates: eager, prio, and stealing by locality.

Tasks are kept apart by the set of kinds of workers that can run them, so that a worker finds its tasks cheaply.
"""

from __future__ import annotations

import heapq
from collections import deque

from ..performance_model import NO_ESTIMATES, Estimates
from ..records import RAM, NodeId, Task, Worker, WorkerId, WorkerKind


class Prio:
    """The policy prio: highest priority first, then submission order, which stays close to the memory peak of the program as written."""

    keeps_partitions = False

    def __init__(self, estimates: Estimates = NO_ESTIMATES) -> None:
        self._heaps: dict[tuple[WorkerKind, ...], list[tuple[int, int, int, Task]]] = {}
        self._num = 0

    def join(self, worker: Worker) -> None:
        """Do nothing: all workers share the tasks."""

    def push(self, task: Task, worker: Worker | None) -> None:
        """Add the task."""
        heap = self._heaps.get(task.spec.kinds)
        if heap is None:
            heap = self._heaps[task.spec.kinds] = []
        heapq.heappush(heap, (-task.spec.priority, task.order, task.id, task))
        self._num += 1

    def pop(self, worker: Worker) -> Task | None:
        """Return the first task, in the order of the policy, that the worker can run."""
        best: list[tuple[int, int, int, Task]] | None = None
        for kinds, heap in self._heaps.items():
            if heap and worker.kind in kinds and (best is None or heap[0] < best[0]):
                best = heap
        if best is None:
            return None
        self._num -= 1
        return heapq.heappop(best)[3]

    def __len__(self) -> int:
        return self._num


class Eager(Prio):
    """The policy eager: first ready, first served."""

    def __init__(self, estimates: Estimates = NO_ESTIMATES) -> None:
        super().__init__(estimates)
        self._num_pushed = 0

    def push(self, task: Task, worker: Worker | None) -> None:
        """Append the task."""
        self._num_pushed += 1
        heapq.heappush(self._heaps.setdefault(task.spec.kinds, []), (self._num_pushed, 0, 0, task))
        self._num += 1


class LocalityStealing:
    """The policy lws: a queue per worker. A task joins a worker that holds most of its bytes; an idle worker steals from the longest queue."""

    keeps_partitions = False

    def __init__(self, estimates: Estimates = NO_ESTIMATES) -> None:
        self._queues: dict[WorkerId, deque[Task]] = {}
        self._nodes: dict[NodeId, list[WorkerId]] = {}
        self._stray: deque[Task] = deque()

    def join(self, worker: Worker) -> None:
        """Create a queue for the worker."""
        if worker.id not in self._queues:
            self._queues[worker.id] = deque()
            self._nodes.setdefault(worker.node, []).append(worker.id)

    def push(self, task: Task, worker: Worker | None) -> None:
        """Queue the task with the worker that freed it, if the task's data is on its node, else with a worker on the node of the data."""
        node = self._main_node(task)
        if worker is not None and worker.node == node and worker.id in self._queues:
            self._queues[worker.id].append(task)
            return
        owners = self._nodes.get(node)
        if owners:
            self._queues[min(owners, key=lambda owner: len(self._queues[owner]))].append(task)
        else:
            self._stray.append(task)

    def pop(self, worker: Worker) -> Task | None:
        """Return the worker's newest own task, else the oldest task of the longest other queue."""
        self.join(worker)
        task = self._take(self._queues[worker.id], worker, newest=True) or self._take(self._stray, worker, newest=False)
        if task is not None:
            return task
        for queue in sorted(self._queues.values(), key=len, reverse=True):
            task = self._take(queue, worker, newest=False)
            if task is not None:
                return task
        return None

    def __len__(self) -> int:
        return len(self._stray) + sum(map(len, self._queues.values()))

    @staticmethod
    def _main_node(task: Task) -> NodeId:
        """Return the node that holds most bytes of the task's valid data."""
        held: dict[NodeId, int] = {}
        for handle, _ in task.accesses:
            for replica in handle.replicas.values():
                if replica.state != "reserved":
                    held[replica.node] = held.get(replica.node, 0) + handle.spec.nbytes
        return max(held, key=lambda node: (held[node], -node), default=RAM)

    @staticmethod
    def _take(queue: deque[Task], worker: Worker, *, newest: bool) -> Task | None:
        order = range(len(queue) - 1, -1, -1) if newest else range(len(queue))
        for at in order:
            task = queue[at]
            if worker.kind in task.spec.kinds:
                del queue[at]
                return task
        return None
