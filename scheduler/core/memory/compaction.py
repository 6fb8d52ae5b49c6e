"""Compaction of an idle node, the last resort against fragmentation: all free memory becomes one hole."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InvalidEvent
from ..events import Action, MoveTile
from ..records import NEWEST, SCRATCH, HandleRecord, NodeId, Replica, Task
from . import coherence
from .replicas import Replicas
from .victim_selection import is_droppable


class Compaction:
    """Compaction of idle nodes.

    Args:
        replicas: replicas of all nodes.
    """

    __slots__ = ("_eviction", "_last", "_nodes", "_replicas", "_reservations")

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._nodes = replicas.nodes
        self._last = replicas.last
        self._reservations = replicas.reservations
        self._eviction = replicas.eviction

    def compact(self, task: Task, node_id: NodeId, actions: list[Action]) -> bool:
        """Make one hole on an idle node, and one on the last tier if the task needs bytes there; return whether the task now fits.

        Nothing runs, moves or is admitted meanwhile, so no replica is pinned. If dirty replicas must go, their write-backs are started instead and
        the result is False. Files never fragment.
        """
        if not self._reservations.allow(task):
            return False
        last = self._nodes[self._last]
        backings = self._missing_backing(task) if node_id != self._last else 0
        if backings and self._plan_hole(self._last, backings) is None:
            return False
        missing = sum(handle.spec.size for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas)
        if not self._make_hole(node_id, missing, actions, {handle for handle, mode in task.accesses if mode != SCRATCH}):
            return False
        return node_id == self._last or last.is_storage or self._make_hole(self._last, backings, actions)

    def _missing_backing(self, task: Task) -> int:
        """Return the bytes on the last tier that backing replicas for the task's results still need."""
        return sum(
            handle.spec.size
            for handle, mode in task.accesses
            if mode != SCRATCH and self._last not in handle.replicas and coherence.wants_backing(handle, mode, self._last)
        )

    def _plan_hole(self, node_id: NodeId, missing: int, kept: Collection[HandleRecord] = ()) -> list[Replica] | None:
        """Return the replicas to drop so that `missing` more bytes fit on the node, in holes of any size; None if too few may go.

        Args:
            kept: handles whose replicas stay, because the task that runs there uses them.
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
            excess -= replica.handle.spec.size
        return None if excess > 0 else victims

    def _make_hole(self, node_id: NodeId, missing: int, actions: list[Action], kept: Collection[HandleRecord] = ()) -> bool:
        """Make one hole of all that is free or may be dropped on the node, if it then has `missing` bytes; the handles `kept` stay."""
        victims = self._plan_hole(node_id, missing, kept)
        if victims is None:
            return False
        if not all(map(is_droppable, victims)):
            self._replicas.write_back_dirty(victims, actions)
            return False
        self._replicas.evict(victims, actions)
        self._compact(node_id, actions)
        return True

    def _compact(self, node_id: NodeId, actions: list[Action]) -> None:
        """Move all replicas of an idle node to the start of its memory."""
        node, candidates = self._nodes[node_id], self._replicas.candidates[node_id]
        for replica in node.starts.values():
            if replica.pins:
                raise InvalidEvent(f"{replica.handle!r} on node {node_id} would be moved while pinned")
        for replica, offset in node.pack():
            if replica.state != "reserved":
                actions.append(MoveTile(node_id, offset, replica.offset, replica.handle.spec.nbytes))
            replica.view = None
            replica.kernel_mark = NEWEST
        for replica in node.starts.values():
            if not replica.is_backing:
                candidates.add(replica)

    def _may_go(self, replica: Replica) -> bool:
        """Whether an unpinned replica may be dropped, after a write-back if it is dirty."""
        return not replica.is_backing and (self._replicas.broken is None or not coherence.is_needed(replica))
