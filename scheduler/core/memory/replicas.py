"""Replicas on nodes and the copies between them: the mechanism below `admission`, `compaction` and `prefetch`, which decide.

Backing replicas. The *last tier* is the storage node if there is one, else host memory. Every handle that holds data has an extent there, its
*backing replica*, reserved together with its first output. So every replica can be written back without waiting for bytes.

Files. Data may start in a file: its handle then has a replica on the node `FILE`, which is its backing replica until its first write. Its other
replicas are clean and can be dropped on any node. The task that writes it reserves the backing replica on the last tier, and the file is forgotten.

Knows memory (`memory_node`), copies (`transfers`), the replica protocol (`coherence`) and the last tier (`reservations`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf

from ..errors import DoesNotFit, InvalidEvent
from ..events import Action, DiscardExtent
from ..records import FILE, NEWEST, RAM, SCRATCH, HandleId, HandleRecord, HandleSpec, NodeId, R, Replica, Task
from ..shortage import AccessSize, Shortage
from . import coherence
from .eviction_policies import RECENT_USES, EvictionPolicy, Foresight
from .extents import rounded
from .hole_search import ExtentPlan
from .memory_node import MemoryNode
from .reservations import Reservations
from .transfers import Copies
from .victim_selection import Candidates, is_droppable, is_unused


class Replicas:
    """The replicas of all nodes, their extents, and the copies between them.

    Args:
        nodes: memory nodes; host memory first, a storage node last.
        foresight: position of execution in the recorded steps.
        eviction: order of eviction.

    Attributes:
        last: last tier.
        has_several: whether data may move, because there are several nodes or data in files.
        candidates: candidates for eviction of each node.
        copies: copies in progress.
        num_released: number of replicas dropped and copies ended so far; a task that waits for memory waits until it changes.
        num_evictions: number of replicas dropped to make room for other data.
        num_flag_writes: number of tasks that wrote flags.
        num_missed: for each node, number of replicas dropped there so far before their data was dead: evicted, overwritten elsewhere, or lost.
        reservations: reserved bytes of the last tier.
        broken: error after which the last tier accepts no more data; None if it works.
        readers: extents of host memory for file readers; they may be moved but are never dropped.
        num_files: number of handles whose data is in a file.
        num_cold: number of those that have no other replica.
        wanted: cold handles of the replays in progress, until something is evicted; they may be read ahead.
    """

    __slots__ = (
        "broken", "candidates", "copies", "eviction", "foresight", "has_several", "last", "nodes", "num_cold",
        "num_evictions", "num_files", "num_flag_writes", "num_missed", "num_released", "readers", "reservations", "wanted",
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
        self.num_flag_writes = 0
        self.num_evictions = 0
        self.num_missed = [0] * len(self.nodes)
        self.readers: list[Replica] = []
        self.num_files = 0
        self.num_cold = 0
        self.wanted: set[HandleRecord] = set()
        self.num_released = 0
        self.broken: BaseException | None = None

    def residents(self, node_id: NodeId) -> Iterable[Replica]:
        """Return the replicas of a node, scratch included."""
        return self.nodes[node_id].starts.values()

    def is_memory(self, node: NodeId) -> bool:
        """Whether a node is neither the disk tier nor files."""
        return node != FILE and not self.nodes[node].is_storage

    def is_at_hand(self, handle: HandleRecord) -> bool:
        """Whether valid data is in the memory of a device, or in host memory on a machine without devices."""
        has_devices = len(self.nodes) > 1 + self.nodes[-1].is_storage
        replicas = handle.replicas.items()
        return any(self.is_memory(node) and (node != RAM or not has_devices) and each.state != "reserved" for node, each in replicas)

    def free_bytes(self, node: NodeId) -> int:
        """Return the free bytes of a node's budget."""
        return self.nodes[node].budget - self.nodes[node].used

    @property
    def readers_bytes(self) -> int:
        """Bytes of host memory for file readers."""
        return sum(replica.handle.spec.size for replica in self.readers)

    def take_for_readers(self, handle: HandleRecord, nbytes: int, actions: list[Action]) -> None:
        """Raise the memory of file readers to `nbytes`, which reading `handle` needs; it never shrinks.

        Raises:
            DoesNotFit: the bytes are not free, and dropping clean data does not free them; nothing has changed.
        """
        more = rounded(nbytes) - self.readers_bytes if nbytes else 0
        if more <= 0:
            return
        node = self.nodes[RAM]
        memory = HandleRecord(HandleId(-1 - len(self.readers)), HandleSpec(more, more, None, "working memory of readers", "persistent", "scratch"))
        planned = self.plan_extents(RAM, [memory])
        if planned is None:
            sizes = (AccessSize("", repr(handle), nbytes),)
            raise DoesNotFit(Shortage("readers", node.name, nbytes, node.budget, node.used, sizes=sizes))
        (offset,) = self.take_extents(planned, actions)
        replica = self.install(memory, RAM, offset, private=True)
        replica.is_backing = True
        if self.last == RAM:
            self.reservations.enter(replica, 0)
        self.readers.append(replica)
        node.mark()

    def attach(self, handle: HandleRecord, source: object) -> None:
        """Make a file the data of a handle that has no replica."""
        handle.replicas[FILE] = Replica(handle, FILE, 0, "shared", is_backing=True, view=source)
        self.has_several = True
        self.num_files += 1
        self.num_cold += 1

    def want(self, handles: Iterable[HandleRecord]) -> None:
        """Note the handles that a new replay uses."""
        if not self.foresight.replays:
            self.wanted.clear()
        self.wanted.update(handle for handle in handles if len(handle.replicas) == 1 and FILE in handle.replicas)

    def plan_extents(self, node_id: NodeId, handles: Sequence[HandleRecord], kept: Collection[Replica] = ()) -> ExtentPlan | None:
        """Return a plan for extents of the handles, in memory over clean replicas if there are no holes; None if they do not fit.

        Args:
            kept: replicas that must stay.
        """
        node, candidates = self.nodes[node_id], self.candidates[node_id]
        if node.fits(handles):
            return ExtentPlan(node_id, handles, None)
        if node.is_storage:  # it refuses for its budget only
            return None
        sizes = [handle.spec.size for handle in handles]
        if not self.num_files and node_id == self.last:  # nothing can be dropped
            holes = candidates.plan_free(sizes)
        else:
            holes = candidates.plan(sizes, kept)
            if holes is None or not all(map(is_droppable, holes.victims)):
                holes = candidates.plan_droppable(sizes, -inf, kept)
        return None if holes is None else ExtentPlan(node_id, handles, holes)

    def take_extents(self, planned: ExtentPlan, actions: list[Action]) -> list[int]:
        """Take planned extents; return the offset of each handle's."""
        node, holes = self.nodes[planned.node], planned.holes
        if holes is None:
            return [offset for offset, _ in node.take_all(planned.handles, preferred=False)]
        self.evict(holes.victims, actions)
        for handle, offset in zip(planned.handles, holes.offsets, strict=True):
            node.take_at(offset, handle.spec.size, handle.spec.data_class)
        return holes.offsets

    def plan_backing(self, handles: Collection[HandleRecord]) -> ExtentPlan | None:
        """Return a plan for the backing replicas of handles on the last tier, where replicas read from files become some; None if they do not fit."""
        last = self.last
        kept = [handle.replicas[last] for handle in handles if last in handle.replicas]
        return self.plan_extents(last, [handle for handle in handles if last not in handle.replicas], kept)

    def reserve_backing(self, handles: Iterable[HandleRecord], planned: ExtentPlan, order: int, actions: list[Action]) -> None:
        """Reserve backing replicas for the task of that `order`, with the extents planned for those that need one."""
        last = self.last
        for handle, offset in zip(planned.handles, self.take_extents(planned, actions), strict=True):
            self.install(handle, last, offset, NEWEST)
        for handle in handles:
            self.reservations.enter(handle.replicas[last], order)

    def forget_write(self, handle: HandleRecord, actions: list[Action]) -> None:
        """Give data in a file its backing replica there again, because the task that was to write the handle never will."""
        backing = handle.replicas.get(self.last)
        if FILE in handle.replicas and backing is not None and backing.is_backing:
            self._end_backing(backing, actions)

    def _end_backing(self, backing: Replica, actions: list[Action]) -> None:
        """End the role of a backing replica whose data has another one."""
        if backing.state == "reserved" and not backing.pins:
            self.drop(backing, actions)
        else:
            self.reservations.leave(backing)
            if backing.pins == backing.outgoing:
                self.candidates[self.last].add(backing)

    def evict(self, victims: Sequence[Replica], actions: list[Action]) -> None:
        """Drop replicas to make room for other data."""
        self.num_evictions += len(victims)
        for victim in victims:
            self.num_missed[victim.node] += 1
            self.drop(victim, actions)

    def install(self, handle: HandleRecord, node_id: NodeId, offset: int, kernel_mark: int | None = None, *, private: bool = False) -> Replica:
        """Return a new replica in an extent that has been taken for it.

        Args:
            kernel_mark: mark of the extent; by default, of the extent taken last.
        """
        if kernel_mark is None:
            kernel_mark = self.nodes[node_id].extents.kernel_mark
        replica = Replica(handle, node_id, offset, since=self.foresight.clock, kernel_mark=kernel_mark)
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

    def note_decision(self, task: Task, share: float, *, is_set: bool) -> None:
        """Note whether a conditional task runs, in the use rates of the data that only such tasks use; `share` is the rate before the first use."""
        for handle, mode in task.accesses:
            use_schedule = handle.use_schedule
            if mode == SCRATCH or use_schedule is None or not use_schedule.is_conditional:
                continue
            rate = share if handle.use_rate < 0 else handle.use_rate
            handle.use_rate = rate + (is_set - rate) / RECENT_USES

    def enter_anew(self, handle: HandleRecord) -> None:
        """Sort the unused replicas of a handle anew, because a use of it was skipped and its next one is further away."""
        if handle.use_schedule is not None and handle.use_schedule.is_conditional:
            for replica in handle.replicas.values():
                if is_unused(replica) and not replica.is_backing:
                    self.candidates[replica.node].add(replica)

    def unpin(self, replica: Replica) -> None:
        """Remove one user; a replica used only by copies becomes a candidate for eviction."""
        replica.pins -= 1
        if replica.pins == replica.outgoing and not replica.is_backing:
            self.candidates[replica.node].add(replica)

    def drop(self, replica: Replica, actions: list[Action]) -> None:
        """Free a replica's extent, or forget a file. An empty backing replica is dropped with the last other replica.

        Raises:
            InvalidEvent: a task or copy uses it.
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
        if node.is_storage and replica.offset + handle.spec.size > node.budget:
            actions.append(DiscardExtent(replica.node, replica.offset, handle.spec.size))
        self.num_released += 1
        if replica.state != "scratch" and len(handle.replicas) == 1:
            (backing,) = handle.replicas.values()
            if backing.node == FILE:
                self.num_cold += 1
            if backing.is_backing and backing.state == "reserved" and not backing.pins:
                self.drop(backing, actions)

    def drop_unpinned(self, handle: HandleRecord, actions: list[Action]) -> None:
        """Drop the unused replicas of a handle. Replicas that copies use follow when these end, and the backing replicas last."""
        for replica in list(handle.replicas.values()):
            if replica.pins or replica.node not in handle.replicas:
                continue
            if replica.is_backing:
                replica.state = "reserved"
            else:
                self.num_missed[replica.node] += 1
                self.drop(replica, actions)
        if all(replica.is_backing and not replica.pins for replica in handle.replicas.values()):
            for replica in list(handle.replicas.values()):
                if replica.node in handle.replicas:  # else it was dropped with the other one
                    self.drop(replica, actions)

    def invalidate_others(self, task: Task, actions: list[Action]) -> None:
        """Drop all other replicas of the results of a task that is about to run, and empty their backing replicas."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode != R and mode != SCRATCH and len(handle.replicas) > 1:
                for other in tuple(handle.replicas.values()):
                    if other is replica:
                        continue
                    if other.node != self.last:  # a file is out of date from now on
                        if other.node != FILE:
                            self.num_missed[other.node] += 1
                        self.drop(other, actions)
                    elif other.pins:
                        raise InvalidEvent(f"{handle!r} would be overwritten while its backing replica is in use")
                    else:
                        other.state = "reserved"

    def end_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Remove a copy that has ended or failed, and return the tasks that waited for it. The caller unpins source and target.

        Raises:
            InvalidEvent: no such copy is in progress.
        """
        self.num_released += 1
        return self.copies.end(source, target)

    def finish_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Complete a copy, and return the tasks that no longer wait for any copy.

        Raises:
            InvalidEvent: no such copy is in progress.
        """
        waiting = self.end_copy(source, target)
        coherence.step(source, "copied from")
        coherence.step(target, "copy arrived")
        self.unpin(source)
        self.unpin(target)
        return [task for task in waiting if not task.num_arriving]

    def write_back(self, victim: Replica, actions: list[Action]) -> None:
        """Start copying a sole replica down: to host memory if there is a hole, else to its backing replica."""
        handle = victim.handle
        target = handle.replicas[self.last]
        if victim.node != RAM != self.last and RAM not in handle.replicas:
            offset = self.nodes[RAM].take(handle.spec.size, handle.spec.data_class)
            if offset is not None:
                target = self.install(handle, RAM, offset)
        self.nodes[target.node].mark()
        if not target.arriving:
            actions.append(self.copies.start(victim, target))
        if victim.pins == victim.outgoing:  # as good as clean from now on
            self.candidates[victim.node].add(victim)

    def write_back_dirty(self, victims: Sequence[Replica], actions: list[Action]) -> None:
        """Start the write-backs without which victims cannot be dropped."""
        for victim in victims:
            if not victim.pins and coherence.is_needed(victim):
                self.write_back(victim, actions)

    def break_tier(self, error: BaseException) -> None:
        """Keep dirty data in place from now on, because the last tier has failed."""
        self.broken = error
        for candidates in self.candidates:
            candidates.keep_dirty = True
