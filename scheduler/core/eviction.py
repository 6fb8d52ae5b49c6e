"""Which replica goes first when a node is full: eviction policies, as small pure classes behind one question.

`rank(replica)` is a number; the lowest goes first. `residency` asks it of replicas that may go and picks neighbours in memory whose highest rank
is lowest (`windows`). Dead data never gets here: it is freed with its last use, under every policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final, Protocol

from . import coherence
from .records import Replay, Replica

FAR: Final = 1 << 20
"""Planned tasks until a use nobody knows of."""


class Horizon:
    """Where execution stands in the planned order of the recorded steps under way, and when each handle is used next.

    Attributes:
        replays: under way, oldest first.
    """

    def __init__(self) -> None:
        self.replays: list[Replay] = []

    @property
    def order(self) -> int:
        """`order` of the oldest planned task that has not ended; -1 without a step under way."""
        if not self.replays:
            return -1
        oldest = self.replays[0]
        return oldest.first_order + oldest.frontier

    def next_use(self, replica: Replica) -> tuple[int, bool]:
        """Planned tasks from now until the handle is used, and whether that use overwrites it unread; `FAR` when no plan says."""
        agenda = replica.handle.agenda
        if agenda is None or not self.replays:
            return FAR, False
        oldest = self.replays[0]
        positions = agenda.positions
        if agenda.replay is not None and agenda.replay is not oldest:  # of the replay behind
            return len(oldest.tasks) - oldest.frontier + positions[0], agenda.overwrites[0]
        done, frontier = oldest.done, oldest.frontier
        if positions[-1] >= len(done):  # of another step, which waits behind this one
            return FAR, False
        at = bisect_left(positions, frontier)
        while at < len(positions):
            if not done[positions[at]]:
                return positions[at] - frontier, agenda.overwrites[at]
            at += 1
        return len(oldest.tasks) - frontier + positions[0], agenda.overwrites[0]


class EvictionPolicy(Protocol):
    """The interface of an eviction policy."""

    def rank(self, replica: Replica) -> float:
        """The lowest goes first."""


class NextUse:
    """What costs least per planned task it frees its room for: a reload, before that perhaps a write-back, over the time until the next use.

    Data that will be overwritten unread costs nothing. This is Belady's furthest next use, weighted by cost as in the GreedyDual family.
    """

    def __init__(self, horizon: Horizon) -> None:
        self.horizon = horizon

    def rank(self, replica: Replica) -> float:
        """Bytes to move per byte, over the distance of the next use."""
        distance, overwrites = self.horizon.next_use(replica)
        if overwrites:
            return 0.0
        cost = 2.0 if coherence.is_needed(replica) and not replica.outgoing else 1.0
        if distance == FAR:
            return cost / (FAR + 1 / (1 + replica.last_use))  # least recently used first, among those nobody knows of
        return cost / (distance + 1)


class LeastRecentlyUsed:
    """What was used longest ago."""

    def __init__(self, horizon: Horizon) -> None:
        pass

    def rank(self, replica: Replica) -> float:
        """The event of the last use."""
        return replica.last_use


class FirstInFirstOut:
    """What has been there longest."""

    def __init__(self, horizon: Horizon) -> None:
        pass

    def rank(self, replica: Replica) -> float:
        """The event of its arrival."""
        return replica.since


EVICTION_POLICIES: Final[dict[str, Callable[[Horizon], EvictionPolicy]]] = {
    "next-use": NextUse,
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
}
"""Every eviction policy by the name users type."""

DEFAULT_EVICTION: Final = "next-use"
"""Falls back on the least recently used where no recorded step says when data is used next."""
