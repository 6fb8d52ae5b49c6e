"""Which tasks may take bytes of the last tier, so that the planned order can always go on.

Rule. A task ahead of the planned order of the recorded steps in flight, or a plain task younger than it, may make new data only if afterwards, at
each position p that the order has yet to pass,

    what outlives replays + temporaries of p + temporaries made ahead, whose makers come after p  <=  budget,

where "what outlives replays" includes what the replays in flight will still make of that kind, and "temporaries of p" is what exists there in planned
order, one task at a time. The oldest task is never asked.

Why that is enough. Whenever the tasks under way have ended, running the rest in planned order needs at each position at most the left side. So if the
budget is at least `StepPlan.minimum_bytes`, the oldest task finds free bytes as soon as others give some back, and the state stays so after it. Data
that died ahead of its time only frees more; so does a replay that ends, for all its temporaries are dead. A replay that starts may promise more than
is free: then only the oldest task makes anything until the order has reached those made ahead. Scratch ends with its task, so the room for the
planned task that uses it is enough.

What a task makes ahead counts at the positions before its own, from which on the plan has it; so only these are looked at, and most often not even
they: where all that is made ahead fits beside the most temporaries of any position, the *reserve*, it fits everywhere.

Data that lies in a file takes nothing here before its first write: a task that reads it where the last tier is frees bytes for it as for scratch, by
dropping what was read before, and the reserve for the planned task that reads it is enough.

Counts bytes, not holes: `compaction` moves replicas together when holes are what is missing. Knows nothing of replicas on other nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ..errors import InvalidEvent
from ..records import SCRATCH, HandleRecord, NodeId, R, Replay, Replica, SharedUse, Task, W
from .coherence import wants_backing
from .eviction_policies import Foresight
from .extents import MemoryNode


class Reservations:
    """The books of the last tier.

    Args:
        node: the last tier.
        node_id: its number.
        foresight: where the recorded steps stand.

    Attributes:
        kept: bytes of data that outlives replays, promised data included.
        ahead: bytes of temporaries that the planned order would not have made yet.
    """

    __slots__ = ("_backing_ahead", "_num_entered", "_promised", "_reserve", "ahead", "foresight", "kept", "node", "node_id")

    def __init__(self, node: MemoryNode, node_id: NodeId, foresight: Foresight) -> None:
        self.node = node
        self.node_id = node_id
        self.foresight = foresight
        self.kept = 0
        self.ahead = 0
        self._reserve = 0  # at least the largest reserve
        self._promised: dict[HandleRecord, int] = {}  # by how many replays
        self._backing_ahead: list[tuple[int, int, Replica]] = []  # (order of the maker, number, backing replica)
        self._num_entered = 0

    def allow(self, task: Task) -> bool:
        """Whether the task may take the bytes it needs on the last tier."""
        replays = self.foresight.replays
        if not replays:
            return True
        step = task.step
        wanted = 0 if step is None else step.makes[task.position]
        if step is not None and self.ahead + wanted <= self.node.budget - self.kept - self._reserve:
            return True
        order = self.foresight.order
        if task.order <= order:
            return True
        missing = [handle for handle, mode in task.accesses if mode != SCRATCH and wants_backing(handle, mode, self.node_id)]
        if not missing:
            return True
        if step is None:
            wanted = sum(handle.size for handle in missing if handle not in self._promised)
        self._drop_reached(order)
        reserve = self._reserve = max([replay.peaks[replay.frontier] for replay in replays])
        if self.kept + self.ahead + reserve + wanted <= self.node.budget:
            return True
        return self._fits_everywhere(self.node.budget - self.kept - wanted, None if step is None else task.order)

    def _fits_everywhere(self, limit: int, before: int | None) -> bool:
        """Whether temporaries have room at each position of the replays in flight that the order has yet to pass.

        Args:
            limit: most bytes, beside what outlives replays and what is to be made.
            before: `order` of the first position where that does not count any more; None if it stays.
        """
        ahead = sorted([(order, backing.handle.size) for order, _, backing in self._backing_ahead if backing.is_ahead])
        after = 0  # bytes whose makers come after the positions that are looked at
        for replay in reversed(self.foresight.replays):
            first, passing, peaks = replay.first_order, replay.passing, replay.peaks
            end = len(passing) if before is None else min(before - first, len(passing))
            while end > replay.frontier:
                while ahead and ahead[-1][0] >= first + end:
                    after += ahead.pop()[1]
                begin = max(ahead[-1][0] - first if ahead else 0, replay.frontier)
                if peaks[begin] + after > limit and max(passing[begin:end]) + after > limit:
                    return False
                end = begin
        return True

    def enter(self, backing: Replica, order: int) -> None:
        """A replica on the last tier becomes its handle's backing replica, for the task of that order."""
        handle = backing.handle
        backing.is_backing = True
        if not _is_temporary(handle):
            if self._promised.pop(handle, None) is None:
                self.kept += handle.size
        elif order > self.foresight.order:
            backing.is_ahead = True
            self.ahead += handle.size
            self._num_entered += 1
            self._drop_reached(self.foresight.order)
            heapq.heappush(self._backing_ahead, (order, self._num_entered, backing))

    def reenter(self, handle: HandleRecord, replay: Replay) -> None:
        """A replay begins that will make `handle`, whose backing replica is still in use from an earlier replay."""
        self._drop_reached(self.foresight.order)
        backing = handle.replicas.get(self.node_id)
        if backing is not None and handle.use_schedule is not None:
            self.enter(backing, replay.first_order + handle.use_schedule.positions[0])

    def leave(self, backing: Replica) -> None:
        """A backing replica is none any more. Data that was lost but outlives replays is a promise again of those in flight that may make it anew."""
        handle = backing.handle
        backing.is_backing = False
        if backing.is_ahead:
            backing.is_ahead = False
            self.ahead -= handle.size
        elif not _is_temporary(handle):
            replays = self.foresight.replays if handle.num_uses else ()
            number = sum(any(use.handle is handle and self._is_to_make(use) for use in replay.shared) for replay in replays)
            if number:
                self._promised[handle] = number
            else:
                self.kept -= handle.size

    def _drop_reached(self, order: int) -> None:
        """What was made ahead of its time counts as in time once the order has reached its maker."""
        ahead = self._backing_ahead
        while ahead and ahead[0][0] <= order:
            backing = heapq.heappop(ahead)[2]
            if backing.is_ahead:
                backing.is_ahead = False
                self.ahead -= backing.handle.size

    def promise(self, replay: Replay) -> None:
        """A replay begins: what it will make and leave behind counts from now on."""
        promised = self._promised
        for use in replay.shared:
            handle = use.handle
            if self._is_to_make(use):
                if handle not in promised:
                    self.kept += handle.size
                promised[handle] = promised.get(handle, 0) + 1
        self._reserve = max(self._reserve, replay.peaks[0])

    def forget(self, replay: Replay) -> None:
        """A replay has ended: what it promised and did not make, it never will."""
        self._reserve = max([each.peaks[each.frontier] for each in self.foresight.replays], default=0)
        for use in replay.shared if self._promised else ():
            count = self._promised.get(use.handle, 0) if self._is_to_make(use) else 0
            if count == 1:
                del self._promised[use.handle]
                self.kept -= use.handle.size
            elif count:
                self._promised[use.handle] = count - 1

    def _is_to_make(self, use: SharedUse) -> bool:
        """Whether a replay may still give a handle its backing replica."""
        return wants_backing(use.handle, R if use.first_writer is None else W, self.node_id)

    def validate(self, backings: Iterable[Replica]) -> None:
        """Check the books against the backing replicas on the last tier.

        Raises:
            InvalidEvent: they do not add up.
        """
        kept = sum(handle.size for handle in self._promised)
        ahead = 0
        for backing in backings:
            if not _is_temporary(backing.handle):
                kept += backing.handle.size
            elif backing.is_ahead:
                ahead += backing.handle.size
        if (kept, ahead) != (self.kept, self.ahead):
            raise InvalidEvent(
                f"node {self.node.name} keeps {kept} B and holds {ahead} B made ahead of their time, but {self.kept} and {self.ahead} were counted"
            )


def _is_temporary(handle: HandleRecord) -> bool:
    """Whether the handle lives and dies within a replay."""
    return handle.use_schedule is not None and handle.use_schedule.replay is not None
