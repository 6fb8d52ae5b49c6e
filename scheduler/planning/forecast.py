"""Forecast of the traffic and the duration of a step in a given order within a memory budget: one queue of tasks, whole tiles, next-use eviction.

The model is coarse so that a candidate costs a planner about 0.1 s: bytes instead of extents, all workers as one, all links as two. The memory
holds the tiles of the running task and as many others as fit; the tile that costs least per task until its next use is evicted first
(`core.memory.eviction_policies.NextUse`). Missing tiles are fetched ahead of their task as far as the prefetcher looks ahead, and dirty victims are
written behind the task as far as there is clean memory. The machine also writes departing tiles early (`departures`), so where links are the
bottleneck a real step takes up to a tenth less. The contents of the memory at the start are those that the step before leaves, so the step is
forecast twice in a row and the second pass counts.

Devices may have a disk under host memory (`Spill`). Host memory is no cache then: a tile evicted from a device goes to host memory while that has
free bytes, else straight to the disk; it stays there until it is overwritten or dead, and is read from there.

Tasks that run aside (`StepPlan.aside`), by CPU workers in host memory, are a second queue: each begins when what it reads has come down from the
device, and what it writes can be fetched from its end on. What only they touch takes no bytes of the device.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..core.memory.prefetch import AHEAD, CLEAN
from ..core.records import SCRATCH, HandleRecord, R, W
from ..core.step_plan import RecordedTask, StepPlan

SHARE: Final = 0.84
"""Fraction of a budget that holds tiles between their uses; copies under way and fragmentation take the rest. A larger fraction forecasts too few
bytes (0.92: by 1 to 9 % for GPT-2 small at a quarter of its need), most so for the orders that are most sensitive to memory."""

SHARE_BESIDE: Final = 0.92
"""The same fraction of a memory that devices spill to, where no task runs; and of devices that share a step, which copy tiles from each other."""

SHARE_LEAVING: Final = 0.88
"""The same fraction in the forecast of departures from devices that share a step. A larger one writes too little back early (0.92: a 50B GPT on eight
devices of 80 GiB takes 1.181 times its bound instead of 1.145 times), a smaller one moves more (0.84: 4 % for a small step at a quarter)."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast cost of one step.

    Attributes:
        read, written: bytes from and to the tier below.
        seconds: from the end of the step before to its own end; 0 without a pace.
    """

    read: int
    written: int
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class Spill:
    """A disk under the tier below, for data beyond that tier's capacity; reads and writes share the disk.

    Attributes:
        capacity: bytes of the tier below.
        read, write: bytes per second from and to the disk.
    """

    capacity: int
    read: float
    write: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates at which a machine computes and copies.

    Attributes:
        seconds: duration of each task if all workers shared it.
        read, write: bytes per second from and to the tier below, over all links together.
        duplex: whether both directions run at once.
        num_devices: number of equal devices of the machine, of which the forecast follows one.
        spill: the disk under a duplex tier below; None without one.
        aside: duration of each task that runs aside, if all workers beside the devices shared it; `seconds` has 0 for those.
    """

    seconds: Mapping[RecordedTask, float]
    read: float
    write: float
    duplex: bool
    num_devices: int = 1
    spill: Spill | None = None
    aside: Mapping[RecordedTask, float] = field(default_factory=dict)


