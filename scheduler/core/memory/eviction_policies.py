"""Eviction policies: the order in which replicas leave a full node.

A policy gives every replica a key that does not grow while it is unused, unless a use of it is skipped (`Replicas.enter_anew`), so that
`victim_selection` can keep replicas sorted, and a price that compares the best clean replica with the best dirty one. Dead data is freed with its
last use under every policy, so policies never see it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

from ..records import RAM, HandleRecord, R, Replay, Replica, Task, UseSchedule, W
from . import coherence

FAR: Final = 1 << 20
"""Assumed number of planned tasks until an unknown use, for each event since the last use."""

RECENT_USES: Final = 16
"""Number of conditional uses of which `HandleRecord.use_rate` is an average, in which the weight of the older ones decays."""

LEAST_RATE: Final = 1 / 256
"""Least use rate from which the next use of data is estimated."""

NEVER: Final = 1 << 60
"""Assumed `order` of an unknown use, for a replica last used at event 0."""


_FORESEEN: Final = NEVER >> 1
"""Keys of `NextUse` below which they are those of known uses."""


def is_foreseen(key: float) -> bool:
    """Whether a key of `NextUse` is that of a known use."""
    return key < _FORESEEN


class Foresight:
    """Position of execution in the planned order of the replays in progress, and the next use of each handle.

    Attributes:
        clock: number of events so far.
        replays: replays in progress, oldest first.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.replays: list[Replay] = []

    @property
    def order(self) -> int:
        """`order` of the oldest planned task that has not ended; -1 without a replay in progress."""
        if not self.replays:
            return -1
        oldest = self.replays[0]
        return oldest.first_order + oldest.frontier

    @property
    def num_partitions(self) -> int:
        """Number of devices that execute the planned order side by side, each its own partition; at least 1."""
        return max(1, len(self.replays[0].partition_nodes)) if self.replays else 1

    def next_use(self, handle: HandleRecord) -> tuple[int, bool]:
        """Return the number of planned tasks until the next use of the handle on any node (`FAR` if unknown), and whether it overwrites it unread."""
        use_schedule = handle.use_schedule
        if use_schedule is None or not self.replays:
            return FAR, False
        oldest = self.replays[0]
        positions = use_schedule.positions
        if use_schedule.replay is not None and use_schedule.replay is not oldest:  # owned by a later replay
            return len(oldest.tasks) - oldest.frontier + positions[0], use_schedule.modes[0] == W
        done, frontier = oldest.done, oldest.frontier
        if positions[-1] >= len(done):  # of another step, whose replay comes later
            return FAR, False
        index = bisect_left(positions, frontier)
        while index < len(positions):
            if not done[positions[index]]:
                return positions[index] - frontier, use_schedule.modes[index] == W
            index += 1
        return len(oldest.tasks) - frontier + positions[0], use_schedule.modes[0] == W

    def next_use_of(self, replica: Replica) -> tuple[int, bool]:
        """Return the number of planned tasks until the next use of one replica, as `next_use` does, and whether it is overwritten unread.

        If the data is on other nodes as well, reads by tasks of other nodes do not count, and writes by them overwrite the replica.
        """
        handle = replica.handle
        if not self.replays or handle.use_schedule is None:
            return self.next_use(handle)
        oldest, use_schedule, node = self.replays[0], handle.use_schedule, replica.node
        if not (oldest.partition_nodes or (oldest.plan.has_aside and node != RAM)) or coherence.is_needed(replica):
            return self.next_use(handle)
        done, frontier, positions = oldest.done, oldest.frontier, use_schedule.positions
        if positions[-1] >= len(done) or use_schedule.replay not in (None, oldest):
            return self.next_use(handle)
        for begin, shift in ((bisect_left(positions, frontier), 0), (0, len(done))):  # in this replay, then in the next one
            for index in range(begin, len(positions)):
                position = positions[index]
                if shift or not done[position]:
                    task = oldest.tasks[position]
                    is_beside = task.spec.aside and node != RAM
                    if not is_beside and task.planned_node in (None, node):
                        return position - frontier + shift, use_schedule.modes[index] == W
                    if use_schedule.modes[index] != R:
                        return FAR, True
        return FAR, False

    def will_run(self, replay: Replay, task: Task) -> bool:
        """Return whether it is known that an unfinished task of a replay runs; a conditional one whose flag is not written yet may be skipped."""
        condition = task.spec.condition
        if condition is None or condition.guard < 0:
            return True
        guard, _ = task.accesses[condition.guard]
        if guard.lost is not None or guard in replay.stale:
            return False  # it will be cancelled
        return (guard.flags is None or guard.flags[condition.number] != 0) and not self.will_change(guard, replay, task.position)

    def extra_distance(self, replica: Replica, use_schedule: UseSchedule, position: int) -> float:
        """Return the expected number of planned tasks from the next planned use of data that only conditional tasks use to its next real use.

        With a use rate of r, 1/r - 1 planned uses are skipped on average before one takes place. The number is 0 if it is known that the next one
        takes place, and for data that was fetched and not used yet. So prefetches end: each replaces data that is used later than its own.

        Args:
            position: position of the next planned use in the oldest replay; beyond the end if it is in the next one.
        """
        oldest, handle = self.replays[0], replica.handle
        if not replica.last_use or (position < len(oldest.tasks) and self.will_run(oldest, oldest.tasks[position])):
            return 0.0
        rate = max(handle.use_rate, LEAST_RATE) if handle.use_rate >= 0 else 1.0
        return (1.0 / rate - 1.0) * len(oldest.tasks) / len(use_schedule.positions)

    def will_change(self, handle: HandleRecord, replay: Replay, position: int) -> bool:
        """Whether an unfinished planned task before the one at `position` of `replay` writes the handle."""
        use_schedule = handle.use_schedule
        if use_schedule is None:
            return False
        for running in self.replays:
            if running is replay or use_schedule.replay is None:
                index = len(use_schedule.positions) if running is not replay else bisect_left(use_schedule.positions, position)
                if index and use_schedule.positions[index - 1] < len(running.done) and self._writes_before(use_schedule, index, running):
                    return True
            if running is replay:
                break
        return False

    @staticmethod
    def _writes_before(use_schedule: UseSchedule, at: int, replay: Replay) -> bool:
        """Whether the last task that writes the handle before its use number `at` is unfinished."""
        while at and use_schedule.positions[at - 1] >= replay.frontier:
            at -= 1
            if use_schedule.modes[at] != R:
                return not replay.done[use_schedule.positions[at]]
        return False

    def leaves(self, replica: Replica) -> bool:
        """Whether the plan expects the handle to leave the memory where tasks run before its next read."""
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
        tolerance: maximum cost, relative to the cheapest candidates, at which a replica of exactly the wanted size is still preferred.
        adds_up: whether prices are bytes to move, so that the prices of neighbours add up to the price of the hole they leave.
        foresees: whether the policy follows the planned order, so that it evicts the data that the forecast of that order evicts
            (`Foresight.leaves`).
    """

    tolerance: float
    adds_up: bool
    foresees: bool

    def key(self, replica: Replica) -> float:
        """Return the key of a replica; replicas with larger keys are evicted first. A candidate whose key has changed is entered anew when it is
        chosen."""

    def price(self, key: float, *, dirty: bool) -> float:
        """Return the cost of dropping a replica now; the cheaper of the best clean and the best dirty replica goes."""


class NextUse:
    """The policy next-use: the lowest cost (a reload, plus a write-back if dirty) per planned task for which the bytes stay free.

    Data that will be overwritten unread costs nothing. This is Belady's furthest next use, weighted by cost as in the GreedyDual family.
    """

    tolerance = 2.0
    adds_up = True
    foresees = True

    def __init__(self, foresight: Foresight) -> None:
        self.foresight = foresight

    def key(self, replica: Replica) -> float:
        """Return the `order` of the next use, the expected one if only conditional tasks use the data; unknown ones are ordered by last use."""
        foresight = self.foresight
        replays, use_schedule = foresight.replays, replica.handle.use_schedule
        if replays and use_schedule is not None:  # hot path: `next_use_of` for data of the oldest replay, if tasks run on one node only
            oldest, positions = replays[0], use_schedule.positions
            done, is_foreign = oldest.done, use_schedule.replay is not None and use_schedule.replay is not oldest
            if not (is_foreign or oldest.partition_nodes or oldest.plan.has_aside) and positions[-1] < len(done):
                index, end = bisect_left(positions, oldest.frontier), len(positions)
                while index < end and done[positions[index]]:
                    index += 1
                position = len(done) + positions[0] if index == end else positions[index]  # the former in the next replay
                extra = foresight.extra_distance(replica, use_schedule, position) if use_schedule.is_conditional else 0
                return inf if use_schedule.modes[index % end] == W else oldest.first_order + position + extra
        distance, overwrites = foresight.next_use_of(replica)
        if overwrites:
            return inf
        if distance == FAR:
            return NEVER - replica.last_use
        if use_schedule is not None and use_schedule.is_conditional and replays:
            extra = foresight.extra_distance(replica, use_schedule, replays[0].frontier + distance)
            return foresight.order + distance + extra
        return foresight.order + distance

    def price(self, key: float, *, dirty: bool) -> float:
        """Return the bytes to move per byte freed, divided by the distance of the next use.

        An unknown next use counts as further away than any known one; its distance grows with the time since the last use.
        """
        foresight = self.foresight
        distance = key - foresight.order if key < _FORESEEN else FAR * (1 + foresight.clock + key - NEVER)
        moves = 2.0 if dirty else 1.0
        return moves / distance if distance > 1.0 else moves


class LeastRecentlyUsed:
    """The policy lru: least recently used first."""

    tolerance = 1.0
    adds_up = False
    foresees = False

    def __init__(self, foresight: Foresight) -> None:
        pass

    def key(self, replica: Replica) -> float:
        """Return the negative event count of the last use."""
        return -replica.last_use

    def price(self, key: float, *, dirty: bool) -> float:
        """Return the event count of the last use."""
        return -key


class FirstInFirstOut:
    """The policy fifo: oldest arrival first."""

    tolerance = 1.0
    adds_up = False
    foresees = False

    def __init__(self, foresight: Foresight) -> None:
        pass

    def key(self, replica: Replica) -> float:
        """Return the negative event count of the arrival."""
        return -replica.since

    def price(self, key: float, *, dirty: bool) -> float:
        """Return the event count of the arrival."""
        return -key


EVICTION_POLICIES: Final[dict[str, Callable[[Foresight], EvictionPolicy]]] = {
    "next-use": NextUse,
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
}
"""Eviction policies by the name that users type."""

DEFAULT_EVICTION: Final = "next-use"
"""Name of the default policy; it falls back to least recently used for data of no recorded step."""
