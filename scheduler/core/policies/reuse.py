"""The policy reuse: dmdas, but resident data first, in the spirit of DARTS (Gonthier, Marchal, Thibault 2022).

A worker looks at the next `AHEAD` tasks of its group, by priority and submission order, and takes the one that misses fewest bytes; ties go to the
first. So tiles are used before they are evicted. The bound keeps the choice cheap, and the order close to that of the program or plan, hence to its
memory peak. A task that has been passed over `PATIENCE` times is taken, whatever it misses.

Measured once in virtual time (tiled matrix products, Cholesky factorizations and multilayer perceptrons on 1, 2 and 4 devices, with and without CPU
workers; geometric mean of the time over the best policy's): under memory pressure 1.03, against 1.04 of dmdas, 1.06 of dmda, 1.14 of lws and 1.19 of
prio; with memory for everything 1.03, like dmdas and dmda. A single queue for all groups, from which workers chose by
missing bytes alone, was slower (1.09 and 1.07), because tiles followed the idle worker.
"""

from __future__ import annotations

from typing import Final

from ..records import NodeId, Task, WorkerKind
from .costs import missing_bytes
from .expected import DataAwareSorted, Entry, Queues

AHEAD: Final = 16
"""Number of tasks considered in each queue of a group."""

PATIENCE: Final = 64
"""Number of times that the first task in line may be passed over."""


class ReuseQueues(Queues):
    """The queues of a group, from which the task that misses fewest bytes on the node is taken."""

    def __init__(self, kind: WorkerKind, node: NodeId) -> None:
        super().__init__(kind, node)
        self._head: Task | None = None
        self._num_passed = 0

    def first(self) -> Task | None:
        """Remove and return the task, among the next ones, that misses fewest bytes, or the first if it has been passed over too often."""
        head = self.head()
        if head is None:
            return None
        best, best_index, fewest = head, len(head) - 1, missing_bytes(head[-1].task, self.node)
        for queue in self.queues.values():
            for index in range(len(queue) - 1, max(-1, len(queue) - 1 - AHEAD), -1):
                nbytes = missing_bytes(queue[index].task, self.node) if fewest else 0
                if nbytes < fewest:
                    best, best_index, fewest = queue, index, nbytes
                if not fewest:
                    break
        if best[best_index] is not head[-1] and self._is_overdue(head[-1]):
            best, best_index = head, len(head) - 1
        return self.take(best, best_index)

    def _is_overdue(self, head: Entry) -> bool:
        """Count another time that the first task was passed over; return whether that is once too often."""
        if head.task is not self._head:
            self._head, self._num_passed = head.task, 0
        self._num_passed += 1
        return self._num_passed > PATIENCE


class Reuse(DataAwareSorted):
    """The policy reuse: dmdas with resident data first."""

    queues = ReuseQueues
