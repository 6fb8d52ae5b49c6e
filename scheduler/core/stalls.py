"""How long workers stood idle although work for them was ready, because its data was on the way or had no free bytes to go to.

Stalled at any moment are, on each node, the idle workers that hold an admitted task, whose inputs are being copied, and of the other idle ones as
many as tasks stand in the node's line for memory; of several equal ones, those that joined first. A worker that waits for another one's result is
idle and not stalled, and neither is one whose next task the planned order holds back. Between two events nothing of this changes, so the sums are
exact. Time is an argument.
"""

from __future__ import annotations

from .dispatch import Dispatch
from .memory.transfers import Copies
from .records import HOST, WorkerId


class Stalls:
    """Sums up stalled workers over time. Nothing needs an `update` while no copy is under way, no task is blocked, and `stalled` is empty.

    Attributes:
        dispatch: knows the idle workers and the blocked tasks.
        copying: copies under way by their target.
        stalled: workers stalled since the last update.
        by_worker: nanoseconds of each worker that ever was, until the last update.
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
        """Of all workers together, until the last update."""
        return sum(self.by_worker.values())

    def update(self, now: int) -> None:
        """Look again after an event at `now`, in nanoseconds."""
        if self.stalled:
            for one in self.stalled:
                self.by_worker[one] = self.by_worker.get(one, 0) + now - self._since
        self._since = now
        dispatch = self.dispatch
        stalled = [worker.id for worker in dispatch.joined if worker.running is None and worker.assigned]
        if dispatch.num_blocked:
            for node, line in enumerate(dispatch.blocked):
                if line:
                    free = [worker.id for worker in dispatch.joined if worker.node == node and not worker.assigned]
                    stalled += free[: sum(task.worker != HOST for task in line)]
        self.stalled = stalled
