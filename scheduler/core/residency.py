"""Which data is where, and how a task gets everything it needs in one place: admission, copies, eviction, write-back, prefetch.

Homes. The *last tier* is the storage node if there is one, else host memory. Every handle that holds data anywhere has an extent there, its
*home*, reserved together with the first output: so every replica always has somewhere to go, and a write-back never waits for room.

Admission is all or nothing: either every byte a task misses on its node, and every home its outputs miss, is reserved with whatever has to be
dropped for it, or nothing is dropped and nothing reserved. When dirty replicas stand in the way their write-backs are started, and admission
is tried again when they have arrived.

Why this ends. A write-back needs nothing that is not reserved already, so every one ends; replicas are dropped only for a task admitted at that
moment, or, while no task waits for memory, for data that is used sooner. So each attempt of the oldest blocked task has strictly fewer dirty
replicas in its way. What it needs of the last tier nobody can take from it: see `claims`.

Knows extents (`memory`), the replica protocol (`coherence`) and who goes first (`victims`); does not know policies, dependencies or failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from . import coherence
from .claims import Claims
from .errors import InvalidEvent
from .events import Action, CopyTile, DiscardExtent, MoveTile
from .eviction import EvictionPolicy, Horizon
from .memory import MemoryNode
from .records import RAM, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W
from .victims import Shelf

SOON: Final = 16
"""A replica that is used within so many planned tasks is not dropped while a write-back could make room instead."""


class NothingToRead(Exception):
    """A condition of admission: the task reads `handle`, which has no valid replica anywhere. The machine catches it."""

    def __init__(self, handle: HandleRecord) -> None:
        super().__init__(handle)
        self.handle = handle


@dataclass(slots=True, eq=False)
class Copy:
    """A copy under way, and the tasks that wait for it."""

    source: Replica
    waiting: list[Task] = field(default_factory=list)


class Residency:
    """Replicas, their extents, and the copies between them.

    Args:
        nodes: host memory first; a storage node, if any, last.
        horizon: where the recorded steps stand.
        eviction: who goes first.

    Attributes:
        last: the last tier.
        has_several: whether there is more than one node, so that data may move.
        shelves: every replica of each node, scratch included, and which of them may go.
        copies: copies under way by target; `queued` their bytes by link.
        actions: where copies are asked for; the machine sets it for every event.
        freed: whether anything was dropped or unpinned since the machine last looked.
        clock: count of events, for LRU.
        claims: who may take room on the last tier.
        broken: why the last tier takes no more data, if so.
        num_hits, num_misses: inputs of admitted tasks that were in place or under way, and that had to be fetched; counted where there are several
            nodes.
    """

    __slots__ = (
        "_waiting",
        "actions",
        "broken",
        "claims",
        "clock",
        "copies",
        "eviction",
        "freed",
        "has_several",
        "horizon",
        "last",
        "moved_bytes",
        "nodes",
        "num_evictions",
        "num_hits",
        "num_misses",
        "num_writing",
        "queued",
        "shelves",
    )  # fmt: skip

    def __init__(self, nodes: Sequence[MemoryNode], horizon: Horizon, eviction: EvictionPolicy) -> None:
        self.nodes = list(nodes)
        self.has_several = len(self.nodes) > 1
        self.horizon = horizon
        self.eviction = eviction
        self.last = NodeId(len(self.nodes) - 1) if self.nodes[-1].is_storage else RAM
        self.claims = Claims(self.nodes[self.last], self.last, horizon)
        self.shelves = [Shelf(node, eviction) for node in self.nodes]
        self.copies: dict[Replica, Copy] = {}
        self.moved_bytes: dict[tuple[NodeId, NodeId], int] = {}
        self.queued: dict[tuple[NodeId, NodeId], int] = {}
        self._waiting: dict[NodeId, Task] = {}  # whose victims are being written back; nothing changes for it before a copy has ended
        self.num_evictions = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_writing = 0
        self.actions: list[Action] = []
        self.freed = False
        self.clock = 0
        self.broken: BaseException | None = None

    def break_tier(self, error: BaseException) -> None:
        """The last tier takes no more data: what is dirty stays where it is."""
        self.broken = error
        for shelf in self.shelves:
            shelf.keep_dirty = True

    def residents(self, node_id: NodeId) -> Iterable[Replica]:
        """Every replica of a node, scratch included."""
        return self.shelves[node_id].starts.values()

    def free_bytes(self, node: NodeId) -> int:
        """Bytes of the node's budget that nothing uses."""
        return self.nodes[node].budget - self.nodes[node].used

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Bytes on their way over a link."""
        return self.queued.get((source, target), 0)

    def below(self, node: NodeId) -> NodeId:
        """Where what is evicted goes; the node itself if nothing lies below it."""
        return RAM if node not in (RAM, self.last) else self.last

    def admit(self, task: Task) -> bool:
        """Pin and reserve everything the task needs on `task.node` and start its copies; or leave all as it is and return False.

        Raises:
            NothingToRead: the task reads data that does not exist; nothing was reserved.
        """
        node_id, last, clock, several = task.node, self.last, self.clock, self.has_several
        replicas: list[Replica] = []
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
                offset = self.nodes[node_id].take(handle.size, handle.data_class)
                if offset is None:
                    self._take_back(replicas)
                    return len(self.nodes) > 1 and self._admit_by_eviction(task)
                replica = self._settle_in(handle, node_id, offset, private=mode == SCRATCH)
                if mode != SCRATCH:
                    if node_id == last:
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
            elif replica.state == "reserved" and mode != W:  # an empty home
                if coherence.best_source(handle, None) is None:
                    self._take_back(replicas)
                    raise NothingToRead(handle)
                fetch = True
            replica.pins += 1
            replica.last_use = clock
            replicas.append(replica)
        task.replicas = replicas
        if grows:
            self.nodes[node_id].mark()
            self.nodes[last].mark()
        if fetch:
            self._fetch(task)
        elif several:
            self.num_hits += num_inputs(task)
        return True

    def is_at_home(self, task: Task, node_id: NodeId) -> bool:
        """Whether the task could run on the node without a single new byte."""
        return all(mode != SCRATCH and node_id in handle.replicas for handle, mode in task.accesses)

    def _make_home(self, handle: HandleRecord, order: int) -> bool:
        """Reserve the handle's extent on the last tier for the task of that order."""
        offset = self.nodes[self.last].take(handle.size, handle.data_class)
        if offset is None:
            return False
        self.claims.enter(self._settle_in(handle, self.last, offset), order)
        return True

    def _settle_in(self, handle: HandleRecord, node_id: NodeId, offset: int, *, private: bool = False) -> Replica:
        """A new replica over an extent just taken."""
        replica = Replica(handle, node_id, offset, since=self.clock)
        if private:
            replica.state = "scratch"
        else:
            handle.replicas[node_id] = replica
        self.shelves[node_id].enter(replica)
        return replica

    def unpin(self, replica: Replica) -> None:
        """One user less; without any but copies the replica may go."""
        replica.pins -= 1
        if replica.pins == replica.outgoing and replica.node != self.last:
            self.shelves[replica.node].offer(replica)

    def _take_back(self, replicas: list[Replica]) -> None:
        """Undo a half-made reservation; that frees nothing anybody could wait for."""
        freed = self.freed
        for replica in replicas:
            self.unpin(replica)
            if replica.pins or replica.arriving:
                continue
            if replica.state == "scratch" or (replica.state == "reserved" and (replica.node != self.last or len(replica.handle.replicas) == 1)):
                self.drop(replica)
        self.freed = freed

    def _admit_by_eviction(self, task: Task) -> bool:
        """`admit` when there is no hole: find what to drop, then drop it and reserve at once."""
        node_id = task.node
        present = [handle.replicas[node_id] for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas]
        missing = [(handle, mode) for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas]
        missing.sort(key=lambda access: -access[0].size)
        if node_id == self.last or self._waiting.get(node_id) is task:
            return False
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
            self._waiting[node_id] = task
            return False
        if not self._make_homes(missing, task.order):
            return False
        self._evict(plan[1])
        private: dict[HandleRecord, Replica] = {}
        for (handle, mode), offset in zip(missing, plan[0], strict=True):
            self.nodes[node_id].claim(offset, handle.size, handle.data_class)
            replica = self._settle_in(handle, node_id, offset, private=mode == SCRATCH)
            if mode == SCRATCH:
                private[handle] = replica
        task.replicas = [private[handle] if mode == SCRATCH else handle.replicas[node_id] for handle, mode in task.accesses]
        for replica in task.replicas:
            replica.pins += 1
            replica.last_use = self.clock
        self.nodes[node_id].mark()
        self.nodes[self.last].mark()
        self._fetch(task)
        return True

    def _find_room(self, node_id: NodeId, sizes: Sequence[int]) -> tuple[list[int], list[Replica]] | None:
        """Where extents would go and what is in the way: what can be dropped at once, if that is not needed soon, else what should go first."""
        shelf = self.shelves[node_id]
        return shelf.plan_droppable(sizes, self.horizon.order + SOON) or shelf.plan(sizes)

    def _make_homes(self, missing: Sequence[tuple[HandleRecord, str]], order: int) -> bool:
        """Reserve the homes of what the task of that order will write, all or none."""
        made: list[Replica] = []
        freed = self.freed
        for handle, mode in missing:
            if mode != SCRATCH and self.last not in handle.replicas:
                if not self._make_home(handle, order):
                    for home in made:
                        self.drop(home)
                    self.freed = freed  # nothing that anybody could wait for
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
                self._await(replica, task)
            if mode != R:
                for other in handle.replicas.values():  # never write what a copy still reads
                    if other.arriving and other is not replica:
                        self._await(other, task)

    def _await(self, target: Replica, task: Task) -> None:
        self.copies[target].waiting.append(task)
        task.num_arriving += 1

    def _copy(self, source: Replica, target: Replica) -> None:
        source.pins += 1
        source.outgoing += 1
        target.pins += 1
        target.arriving = True
        source.handle.num_uses += 1
        self.copies[target] = Copy(source)
        self.num_writing += target.node == self.last
        link = (source.node, target.node)
        self.moved_bytes[link] = self.moved_bytes.get(link, 0) + source.handle.nbytes
        self.queued[link] = self.queued.get(link, 0) + source.handle.nbytes
        self.actions.append(CopyTile(source, target))

    def end_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Take note that a copy has ended, well or not; the tasks that waited for it. The caller unpins source and target.

        Raises:
            InvalidEvent: no such copy is under way.
        """
        copy = self.copies.pop(target, None)
        if copy is None or copy.source is not source:
            raise InvalidEvent(f"a copy of {target.handle!r} from node {source.node} to node {target.node} finished that was not under way")
        self.queued[source.node, target.node] -= source.handle.nbytes
        self._waiting.clear()
        target.arriving = False
        source.outgoing -= 1
        source.handle.num_uses -= 1
        self.num_writing -= target.node == self.last
        self.freed = True
        for task in copy.waiting:
            task.num_arriving -= 1
        return copy.waiting

    def forget(self, task: Task) -> None:
        """The task waits for no copy any more."""
        for copy in self.copies.values():
            if task in copy.waiting:
                copy.waiting.remove(task)
        task.num_arriving = 0

    def finish_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Take note that a copy has arrived; the tasks that have nothing more to wait for.

        Raises:
            InvalidEvent: no such copy is under way.
        """
        waiting = self.end_copy(source, target)
        coherence.step(source, "copied from")
        coherence.step(target, "copy arrived")
        self.unpin(source)
        self.unpin(target)
        return [task for task in waiting if not task.num_arriving]

    def write_back(self, victim: Replica) -> None:
        """Start copying a sole replica to a lower tier: host memory if there is a hole, else home."""
        handle = victim.handle
        target = handle.replicas[self.last]
        if victim.node != RAM != self.last and RAM not in handle.replicas:
            offset = self.nodes[RAM].take(handle.size, handle.data_class)
            if offset is not None:
                target = self._settle_in(handle, RAM, offset)
        self.nodes[target.node].mark()
        if not target.arriving:
            self._copy(victim, target)

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

    def _evict(self, victims: Sequence[Replica]) -> None:
        self.num_evictions += len(victims)
        for victim in victims:
            self.drop(victim)

    def compact_for(self, task: Task, node_id: NodeId) -> bool:
        """Make one hole of all that is free or droppable on an idle node, and of what is free on the last tier, if the task then fits there.

        The last resort against fragmentation, so nothing may run, move or be admitted meanwhile: no replica is pinned. When dirty replicas must
        go, their write-backs are started instead and False is returned. A file needs no compaction, its addresses are plenty.
        """
        if not self.claims.allow(task):
            return False
        homes = sum(handle.size for handle, mode in task.accesses if mode != SCRATCH and self.last not in handle.replicas)
        last = self.nodes[self.last]
        if node_id != self.last and last.used + homes > last.budget:
            return False
        if not self._make_hole(task, node_id):
            return False
        if node_id != self.last and not last.is_storage:
            self._compact(self.last)
        return True

    def _make_hole(self, task: Task, node_id: NodeId) -> bool:
        """Make one hole of all that is free or droppable on the node, if the task then fits there."""
        node, shelf = self.nodes[node_id], self.shelves[node_id]
        own = {handle for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas}
        missing = sum(handle.size for handle, _ in task.accesses) - sum(handle.size for handle in own)
        candidates = [replica for replica in shelf.starts.values() if replica.handle not in own and self._may_go(replica)]
        candidates.sort(key=self.eviction.key, reverse=True)
        victims: list[Replica] = []
        excess = node.used + missing - node.extents.capacity
        for replica in candidates:
            if excess <= 0:
                break
            victims.append(replica)
            excess -= replica.handle.size
        if excess > 0 or not self._are_clean(victims):
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
            if node_id != self.last:
                shelf.offer(replica)

    def _may_go(self, replica: Replica) -> bool:
        """Whether an unpinned replica may be dropped, perhaps after a write-back."""
        return replica.node != self.last and (self.broken is None or not coherence.is_needed(replica))

    def invalidate_others(self, task: Task) -> None:
        """The task is about to write: drop every other replica of what it writes, and empty its home."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode != R and mode != SCRATCH and len(handle.replicas) > 1:
                for other in [other for other in handle.replicas.values() if other is not replica]:
                    if other.node != self.last:
                        self.drop(other)
                    elif other.pins:
                        raise InvalidEvent(f"{handle!r} would be overwritten while its home is in use")
                    else:
                        other.state = "reserved"

    def drop(self, replica: Replica) -> None:
        """Give a replica's extent back; an empty home goes with the last other replica.

        Raises:
            InvalidEvent: something still uses it.
        """
        if replica.pins:
            raise InvalidEvent(f"{replica.handle!r} on node {replica.node} would be freed while pinned")
        handle, node = replica.handle, self.nodes[replica.node]
        if replica.state != "scratch":
            del handle.replicas[replica.node]
            if replica.node == self.last:
                self.claims.leave(replica)
        self.shelves[replica.node].leave(replica)
        replica.view = None
        node.give(replica.offset, handle.size, handle.data_class)
        if node.is_storage and replica.offset + handle.size > node.budget:
            self.actions.append(DiscardExtent(replica.node, replica.offset, handle.size))
        self.freed = True
        if replica.state != "scratch" and len(handle.replicas) == 1:
            home = handle.replicas.get(self.last)
            if home is not None and home.state == "reserved" and not home.pins:
                self.drop(home)

    def drop_unpinned(self, handle: HandleRecord) -> None:
        """Drop every replica nobody is using; what a copy still uses goes when it has ended, and the home with the last of them."""
        for replica in list(handle.replicas.values()):
            if not replica.pins and replica.node != self.last:
                self.drop(replica)
        home = handle.replicas.get(self.last)
        if home is not None and not home.pins:
            if len(handle.replicas) == 1:
                self.drop(home)
            else:
                home.state = "reserved"

    def validate(self, admitted: Sequence[Task]) -> None:
        """Check extents, ledger, protocol and pins against the tasks that are admitted now.

        Raises:
            InvalidEvent: something does not add up.
        """
        pins: dict[Replica, int] = {}
        used = [replica for task in admitted for replica in task.replicas]
        used += [replica for target, copy in self.copies.items() for replica in (target, copy.source)]
        for replica in used:
            pins[replica] = pins.get(replica, 0) + 1
        for number, (node, shelf) in enumerate(zip(self.nodes, self.shelves, strict=True)):
            resident = list(shelf.starts.values())
            if sorted(shelf.ends) != sorted(replica.offset + replica.handle.size for replica in resident):
                raise InvalidEvent(f"the shelf of node {node.name} lost track of where its replicas end")
            node.validate([(replica.offset, replica.handle.size) for replica in resident])
            for replica in resident:
                self._validate_replica(replica, pins.pop(replica, 0))
                if replica.node != number:
                    raise InvalidEvent(f"{replica.handle!r} is listed on node {number} but lives on node {replica.node}")
        self.claims.validate(replica for replica in self.residents(self.last) if replica.state != "scratch")
        for replica in pins:
            raise InvalidEvent(f"{replica.handle!r} on node {replica.node} is in use but was dropped")

    def _validate_replica(self, replica: Replica, pins: int) -> None:
        handle, where = replica.handle, f"{replica.handle!r} on node {replica.node}"
        coherence.validate(handle)
        if replica.pins != pins:
            raise InvalidEvent(f"{where} has {replica.pins} pins, but {pins} tasks and copies use it")
        if replica.outgoing != sum(copy.source is replica for copy in self.copies.values()):
            raise InvalidEvent(f"{where} counts {replica.outgoing} copies out of it")
        if replica.state != "scratch" and handle.replicas.get(replica.node) is not replica:
            raise InvalidEvent(f"{where} is an orphan")
        if replica.state != "scratch" and self.last not in handle.replicas:
            raise InvalidEvent(f"{where} has no home to go to")
        if replica.arriving != (replica in self.copies):
            raise InvalidEvent(f"{where}: lost track of a copy")
        is_home = replica.node == self.last and len(handle.replicas) > 1
        if replica.state in ("reserved", "scratch") and not pins and not is_home:
            raise InvalidEvent(f"{where} is {replica.state} although nobody uses it")
        if handle.released and not handle.num_uses:
            raise InvalidEvent(f"{where} outlived its handle")


def num_inputs(task: Task) -> int:
    """Accesses of a task that read."""
    return sum(mode == R or mode == RW for _, mode in task.accesses)
