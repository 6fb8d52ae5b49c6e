"""Which data is where, and how a task gets everything it needs in one place: admission, copies, eviction, write-back.

Admission is all or nothing: either every byte a task misses on its node is reserved, with whatever has to be dropped for it, or nothing is
dropped and nothing reserved. When only dirty replicas stand in the way their write-backs are started and admission is tried again later.

Why this ends. Replicas are dropped only for a task that is admitted at that moment, or by the *urgent* task (the oldest of all that are
blocked) to make room in host memory for a write-back. So between two admissions every write-back brings the urgent task strictly closer to
an eviction plan without dirty replicas, and whoever is not urgent can only use up free host memory, of which nothing makes more.

Knows extents (`memory`) and the replica protocol (`coherence`); does not know policies, dependencies or failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import coherence
from .errors import InvalidEvent
from .events import Action, CopyTile, MoveTile
from .memory import MemoryNode
from .records import RAM, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W
from .windows import Span, best_window


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

    Attributes:
        resident: every replica of each node, scratch included.
        copies: copies under way by target.
        actions: where copies are asked for; the machine sets it for every event.
        freed: whether anything was dropped or unpinned since the machine last looked.
        clock: count of events, for LRU.
    """

    __slots__ = ("actions", "clock", "copies", "freed", "moved_bytes", "nodes", "num_evictions", "resident")

    def __init__(self, nodes: Sequence[MemoryNode]) -> None:
        self.nodes = list(nodes)
        self.resident: list[dict[Replica, None]] = [{} for _ in self.nodes]
        self.copies: dict[Replica, Copy] = {}
        self.moved_bytes: dict[tuple[NodeId, NodeId], int] = {}
        self.num_evictions = 0
        self.actions: list[Action] = []
        self.freed = False
        self.clock = 0

    # --- admission ----------------------------------------------------------------------------------------------------

    def admit(self, task: Task, *, urgent: bool) -> bool:
        """Pin and reserve everything the task needs on `task.node` and start its copies; or leave all as it is and return False.

        Args:
            urgent: whether the task may drop replicas from host memory to make room for write-backs.

        Raises:
            NothingToRead: the task reads data that does not exist; nothing was reserved.
        """
        node_id = task.node
        replicas: list[Replica] = []
        fetch = False
        clock = self.clock
        for handle, mode in task.accesses:
            replica = handle.replicas.get(node_id)
            if replica is None or mode == SCRATCH:
                if (mode == R or mode == RW) and coherence.best_source(handle, None) is None:
                    self._take_back(replicas)
                    raise NothingToRead(handle)
                offset = self.nodes[node_id].take(handle.size, handle.data_class)
                if offset is None:
                    self._take_back(replicas)
                    return len(self.nodes) > 1 and self._admit_by_eviction(task, urgent=urgent)
                replica = self._settle_in(handle, node_id, offset, private=mode == SCRATCH)
                if mode != SCRATCH and (mode != W or len(handle.replicas) > 1):
                    fetch = True
            elif replica.arriving or (mode != R and len(handle.replicas) > 1):
                fetch = True
            replica.pins += 1
            replica.last_use = clock
            replicas.append(replica)
        task.replicas = replicas
        if fetch:
            self._fetch(task)
        return True

    def is_at_home(self, task: Task, node_id: NodeId) -> bool:
        """Whether the task could run on the node without a single new byte."""
        return all(mode != SCRATCH and node_id in handle.replicas for handle, mode in task.accesses)

    def _settle_in(self, handle: HandleRecord, node_id: NodeId, offset: int, *, private: bool = False) -> Replica:
        """A new replica over an extent just taken."""
        replica = Replica(handle, node_id, offset)
        if private:
            replica.state = "scratch"
        else:
            handle.replicas[node_id] = replica
        self.resident[node_id][replica] = None
        return replica

    def _take_back(self, replicas: list[Replica]) -> None:
        """Undo a half-made reservation; that frees nothing anybody could wait for."""
        freed = self.freed
        for replica in replicas:
            replica.pins -= 1
            if not replica.pins and not replica.arriving and (replica.state == "reserved" or replica.state == "scratch"):
                self.drop(replica)
        self.freed = freed

    def _admit_by_eviction(self, task: Task, *, urgent: bool) -> bool:
        """`admit` when there is no hole: find what to drop, then drop it and reserve at once."""
        node_id = task.node
        present = [handle.replicas[node_id] for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas]
        missing = [(handle, mode) for handle, mode in task.accesses if mode == SCRATCH or node_id not in handle.replicas]
        missing.sort(key=lambda access: -access[0].size)
        for replica in present:
            replica.pins += 1
        plan = self._plan(node_id, [handle.size for handle, _ in missing], frozenset())
        for replica in present:
            replica.pins -= 1
        if plan is None:
            return False
        offsets, victims = plan
        dirty = [victim for victim in victims if coherence.is_needed(victim)]
        if dirty:
            self._write_back(dirty, urgent=urgent)
            return False
        self._evict(victims)
        private: dict[HandleRecord, Replica] = {}
        for (handle, mode), offset in zip(missing, offsets, strict=True):
            self.nodes[node_id].claim(offset, handle.size, handle.data_class)
            replica = self._settle_in(handle, node_id, offset, private=mode == SCRATCH)
            if mode == SCRATCH:
                private[handle] = replica
        task.replicas = [private[handle] if mode == SCRATCH else handle.replicas[node_id] for handle, mode in task.accesses]
        for replica in task.replicas:
            replica.pins += 1
            replica.last_use = self.clock
        self._fetch(task)
        return True

    def _fetch(self, task: Task) -> None:
        """Start the copies the admitted task needs, and wait for those that touch what it writes."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode == SCRATCH:
                continue
            if replica.state == "reserved" and not replica.arriving and mode != W:
                source = coherence.best_source(handle, replica)
                assert source is not None  # admit() has looked
                self._copy(source, replica)
            if replica.arriving:
                self._await(replica, task)
            if mode != R:
                for other in handle.replicas.values():  # never write what a copy still reads
                    if other.arriving and other is not replica:
                        self._await(other, task)

    def _await(self, target: Replica, task: Task) -> None:
        self.copies[target].waiting.append(task)
        task.num_arriving += 1

    # --- copies and eviction ------------------------------------------------------------------------------------------

    def _copy(self, source: Replica, target: Replica) -> None:
        source.pins += 1
        target.pins += 1
        target.arriving = True
        source.handle.num_uses += 1
        self.copies[target] = Copy(source)
        link = (source.node, target.node)
        self.moved_bytes[link] = self.moved_bytes.get(link, 0) + source.handle.nbytes
        self.actions.append(CopyTile(source, target))

    def finish_copy(self, source: Replica, target: Replica) -> list[Task]:
        """Take note that a copy has arrived; the tasks that have nothing more to wait for.

        Raises:
            InvalidEvent: no such copy is under way.
        """
        copy = self.copies.pop(target, None)
        if copy is None or copy.source is not source:
            raise InvalidEvent(f"a copy of {target.handle!r} from node {source.node} to node {target.node} finished that was not under way")
        source.pins -= 1
        target.pins -= 1
        target.arriving = False
        coherence.step(source, "copied from")
        coherence.step(target, "copy arrived")
        source.handle.num_uses -= 1
        self.freed = True
        for task in copy.waiting:
            task.num_arriving -= 1
        return [task for task in copy.waiting if not task.num_arriving]

    def _plan(self, node_id: NodeId, sizes: Sequence[int], keep: frozenset[HandleRecord]) -> tuple[list[int], list[Replica]] | None:
        """Where extents of `sizes` would go, and the replicas to drop for it; None if they cannot all be placed.

        Prefers to drop as few bytes as possible that must be written back first, then the least recently used.
        """
        node = self.nodes[node_id]
        spans = [Span(offset, size) for offset, size in node.extents.all_free()]
        spans += [Span(replica.offset, replica.handle.size, replica, *self._price(replica, keep)) for replica in self.resident[node_id]]
        spans.sort(key=lambda span: span.offset)
        offsets: list[int] = []
        victims: list[Replica] = []
        for size in sizes:
            window = best_window(spans, size)
            if window is None:
                return None
            first, last = window
            offset, end = spans[first].offset, spans[last].end
            victims += [span.replica for span in spans[first : last + 1] if span.replica is not None]
            rest = [Span(offset + size, end - offset - size)] if end > offset + size else []
            spans[first : last + 1] = [Span(offset, size, None, movable=False), *rest]
            offsets.append(offset)
        return offsets, victims

    @staticmethod
    def _price(replica: Replica, keep: frozenset[HandleRecord]) -> tuple[bool, int, int]:
        """Whether a replica may go, how many bytes must be written back first, and when it was used last."""
        if replica.pins or replica.handle in keep:
            return False, 0, 0
        if not coherence.is_needed(replica):
            return True, 0, replica.last_use
        return replica.node != RAM, replica.handle.size, replica.last_use

    def _write_back(self, dirty: Sequence[Replica], *, urgent: bool) -> None:
        """Start copying sole replicas to host memory, as far as there is room."""
        keep = frozenset(victim.handle for victim in dirty)
        for victim in dirty:
            handle = victim.handle
            home = handle.replicas.get(RAM)
            if home is None:
                offset = self.nodes[RAM].take(handle.size, handle.data_class)
                if offset is None and urgent:
                    offset = self._make_room(handle, keep)
                if offset is None:
                    return
                home = self._settle_in(handle, RAM, offset)
            if not home.arriving:
                self._copy(victim, home)

    def _make_room(self, handle: HandleRecord, keep: frozenset[HandleRecord]) -> int | None:
        """Drop replicas from host memory that are valid elsewhere, to make room for `handle`."""
        plan = self._plan(RAM, [handle.size], keep)
        if plan is None:
            return None
        (offset,), victims = plan
        self._evict(victims)
        self.nodes[RAM].claim(offset, handle.size, handle.data_class)
        return offset

    def _evict(self, victims: Sequence[Replica]) -> None:
        self.num_evictions += len(victims)
        for victim in victims:
            self.drop(victim)

    def compact_for(self, task: Task, node_id: NodeId) -> bool:
        """Make one hole of all that is free or droppable on an idle node, if the task then fits there; else change nothing.

        The last resort against fragmentation, so nothing may run, move or be admitted meanwhile: no replica of the node is pinned.
        """
        node, resident = self.nodes[node_id], self.resident[node_id]
        own = {handle for handle, mode in task.accesses if mode != SCRATCH and node_id in handle.replicas}
        missing = sum(handle.size for handle, _ in task.accesses) - sum(handle.size for handle in own)
        victims = sorted((r for r in resident if r.handle not in own and not coherence.is_needed(r)), key=lambda replica: replica.last_use)
        if node.used - sum(victim.handle.size for victim in victims) + missing > node.extents.capacity:
            return False
        while node.used + missing > node.extents.capacity:
            self._evict([victims.pop(0)])
        position = 0
        for replica in sorted(resident, key=lambda replica: replica.offset):
            if replica.pins:
                raise InvalidEvent(f"{replica.handle!r} on node {node_id} would be moved while pinned")
            if replica.offset != position:
                self.actions.append(MoveTile(node_id, replica.offset, position, replica.handle.nbytes))
                replica.offset, replica.view = position, None
            position += replica.handle.size
        node.extents.compact(position)
        return True

    # --- ends ---------------------------------------------------------------------------------------------------------

    def invalidate_others(self, task: Task) -> None:
        """The task is about to write: drop every other replica of what it writes."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if mode != R and mode != SCRATCH and len(handle.replicas) > 1:
                for other in [other for other in handle.replicas.values() if other is not replica]:
                    self.drop(other)

    def drop(self, replica: Replica) -> None:
        """Give a replica's extent back.

        Raises:
            InvalidEvent: something still uses it.
        """
        if replica.pins:
            raise InvalidEvent(f"{replica.handle!r} on node {replica.node} would be freed while pinned")
        handle = replica.handle
        if replica.state != "scratch":
            del handle.replicas[replica.node]
        del self.resident[replica.node][replica]
        replica.view = None
        self.nodes[replica.node].give(replica.offset, handle.size, handle.data_class)
        self.freed = True

    def drop_unpinned(self, handle: HandleRecord) -> None:
        """Drop every replica no copy is using; what a copy still uses goes when it has ended."""
        for replica in list(handle.replicas.values()):
            if not replica.pins:
                self.drop(replica)

    # --- inspection ---------------------------------------------------------------------------------------------------

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
        for number, (node, resident) in enumerate(zip(self.nodes, self.resident, strict=True)):
            node.validate([(replica.offset, replica.handle.size) for replica in resident])
            for replica in resident:
                self._validate_replica(replica, pins.pop(replica, 0))
                if replica.node != number:
                    raise InvalidEvent(f"{replica.handle!r} is listed on node {number} but lives on node {replica.node}")
        for replica in pins:
            raise InvalidEvent(f"{replica.handle!r} on node {replica.node} is in use but was dropped")

    def _validate_replica(self, replica: Replica, pins: int) -> None:
        handle, where = replica.handle, f"{replica.handle!r} on node {replica.node}"
        coherence.validate(handle)
        if replica.pins != pins:
            raise InvalidEvent(f"{where} has {replica.pins} pins, but {pins} tasks and copies use it")
        if replica.state != "scratch" and handle.replicas.get(replica.node) is not replica:
            raise InvalidEvent(f"{where} is an orphan")
        if replica.arriving != (replica in self.copies):
            raise InvalidEvent(f"{where}: lost track of a copy")
        if replica.state in ("reserved", "scratch") and not pins:
            raise InvalidEvent(f"{where} is {replica.state} although nobody uses it")
        if handle.released and not handle.num_uses:
            raise InvalidEvent(f"{where} outlived its handle")
