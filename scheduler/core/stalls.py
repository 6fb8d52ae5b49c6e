"""How long workers stood idle although work for them was ready, because its data was on the way or had no room.

Stalled at any moment are, on each node, the idle workers that hold an admitted task, whose inputs are being copied, and of the other idle ones as
many as tasks stand in the node's line for memory. A worker that waits for another one's result is idle and not stalled, and neither is one whose
next task the planned order holds back. Between two events nothing of this changes, so the sum is exact. Time is an argument.
"""

from __future__ import annotations

from .dispatch import Dispatch
from .records import HOST


class Stalls:
    """Sums up stalled workers over time.

    Attributes:
        num: workers stalled since the last update.
        nanoseconds: of all workers together, until the last update.
    """

    __slots__ = ("_dispatch", "_since", "nanoseconds", "num")

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._since = 0
        self.num = 0
        self.nanoseconds = 0

    def update(self, now: int) -> None:
        """Count again after an event at `now`, in nanoseconds; needed whenever copies are under way, tasks are blocked, or `num` is not zero."""
        self.nanoseconds += self.num * (now - self._since)
        self._since = now
        dispatch = self._dispatch
        num = 0
        for worker in dispatch.crew:
            if worker.running is None and worker.assigned:
                num += 1
        if dispatch.num_blocked:
            for node, line in enumerate(dispatch.blocked):
                if line:
                    free = sum(worker.node == node and not worker.assigned for worker in dispatch.crew)
                    num += min(free, sum(task.worker != HOST for task in line))
        self.num = num
