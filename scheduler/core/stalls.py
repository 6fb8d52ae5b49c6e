"""Time that workers stood idle although work for them was ready, because its data was on the way or had no memory to go to.

An idle worker is stalled while it holds an admitted task, whose inputs are being copied. If n tasks wait for the memory of a node, n more of its idle
workers are stalled; those that joined first are counted. A worker that waits for the result of another one is idle but not stalled, and so is a
worker whose next task is held back by the planned order. The stalled workers do not change between two events, so the sums are exact. Time is an
argument.
"""

from __future__ import annotations

from .dispatch import Dispatch
from .memory.transfers import Copies
from .records import HOST, WorkerId


class Stalls:
    """Sums of stalled time. No `update` is needed while no copy is in progress, no task is blocked, and `stalled` is empty.

    Attributes:
        dispatch: the dispatch, which knows the idle workers and the blocked tasks.
        copying: copies in progress by their target.
        stalled: workers stalled since the last update.
        by_worker: nanoseconds each worker was stalled, until the last update; workers that never stalled are missing.
    """

    __slots__ = ("_since", "by_worker", "copying", "dispatch", "stalled")

    def __init__(self, dispatch: Dispatch, copies: Copies) -> None:
        self.dispatch = dispatch
        self.copying = copies.by_target
        self._since = 0
        self.stalled: list[WorkerId] = []
        self.by_worker: dict[WorkerId, int] = {}

    @property
    def nanoseconds(self) -> int:
        """Stalled nanoseconds of all workers together, until the last update."""
        return sum(self.by_worker.values())

    def update(self, now: int) -> None:
        """Add the time since the last update, and find the workers that are stalled after an event at `now`, in nanoseconds."""
        if self.stalled:
            for worker_id in self.stalled:
                self.by_worker[worker_id] = self.by_worker.get(worker_id, 0) + now - self._since
        self._since = now
        dispatch = self.dispatch
        stalled = [worker.id for worker in dispatch.joined if worker.running is None and worker.assigned]
        if dispatch.num_blocked:
            for node, line in enumerate(dispatch.blocked):
                if line:
                    free = [worker.id for worker in dispatch.joined if worker.node == node and not worker.assigned]
                    stalled += free[: sum(task.worker != HOST for task in line)]
        self.stalled = stalled
