"""A policy in front of another one: tasks that the program has placed by hand wait for their worker, the others are the other policy's.

It stands there from the first pinned task on, so programs that place nothing pay nothing. A worker takes its own tasks first, by priority, then
submission order: no other worker can run it. The other policy does not count them when it weighs queues; where that sends a worker too much, others
steal it.
"""

from __future__ import annotations

import heapq

from ..records import Task, TaskId, Worker, WorkerId
from .base import Policy


class Pinned:
    """A policy, and a line of tasks for each worker that has any.

    Args:
        policy: whose decisions the others are.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_partitions = policy.keeps_partitions
        self._lines: dict[WorkerId, list[tuple[int, int, TaskId, Task]]] = {}
        self._num = 0

    def join(self, worker: Worker) -> None:
        """The worker joins the policy."""
        self.policy.join(worker)

    def push(self, task: Task, worker: Worker | None) -> None:
        """Let a pinned task wait for its worker; hand on any other."""
        if task.pin is None:
            self.policy.push(task, worker)
            return
        heapq.heappush(self._lines.setdefault(task.pin, []), (-task.priority, task.order, task.id, task))
        self._num += 1

    def pop(self, worker: Worker) -> Task | None:
        """The most urgent of the worker's own tasks, else what the policy gives it."""
        line = self._lines.get(worker.id)
        if not line:
            return self.policy.pop(worker)
        self._num -= 1
        return heapq.heappop(line)[3]

    def __len__(self) -> int:
        return len(self.policy) + self._num
