"""Which replica goes first when a node is full: eviction policies, as small pure classes behind one question.

A policy gives every replica a key that stands still while it is not used, so that `victim_selection` can keep replicas sorted, and a price to weigh
the best clean replica against the best dirty one. Dead data never gets here: it is freed with its last use, under every policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

from ..records import RAM, HandleRecord, R, Replay, Replica, UseSchedule, W
from . import coherence

FAR: Final = 1 << 20
"""Planned tasks until an unknown use, for each event since the last one."""

NEVER: Final = 1 << 60
"""`order` of such a use, for the first event's replica."""


def is_foreseen(key: float) -> bool:
    """Whether a key of `NextUse` is that of a known use."""
    return key < NEVER >> 1


class Foresight:
    """Where execution stands in the planned order of the recorded steps under way, and when each handle is used next.

    Attributes:
        clock: events so far.
        replays: under way, oldest first.
        reached: `order` of the latest plain task of those whose uses are foreseen (`Task.next_uses`).
    """

    def __init__(self) -> None:
        self.clock = 0
        self.replays: list[Replay] = []
        self.reached = -1

    @property
    def order(self) -> int:
        """`order` of the oldest planned task that has not ended; without a step under way, where plain tasks stand, -1 if their uses are not
        foreseen."""
        if not self.replays:
            return self.reached
        oldest = self.replays[0]
        return oldest.first_order + oldest.frontier

    @property
    def num_partitions(self) -> int:
        """How many devices pass through the planned order side by side, each with a part of its own."""
        return max(1, len(self.replays[0].partition_nodes)) if self.replays else 1

    def next_use(self, handle: HandleRecord) -> tuple[int, bool]:
        """Planned tasks from now until the handle is used anywhere, and whether that use overwrites it unread; `FAR` when no plan says."""
        use_schedule = handle.use_schedule
        if use_schedule is None or not self.replays:
            return (FAR if handle.next_use is None else handle.next_use - self.order), False
        oldest = self.replays[0]
        positions = use_schedule.positions
        if use_schedule.replay is not None and use_schedule.replay is not oldest:  # of the replay behind
            return len(oldest.tasks) - oldest.frontier + positions[0], use_schedule.modes[0] == W
        done, frontier = oldest.done, oldest.frontier
        if positions[-1] >= len(done):  # of another step, which waits behind this one
            return FAR, False
        at = bisect_left(positions, frontier)
        while at < len(positions):
            if not done[positions[at]]:
                return positions[at] - frontier, use_schedule.modes[at] == W
            at += 1
        return len(oldest.tasks) - frontier + positions[0], use_schedule.modes[0] == W

    def next_use_of(self, replica: Replica) -> tuple[int, bool]:
        """The same of one replica. While the data is elsewhere too, what tasks of other nodes read does not count; what they write overwrites it."""
        handle = replica.handle
        if not self.replays or handle.use_schedule is None:
            return self.next_use(handle)
        oldest, use_schedule, node = self.replays[0], handle.use_schedule, replica.node
        if not (oldest.partition_nodes or (oldest.has_aside and node != RAM)) or coherence.is_needed(replica):
            return self.next_use(handle)
        done, frontier, positions = oldest.done, oldest.frontier, use_schedule.positions
        if positions[-1] >= len(done) or use_schedule.replay not in (None, oldest):
            return self.next_use(handle)
        for begin, shift in ((bisect_left(positions, frontier), 0), (0, len(done))):  # in this replay, then in the next one
            for at in range(begin, len(positions)):
                position = positions[at]
                if shift or not done[position]:
                    task = oldest.tasks[position]
                    is_beside = task.aside and node != RAM
                    if not is_beside and task.planned_node in (None, node):
                        return position - frontier + shift, use_schedule.modes[at] == W
                    if use_schedule.modes[at] != R:
                        return FAR, True
        return FAR, False

    def will_change(self, handle: HandleRecord, replay: Replay, position: int) -> bool:
        """Whether a planned task that comes before that one, and has not ended, writes the handle."""
        use_schedule = handle.use_schedule
        if use_schedule is None:
            return False
        for each in self.replays:
            if each is replay or use_schedule.replay is None:
                at = len(use_schedule.positions) if each is not replay else bisect_left(use_schedule.positions, position)
                if at and use_schedule.positions[at - 1] < len(each.done) and self._writes_before(use_schedule, at, each):
                    return True
            if each is replay:
                break
        return False

    @staticmethod
    def _writes_before(use_schedule: UseSchedule, at: int, replay: Replay) -> bool:
        """Whether the last task of a replay that writes the handle before that use of it has not ended."""
        while at and use_schedule.positions[at - 1] >= replay.frontier:
            at -= 1
            if use_schedule.modes[at] != R:
                return not replay.done[use_schedule.positions[at]]
        return False

    def leaves(self, replica: Replica) -> bool:
        """Whether the handle is expected to leave the memory where tasks run before it is read next."""
        use_schedule = replica.handle.use_schedule
        if use_schedule is None or not use_schedule.leaves or not self.replays:
            return False
        distance, overwrites = self.next_use_of(replica)
        if overwrites or distance == FAR:
            return False
        oldest = self.replays[0]
        return (oldest.frontier + distance) % len(oldest.tasks) in use_schedule.leaves


