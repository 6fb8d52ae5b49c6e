"""The last resort against fragmentation: all that is free on an idle node becomes one hole."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InvalidEvent
from ..events import Action, MoveTile
from ..records import NEWEST, SCRATCH, HandleRecord, NodeId, Replica, Task
from . import coherence
from .replicas import Replicas


class Compaction:
    """Moves the replicas of idle nodes together.

    Args:
        replicas: of all nodes.
    """

    __slots__ = ("_eviction", "_last", "_nodes", "_replicas", "_reservations")

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._nodes = replicas.nodes
        self._last = replicas.last
        self._reservations = replicas.reservations
        self._eviction = replicas.eviction

    def compact(self, task: Task, node_id: NodeId, actions: list[Action]) -> bool:
        """Make one hole of all that is free or droppable on an idle node, and of what is free on the last tier, if the task then fits there.

        The last resort against fragmentation, so nothing may run, move or be admitted meanwhile: no replica is pinned. When dirty replicas must
        go, their write-backs are started instead and False is returned. A file needs no compaction, its addresses are plenty; nor does memory of
        which only bytes are counted.
        """
        if self._nodes[node_id].is_counted or not self._reservations.allow(task):
            return False
        last = self._nodes[self._last]
        backings = self._missing_backing(task) if node_id != self._last else 0
        if backings and self._plan_hole(self._last, backings) is None:
            return False
        missing = sum(handle.size for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas)
        if not self._make_hole(node_id, missing, actions, {handle for handle, mode in task.accesses if mode != SCRATCH}):
            return False
        return node_id == self._last or last.is_storage or self._make_hole(self._last, backings, actions)

    def _missing_backing(self, task: Task) -> int:
        """Bytes that the backing replicas of what the task will write still take on the last tier."""
        return sum(
            handle.size
            for handle, mode in task.accesses
            if mode != SCRATCH and self._last not in handle.replicas and coherence.wants_backing(handle, mode, self._last)
        )

    def _plan_hole(self, node_id: NodeId, missing: int, kept: Collection[HandleRecord] = ()) -> list[Replica] | None:
        """What must go so that the node has so many bytes more, in holes of any size; None if too little may.

        Args:
            kept: what stays: the data of a task that will run there. One that runs elsewhere reads its data wherever else it lies.
        """
        node = self._nodes[node_id]
        candidates = [replica for replica in node.starts.values() if replica.handle not in kept and self._may_go(replica)]
        candidates.sort(key=self._eviction.key, reverse=True)
        victims: list[Replica] = []
        excess = node.used + missing - min(node.extents.capacity, node.budget)
        for replica in candidates:
            if excess <= 0:
                break
            victims.append(replica)
            excess -= replica.handle.size
        return None if excess > 0 else victims

    def _make_hole(self, node_id: NodeId, missing: int, actions: list[Action], kept: Collection[HandleRecord] = ()) -> bool:
        """Make one hole of all that is free or droppable on the node, if so many bytes more then fit there; `kept` stays."""
        victims = self._plan_hole(node_id, missing, kept)
        if victims is None or not self._replicas.are_clean(victims, actions):
            return False
        self._replicas.evict(victims, actions)
        self._compact(node_id, actions)
        return True

    def _compact(self, node_id: NodeId, actions: list[Action]) -> None:
        """Move all replicas of an idle node to its beginning."""
        node, candidates = self._nodes[node_id], self._replicas.candidates[node_id]
        for replica in node.starts.values():
            if replica.pins:
                raise InvalidEvent(f"{replica.handle!r} on node {node_id} would be moved while pinned")
        for replica, offset in node.pack():
            if replica.state != "reserved":
                actions.append(MoveTile(node_id, offset, replica.offset, replica.handle.nbytes))
            replica.view = None
            replica.kernel_mark = NEWEST
        for replica in node.starts.values():
            if not replica.is_backing:
                candidates.add(replica)

    def _may_go(self, replica: Replica) -> bool:
        """Whether an unpinned replica may be dropped, perhaps after a write-back."""
        return not replica.is_backing and (self._replicas.broken is None or not coherence.is_needed(replica))
