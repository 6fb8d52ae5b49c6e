"""Copies in progress between replicas, the tasks that wait for them, and the traffic of the links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import InvalidEvent
from ..events import CopyTile
from ..records import FILE, RAM, NodeId, Replica, Task


@dataclass(slots=True, eq=False)
class Copy:
    """A copy in progress, and the tasks that wait for it."""

    source: Replica
    waiting: list[Task] = field(default_factory=list)


class Copies:
    """The copies in progress; false if there are none. A copy pins its source and its target, and counts as a use of its data.

    Args:
        num_nodes: number of memory nodes.
        last: last tier.

    Attributes:
        by_target: copies by the replica that they write, oldest first.
        moved_bytes: bytes of all copies so far over each link (from, to).
        num_writing: for each node, number of copies in progress from it towards the last tier.
        num_ended: for each node, number of copies to it that have ended so far.
    """

    __slots__ = ("_last", "_num_on", "_queued", "by_target", "moved_bytes", "num_ended", "num_writing")

    def __init__(self, num_nodes: int, last: NodeId) -> None:
        self._last = last
        self.by_target: dict[Replica, Copy] = {}
        self._queued: dict[tuple[NodeId, NodeId], int] = {}
        self._num_on: dict[tuple[NodeId, NodeId], int] = {}
        self.moved_bytes: dict[tuple[NodeId, NodeId], int] = {}
        self.num_writing = [0] * num_nodes
        self.num_ended = [0] * num_nodes

    def __len__(self) -> int:
        return len(self.by_target)

    def __contains__(self, target: Replica) -> bool:
        return target in self.by_target

    def __iter__(self) -> Iterator[tuple[Replica, Replica]]:
        """Iterate over (source, target), oldest first."""
        return ((copy.source, target) for target, copy in self.by_target.items())

    def num_arriving(self, node: NodeId) -> int:
        """Return the number of copies in progress to a node."""
        return sum(target.node == node for target in self.by_target)

    def num_on(self, source: NodeId, target: NodeId) -> int:
        """Return the number of copies in progress over a link."""
        return self._num_on.get((source, target), 0)

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Return the bytes in transit over a link."""
        return self._queued.get((source, target), 0)

    def start(self, source: Replica, target: Replica) -> CopyTile:
        """Enter a new copy, and return the action that starts it."""
        source.pins += 1
        source.outgoing += 1
        target.pins += 1
        target.arriving = True
        handle = source.handle
        handle.num_uses += 1
        self.by_target[target] = Copy(source)
        link = (source.node, target.node)
        self.moved_bytes[link] = self.moved_bytes.get(link, 0) + handle.spec.nbytes
        self._queued[link] = self._queued.get(link, 0) + handle.spec.nbytes
        self._num_on[link] = self._num_on.get(link, 0) + 1
        if self._is_down(link):
            self.num_writing[source.node] += 1
        return CopyTile(source, target)

    def end(self, source: Replica, target: Replica) -> list[Task]:
        """Remove a copy that has ended or failed, and return the tasks that waited for it. The caller unpins source and target.

        Raises:
            InvalidEvent: no such copy is in progress.
        """
        copy = self.by_target.pop(target, None)
        if copy is None or copy.source is not source:
            raise InvalidEvent(f"a copy of {target.handle!r} from node {source.node} to node {target.node} finished but was not in progress")
        link = (source.node, target.node)
        self._queued[link] -= source.handle.spec.nbytes
        self._num_on[link] -= 1
        self.num_ended[target.node] += 1
        if self._is_down(link):
            self.num_writing[source.node] -= 1
        target.arriving = False
        source.outgoing -= 1
        source.handle.num_uses -= 1
        for task in copy.waiting:
            task.num_arriving -= 1
        return copy.waiting

    def wait_for(self, target: Replica, task: Task) -> None:
        """Make the task wait for the copy to `target`."""
        self.by_target[target].waiting.append(task)
        task.num_arriving += 1

    def forget(self, task: Task) -> None:
        """Make the task wait for no copy."""
        for copy in self.by_target.values():
            if task in copy.waiting:
                copy.waiting.remove(task)
        task.num_arriving = 0

    def _is_down(self, link: tuple[NodeId, NodeId]) -> bool:
        """Whether a link leads towards the last tier."""
        source, target = link
        return source != FILE and source != self._last and (target == self._last or target == RAM)