class EvictionPolicy(Protocol):
    """The interface of an eviction policy.

    Attributes:
        tolerance: a replica of the size that is needed may cost so many times more than the best one, and a hole so many times more than as many
            bytes of the best ones that do not lie side by side.
        adds_up: whether prices are bytes to move, so that those of neighbours add up to that of the hole they leave.
        foresees: whether it goes by the planned order, so that what leaves is what the forecast of that order says (`Foresight.leaves`).
    """

    tolerance: float
    adds_up: bool
    foresees: bool

    def key(self, replica: Replica) -> float:
        """The larger, the sooner it goes, among clean and among dirty replicas; stays the same until the replica is used again."""

    def price(self, key: float, *, dirty: bool) -> float:
        """What it costs to let a replica go now: of the best clean and the best dirty one, the cheaper goes."""


class NextUse:
    """What costs least per planned task that its bytes are free for: a reload, before that perhaps a write-back, over the time until the next use.

    Data that will be overwritten unread costs nothing. This is Belady's furthest next use, weighted by cost as in the GreedyDual family.
    """

    tolerance = 2.0
    adds_up = True
    foresees = True

    def __init__(self, foresight: Foresight) -> None:
        self.foresight = foresight

    def key(self, replica: Replica) -> float:
        """`order` of the next use; among replicas of unknown next use, the least recently used first."""
        distance, overwrites = self.foresight.next_use_of(replica)
        if overwrites:
            return inf
        if distance == FAR:
            return NEVER - replica.last_use
        return self.foresight.order + distance

    def price(self, key: float, *, dirty: bool) -> float:
        """Bytes to move per byte freed, over the distance of the next use; what was used long ago is expected to be used late."""
        foresight = self.foresight
        distance = key - foresight.order if is_foreseen(key) else FAR * (1 + foresight.clock + key - NEVER)
        return (2.0 if dirty else 1.0) / max(distance, 1.0)


class LeastRecentlyUsed:
    """What was used longest ago."""

    tolerance = 1.0
    adds_up = False
    foresees = False

    def __init__(self, foresight: Foresight) -> None:
        pass

    def key(self, replica: Replica) -> float:
        """The event of the last use, counted backwards."""
        return -replica.last_use

    def price(self, key: float, *, dirty: bool) -> float:
        """The event of the last use."""
        return -key


class FirstInFirstOut:
    """What has been there longest."""

    tolerance = 1.0
    adds_up = False
    foresees = False

    def __init__(self, foresight: Foresight) -> None:
        pass

    def key(self, replica: Replica) -> float:
        """The event of its arrival, counted backwards."""
        return -replica.since

    def price(self, key: float, *, dirty: bool) -> float:
        """The event of its arrival."""
        return -key


EVICTION_POLICIES: Final[dict[str, Callable[[Foresight], EvictionPolicy]]] = {
    "next-use": NextUse,
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
}
"""Every eviction policy by the name users type."""

DEFAULT_EVICTION: Final = "next-use"
"""Falls back on the least recently used where no recorded step says when data is used next."""
