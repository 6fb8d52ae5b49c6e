"""How a task gets everything it needs in one place: admission, eviction, prefetch, compaction. Where replicas are and how they move: `replicas`.

Admission is all or nothing: either every byte a task misses on its node, and every home its outputs miss, is reserved with whatever has to be
dropped for it, or nothing is dropped and nothing reserved. When dirty replicas stand in the way their write-backs are started, and admission
is tried again when they have arrived.

Why this ends. A write-back needs nothing that is not reserved already, so every one ends, and early ones only make dirty replicas fewer. Replicas are
dropped only for a task admitted at that moment, or for data that is used sooner, which can be dropped for a task at once. So each attempt of the
oldest blocked task has strictly fewer dirty replicas in its way. What it needs of the last tier nobody can take from it: see `claims`. What was read
from a file is never dirty: wherever it is, it can be dropped as soon as no task or copy uses it.

Knows extents and replicas (`replicas`) and who goes first (`victims`); does not know policies, dependencies or failures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from . import coherence
from .errors import DoesNotFit, InvalidEvent
from .events import MoveTile
from .records import FILE, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W
from .replicas import Replicas

SOON: Final = 256
"""A replica used within so many planned tasks does not go just because it can be dropped at once: it goes when its price is the best."""


class NothingToRead(Exception):
    """A condition of admission: the task reads `handle`, which has no valid replica anywhere. The machine catches it."""

    def __init__(self, handle: HandleRecord) -> None:
        super().__init__(handle)
        self.handle = handle


class Residency(Replicas):
    """What comes into each memory, and what goes for it."""

    __slots__ = ()

    def break_tier(self, error: BaseException) -> None:
        """The last tier takes no more data: what is dirty stays where it is."""
        self.broken = error
        for shelf in self.shelves:
            shelf.keep_dirty = True

    def admit(self, task: Task) -> bool:
        """Pin and reserve everything the task needs on `task.node` and start its copies; or leave all as it is and return False.

        Raises:
            NothingToRead: the task reads data that does not exist; nothing was reserved.
        """
        node_id, last, clock, several = task.node, self.last, self.horizon.clock, self.has_several
        replicas: list[Replica] = []
        homeless: tuple[HandleRecord, ...] = ()  # written, and at home in a file so far
        grows = fetch = False
        for handle, mode in task.accesses:
            replica = handle.replicas.get(node_id)
            if replica is None or mode == SCRATCH:
                if not grows:
                    if not self.claims.allow(task):
                        self._take_back(replicas)
                        return False
                    grows = True
                if (mode == R or mode == RW) and coherence.best_source(handle, None) is None:
                    self._take_back(replicas)
                    raise NothingToRead(handle)
                offset = self.nodes[node_id].take(handle.size, handle.data_class, handle.place)
                if offset is None:
                    self._take_back(replicas)
                    return several and self._admit_by_eviction(task)
                handle.place = offset
                replica = self._settle_in(handle, node_id, offset, private=mode == SCRATCH)
                if mode != SCRATCH:
                    if several and FILE in handle.replicas:
                        if mode != R:
                            homeless += (handle,)
                    elif node_id == last:
                        self.claims.enter(replica, task.order)
                    elif last not in handle.replicas and not self._make_home(handle, task.order):
                        replica.pins += 1
                        replicas.append(replica)
                        self._take_back(replicas)
                        return False
                    if mode != W or len(handle.replicas) > 1:
                        fetch = True
            elif several and (replica.arriving or (mode != R and len(handle.replicas) > 1)):
                fetch = True
                if mode != R and FILE in handle.replicas:
                    homeless += (handle,)
            elif replica.state == "reserved" and mode != W:  # an empty home
                if coherence.best_source(handle, None) is None:
                    self._take_back(replicas)
                    raise NothingToRead(handle)
                fetch = True
            replica.pins += 1
            replicas.append(replica)
        if homeless and not ((grows or self.claims.allow(task)) and self._make_homes(homeless, task.order)):
            self._take_back(replicas)
            return False
        for replica in replicas:
            replica.last_use = clock
        task.replicas = replicas
        if grows or homeless:
            self.nodes[node_id].mark()
            self.nodes[last].mark()
        if fetch:
            self._fetch(task)
        elif several:
            self.num_hits += num_inputs(task)
        return True

    def does_not_fit(self, task: Task) -> DoesNotFit:
        """Why the task finds no room, now that nothing else can go: the node, its budget, and what is taken."""
        node, last = self.nodes[task.node], self.nodes[self.last]
        total = sum(handle.size for handle, _ in task.accesses)
        new = sum(handle.size for handle, mode in task.accesses if mode != SCRATCH and self.last not in handle.replicas)
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

    def is_at_home(self, task: Task, node_id: NodeId) -> bool:
        """Whether the task could run on the node without a single new byte."""
        return all(mode != SCRATCH and node_id in handle.replicas for handle, mode in task.accesses)

    def _take_back(self, replicas: list[Replica]) -> None:
        """Undo a half-made reservation; that frees nothing anybody could wait for."""
        freed = self.freed
        for replica in replicas:
            self.unpin(replica)
            if replica.pins or replica.arriving:
                continue
            if replica.state == "scratch" or (replica.state == "reserved" and (not replica.is_home or len(replica.handle.replicas) == 1)):
                self.drop(replica)
        self.freed = freed

    def _admit_by_eviction(self, task: Task) -> bool:
        """`admit` when there is no hole: find what to drop, then drop it and reserve at once."""
        node_id = task.node
        present = [handle.replicas[node_id] for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas]
        missing = [(handle, mode) for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas]
        missing.sort(key=lambda access: -access[0].size)
        if node_id == self.last and not self.num_files:
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
        plan = self._find_room(node_id, [handle.size for handle, _ in missing])
        for replica in present:
            self.unpin(replica)
        if plan is None:
            return False
        if not self._are_clean(plan[1]):
            self._waiting[node_id] = task, plan[1]
            return False
        homeless = [handle for handle, mode in task.accesses if mode != SCRATCH and coherence.wants_home(handle, mode, self.last)]
        if node_id != self.last and not self._make_homes(homeless, task.order):
            return False
        self._evict(plan[1])
        private: dict[HandleRecord, Replica] = {}
        for (handle, mode), offset in zip(missing, plan[0], strict=True):
            self.nodes[node_id].claim(offset, handle.size, handle.data_class)
            replica = self._settle_in(handle, node_id, offset, private=mode == SCRATCH)
            if mode == SCRATCH:
                private[handle] = replica
        if node_id == self.last:
            self._make_homes(homeless, task.order)  # of what is there now
        task.replicas = [private[handle] if mode == SCRATCH else handle.replicas[node_id] for handle, mode in task.accesses]
        for replica in task.replicas:
            replica.pins += 1
            replica.last_use = self.horizon.clock
        self.nodes[node_id].mark()
        self.nodes[self.last].mark()
        self._fetch(task)
        return True

    def _find_room(self, node_id: NodeId, sizes: Sequence[int]) -> tuple[list[int], list[Replica]] | None:
        """Where extents would go and what is in the way: what can be dropped at once, if that is not needed soon, else what should go first."""
        shelf = self.shelves[node_id]
        return shelf.plan_droppable(sizes, self.horizon.order + SOON * self.horizon.num_parts) or shelf.plan(sizes)

    def _make_homes(self, handles: Sequence[HandleRecord], order: int) -> bool:
        """Reserve the homes of what the task of that order will write, all or none."""
        made: list[Replica] = []
        for handle in handles:
            if coherence.wants_home(handle, W, self.last):
                if not self._make_home(handle, order):
                    for home in made:
                        self._unmake_home(home)
                    return False
                made.append(handle.replicas[self.last])
        return True

    def _are_clean(self, victims: Sequence[Replica]) -> bool:
        """Whether dropping the victims loses nothing; if it does, start the write-backs that are missing."""
        if all(not victim.pins and not coherence.is_needed(victim) for victim in victims):
            return True
        for victim in victims:
            if not victim.pins and coherence.is_needed(victim):
                self.write_back(victim)
        return False

    def _fetch(self, task: Task) -> None:
        """Start the copies the admitted task needs, and wait for those that touch what it writes."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode == SCRATCH:
                continue
            if replica.state == "reserved" and not replica.arriving and mode != W:
                source = coherence.best_source(handle, replica)
                assert source is not None  # admit() has looked
                self._copy(source, replica)
                self.num_misses += 1
            elif mode != W:
                self.num_hits += 1
            if replica.arriving:
                self.copies.wait_for(replica, task)
            if mode != R:
                for other in handle.replicas.values():  # never write what a copy still reads
                    if other.arriving and other is not replica:
                        self.copies.wait_for(other, task)

    def prefetch(self, handle: HandleRecord, node_id: NodeId, distance: int) -> bool:
        """Start fetching data that is used `distance` planned tasks from now, into free memory or over what is used later; or return False."""
        source = coherence.best_source(handle, None)
        assert source is not None  # the caller has looked
        node = self.nodes[node_id]
        offset = node.take(handle.size, handle.data_class)
        if offset is None:
            plan = self.shelves[node_id].plan_droppable([handle.size], self.horizon.order + distance)
            if plan is None:
                return False
            (offset,), victims = plan
            self._evict(victims)
            node.claim(offset, handle.size, handle.data_class)
        node.mark()
        self._copy(source, self._settle_in(handle, node_id, offset))
        return True

    def compact_for(self, task: Task, node_id: NodeId) -> bool:
        """Make one hole of all that is free or droppable on an idle node, and of what is free on the last tier, if the task then fits there.

        The last resort against fragmentation, so nothing may run, move or be admitted meanwhile: no replica is pinned. When dirty replicas must
        go, their write-backs are started instead and False is returned. A file needs no compaction, its addresses are plenty; nor does memory of
        which only bytes are counted.
        """
        if self.nodes[node_id].is_counted or not self.claims.allow(task):
            return False
        last = self.nodes[self.last]
        homes = self._missing_homes(task) if node_id != self.last else 0
        if homes and self._plan_hole(self.last, homes) is None:
            return False
        missing = sum(handle.size for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas)
        if not self._make_hole(node_id, missing, {handle for handle, mode in task.accesses if mode != SCRATCH}):
            return False
        return node_id == self.last or last.is_storage or self._make_hole(self.last, homes)

    def _missing_homes(self, task: Task) -> int:
        """Bytes that the homes of what the task will write still take on the last tier."""
        return sum(
            handle.size
            for handle, mode in task.accesses
            if mode != SCRATCH and self.last not in handle.replicas and coherence.wants_home(handle, mode, self.last)
        )

    def _plan_hole(self, node_id: NodeId, missing: int, kept: Collection[HandleRecord] = ()) -> list[Replica] | None:
        """What must go so that the node has so many bytes more, in holes of any size; None if too little may.

        Args:
            kept: what stays: the data of a task that will run there. One that runs elsewhere reads its data wherever else it lies.
        """
        node, shelf = self.nodes[node_id], self.shelves[node_id]
        candidates = [replica for replica in shelf.starts.values() if replica.handle not in kept and self._may_go(replica)]
        candidates.sort(key=self.eviction.key, reverse=True)
        victims: list[Replica] = []
        excess = node.used + missing - min(node.extents.capacity, node.budget)
        for replica in candidates:
            if excess <= 0:
                break
            victims.append(replica)
            excess -= replica.handle.size
        return None if excess > 0 else victims

    def _make_hole(self, node_id: NodeId, missing: int, kept: Collection[HandleRecord] = ()) -> bool:
        """Make one hole of all that is free or droppable on the node, if so many bytes more then fit there; `kept` stays."""
        victims = self._plan_hole(node_id, missing, kept)
        if victims is None or not self._are_clean(victims):
            return False
        self._evict(victims)
        self._compact(node_id)
        return True

    def _compact(self, node_id: NodeId) -> None:
        """Move all replicas of an idle node to its beginning."""
        shelf = self.shelves[node_id]
        position = 0
        kept = [replica for _, replica in sorted(shelf.starts.items())]
        for replica in kept:
            if replica.pins:
                raise InvalidEvent(f"{replica.handle!r} on node {node_id} would be moved while pinned")
            if replica.offset != position:
                if replica.state != "reserved":
                    self.actions.append(MoveTile(node_id, replica.offset, position, replica.handle.nbytes))
                replica.offset, replica.view = position, None
            position += replica.handle.size
        self.nodes[node_id].extents.compact(position)
        shelf.move(kept)
        for replica in kept:
            if not replica.is_home:
                shelf.offer(replica)

    def _may_go(self, replica: Replica) -> bool:
        """Whether an unpinned replica may be dropped, perhaps after a write-back."""
        return not replica.is_home and (self.broken is None or not coherence.is_needed(replica))


def num_inputs(task: Task) -> int:
    """Accesses of a task that read."""
    return sum(mode == R or mode == RW for _, mode in task.accesses)
