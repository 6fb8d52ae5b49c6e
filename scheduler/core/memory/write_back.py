"""Early write-back: dirty data leaves a node before a task needs its memory.

- A small share of the node is kept free or clean, so that admission rarely waits for a write-back; data that the plan overwrites before it is read
  is not written for that. Clean bytes are counted again only after enough bytes have been taken, because counting is slow.
- Beyond that share, data that leaves before its next use according to the forecast of the planned order (`UseSchedule.leaves`) is written back as
  soon as its last use has ended, one at a time: a link that idles in one part of a step is missing in another.

Other dirty data stays, because it may die unwritten.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ..events import Action
from ..records import SCRATCH, NodeId, Replica, Task
from .replicas import Replicas
from .victim_selection import is_dirty, is_unused

WRITES: Final = 4
"""Number of copies in progress from the node towards the last tier at which no further one is started early."""

CLEAN: Final = 6
"""Budget of a node over the bytes that are kept free or clean."""

LOOKS: Final = 2
"""Number of times that clean bytes are counted while as many bytes as the clean share are taken."""

LEAVING: Final = 1
"""Number of copies in progress from the node towards the last tier at which no data is written only because it will leave."""


class EarlyWriteBack:
    """Early write-back of one node.

    Args:
        replicas: replicas of all nodes.
        node: node where tasks run.
    """

    def __init__(self, replicas: Replicas, node: NodeId) -> None:
        self.replicas = replicas
        self.node = node
        self._counted_at = 0  # bytes that the node had allocated when clean bytes were last counted
        self._wanted = 0  # bytes to write back, as of that time
        self._leaving: deque[Replica] = deque()  # data that will leave, by its last use

    def rest(self) -> None:
        """Forget the last replay, now that none is in progress."""
        self._leaving.clear()

    def run(self, actions: list[Action]) -> None:
        """Start the write-backs that should be in progress now."""
        replicas = self.replicas
        if self.node == replicas.last:
            return  # data here is never written elsewhere
        node = replicas.nodes[self.node]
        goal = node.budget // CLEAN
        num_writing = replicas.copies.num_writing[self.node]
        if num_writing >= WRITES or replicas.broken is not None:
            return
        if node.taken - self._counted_at >= goal // LOOKS:
            self._counted_at = node.taken
            self._wanted = goal - (node.budget - node.used)
            if self._wanted > 0:
                self._wanted -= replicas.candidates[self.node].clean_nbytes(self._wanted)
        if self._wanted > 0:
            for replica in replicas.candidates[self.node].dirty(WRITES - num_writing):
                if self._wanted > 0 and not self._is_overwritten(replica):
                    replicas.write_back(replica, actions)
                    self._wanted -= replica.handle.spec.size
        while self._leaving and num_writing < LEAVING:
            replica = self._leaving.popleft()
            if self._will_leave(replica):
                replicas.write_back(replica, actions)
                num_writing += 1

    def note(self, ended: Task) -> None:
        """Queue the data whose last use before it leaves was by the task that has just ended."""
        replicas = self.replicas
        if self.node == replicas.last or not replicas.eviction.foresees:
            return
        for handle, mode in ended.accesses:
            schedule = handle.use_schedule
            if mode != SCRATCH and schedule is not None and schedule.leaves:
                replica = handle.replicas.get(self.node)
                if replica is not None and self._will_leave(replica):
                    self._leaving.append(replica)

    def _is_overwritten(self, replica: Replica) -> bool:
        """Whether planned tasks overwrite the data before any of them reads it."""
        return self.replicas.foresight.next_use_of(replica)[1]

    def _will_leave(self, replica: Replica) -> bool:
        """Whether a replica is still there, unused and dirty, and leaves before its next use according to the forecast."""
        is_there = replica.handle.replicas.get(self.node) is replica
        return is_there and is_unused(replica) and is_dirty(replica) and self.replicas.foresight.leaves(replica)