class _Clock:
    """Virtual time of a step: one queue of tasks, and one queue of copies in each direction, each entry as early as the rules allow.

    Args:
        ahead: most bytes that are fetched before the running task has ended.
        backlog: most bytes that wait to be written while other tiles are fetched into the memory they leave.
    """

    def __init__(self, pace: Pace, ahead: int, backlog: int) -> None:
        self.pace, self.ahead, self.backlog = pace, ahead, backlog
        self.now = self.reads = self.writes = 0.0
        self._ahead: deque[tuple[float, int]] = deque()  # start time and fetched bytes of the latest tasks
        self._fetched = 0
        self._fetch_from = 0.0  # start of the oldest task in the lookahead: no fetch begins before
        self._aside = 0.0  # end of the latest task aside
        self._since: dict[HandleRecord, float] = {}  # when a task aside has written what no task here has read yet

    @property
    def end(self) -> float:
        """When all tasks so far have ended."""
        return max(self.now, self._aside)

    def run_aside(self, task: RecordedTask, sent: int, far_read: int, far_written: int) -> None:
        """Run a task aside after `sent` bytes have come down to it; the far ones come from and go to the disk."""
        pace = self.pace
        if sent:
            self.writes = max(self.writes, self.now) + sent * pace.num_devices / pace.write
        seconds = pace.aside.get(task, 0.0)
        if pace.spill is not None:
            seconds += far_read / pace.spill.read + far_written / pace.spill.write
        self._aside = max(self._aside, self.writes if sent else self.now) + seconds * pace.num_devices
        for handle, mode in task.accesses:
            if mode != R:
                self._since[handle] = self._aside

    def run(self, task: RecordedTask, read: int, written: int, far_read: int = 0, far_written: int = 0) -> None:
        """Run a task after `read` bytes were fetched for it and `written` bytes evicted, of which the far ones came from and went to the disk
        below."""
        pace = self.pace
        if self._since and read:
            self.reads = max([self.reads, *(self._since.pop(handle, 0.0) for handle, _ in task.accesses)])
        reading, writing = (read - far_read) * pace.num_devices / pace.read, (written - far_written) * pace.num_devices / pace.write
        spare, far_reading = self.backlog * pace.num_devices / pace.write, 0.0
        if pace.spill is not None and (far_read or far_written):
            spare = self.backlog * pace.num_devices / pace.spill.write
            far_reading = far_read * pace.num_devices / pace.spill.read
            reading += far_reading
            writing += far_written * pace.num_devices / pace.spill.write
        if pace.duplex:
            if written:
                self.writes = max(self.writes, self._fetch_from) + writing
            if read:
                self.reads = max(self.reads, self._fetch_from, self.writes - spare) + reading
            if far_reading:  # the disk serves one direction at a time
                self.writes = max(self.writes, self._fetch_from) + far_reading
        elif read or written:  # one direction at a time until `writes`; reads overtake pending writes
            self.reads = max(self.reads, self._fetch_from, self.writes - spare) + reading
            self.writes = max(self.writes, self._fetch_from) + reading + writing
        ready = self.reads if read else self.writes - spare if written else 0.0
        start = max(self.now, ready)
        self.now = start + pace.seconds[task] * pace.num_devices
        self._ahead.append((start, read))
        self._fetched += read
        while self._fetched > self.ahead and len(self._ahead) > 1:
            self._fetch_from, nbytes = self._ahead.popleft()
            self._fetched -= nbytes


class _Below:
    """The tier below, and the disk under it.

    Args:
        capacity: bytes of the tier below.

    Attributes:
        free: bytes of the tier that hold no tile.
        spilled: tiles on the disk.
    """

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.spilled: set[HandleRecord] = set()
        self._held: set[HandleRecord] = set()

    def take(self, handle: HandleRecord) -> bool:
        """Hold a tile: in the tier if it has the bytes free, else on the disk. Returns whether the tier had them."""
        if handle.size > self.free:
            self.spilled.add(handle)
            return False
        self.free -= handle.size
        self._held.add(handle)
        return True

    def forget(self, handle: HandleRecord) -> None:
        """Drop the copy of a tile, which is out of date or dead."""
        self.spilled.discard(handle)
        if handle in self._held:
            self._held.remove(handle)
            self.free += handle.size


class _Memory:
    """Tiles in a memory of `capacity` bytes, and the next use of each.

    Args:
        below: the tier below if a disk is under it; None otherwise.

    Attributes:
        read, written: bytes from and to the tier below, of which `far_read` and `far_written` from and to the disk under it.
        gone: evicted tiles, each with its next use.
    """

    def __init__(self, capacity: int, below: _Below | None = None) -> None:
        self.capacity = capacity
        self.below = below
        self.used = 0
        self.read = self.written = self.far_read = self.far_written = 0
        self.next_use: dict[HandleRecord, int] = {}  # of resident tiles
        self.dirty: set[HandleRecord] = set()
        self.gone: list[tuple[HandleRecord, int]] = []
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (-next use, handle), clean and dirty
        self._by_id: dict[int, HandleRecord] = {}

    def touch(self, handle: HandleRecord, *, reads: bool) -> None:
        """Bring a tile in unless it is resident; `reads` tells whether its data is needed."""
        if handle in self.next_use:
            del self.next_use[handle]
            return
        self.used += handle.size
        if reads:
            self.read += handle.size
            if self.below is not None and handle in self.below.spilled:
                self.far_read += handle.size

    def leave(self, handle: HandleRecord, next_use: int, *, written: bool, stays: bool) -> None:
        """Release a tile after a task: it may be evicted unless it `stays`. `next_use` counts tasks from the start of the first pass."""
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
        """Drop a tile that no task uses any more."""
        self.used -= handle.size
        self.next_use.pop(handle, None)
        self.dirty.discard(handle)
        if self.below is not None:
            self.below.forget(handle)

    def send(self, handle: HandleRecord, *, reads: bool, drops: bool) -> None:
        """Let a task aside use a tile that may be here: what it reads is written down first if it is nowhere else.

        Args:
            drops: whether it stays no longer, being overwritten there or dead.
        """
        if handle not in self.next_use:
            return
        if handle in self.dirty and reads:
            self.written += handle.size
            self.dirty.discard(handle)
        if drops:
            self.used -= handle.size
            del self.next_use[handle]
            self.dirty.discard(handle)

    def evict(self, now: int) -> None:
        """Evict tiles until the rest fits."""
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
    """Traffic and duration of a step in the order of `plan` within a budget.

    A task whose data exceeds the budget goes unnoticed here; it costs nothing extra.

    Args:
        budget: bytes.
        pace: rates of the machine; without them only bytes are forecast.
        only_files: whether only tiles that lie in files may be evicted, because there is no tier below.
        share: fraction of the budget that holds tiles between their uses.
    """
    return _run(plan, int(budget * share), budget, pace, only_files=only_files)[0]


