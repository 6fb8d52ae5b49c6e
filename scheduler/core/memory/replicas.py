"""Replicas on nodes and the copies between them: extents taken and given back, write-backs, and the books of both.

The mechanism below `admission`, `compaction` and `prefetch`, which decide what comes and what goes.

Backing replicas. The *last tier* is the storage node if there is one, else host memory. Every handle that holds data anywhere has an extent there,
its *backing replica*, reserved together with the first output: so every replica always has somewhere to go, and a write-back never waits for bytes.

Files. Data may begin in a file: its handle then has a replica on the node `FILE`, which is its backing replica until its first write. So its other
replicas are dropped for others like any clean ones, wherever they are, the last tier included; the task that will write it reserves the backing
replica there, and when it begins to write, the file is out of date and forgotten.

Knows extents (`extents`), copies under way (`transfers`), the replica protocol (`coherence`) and reservations on the last tier (`reservations`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from ..errors import DoesNotFit, InvalidEvent
from ..events import Action, DiscardExtent, ForgetObject
from ..records import FILE, RAM, SCRATCH, HandleId, HandleRecord, NodeId, R, Replica, Task
from . import coherence
from .eviction_policies import EvictionPolicy, Foresight
from .extents import MemoryNode, rounded
from .reservations import Reservations
from .transfers import Copies
from .victim_selection import Candidates


class Replicas:
    """Replicas, their extents, and the copies between them.

    Args:
        nodes: host memory first; a storage node, if any, last.
        foresight: where the recorded steps stand.
        eviction: order in which replicas go.

    Attributes:
        last: the last tier.
        has_several: whether there is more than one node, or data in files, so that data may move.
        candidates: of each node, the replicas that may go.
        copies: those under way.
        num_released: replicas dropped and copies ended so far: what a task that waits for memory waits for.
        reservations: which tasks may take bytes of the last tier.
        broken: why the last tier takes no more data, if so.
        readers: extents of host memory where file readers work; they may move, and never go.
        changed: data that differs from what is on its way to the last tier.
        held: data that the program keeps in host memory until its handle is released.
        missed: of each node, `order` of the next use of what was evicted from it or overwritten elsewhere: the first one since its lookahead looked.
        num_files: handles whose data is in a file; `num_cold` those of them with no replica anywhere else.
        wanted: cold handles of replays in flight, for as long as nothing has been evicted: what there is to read ahead.
    """

    __slots__ = (
        "broken",
        "candidates",
        "changed",
        "copies",
        "eviction",
        "foresight",
        "has_several",
        "held",
        "last",
        "missed",
        "nodes",
        "num_cold",
        "num_evictions",
        "num_files",
        "num_released",
        "readers",
        "reservations",
        "wanted",
    )  # fmt: skip

    def __init__(self, nodes: Sequence[MemoryNode], foresight: Foresight, eviction: EvictionPolicy) -> None:
        self.nodes = list(nodes)
        self.has_several = len(self.nodes) > 1
        self.foresight = foresight
        self.eviction = eviction
        self.last = NodeId(len(self.nodes) - 1) if self.nodes[-1].is_storage else RAM
        self.reservations = Reservations(self.nodes[self.last], self.last, foresight)
        self.candidates = [Candidates(node, eviction) for node in self.nodes]
        self.copies = Copies(len(self.nodes), self.last)
        self.num_evictions = 0
        self.missed = [inf] * len(self.nodes)
        self.readers: list[Replica] = []
        self.changed: set[HandleRecord] = set()
        self.held: dict[HandleRecord, Replica] = {}
        self.num_files = 0
        self.num_cold = 0
        self.wanted: set[HandleRecord] = set()
        self.num_released = 0
        self.broken: BaseException | None = None

    def residents(self, node_id: NodeId) -> Iterable[Replica]:
        """Every replica of a node, scratch included."""
        return self.nodes[node_id].starts.values()

    def is_memory(self, node: NodeId) -> bool:
        """Whether a node is neither the disk tier nor files."""
        return node != FILE and not self.nodes[node].is_storage

    def free_bytes(self, node: NodeId) -> int:
        """Bytes of the node's budget that nothing uses."""
        return self.nodes[node].budget - self.nodes[node].used

    @property
    def readers_bytes(self) -> int:
        """Bytes of host memory of the file readers."""
        return sum(replica.handle.size for replica in self.readers)

    def take_for_readers(self, handle: HandleRecord, nbytes: int, actions: list[Action]) -> None:
        """File readers get so many bytes of host memory in all, because the data of `handle` needs them; they keep what they have.

        Raises:
            DoesNotFit: there are no bytes for it, not even those of data that can be dropped at once; nothing has changed.
        """
        more = rounded(nbytes) - self.readers_bytes if nbytes else 0
        if more <= 0:
            return
        node = self.nodes[RAM]
        memory = HandleRecord(HandleId(-1 - len(self.readers)), more, more, None, "working memory of readers", "persistent", "scratch")
        offset = self._take(RAM, memory, actions)
        if offset is None:
            raise DoesNotFit(
                f"reading {handle!r} from its source takes {nbytes:,} B of {node.name} for its readers, but of its budget of {node.budget:,} B "
                f"{node.used:,} B are taken; raise the budget, or attach sources before data is written",
                node.name,
            )
        replica = self.install(memory, RAM, offset, private=True)
        replica.is_backing = True
        if self.last == RAM:
            self.reservations.enter(replica, 0)
        self.readers.append(replica)
        node.mark()

    def attach(self, handle: HandleRecord, source: object) -> None:
        """The data of a handle, which has no replica, is from now on what lies in a file."""
        handle.replicas[FILE] = Replica(handle, FILE, 0, "shared", is_backing=True, view=source)
        self.has_several = True
        self.num_files += 1
        self.num_cold += 1

    def adopt(self, handle: HandleRecord, actions: list[Action], *, stays: bool) -> None:
        """Count data that has come to be in host memory by itself, and reserve its backing replica.

        Raises:
            DoesNotFit: the last tier has no bytes for it; nothing has changed.
            InvalidEvent: the handle has data already, or host memory is not one of which only bytes are counted.
        """
        node = self.nodes[RAM]
        if handle.replicas or handle in self.held or not node.is_counted:
            raise InvalidEvent(f"{handle!r} was adopted by node {node.name}, where it cannot appear by itself")
        replica = self.install(handle, RAM, node.adopt(handle.size, handle.data_class), private=stays)
        if stays:
            replica.is_backing = True
            self.held[handle] = replica
        elif self.last == RAM:
            self.reservations.enter(replica, 0)
        elif not self.reserve_backing(handle, 0, actions):
            self.drop(replica, actions)
            below = self.nodes[self.last]
            raise DoesNotFit(
                f"node {below.name} is full: {handle.nbytes:,} B of new data must have room there, but of its budget of {below.budget:,} B "
                f"{below.used:,} B are taken; raise it",
                below.name,
            )
        if not stays:
            replica.state = "modified"
            if not replica.is_backing:
                self.candidates[RAM].add(replica)

    def change(self, handle: HandleRecord) -> None:
        """What is in host memory, and used there, differs from now on from what the last tier has of it, or is getting."""
        replica, backing = handle.replicas[RAM], handle.replicas.get(self.last)
        if backing is None or backing is replica:
            return
        if backing.arriving:
            self.changed.add(handle)
        elif backing.state != "reserved":
            backing.state, replica.state = "reserved", "modified"

    def let_go(self, handle: HandleRecord, actions: list[Action]) -> None:
        """The program no longer keeps what it held."""
        replica = self.held.pop(handle)
        replica.is_backing = False
        self.drop(replica, actions)

    def want(self, handles: Iterable[HandleRecord]) -> None:
        """A replay begins that uses these."""
        if not self.foresight.replays:
            self.wanted.clear()
        self.wanted.update(handle for handle in handles if len(handle.replicas) == 1 and FILE in handle.replicas)

    def _take(self, node_id: NodeId, handle: HandleRecord, actions: list[Action]) -> int | None:
        """A new extent for a handle, in memory over what can be dropped at once if there is no hole; None if that makes none either."""
        node, candidates = self.nodes[node_id], self.candidates[node_id]
        offset = node.take(handle.size, handle.data_class)
        if offset is None and not node.is_storage and (self.num_files or node_id != self.last):  # a disk tier refuses for its budget, not for a hole
            plan = candidates.plan([handle.size])
            if plan is None or any(victim.pins or coherence.is_needed(victim) for victim in plan[1]):
                plan = candidates.plan_droppable([handle.size], -inf)
            if plan is not None:
                (offset,), victims = plan
                self.evict(victims, actions)
                node.take_at(offset, handle.size, handle.data_class)
        return offset

    def reserve_backing(self, handle: HandleRecord, order: int, actions: list[Action]) -> bool:
        """Reserve the handle's extent on the last tier for the task of that order; what was read into it from a file becomes it, or may go for it."""
        backing = handle.replicas.get(self.last)
        if backing is None:
            offset = self._take(self.last, handle, actions)
            if offset is None:
                return False
            backing = self.install(handle, self.last, offset)
        self.reservations.enter(backing, order)
        return True

    def release_backing(self, backing: Replica, actions: list[Action]) -> None:
        """Undo `reserve_backing`: that releases nothing which a task could wait for."""
        num_released = self.num_released
        self._end_backing(backing, actions)
        self.num_released = num_released

    def forget_write(self, handle: HandleRecord, actions: list[Action]) -> None:
        """A task that was to write the handle never will: data that is in a file has its backing replica there, as before."""
        backing = handle.replicas.get(self.last)
        if FILE in handle.replicas and backing is not None and backing.is_backing:
            self._end_backing(backing, actions)

    def _end_backing(self, backing: Replica, actions: list[Action]) -> None:
        """A backing replica of data that has another one is none any more."""
        if backing.state == "reserved" and not backing.pins:
            self.drop(backing, actions)
        else:
            self.reservations.leave(backing)
            if backing.pins == backing.outgoing:
                self.candidates[self.last].add(backing)

    def take_back(self, taken: Sequence[Replica], actions: list[Action]) -> None:
        """Undo a half-made admission, which has pinned these: that releases nothing which a task could wait for."""
        num_released = self.num_released
        for replica in taken:
            self.unpin(replica)
            if replica.pins or replica.arriving:
                continue
            if replica.state == "scratch" or (replica.state == "reserved" and (not replica.is_backing or len(replica.handle.replicas) == 1)):
                self.drop(replica, actions)
        self.num_released = num_released

    def evict(self, victims: Sequence[Replica], actions: list[Action]) -> None:
        """Drop replicas for the sake of other data."""
        self.num_evictions += len(victims)
        for victim in victims:
            self._miss(victim)
            self.drop(victim, actions)

    def _miss(self, replica: Replica) -> None:
        """A replica is about to go although a planned task may read it on its node."""
        distance, overwrites = self.foresight.next_use_of(replica)
        if not overwrites:
            self.missed[replica.node] = min(self.missed[replica.node], self.foresight.order + distance)

    def install(self, handle: HandleRecord, node_id: NodeId, offset: int, *, private: bool = False) -> Replica:
        """A new replica over an extent just taken."""
        replica = Replica(handle, node_id, offset, since=self.foresight.clock, kernel_mark=self.nodes[node_id].extents.kernel_mark)
        if private:
            replica.state = "scratch"
        else:
            if self.num_cold and len(handle.replicas) == 1 and FILE in handle.replicas:
                self.num_cold -= 1
                self.wanted.discard(handle)
            handle.replicas[node_id] = replica
        self.nodes[node_id].occupy(replica)
        self.candidates[node_id].enter(replica)
        return replica

    def unpin(self, replica: Replica) -> None:
        """One user less; without any but copies the replica may go."""
        replica.pins -= 1
        if replica.pins == replica.outgoing and not replica.is_backing:
            self.candidates[replica.node].add(replica)

    def drop(self, replica: Replica, actions: list[Action]) -> None:
        """Give a replica's extent back, or forget a file; an empty backing replica goes with the last other replica.

        Raises:
            InvalidEvent: something still uses it.
        """
        if replica.pins:
            raise InvalidEvent(f"{replica.handle!r} on node {replica.node} would be freed while pinned")
        handle = replica.handle
        if replica.state != "scratch":
            del handle.replicas[replica.node]
            if replica.node == FILE:
                self.num_files -= 1
                self.num_cold -= not handle.replicas
                self.wanted.discard(handle)
                if not self.num_files:
                    self.has_several = len(self.nodes) > 1
                return
            if replica.is_backing:
                self.reservations.leave(replica)
        node = self.nodes[replica.node]
        self.candidates[replica.node].leave(replica)
        replica.view = None
        node.vacate(replica)
        if node.is_counted:
            if replica.state != "scratch":
                actions.append(ForgetObject(replica.node, handle))
        elif node.is_storage and replica.offset + handle.size > node.budget:
            actions.append(DiscardExtent(replica.node, replica.offset, handle.size))
        self.num_released += 1
        if replica.state != "scratch" and len(handle.replicas) == 1:
            (backing,) = handle.replicas.values()
            if backing.node == FILE:
                self.num_cold += 1
            if backing.is_backing and backing.state == "reserved" and not backing.pins:
                self.drop(backing, actions)

    def drop_unpinned(self, handle: HandleRecord, actions: list[Action]) -> None:
        """Drop every unused replica; what a copy still uses goes when it has ended, and the backing replicas with the last of them."""
        for replica in list(handle.replicas.values()):
            if replica.pins or replica.node not in handle.replicas:
                continue
            if replica.is_backing:
                replica.state = "reserved"
            else:
                self.drop(replica, actions)
        if all(replica.is_backing and not replica.pins for replica in handle.replicas.values()):
            for replica in list(handle.replicas.values()):
                if replica.node in handle.replicas:  # else it went with the other one
                    self.drop(replica, actions)

    def invalidate_others(self, task: Task, actions: list[Action]) -> None:
        """The task is about to write: drop every other replica of what it writes, and empty its backing replica."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode != R and mode != SCRATCH and len(handle.replicas) > 1:
                for other in tuple(handle.replicas.values()):
                    if other is replica:
                        continue
                    if other.node != self.last:  # a file is out of date from now on
                        if other.node != FILE:
                            self._miss(other)
                        self.drop(other, actions)
                    elif other.pins:
                        raise InvalidEvent(f"{handle!r} would be overwritten while its backing replica is in use")
                    else:
                        other.state = "reserved"

    def end_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Take note that a copy has ended, well or not; the tasks that waited for it. The caller unpins source and target.

        Raises:
            InvalidEvent: no such copy is under way.
        """
        self.num_released += 1
        return self.copies.end(source, target)

    def finish_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Take note that a copy has arrived; the tasks that have nothing more to wait for.

        Raises:
            InvalidEvent: no such copy is under way.
        """
        waiting = self.end_copy(source, target)
        if source.handle in self.changed:  # while it was copied: the copy is worth nothing
            self.changed.remove(source.handle)
        else:
            coherence.step(source, "copied from")
            coherence.step(target, "copy arrived")
        self.unpin(source)
        self.unpin(target)
        return [task for task in waiting if not task.num_arriving]

    def write_back(self, victim: Replica, actions: list[Action]) -> None:
        """Start copying a sole replica to a lower tier: host memory if there is a hole, else to its backing replica."""
        handle = victim.handle
        target = handle.replicas[self.last]
        if victim.node != RAM != self.last and RAM not in handle.replicas:
            offset = self.nodes[RAM].take(handle.size, handle.data_class)
            if offset is not None:
                target = self.install(handle, RAM, offset)
        self.nodes[target.node].mark()
        if not target.arriving:
            actions.append(self.copies.start(victim, target))
        if victim.pins == victim.outgoing:  # as good as clean from now on
            self.candidates[victim.node].add(victim)

    def are_clean(self, victims: Sequence[Replica], actions: list[Action]) -> bool:
        """Whether dropping the victims loses nothing; if it does, start the write-backs that are missing."""
        if all(not victim.pins and not coherence.is_needed(victim) for victim in victims):
            return True
        for victim in victims:
            if not victim.pins and coherence.is_needed(victim):
                self.write_back(victim, actions)
        return False

    def break_tier(self, error: BaseException) -> None:
        """The last tier takes no more data: what is dirty stays where it is."""
        self.broken = error
        for candidates in self.candidates:
            candidates.keep_dirty = True
