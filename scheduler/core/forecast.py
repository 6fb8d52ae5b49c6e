"""What an order of a step moves within a memory budget: one worker, whole tiles, next-use eviction, bytes instead of extents.

A quick stand-in for virtual time, by which a planner sorts its candidates: no fragmentation, no prefetching, no time. The memory holds what the
running task touches and whatever of the rest fits; what costs least per task until its next use goes first (`eviction.NextUse`). Data that
outlives the step is in the memory at the start as far as the step before left it there, so the step is run twice and the second run counts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from .records import SCRATCH, HandleRecord, W
from .steps import StepPlan

SHARE: Final = 0.92
"""The part of a budget that holds tiles between their uses; the rest goes to copies under way and to fragmentation."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that one step moves.

    Attributes:
        read, written: from and to the tier below.
    """

    read: int
    written: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.read + self.written


class _Memory:
    """Tiles in a memory of so many bytes, and when each is used next."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.read = self.written = 0
        self.next_use: dict[HandleRecord, int] = {}  # of what is resident
        self.dirty: set[HandleRecord] = set()
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (-next use, handle), clean and dirty
        self._by_id: dict[int, HandleRecord] = {}

    def touch(self, handle: HandleRecord, *, reads: bool) -> None:
        """Bring a tile in, if it is not there."""
        if handle in self.next_use:
            del self.next_use[handle]
            return
        self.used += handle.size
        self.read += handle.size if reads else 0

    def leave(self, handle: HandleRecord, next_use: int, *, written: bool) -> None:
        """A task is done with a tile; it is used next at `next_use`, counted in tasks from the start."""
        if written:
            self.dirty.add(handle)
        self.next_use[handle] = next_use
        self._by_id[handle.id] = handle
        heapq.heappush(self._heaps[handle in self.dirty], (-next_use, handle.id))

    def kill(self, handle: HandleRecord) -> None:
        """A tile is dead."""
        self.used -= handle.size
        self.next_use.pop(handle, None)
        self.dirty.discard(handle)

    def make_room(self, now: int) -> None:
        """Let tiles go until the rest fits."""
        while self.used > self.capacity:
            tops = [self._top(0), self._top(1)]
            if tops[0] is None and tops[1] is None:
                return
            prices = [(1 + which) / max(top[0] - now, 1) if top is not None else 3.0 for which, top in enumerate(tops)]
            which = 0 if prices[0] <= prices[1] else 1
            _, number = heapq.heappop(self._heaps[which])
            handle = self._by_id[number]
            del self.next_use[handle]
            self.used -= handle.size
            if which:
                self.written += handle.size
                self.dirty.discard(handle)

    def _top(self, which: int) -> tuple[int, int] | None:
        heap = self._heaps[which]
        while heap:
            negative, number = heap[0]
            handle = self._by_id[number]
            if self.next_use.get(handle) == -negative and (handle in self.dirty) == bool(which):
                return -negative, number
            heapq.heappop(heap)
        return None


def forecast(plan: StepPlan, budget: int) -> Forecast:
    """Bytes that a step moves in the order of `plan` within a budget in bytes.

    What does not fit at all is not noticed here: it costs nothing extra.
    """
    memory = _Memory(int(budget * SHARE))
    period = len(plan.tasks)
    before = (0, 0)
    for start in (0, period):
        before = memory.read, memory.written
        places = dict.fromkeys(plan.uses, 0)
        for position, task in enumerate(plan.tasks):
            now = start + position
            scratch = 0
            for handle, mode in task.accesses:
                if mode == SCRATCH:
                    scratch += handle.size
                else:
                    memory.touch(handle, reads=mode != W)
            memory.used += scratch
            memory.make_room(now)
            memory.used -= scratch
            for handle, mode in task.accesses:
                if mode == SCRATCH:
                    continue
                use = plan.uses[handle]
                place = places[handle] = places[handle] + 1
                if place < len(use.positions):
                    memory.leave(handle, start + use.positions[place], written=mode != "R")
                elif plan.owned.get(handle) is False:
                    memory.kill(handle)
                else:
                    memory.leave(handle, start + period + use.positions[0], written=mode != "R")
    return Forecast(memory.read - before[0], memory.written - before[1])
