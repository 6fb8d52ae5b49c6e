"""Reservations on the last tier: which tasks may create data there, so that the planned order can always go on.

Rule: a task ahead of the planned order may create data only if afterwards, at each position p that the order has yet to pass,

    lasting data + temporaries at p + temporaries created ahead by tasks after p  <=  budget.

*Lasting* data outlives replays; what the replays in progress will still create of it counts, too. *Temporaries at p* exist at p if tasks run one by
one in planned order. The oldest task is never refused. The proof that no step hangs is in `docs/internals/scheduler.md`.

Counts bytes: `compaction` helps if only holes are missing. Data in a file needs no bytes here before its first write. Knows no other node.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ..errors import InvalidEvent
from ..records import SCRATCH, HandleRecord, NodeId, R, Replay, Replica, SharedUse, Task, W
from .coherence import wants_backing
from .eviction_policies import Foresight
from .memory_node import MemoryNode


class Reservations:
    """Reserved bytes of the last tier.

    Args:
        node: last tier.
        node_id: number of that node.
        foresight: position of execution in the recorded steps.

    Attributes:
        lasting: bytes of lasting data, including promised data.
        ahead: bytes of temporaries that the planned order would not have created yet.
    """

    __slots__ = ("_created_ahead", "_highest_peak", "_num_entered", "_promised", "ahead", "foresight", "lasting", "node", "node_id")

    def __init__(self, node: MemoryNode, node_id: NodeId, foresight: Foresight) -> None:
        self.node = node
        self.node_id = node_id
        self.foresight = foresight
        self.lasting = 0
        self.ahead = 0
        self._highest_peak = 0  # upper bound of the bytes of temporaries at any position yet to come
        self._promised: dict[HandleRecord, int] = {}  # lasting data not created yet -> number of replays that will create it
        self._created_ahead: list[tuple[int, int, Replica]] = []  # a heap: (order of the creating task, number, backing replica)
        self._num_entered = 0

    def allow(self, task: Task) -> bool:
        """Whether the task may create its data on the last tier: by upper bounds if they suffice, else by the rule at each position."""
        replays = self.foresight.replays
        if not replays:
            return True
        step = task.step
        new_bytes = 0 if step is None else step.plan.makes[task.position]
        if step is not None and self.ahead + new_bytes <= self.node.budget - self.lasting - self._highest_peak:
            return True  # hot path: most tasks
        order = self.foresight.order
        if task.order <= order:
            return True
        missing = [handle for handle, mode in task.accesses if mode != SCRATCH and wants_backing(handle, mode, self.node_id)]
        if not missing:
            return True
        if step is None:
            new_bytes = sum(handle.spec.size for handle in missing if handle not in self._promised)
        self._drop_reached(order)
        self._highest_peak = max([replay.plan.peaks[replay.frontier] for replay in replays])
        free_bytes = self.node.budget - self.lasting - new_bytes
        if self.ahead + self._highest_peak <= free_bytes:
            return True
        return self._fits_at_each_position(free_bytes, None if step is None else task.order)

    def _fits_at_each_position(self, free_bytes: int, creator: int | None) -> bool:
        """Whether the temporaries fit at each position that the order has yet to pass, in the replays in progress.

        Tasks that have created data ahead cut the order into sections. At all positions of a section the same creators are still to come, and with
        them the same bytes created ahead. So the position with the most temporaries decides.

        Args:
            free_bytes: bytes for temporaries: the budget without lasting data and without the data to be created.
            creator: `order` of the task that would create data. Only positions before it are examined, since from there on the plan counts its data;
                None for a plain task, whose data counts at all positions.
        """
        cuts = sorted([(order, backing.handle.spec.size) for order, _, backing in self._created_ahead if backing.is_ahead], reverse=True)
        ahead = self.ahead  # bytes of `cuts`: those that tasks after the present section have created
        for replay in self.foresight.replays:
            first, passing, peaks, begin = replay.first_order, replay.plan.passing, replay.plan.peaks, replay.frontier
            end = len(passing) if creator is None else min(creator - first, len(passing))
            while begin < end:
                while cuts and cuts[-1][0] <= first + begin:
                    ahead -= cuts.pop()[1]
                if peaks[begin] + ahead <= free_bytes:
                    break  # the rest of the replay fits, too: no position has more temporaries, and less is created ahead after it
                next_cut = min(cuts[-1][0] - first, end) if cuts else end
                if max(passing[begin:next_cut]) + ahead > free_bytes:
                    return False
                begin = next_cut
        return True

    def enter(self, backing: Replica, order: int) -> None:
        """Make a replica on the last tier its handle's backing replica, for the creating task of that `order`."""
        handle = backing.handle
        backing.is_backing = True
        if not _is_temporary(handle):
            if self._promised.pop(handle, None) is None:
                self.lasting += handle.spec.size
        elif order > self.foresight.order:
            backing.is_ahead = True
            self.ahead += handle.spec.size
            self._num_entered += 1
            self._drop_reached(self.foresight.order)
            heapq.heappush(self._created_ahead, (order, self._num_entered, backing))

    def reenter(self, handle: HandleRecord, replay: Replay) -> None:
        """Count a handle that a new replay will create, if its backing replica is still in use from an earlier replay."""
        self._drop_reached(self.foresight.order)
        backing = handle.replicas.get(self.node_id)
        if backing is not None and handle.use_schedule is not None:
            self.enter(backing, replay.first_order + handle.use_schedule.positions[0])

    def leave(self, backing: Replica) -> None:
        """End the role of a backing replica. Lost lasting data is promised again by the replays in progress that may create it anew."""
        handle = backing.handle
        backing.is_backing = False
        if backing.is_ahead:
            backing.is_ahead = False
            self.ahead -= handle.spec.size
        elif not _is_temporary(handle):
            replays = self.foresight.replays if handle.num_uses else ()
            number = sum(any(use.handle is handle and self._may_create(use) for use in replay.shared) for replay in replays)
            if number:
                self._promised[handle] = number
            else:
                self.lasting -= handle.spec.size

    def _drop_reached(self, order: int) -> None:
        """Stop counting temporaries as created ahead once the planned order has reached the task that created them."""
        ahead = self._created_ahead
        while ahead and ahead[0][0] <= order:
            backing = heapq.heappop(ahead)[2]
            if backing.is_ahead:
                backing.is_ahead = False
                self.ahead -= backing.handle.spec.size

    def promise(self, replay: Replay) -> None:
        """Count the lasting data that a new replay will create."""
        promised = self._promised
        for use in replay.shared:
            handle = use.handle
            backing = handle.replicas.get(self.node_id)  # hot path: most data has a backing replica
            if (backing is None or not backing.is_backing) and self._may_create(use):
                if handle not in promised:
                    self.lasting += handle.spec.size
                promised[handle] = promised.get(handle, 0) + 1
        self._highest_peak = max(self._highest_peak, replay.plan.peaks[0])

    def forget(self, replay: Replay) -> None:
        """Stop counting the lasting data that a finished replay promised but did not create."""
        self._highest_peak = max([each.plan.peaks[each.frontier] for each in self.foresight.replays], default=0)
        for use in replay.shared if self._promised else ():
            count = self._promised.get(use.handle, 0) if self._may_create(use) else 0
            if count == 1:
                del self._promised[use.handle]
                self.lasting -= use.handle.spec.size
            elif count:
                self._promised[use.handle] = count - 1

    def _may_create(self, use: SharedUse) -> bool:
        """Whether a replay may still create the backing replica of a handle."""
        return wants_backing(use.handle, R if use.first_writer is None else W, self.node_id)

    def validate(self, backings: Iterable[Replica]) -> None:
        """Compare the sums with the backing replicas on the last tier.

        Raises:
            InvalidEvent: they differ.
        """
        lasting = sum(handle.spec.size for handle in self._promised)
        ahead = 0
        for backing in backings:
            if not _is_temporary(backing.handle):
                lasting += backing.handle.spec.size
            elif backing.is_ahead:
                ahead += backing.handle.spec.size
        if (lasting, ahead) != (self.lasting, self.ahead):
            raise InvalidEvent(
                f"node {self.node.name} keeps {lasting} B and holds {ahead} B created ahead, but {self.lasting} and {self.ahead} were counted"
            )


def _is_temporary(handle: HandleRecord) -> bool:
    """Whether a replay owns the handle, so that it dies with it."""
    return handle.use_schedule is not None and handle.use_schedule.replay is not None
