"""How a task gets everything it needs in one place: reserved in free memory, or over what is dropped for it.

Admission is all or nothing: either every byte a task misses on its node, and every backing replica its outputs miss, is reserved with whatever
has to be dropped for it, or nothing is dropped and nothing reserved. When dirty replicas stand in the way their write-backs are started, and
admission is tried again when they have arrived.

Why this ends. A write-back needs nothing that is not reserved already, so every one ends, and early ones only make dirty replicas fewer. Replicas are
dropped only for a task admitted at that moment, or for data that is used sooner, which can be dropped for a task at once. So each attempt of the
oldest blocked task has strictly fewer dirty replicas in its way. Other tasks cannot take what it needs of the last tier: see `reservations`. What was
read from a file is never dirty: wherever it is, it can be dropped as soon as no task or copy uses it.

Works on the nodes' replicas (`replicas`) and asks which goes first (`victim_selection`); does not know policies, dependencies or failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..errors import DoesNotFit
from ..events import Action
from ..records import FILE, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W
from . import coherence
from .replicas import Replicas

SOON: Final = 256
"""A replica used within so many planned tasks does not go just because it can be dropped at once: it goes when its price is the best."""


class NothingToRead(Exception):
    """A condition of admission: the task reads `handle`, which has no valid replica anywhere. The machine catches it."""

    def __init__(self, handle: HandleRecord) -> None:
        super().__init__(handle)
        self.handle = handle


class Admission:
    """Reserves what tasks need.

    Args:
        replicas: of all nodes.

    Attributes:
        num_hits, num_misses: inputs of admitted tasks that were in place or under way, and that had to be fetched; counted where there are several
            nodes.
    """

    __slots__ = ("_copies", "_foresight", "_last", "_nodes", "_replicas", "_reservations", "_waiting", "num_hits", "num_misses")

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._nodes = replicas.nodes
        self._last = replicas.last
        self._foresight = replicas.foresight
        self._reservations = replicas.reservations
        self._copies = replicas.copies
        self._waiting: dict[NodeId, tuple[Task, Sequence[Replica]]] = {}  # the latest task that waits for write-backs, and its victims; may be over
        self.num_hits = 0
        self.num_misses = 0

    def admit(self, task: Task, actions: list[Action]) -> bool:
        """Pin and reserve everything the task needs on `task.node` and start its copies; or leave all as it is and return False.

        Raises:
            NothingToRead: the task reads data that does not exist; nothing was reserved.
        """
        books, node_id, last, clock = self._replicas, task.node, self._last, self._foresight.clock
        several = books.has_several
        taken: list[Replica] = []
        unbacked: tuple[HandleRecord, ...] = ()  # written, and with a file as their backing replica so far
        grows = fetch = False
        for handle, mode in task.accesses:
            replica = handle.replicas.get(node_id)
            if replica is None or mode == SCRATCH:
                if not grows:
                    if not self._reservations.allow(task):
                        books.take_back(taken, actions)
                        return False
                    grows = True
                if (mode == R or mode == RW) and coherence.best_source(handle, None) is None:
                    books.take_back(taken, actions)
                    raise NothingToRead(handle)
                offset = self._nodes[node_id].take(handle.size, handle.data_class, handle.preferred_offset)
                if offset is None:
                    books.take_back(taken, actions)
                    return several and self._admit_by_eviction(task, actions)
                handle.preferred_offset = offset
                replica = books.install(handle, node_id, offset, private=mode == SCRATCH)
                if mode != SCRATCH:
                    if several and FILE in handle.replicas:
                        if mode != R:
                            unbacked += (handle,)
                    elif node_id == last:
                        self._reservations.enter(replica, task.order)
                    elif last not in handle.replicas and not books.reserve_backing(handle, task.order, actions):
                        replica.pins += 1
                        taken.append(replica)
                        books.take_back(taken, actions)
                        return False
                    if mode != W or len(handle.replicas) > 1:
                        fetch = True
            elif several and (replica.arriving or (mode != R and len(handle.replicas) > 1)):
                fetch = True
                if mode != R and FILE in handle.replicas:
                    unbacked += (handle,)
            elif replica.state == "reserved" and mode != W:  # an empty backing replica
                if coherence.best_source(handle, None) is None:
                    books.take_back(taken, actions)
                    raise NothingToRead(handle)
                fetch = True
            replica.pins += 1
            taken.append(replica)
        if unbacked and not ((grows or self._reservations.allow(task)) and self._reserve_backing(unbacked, task.order, actions)):
            books.take_back(taken, actions)
            return False
        for replica in taken:
            replica.last_use = clock
        task.replicas = taken
        if grows or unbacked:
            self._nodes[node_id].mark()
            self._nodes[last].mark()
        if fetch:
            self._fetch(task, actions)
        elif several:
            self.num_hits += num_inputs(task)
        return True

    def does_not_fit(self, task: Task) -> DoesNotFit:
        """Why the task finds no free bytes, now that nothing else can go: the node, its budget, and what is taken."""
        node, last = self._nodes[task.node], self._nodes[self._last]
        total = sum(handle.size for handle, _ in task.accesses)
        new = sum(handle.size for handle, mode in task.accesses if mode != SCRATCH and self._last not in handle.replicas)
        if node is not last and total <= node.budget and new > last.budget - last.used:
            return DoesNotFit(
                f"node {last.name} is full: {task.name} makes {new:,} B of new data that must have room there, but of its budget of "
                f"{last.budget:,} B {last.used:,} B are taken; raise the budget",
                last.name,
            )
        sizes = ", ".join(f"{mode} {handle.name or handle.id} {handle.size:,} B" for handle, mode in task.accesses)
        return DoesNotFit(
            f"{task.name} needs {total:,} B at once on node {node.name} ({sizes}), but of its budget of {node.budget:,} B "
            f"{node.used:,} B are taken by data that has nowhere else to go and the largest hole is {node.largest_hole():,} B; "
            f"raise the budget or use smaller tiles or minibatches",
            node.name,
        )

    def needs_no_bytes(self, task: Task, node_id: NodeId) -> bool:
        """Whether the task could run on the node without a single new byte."""
        return all(mode != SCRATCH and node_id in handle.replicas for handle, mode in task.accesses)

    def _admit_by_eviction(self, task: Task, actions: list[Action]) -> bool:
        """`admit` when there is no hole: find what to drop, then drop it and reserve at once."""
        node_id = task.node
        present = [handle.replicas[node_id] for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas]
        missing = [(handle, mode) for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas]
        missing.sort(key=lambda access: -access[0].size)
        if node_id == self._last and not self._replicas.num_files:
            return False
        waiting = self._waiting.get(node_id)
        if waiting is not None and waiting[0] is task:
            if any(victim.outgoing for victim in waiting[1]):
                return False  # still being written back; the end of each makes the node ask again
            del self._waiting[node_id]
        for handle, mode in missing:
            if (mode == R or mode == RW) and coherence.best_source(handle, None) is None:
                raise NothingToRead(handle)
        for replica in present:
            replica.pins += 1
        plan = self._find_extents(node_id, [handle.size for handle, _ in missing])
        for replica in present:
            self._replicas.unpin(replica)
        if plan is None:
            return False
        if not self._replicas.are_clean(plan[1], actions):
            self._waiting[node_id] = task, plan[1]
            return False
        unbacked = [handle for handle, mode in task.accesses if mode != SCRATCH and coherence.wants_backing(handle, mode, self._last)]
        if node_id != self._last and not self._reserve_backing(unbacked, task.order, actions):
            return False
        self._replicas.evict(plan[1], actions)
        private: dict[HandleRecord, Replica] = {}
        for (handle, mode), offset in zip(missing, plan[0], strict=True):
            self._nodes[node_id].take_at(offset, handle.size, handle.data_class)
            replica = self._replicas.install(handle, node_id, offset, private=mode == SCRATCH)
            if mode == SCRATCH:
                private[handle] = replica
        if node_id == self._last:
            self._reserve_backing(unbacked, task.order, actions)  # of what is there now
        task.replicas = [private[handle] if mode == SCRATCH else handle.replicas[node_id] for handle, mode in task.accesses]
        for replica in task.replicas:
            replica.pins += 1
            replica.last_use = self._foresight.clock
        self._nodes[node_id].mark()
        self._nodes[self._last].mark()
        self._fetch(task, actions)
        return True

    def _find_extents(self, node_id: NodeId, sizes: Sequence[int]) -> tuple[list[int], list[Replica]] | None:
        """Where extents would go and what is in the way: what can be dropped at once, if that is not needed soon, else what should go first."""
        candidates = self._replicas.candidates[node_id]
        return candidates.plan_droppable(sizes, self._foresight.order + SOON * self._foresight.num_partitions) or candidates.plan(sizes)

    def _reserve_backing(self, handles: Sequence[HandleRecord], order: int, actions: list[Action]) -> bool:
        """Reserve the backing replicas of what the task of that order will write, all or none."""
        made: list[Replica] = []
        for handle in handles:
            if coherence.wants_backing(handle, W, self._last):
                if not self._replicas.reserve_backing(handle, order, actions):
                    for backing in made:
                        self._replicas.release_backing(backing, actions)
                    return False
                made.append(handle.replicas[self._last])
        return True

    def _fetch(self, task: Task, actions: list[Action]) -> None:
        """Start the copies the admitted task needs, and wait for those that touch what it writes."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode == SCRATCH:
                continue
            if replica.state == "reserved" and not replica.arriving and mode != W:
                source = coherence.best_source(handle, replica)
                assert source is not None  # admit() has looked
                actions.append(self._copies.start(source, replica))
                self.num_misses += 1
            elif mode != W:
                self.num_hits += 1
            if replica.arriving:
                self._copies.wait_for(replica, task)
            if mode != R:
                for other in handle.replicas.values():  # never write what a copy still reads
                    if other.arriving and other is not replica:
                        self._copies.wait_for(other, task)


def num_inputs(task: Task) -> int:
    """Accesses of a task that read."""
    return len([mode for _, mode in task.accesses if mode == R or mode == RW])