def departures(plan: StepPlan, budget: int, share: float = SHARE) -> dict[HandleRecord, set[int]]:
    """Which handles leave a memory of `budget` bytes in the order of `plan`: handle -> positions of the uses before which it has left."""
    found: dict[HandleRecord, set[int]] = {}
    for handle, position in _run(plan, int(budget * share), budget)[1]:
        found.setdefault(handle, set()).add(position % len(plan.tasks))
    return found


def _run(
    plan: StepPlan, capacity: int, budget: int, pace: Pace | None = None, *, only_files: bool = False
) -> tuple[Forecast, list[tuple[HandleRecord, int]]]:
    """`forecast`, and the evictions of the pass that counts: (handle, position of its next use, counted from the first pass's start).

    Args:
        capacity: bytes of the budget that hold tiles between their uses.
    """
    below = None
    if pace is not None and pace.spill is not None:
        below = _filled(plan, int(pace.spill.capacity * SHARE_BESIDE) - budget // CLEAN)  # tiles written early lie in both
    memory = _Memory(capacity, below)
    clock = None if pace is None else _Clock(pace, budget // AHEAD, budget // CLEAN)
    period = len(plan.tasks)
    before = (0, 0, 0.0)
    for start in (0, period):
        before = memory.read, memory.written, clock.end if clock else 0.0
        memory.gone.clear()
        num_uses = dict.fromkeys(plan.uses, 0)
        for position, task in enumerate(plan.tasks):
            now = start + position
            if plan.aside[position]:
                _run_aside(plan, task, memory, clock, num_uses, start + period)
                continue
            read, written, scratch = memory.read, memory.written, 0
            far_read, far_written = memory.far_read, memory.far_written
            for handle, mode in task.accesses:
                if mode == SCRATCH:
                    scratch += handle.size
                else:
                    memory.touch(handle, reads=mode != W)
            memory.used += scratch
            memory.evict(now)
            memory.used -= scratch
            if clock is not None:
                clock.run(task, memory.read - read, memory.written - written, memory.far_read - far_read, memory.far_written - far_written)
            for handle, mode in task.accesses:
                if mode == SCRATCH:
                    continue
                use = plan.uses[handle]
                stays = only_files and not plan.stays_in_file(handle)
                count = num_uses[handle] = num_uses[handle] + 1
                if count < len(use.positions):
                    memory.leave(handle, start + use.positions[count], written=mode != "R", stays=stays)
                    if plan.has_aside and plan.aside[use.positions[count]] and use.modes[count] != R and handle not in memory.dirty:
                        memory.send(handle, reads=False, drops=True)  # it goes first: it will be overwritten elsewhere
                elif plan.owned.get(handle) is False:
                    memory.kill(handle)
                else:
                    memory.leave(handle, start + period + use.positions[0], written=mode != "R", stays=stays)
    return Forecast(memory.read - before[0], memory.written - before[1], clock.end - before[2] if clock else 0.0), memory.gone


def _run_aside(plan: StepPlan, task: RecordedTask, memory: _Memory, clock: _Clock | None, num_uses: dict[HandleRecord, int], next_pass: int) -> None:
    """A task of `_run` that runs aside.

    Args:
        num_uses: of each handle so far.
        next_pass: position of the first task of the next pass.
    """
    written, far_read, far_written = memory.written, 0, 0
    for handle, mode in task.accesses:
        if mode == SCRATCH:
            continue
        use = plan.uses[handle]
        count = num_uses[handle] = num_uses[handle] + 1
        is_dead = count == len(use.positions) and plan.owned.get(handle) is False
        memory.send(handle, reads=mode != W, drops=mode != R or is_dead)
        if handle in memory.next_use:
            later = next_pass - len(plan.tasks) + use.positions[count] if count < len(use.positions) else next_pass + use.positions[0]
            memory.leave(handle, later, written=False, stays=False)
        if memory.below is not None:
            if handle in memory.below.spilled:
                far_read += handle.size if mode != W else 0
                far_written += handle.size if mode != R else 0
            if is_dead:
                memory.below.forget(handle)
    if clock is not None:
        clock.run_aside(task, memory.written - written, far_read, far_written)


def _filled(plan: StepPlan, capacity: int) -> _Below:
    """The tier below at the start: it holds the data that exists, in the order of first use, as far as its capacity goes."""
    below = _Below(capacity)
    for handle, use in plan.uses.items():
        if use.needs_data and handle not in plan.owned and not plan.stays_in_file(handle):
            below.take(handle)
    return below
