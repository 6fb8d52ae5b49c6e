"""A wrapper for tasks that the program has placed by hand: they wait for their worker, and all others go to the wrapped policy.

It is added with the first pinned task, so programs without pins pay nothing. A worker takes its own tasks first, by priority, then submission order,
since no other worker can run them. The wrapped policy does not count pinned tasks when it weighs queues; if it queues too much with a worker, other
workers steal it.
"""

from __future__ import annotations

import heapq

from ..records import Task, TaskId, Worker, WorkerId
from .base import Policy


class Pinned:
    """A policy, and a queue of pinned tasks for each worker that has any.

    Args:
        policy: policy for the tasks that are not pinned.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_partitions = policy.keeps_partitions
        self._lines: dict[WorkerId, list[tuple[int, int, TaskId, Task]]] = {}
        self._num = 0

    def join(self, worker: Worker) -> None:
        """Add a worker to the policy."""
        self.policy.join(worker)

    def push(self, task: Task, worker: Worker | None) -> None:
        """Queue a pinned task for its worker; pass any other to the policy."""
        if task.spec.pin is None:
            self.policy.push(task, worker)
            return
        heapq.heappush(self._lines.setdefault(task.spec.pin, []), (-task.spec.priority, task.order, task.id, task))
        self._num += 1

    def pop(self, worker: Worker) -> Task | None:
        """Return the most urgent of the worker's own tasks, else the policy's task for it."""
        line = self._lines.get(worker.id)
        if not line:
            return self.policy.pop(worker)
        self._num -= 1
        return heapq.heappop(line)[3]

    def __len__(self) -> int:
        return len(self.policy) + self._num
