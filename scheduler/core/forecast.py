"""What an order of a step moves within a memory budget, and how long it takes: one queue of tasks, whole tiles, next-use eviction.

The virtual time in which a planner compares its candidates, 0.1 s for each: bytes instead of extents, all workers as one, all links as two. The
memory holds what the running task touches and whatever of the rest fits; what costs least per task until its next use goes first
(`eviction.NextUse`). What a task misses is fetched ahead of it as far as the lookahead goes, and what leaves is written behind it as far as there
is clean memory. The machine does better than that: it writes early what will leave (`departures`), so where links bind a step takes up to a tenth
less. Data that outlives the step is in the memory at the start as far as the step before left it there, so the step is run twice and the second
run counts.

Devices may have a disk under host memory (`Spill`). Host memory is no cache then: what leaves a device goes there while there is room, and else
straight to the disk; it stays until it is overwritten or dead, and what is read comes from where it is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .lookahead import AHEAD, CLEAN
from .records import SCRATCH, HandleRecord, W
from .steps import RecordedTask, StepPlan

SHARE: Final = 0.84
"""The part of a budget that holds tiles between their uses; the rest goes to copies under way and to fragmentation. With 0.92 the bytes of GPT-2
small at a quarter of what it needs came out 1 to 9 % too low, the orders that are most sensitive to memory lowest, and one of those was chosen."""

SHARE_BESIDE: Final = 0.92
"""The same of a memory that devices spill to, where nothing computes; and in the forecast of devices with parts of a step, which lend each other what
they hold."""

SHARE_LEAVING: Final = 0.88
"""The same where it says what leaves devices with parts. With 0.92 too little is written back early, and a 50B GPT on eight devices of 80 GiB took
1.181 times its bound instead of 1.145 times; with 0.84 a small step within a quarter moved 4 % more."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one step costs.

    Attributes:
        read, written: bytes from and to the tier below.
        seconds: from the end of the step before to its own end; 0 without a pace.
    """

    read: int
    written: int
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Both directions."""
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class Spill:
    """A disk under the tier below, which takes what that has no room for; both directions share it.

    Attributes:
        room: bytes of the tier below.
        read, write: bytes per second from and to the disk.
    """

    room: int
    read: float
    write: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a machine computes and moves.

    Attributes:
        seconds: of each task, if all workers shared it.
        read, write: bytes per second from and to the tier below, over all links together.
        duplex: whether both directions go at once.
        parts: of how many equal parts of the machine only one is looked at.
        spill: the disk under a duplex tier below; None where there is none.
    """

    seconds: Mapping[RecordedTask, float]
    read: float
    write: float
    duplex: bool
    parts: int = 1
    spill: Spill | None = None


class _Clock:
    """When things end: tasks one after the other, copies one after the other in each direction, both as early as the rules allow.

    Args:
        ahead: bytes that are fetched, at most, before the task that is running has ended.
        backlog: bytes that wait to be written, at most, when others are fetched into their room.
    """

    def __init__(self, pace: Pace, ahead: int, backlog: int) -> None:
        self.pace, self.ahead, self.backlog = pace, ahead, backlog
        self.now = self.reads = self.writes = 0.0
        self._ahead: deque[tuple[float, int]] = deque()  # of the latest tasks, the start and the bytes each fetched
        self._fetched = 0
        self._horizon = 0.0

    def run(self, task: RecordedTask, read: int, written: int, far_read: int = 0, far_written: int = 0) -> None:
        """A task runs, after `read` bytes were fetched and `written` have left their room, the far ones of them from and to the disk below."""
        pace = self.pace
        reading, writing = (read - far_read) * pace.parts / pace.read, (written - far_written) * pace.parts / pace.write
        spare, far_reading = self.backlog * pace.parts / pace.write, 0.0
        if pace.spill is not None and (far_read or far_written):
            spare = self.backlog * pace.parts / pace.spill.write
            far_reading = far_read * pace.parts / pace.spill.read
            reading += far_reading
            writing += far_written * pace.parts / pace.spill.write
        if pace.duplex:
            if written:
                self.writes = max(self.writes, self._horizon) + writing
            if read:
                self.reads = max(self.reads, self._horizon, self.writes - spare) + reading
            if far_reading:  # the disk does nothing else meanwhile
                self.writes = max(self.writes, self._horizon) + far_reading
        elif read or written:  # one after the other until `writes`; reads overtake what still waits to be written
            self.reads = max(self.reads, self._horizon, self.writes - spare) + reading
            self.writes = max(self.writes, self._horizon) + reading + writing
        ready = self.reads if read else self.writes - spare if written else 0.0
        start = max(self.now, ready)
        self.now = start + pace.seconds[task] * pace.parts
        self._ahead.append((start, read))
        self._fetched += read
        while self._fetched > self.ahead and len(self._ahead) > 1:
            self._horizon, nbytes = self._ahead.popleft()
            self._fetched -= nbytes


class _Below:
    """The tier below, and the disk under it.

    Args:
        room: bytes of the tier below.

    Attributes:
        spilled: what is on the disk.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.spilled: set[HandleRecord] = set()
        self._held: set[HandleRecord] = set()

    def take(self, handle: HandleRecord) -> bool:
        """Hold a tile, on the disk if there is no room above it; returns whether there was."""
        if handle.size > self.room:
            self.spilled.add(handle)
            return False
        self.room -= handle.size
        self._held.add(handle)
        return True

    def forget(self, handle: HandleRecord) -> None:
        """What is here of a tile, if anything, is worth nothing any more."""
        self.spilled.discard(handle)
        if handle in self._held:
            self._held.remove(handle)
            self.room += handle.size


