"""Admission: a task's data gets its place on the task's node, in free memory or in that of replicas dropped for it.

Admission is all or nothing. `Admission` first finds the data that a task misses and extents for it (`AdmissionPlan`, or `Blocked`); only then it
takes extents, drops replicas and starts copies. If dirty replicas are in the way, it starts their write-backs, and `dispatch` asks again later.

Why this ends: a write-back needs nothing that is not reserved already, so each one ends. Replicas are dropped only for a task admitted at that
moment, or for data that is used sooner. So each attempt of the oldest blocked task finds fewer dirty replicas in its way, and `reservations` keeps
its bytes on the last tier free. Data that was read from a file is never dirty.

Knows the replicas of the nodes (`replicas`) and the order of eviction (`victim_selection`); does not know policies, dependencies or failures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from ..errors import DoesNotFit
from ..events import Action
from ..records import FILE, NEWEST, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W
from ..shortage import Shortage, access_sizes
from . import coherence, victim_selection
from .hole_search import ExtentPlan, Holes
from .memory_node import Extent, MemoryNode
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
        new: positions of the accesses whose handles need an extent on the node, scratch included; `handles` are these handles.
        unbacked: handles that need a backing replica on the last tier.
        copies: whether a copy must be started or waited for.
        unreadable: a handle that the task reads although no replica of it is valid; None if there is none.
    """

    new: list[int]
    handles: list[HandleRecord]
    unbacked: Collection[HandleRecord]
    copies: bool
    unreadable: HandleRecord | None


class AdmissionPlan(NamedTuple):
    """A plan to admit a task.

    Attributes:
        present: replicas of the accesses that are on the task's node, in their order.
        holes: extents of `missing.new` on the task's node, and replicas to drop for them; None if free memory suffices.
        backing: extents on the last tier for the backing replicas of `missing.unbacked`; None if there are none, or if the task runs there.
    """

    present: list[Replica]
    missing: Missing
    holes: Holes | None
    backing: ExtentPlan | None


class Blocked(NamedTuple):
    """The reason why a task is not admitted.

    Attributes:
        sizes: bytes of the extents for which there are no holes; empty if something else is missing.
        holes: holes of these sizes that are left once their dirty victims have been written back; None if there are none at all.
        num_changes: `Candidates.num_changes` of the node at the time.
    """

    task: Task
    sizes: Sequence[int] = ()
    holes: Holes | None = None
    num_changes: int = -1


