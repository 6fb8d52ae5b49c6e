"""Admission: a task's data gets its place on the task's node, in free memory or in that of replicas dropped for it.

Admission is all or nothing. `Admission` first finds the data that a task misses and extents for it; only then it takes extents, drops replicas and
starts copies. If dirty replicas are in the way, it starts their write-backs, and the task asks again when they have ended.

Why this ends: a write-back needs nothing that is not reserved already, so each one ends. Replicas are dropped only for a task admitted at that
moment, or for data that is used sooner. So each attempt of the oldest blocked task finds fewer dirty replicas in its way, and `reservations` keeps
its bytes on the last tier free. Data that was read from a file is never dirty.

Knows the replicas of the nodes (`replicas`) and the order of eviction (`victim_selection`); does not know policies, dependencies or failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..errors import DoesNotFit
from ..events import Action
from ..records import FILE, NEWEST, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W
from ..shortage import Shortage, access_sizes
from . import coherence
from .memory_node import Extent
from .replicas import Replicas

SOON: Final = 256
"""Number of planned tasks within which the next use of a clean replica protects it: it goes then only if the eviction policy chooses it."""


class NothingToRead(Exception):
    """A condition of admission: the task reads `handle`, which has no valid replica anywhere. The machine catches it."""

    def __init__(self, handle: HandleRecord) -> None:
        super().__init__(handle)
        self.handle = handle


class Missing(NamedTuple):
    """The data that a task misses on its node before it is admitted.

    Attributes:
        new: positions of the accesses whose handles need an extent on the node, scratch included.
        unbacked: handles that may need a backing replica on the last tier.
        copies: whether a copy must be started or waited for.
        unreadable: a handle that the task reads although no replica of it is valid; None if there is none.
    """

    new: list[int]
    unbacked: list[HandleRecord]
    copies: bool
    unreadable: HandleRecord | None


class Admission:
    """Reserves the memory of tasks.

    Args:
        replicas: replicas of all nodes.

    Attributes:
        num_hits, num_misses: number of inputs of admitted tasks that were on the node or on their way to it, and number of those that had to be
            fetched. Not counted on a machine with one node and no files.
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
        """Pin and reserve everything the task needs on `task.node`, and start its copies.

        Returns:
            Whether the task is admitted. If not, it holds nothing, and write-backs may have been started for it.

        Raises:
            NothingToRead: the task reads data that does not exist; it holds nothing.
        """
        present: list[Replica] = []
        missing = self._missing(task, present)
        if missing is None:  # the usual case while nothing moves
            self._pin(task, present)
            if self._replicas.has_several:
                self.num_hits += num_inputs(task)
            return True
        if (missing.new or missing.unbacked) and not self._reservations.allow(task):
            return False
        if missing.unreadable is not None:
            raise NothingToRead(missing.unreadable)
        node = self._nodes[task.node]
        handles = [task.accesses[position][0] for position in missing.new]
        extents = node.take_all(handles)
        if extents is None:
            return self._replicas.has_several and self._admit_by_eviction(task, present, missing, actions)
        if task.node != self._last and not self._reserve_backing(missing.unbacked, task.order, actions):
            node.give_all(handles, extents)
            return False
        self._commit(task, present, missing, extents, actions)
        return True

    def does_not_fit(self, task: Task) -> DoesNotFit:
        """Return the error for a task that does not fit although everything that can be dropped is gone."""
        node, last = self._nodes[task.node], self._nodes[self._last]
        total = sum(handle.size for handle, _ in task.accesses)
        new = sum(handle.size for handle, mode in task.accesses if mode != SCRATCH and self._last not in handle.replicas)
        if node is not last and total <= node.budget and new > last.budget - last.used:
            return DoesNotFit(Shortage("full", last.name, new, last.budget, last.used, task.name))
        sizes = access_sizes(task.accesses)
        return DoesNotFit(Shortage("taken", node.name, total, node.budget, node.used, task.name, sizes, hole=node.largest_hole()))

    def needs_no_bytes(self, task: Task, node_id: NodeId) -> bool:
        """Whether the task needs no extent on the node."""
        return all(mode != SCRATCH and node_id in handle.replicas for handle, mode in task.accesses)

    def _missing(self, task: Task, present: list[Replica]) -> Missing | None:
        """Return what the task misses on its node; None if it misses nothing.

        Args:
            present: empty list, to which the replicas of all accesses but those of `Missing.new` are added.
        """
        node_id, several = task.node, self._replicas.has_several
        new: list[int] = []
        unbacked: list[HandleRecord] = []
        unreadable = None
        copies = False
        for handle, mode in task.accesses:
            replica = handle.replicas.get(node_id) if mode != SCRATCH else None
            if replica is not None:
                present.append(replica)
            if replica is None:
                new.append(len(present) + len(new))
                if mode == SCRATCH:
                    continue
                copies = copies or mode != W or bool(handle.replicas)
                is_read = mode == R or mode == RW
                if coherence.wants_backing(handle, mode, self._last):
                    unbacked.append(handle)
            elif several and (replica.arriving or (mode != R and len(handle.replicas) > 1)):
                copies, is_read = True, False
                if mode != R and FILE in handle.replicas:
                    unbacked.append(handle)
            elif replica.state == "reserved" and mode != W:  # an empty backing replica
                copies = is_read = True
            else:
                continue
            if is_read and unreadable is None and coherence.best_source(handle, None) is None:
                unreadable = handle
        return Missing(new, unbacked, copies, unreadable) if new or copies else None

    def _admit_by_eviction(self, task: Task, present: list[Replica], missing: Missing, actions: list[Action]) -> bool:
        """Admit a task for which there is no hole, over replicas that are dropped for it; as `admit`."""
        node_id, node = task.node, self._nodes[task.node]
        if node_id == self._last and not self._replicas.num_files:
            return False
        waiting = self._waiting.get(node_id)
        if waiting is not None and waiting[0] is task:
            if any(victim.outgoing for victim in waiting[1]):
                return False  # wait for these write-backs; the end of each one leads to another attempt
            del self._waiting[node_id]
        largest_first = sorted(missing.new, key=lambda position: -task.accesses[position][0].size)
        plan = self._find_extents(task, [task.accesses[position][0].size for position in largest_first])
        if plan is None:
            return False
        offsets, victims = plan
        if not self._replicas.are_clean(victims, actions):
            self._waiting[node_id] = task, victims
            return False
        if node_id != self._last and not self._reserve_backing(missing.unbacked, task.order, actions):
            return False
        self._replicas.evict(victims, actions)
        offset_of = dict(zip(largest_first, offsets, strict=True))
        for position, offset in offset_of.items():
            handle = task.accesses[position][0]
            node.take_at(offset, handle.size, handle.data_class)
        self._commit(task, present, missing, [(offset_of[position], NEWEST) for position in missing.new], actions)
        return True

    def _find_extents(self, task: Task, sizes: Sequence[int]) -> tuple[list[int], list[Replica]] | None:
        """Return offsets on the task's node and the replicas that are in the way there.

        Clean replicas that are not needed soon are preferred; otherwise the eviction policy decides. What the task itself uses stays.
        """
        node_id, foresight = task.node, self._foresight
        own = [handle.replicas[node_id] for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas]
        for replica in own:
            replica.pins += 1
        candidates = self._replicas.candidates[node_id]
        plan = candidates.plan_droppable(sizes, foresight.order + SOON * foresight.num_partitions) or candidates.plan(sizes)
        for replica in own:
            self._replicas.unpin(replica)
        return plan

    def _commit(self, task: Task, present: list[Replica], missing: Missing, extents: Sequence[Extent], actions: list[Action]) -> None:
        """Install the task's new replicas in extents just taken, pin all that it uses, and start its copies."""
        node_id, install = task.node, self._replicas.install
        for position, (offset, kernel_mark) in zip(missing.new, extents, strict=True):
            handle, mode = task.accesses[position]
            present.insert(position, install(handle, node_id, offset, kernel_mark, private=mode == SCRATCH))
        self._pin(task, present)
        if node_id == self._last:
            for handle in missing.unbacked:
                self._reservations.enter(handle.replicas[node_id], task.order)
        if extents or missing.unbacked:
            self._nodes[node_id].mark()
            self._nodes[self._last].mark()
        if missing.copies:
            self._start_copies(task, actions)
        elif self._replicas.has_several:
            self.num_hits += num_inputs(task)

    def _pin(self, task: Task, replicas: list[Replica]) -> None:
        """Give the task its replicas; while it uses them, none is dropped."""
        clock = self._foresight.clock
        for replica in replicas:
            replica.pins += 1
            replica.last_use = clock
        task.replicas = replicas

    def _reserve_backing(self, handles: Sequence[HandleRecord], order: int, actions: list[Action]) -> bool:
        """Reserve the backing replicas of the results of the task of that `order`, all or none."""
        reserved: list[Replica] = []
        for handle in handles:
            if coherence.wants_backing(handle, W, self._last):
                if not self._replicas.reserve_backing(handle, order, actions):
                    for backing in reserved:
                        self._replicas.release_backing(backing, actions)
                    return False
                reserved.append(handle.replicas[self._last])
        return True

    def _start_copies(self, task: Task, actions: list[Action]) -> None:
        """Start the copies that the admitted task needs, and make it wait for copies of the data that it writes."""
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
                for other in handle.replicas.values():  # a copy may still read it
                    if other.arriving and other is not replica:
                        self._copies.wait_for(other, task)


def num_inputs(task: Task) -> int:
    """Return the number of accesses of a task that read."""
    return len([mode for _, mode in task.accesses if mode == R or mode == RW])