class _Memory:
    """Tiles in a memory of so many bytes, and when each is used next.

    Args:
        below: None where there is no disk under it.

    Attributes:
        read, written: bytes from and to what is below; of them, `far_read` and `far_written` from and to the disk under it.
        gone: what was let go, and when it is used next.
    """

    def __init__(self, capacity: int, below: _Below | None = None) -> None:
        self.capacity = capacity
        self.below = below
        self.used = 0
        self.read = self.written = self.far_read = self.far_written = 0
        self.next_use: dict[HandleRecord, int] = {}  # of what is resident
        self.dirty: set[HandleRecord] = set()
        self.gone: list[tuple[HandleRecord, int]] = []
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (-next use, handle), clean and dirty
        self._by_id: dict[int, HandleRecord] = {}

    def touch(self, handle: HandleRecord, *, reads: bool) -> None:
        """Bring a tile in, if it is not there."""
        if handle in self.next_use:
            del self.next_use[handle]
            return
        self.used += handle.size
        if reads:
            self.read += handle.size
            if self.below is not None and handle in self.below.spilled:
                self.far_read += handle.size

    def leave(self, handle: HandleRecord, next_use: int, *, written: bool, stays: bool) -> None:
        """A task is done with a tile, which may go unless it `stays`; it is used next at `next_use`, counted in tasks from the start."""
        self.next_use[handle] = next_use
        if stays:
            return
        if written:
            self.dirty.add(handle)
            if self.below is not None:
                self.below.forget(handle)
        self._by_id[handle.id] = handle
        heapq.heappush(self._heaps[handle in self.dirty], (-next_use, handle.id))

    def kill(self, handle: HandleRecord) -> None:
        """A tile is dead."""
        self.used -= handle.size
        self.next_use.pop(handle, None)
        self.dirty.discard(handle)
        if self.below is not None:
            self.below.forget(handle)

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
            self.gone.append((handle, self.next_use.pop(handle)))
            self.used -= handle.size
            if which:
                self.written += handle.size
                if self.below is not None and not self.below.take(handle):
                    self.far_written += handle.size
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


def forecast(plan: StepPlan, budget: int, pace: Pace | None = None, *, only_files: bool = False, share: float = SHARE) -> Forecast:
    """What a step costs in the order of `plan` within a budget in bytes.

    What does not fit at all is not noticed here: it costs nothing extra.

    Args:
        only_files: whether nothing but what lies in files may leave, because no tier is below.
        share: the part of the budget that holds tiles between their uses.
    """
    return _run(plan, int(budget * share), budget, pace, only_files=only_files)[0]


def departures(plan: StepPlan, budget: int, share: float = SHARE) -> dict[HandleRecord, set[int]]:
    """Which handles leave a memory of so many bytes in the order of `plan`, and before which of their uses."""
    found: dict[HandleRecord, set[int]] = {}
    for handle, position in _run(plan, int(budget * share), budget)[1]:
        found.setdefault(handle, set()).add(position % len(plan.tasks))
    return found


def _run(
    plan: StepPlan, capacity: int, budget: int, pace: Pace | None = None, *, only_files: bool = False
) -> tuple[Forecast, list[tuple[HandleRecord, int]]]:
    """`forecast`, and what left in the run that counts, with the task that uses it next, counted from the first run's start.

    Args:
        capacity: bytes of the budget that hold tiles between their uses.
    """
    below = None
    if pace is not None and pace.spill is not None:
        below = _filled(plan, int(pace.spill.room * SHARE_BESIDE) - budget // CLEAN)  # what is written early lies in both
    memory = _Memory(capacity, below)
    clock = None if pace is None else _Clock(pace, budget // AHEAD, budget // CLEAN)
    period = len(plan.tasks)
    before = (0, 0, 0.0)
    for start in (0, period):
        before = memory.read, memory.written, clock.now if clock else 0.0
        memory.gone.clear()
        places = dict.fromkeys(plan.uses, 0)
        for position, task in enumerate(plan.tasks):
            now = start + position
            read, written, scratch = memory.read, memory.written, 0
            far_read, far_written = memory.far_read, memory.far_written
            for handle, mode in task.accesses:
                if mode == SCRATCH:
                    scratch += handle.size
                else:
                    memory.touch(handle, reads=mode != W)
            memory.used += scratch
            memory.make_room(now)
            memory.used -= scratch
            if clock is not None:
                clock.run(task, memory.read - read, memory.written - written, memory.far_read - far_read, memory.far_written - far_written)
            for handle, mode in task.accesses:
                if mode == SCRATCH:
                    continue
                use = plan.uses[handle]
                stays = only_files and not plan.stays_in_file(handle)
                place = places[handle] = places[handle] + 1
                if place < len(use.positions):
                    memory.leave(handle, start + use.positions[place], written=mode != "R", stays=stays)
                elif plan.owned.get(handle) is False:
                    memory.kill(handle)
                else:
                    memory.leave(handle, start + period + use.positions[0], written=mode != "R", stays=stays)
    return Forecast(memory.read - before[0], memory.written - before[1], clock.now - before[2] if clock else 0.0), memory.gone


def _filled(plan: StepPlan, room: int) -> _Below:
    """The tier below as it is at the start: it holds what is used first of the data that there is."""
    below = _Below(room)
    for handle, use in plan.uses.items():
        if use.needs_data and handle not in plan.owned and not plan.stays_in_file(handle):
            below.take(handle)
    return below
