"""Read-only status of a machine's memory nodes: names, budgets, bytes in use, traffic and counts.

Drivers, planners, policies and reports use `MemoryStatus` instead of the modules of this room, whose structure may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..records import FILE, FILE_NAME, RAM, DataClass, NodeId, Replica
from .admission import Admission
from .replicas import Replicas


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Bytes of one memory node at one moment.

    Attributes:
        budget: hard limit.
        used: bytes in use now.
        peak: largest number in use at once so far; `peak_by_class` is its division by class of data.
        recent_peak: largest number in use at once since `MemoryStatus.begin_recent_peaks`.
    """

    name: str
    budget: int
    used: int
    peak: int
    peak_by_class: dict[DataClass, int]
    recent_peak: int


class MemoryStatus:
    """Read-only view of the memory nodes of one machine.

    Attributes:
        last: last tier, which is the disk if there is one, else host memory.
        tier: disk below all memories; None without one.
        names: names of the nodes, in order.
    """

    __slots__ = ("_admission", "_copies", "_nodes", "_replicas", "last", "names", "tier")

    def __init__(self, replicas: Replicas, admission: Admission) -> None:
        self._admission = admission
        self._replicas = replicas
        self._copies = replicas.copies
        self._nodes = replicas.nodes
        self.last = replicas.last
        self.tier = self.last if self._nodes[self.last].is_storage else None
        self.names = tuple(node.name for node in self._nodes)

    def name_of(self, node: NodeId) -> str:
        """Return the name of a node for users, also of the node of files."""
        return FILE_NAME if node == FILE else self.names[node]

    def budget(self, node: NodeId) -> int:
        """Return the budget of a node in bytes."""
        return self._nodes[node].budget

    def used(self, node: NodeId) -> int:
        """Return the bytes in use on a node."""
        return self._nodes[node].used

    def used_by_class(self, node: NodeId) -> dict[DataClass, int]:
        """Return the bytes in use on a node, by class of data."""
        return dict(self._nodes[node].by_class)

    def free_bytes(self, node: NodeId) -> int:
        """Return the bytes of a node's budget that are not in use."""
        return self._nodes[node].budget - self._nodes[node].used

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Return the bytes in transit over a link."""
        return self._copies.queued_bytes(source, target)

    def below(self, node: NodeId) -> NodeId:
        """Return the node that receives what is evicted from `node`; `node` itself if there is none below it."""
        return RAM if node not in (RAM, self.last) else self.last

    def usage(self) -> list[NodeUsage]:
        """Return the current usage of every node."""
        return [NodeUsage(node.name, node.budget, node.used, node.peak, dict(node.peak_by_class), node.recent_peak) for node in self._nodes]

    def begin_recent_peaks(self) -> None:
        """Start a new period of `NodeUsage.recent_peak` on every node."""
        for node in self._nodes:
            node.forget_recent_peak()

    @property
    def moved_bytes(self) -> dict[tuple[NodeId, NodeId], int]:
        """Bytes copied so far over each link."""
        return self._copies.moved_bytes

    def moved_by_name(self) -> dict[str, int]:
        """Return the bytes copied so far over each link, by "from->to"."""
        return {f"{self.name_of(a)}->{self.name_of(b)}": nbytes for (a, b), nbytes in self._copies.moved_bytes.items()}

    @property
    def num_copying(self) -> int:
        """Number of copies in progress."""
        return len(self._copies)

    @property
    def num_evictions(self) -> int:
        """Number of replicas dropped so far to make room for other data."""
        return self._replicas.num_evictions

    @property
    def num_hits(self) -> int:
        """Number of inputs of admitted tasks that were in place or in transit; counted only if there are several nodes."""
        return self._admission.num_hits

    @property
    def num_misses(self) -> int:
        """Number of inputs of admitted tasks that had to be fetched; counted only if there are several nodes."""
        return self._admission.num_misses

    @property
    def readers_bytes(self) -> int:
        """Bytes of host memory reserved for readers of files."""
        return self._replicas.readers_bytes

    @property
    def num_in_files(self) -> tuple[int, int]:
        """Number of handles whose data is in a file, and number of those whose data is nowhere else."""
        return self._replicas.num_files, self._replicas.num_cold

    def replicas(self) -> Iterator[Replica]:
        """Iterate over the replicas of all memory nodes, scratch included."""
        for number in range(len(self._nodes)):
            yield from self._replicas.residents(NodeId(number))