class Admission:
    """Reserves the memory of tasks.

    Args:
        replicas: replicas of all nodes.

    Attributes:
        num_hits, num_misses: number of inputs of admitted tasks that were on the node or on their way to it, and number of those that had to be
            fetched. Not counted on a machine with one node and no files.
    """

    __slots__ = ("_blocked", "_copies", "_foresight", "_last", "_nodes", "_replicas", "_reservations", "num_hits", "num_misses")

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._nodes = replicas.nodes
        self._last = replicas.last
        self._foresight = replicas.foresight
        self._reservations = replicas.reservations
        self._copies = replicas.copies
        self._blocked: dict[NodeId, Blocked] = {}  # the latest refusal of each node; the task may have been admitted since
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
        plan = self._plan(task, present, missing)
        if isinstance(plan, AdmissionPlan):
            self._commit(task, plan, actions)
            return True
        if plan is not self._blocked.get(task.node):
            self._blocked[task.node] = plan
            if plan.holes is not None:
                self._replicas.write_back_dirty(plan.holes.victims, actions)
        return False

    def _plan(self, task: Task, present: list[Replica], missing: Missing) -> AdmissionPlan | Blocked:
        """Return what the task takes to be admitted, or why it cannot be admitted now. Nothing changes.

        Raises:
            NothingToRead: the task reads data that does not exist.
        """
        if (missing.new or missing.unbacked) and not self._reservations.allow(task):
            return Blocked(task)
        if missing.unreadable is not None:
            raise NothingToRead(missing.unreadable)
        holes = backing = None
        if missing.new and not self._nodes[task.node].fits(missing.handles, preferred=True):
            planned = self._plan_extents(task, sorted([handle.spec.size for handle in missing.handles], reverse=True))
            if isinstance(planned, Blocked):
                return planned
            holes = planned
        if missing.unbacked and task.node != self._last:
            backing = self._replicas.plan_backing(missing.unbacked)
            if backing is None:
                return Blocked(task)
        return AdmissionPlan(present, missing, holes, backing)

    def _plan_extents(self, task: Task, sizes: Sequence[int]) -> Holes | Blocked:
        """Return holes of these sizes, descending, on the task's node over replicas that can be dropped at once.

        Clean replicas that are not needed soon are preferred; otherwise the eviction policy decides. What the task itself uses stays.
        """
        node_id, foresight = task.node, self._foresight
        candidates = self._replicas.candidates[node_id]
        if node_id == self._last and not self._replicas.num_files:  # nothing can be dropped
            return candidates.plan_free(sizes) or Blocked(task)
        blocked = self._blocked.get(node_id)
        if blocked is not None and blocked.task is task and blocked.sizes == sizes:
            if blocked.holes is None:
                if blocked.num_changes == candidates.num_changes:
                    return blocked
            elif any(victim.outgoing for victim in blocked.holes.victims):
                return blocked  # wait for these write-backs; the end of each one leads to another attempt
            elif candidates.still_fits(sizes, blocked.holes):
                return blocked.holes
        own = [handle.replicas[node_id] for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas]
        holes = candidates.plan_droppable(sizes, foresight.order + SOON * foresight.num_partitions, own) or candidates.plan(sizes, own)
        if holes is not None and all(map(victim_selection.is_droppable, holes.victims)):
            return holes
        return Blocked(task, sizes, holes, candidates.num_changes)

    def does_not_fit(self, task: Task) -> DoesNotFit:
        """Return the error for a task that does not fit although everything that can be dropped is gone."""
        node, last = self._nodes[task.node], self._nodes[self._last]
        total = sum(handle.spec.size for handle, _ in task.accesses)
        new = sum(handle.spec.size for handle, mode in task.accesses if mode != SCRATCH and self._last not in handle.replicas)
        if node is not last and total <= node.budget and new > last.budget - last.used:
            return DoesNotFit(Shortage("full", last.name, new, last.budget, last.used, task.spec.name))
        sizes = access_sizes(task.accesses)
        return DoesNotFit(Shortage("taken", node.name, total, node.budget, node.used, task.spec.name, sizes, hole=node.largest_hole()))

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
        handles: list[HandleRecord] = []
        unbacked: dict[HandleRecord, None] = {}
        unreadable = None
        copies = False
        for handle, mode in task.accesses:
            replica = handle.replicas.get(node_id)  # none for scratch, which a handle does not list
            if replica is not None:
                present.append(replica)
                if not several and replica.state != "reserved":
                    continue
            if replica is None:
                new.append(len(present) + len(new))
                handles.append(handle)
                if mode == SCRATCH:
                    continue
                copies = copies or mode != W or bool(handle.replicas)
                is_read = mode == R or mode == RW
                if coherence.wants_backing(handle, mode, self._last):
                    unbacked[handle] = None
            elif several and (replica.arriving or (mode != R and len(handle.replicas) > 1)):
                copies, is_read = True, False
                if mode != R and FILE in handle.replicas and coherence.wants_backing(handle, mode, self._last):
                    unbacked[handle] = None
            elif replica.state == "reserved" and mode != W:  # an empty backing replica
                copies = is_read = True
            else:
                continue
            if is_read and unreadable is None and coherence.best_source(handle, None) is None:
                unreadable = handle
        return Missing(new, handles, unbacked, copies, unreadable) if new or copies else None

    def _commit(self, task: Task, plan: AdmissionPlan, actions: list[Action]) -> None:
        """Reserve backing replicas, drop victims, install the task's new replicas, pin all that it uses, and start its copies."""
        node_id, replicas, present, missing = task.node, self._replicas, plan.present, plan.missing
        node, handles = self._nodes[node_id], missing.handles
        if plan.backing is not None:
            replicas.reserve_backing(missing.unbacked, plan.backing, task.order, actions)
        extents = node.take_all(handles, preferred=True) if plan.holes is None else self._take_holes(node, handles, plan.holes, actions)
        for position, handle, (offset, kernel_mark) in zip(missing.new, handles, extents, strict=True):
            is_scratch = task.accesses[position][1] == SCRATCH
            present.insert(position, replicas.install(handle, node_id, offset, kernel_mark, private=is_scratch))
        self._pin(task, present)
        if node_id == self._last:
            for handle in missing.unbacked:
                self._reservations.enter(handle.replicas[node_id], task.order)
        if handles or missing.unbacked:
            node.mark()
            self._nodes[self._last].mark()
        if missing.copies:
            self._start_copies(task, actions)
        elif replicas.has_several:
            self.num_hits += num_inputs(task)

    def _take_holes(self, node: MemoryNode, handles: Sequence[HandleRecord], holes: Holes, actions: list[Action]) -> list[Extent]:
        """Drop the victims of holes that were planned for the sizes of handles, largest first, and take the extents."""
        self._replicas.evict([victim for victim in holes.victims if node.starts.get(victim.offset) is victim], actions)
        extents: list[Extent] = [(0, NEWEST)] * len(handles)
        largest_first = sorted(range(len(handles)), key=lambda number: -handles[number].spec.size)
        for number, offset in zip(largest_first, holes.offsets, strict=True):
            node.take_at(offset, handles[number].spec.size, handles[number].spec.data_class)
            extents[number] = offset, NEWEST
        return extents

    def _pin(self, task: Task, replicas: list[Replica]) -> None:
        """Give the task its replicas; while it uses them, none is dropped."""
        clock = self._foresight.clock
        for replica in replicas:
            replica.pins += 1
            replica.last_use = clock
        task.replicas = replicas

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
