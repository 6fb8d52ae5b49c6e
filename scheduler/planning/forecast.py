"""Forecast of the traffic and the duration of a step in a given order within a memory budget: one queue of tasks, whole tiles, next-use eviction.

The model is coarse so that a candidate costs a planner about 0.1 s: bytes instead of extents, all workers as one, all links as two. The memory
holds the tiles of the running task and as many others as fit; the tile that costs least per task until its next use is evicted first
(`core.memory.eviction_policies.NextUse`). Missing tiles are fetched ahead of their task as far as the prefetcher looks ahead, and dirty victims are
written behind the task as far as there is clean memory. The machine also writes departing tiles early (`foresee`), so where links are the
bottleneck a real step takes up to a tenth less. The contents of the memory at the start are those that the step before leaves, so the step is
forecast twice in a row and the second pass counts.

Devices may have a disk under host memory (`Spill`). Host memory is no cache then: a tile evicted from a device goes to host memory while that has
free bytes, else straight to the disk; it stays there until it is overwritten or dead, and is read from there.

Tasks that run aside (`StepPlan.aside`), by CPU workers in host memory, are a second queue: each begins when what it reads has come down from the
device, and what it writes can be fetched from its end on. What only they touch takes no bytes of the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from ..core.memory.prefetch import AHEAD, CLEAN, TASKS
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

MOST_AHEAD: Final = 512
"""Tasks before its use from which on data may be fetched, at most."""

DEAD: Final = -1
"""In place of a next use: there is none."""


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


@dataclass(slots=True)
class _Moves:
    """What one task makes move.

    Attributes:
        used: bytes in use while it runs.
        added: bytes that it misses, what it makes and scratch among them.
        read: bytes that are fetched for it, of which `far_read` from the disk under the tier below.
        evicted: what is written back for it: (position of its last use, bytes, whether they go to that disk).
        after: position of the latest task aside that makes what is fetched; None without one.
        far_written: bytes that a task aside writes to that disk.
    """

    used: int
    added: int
    read: int
    far_read: int
    evicted: list[tuple[int, int, bool]]
    after: int | None = None
    far_written: int = 0

    @property
    def is_far(self) -> bool:
        """Whether the disk under the tier below serves it."""
        return self.far_read > 0 or any(is_far for _, _, is_far in self.evicted)


@dataclass(frozen=True, slots=True)
class _Passed:
    """A pass through a step, the one before it done.

    Attributes:
        moves: of each task; positions count from the start of the pass, those of the pass before are below 0.
        gone: what was evicted, with the position of its next use, counted from the start of the pass before.
    """

    moves: list[_Moves]
    gone: list[tuple[HandleRecord, int]]


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
        reach: most bytes that tasks ahead of the running one miss while the prefetcher fetches for them.
        backlog: most bytes that wait to be written while other tiles are fetched into the memory they leave.
    """

    def __init__(self, pace: Pace, reach: int, backlog: int) -> None:
        self.pace, self.reach, self.backlog = pace, reach, backlog
        self.now = self.reads = self.writes = 0.0
        self._aside = 0.0  # end of the latest task aside
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._oldest = 0  # task ahead of which the prefetcher has come as far as the one that is next
        self._missing = 0  # bytes that the tasks from there on miss
        self._added: list[int] = []

    @property
    def end(self) -> float:
        """When all tasks so far have ended."""
        return max(self.now, self._aside)

    def run_aside(self, seconds: float, moves: _Moves, start: int) -> None:
        """Run a task aside, when what is evicted for it has come down.

        Args:
            seconds: it takes if all workers beside the devices share it.
            start: number of tasks before the step, from which positions count.
        """
        pace = self.pace
        for since, nbytes, _ in moves.evicted:
            self.writes = max(self.writes, self._ended(start + since)) + nbytes * pace.num_devices / pace.write
        if pace.spill is not None:
            seconds += moves.far_read / pace.spill.read + moves.far_written / pace.spill.write
        self._aside = max(self._aside, self.writes if moves.evicted else self.now) + seconds * pace.num_devices
        self._look_ahead(len(self._starts), 0)
        self._starts.append(self.now)
        self._ends.append(self._aside)

    def _ended(self, at: int) -> float:
        """When a task ended; 0 for one before the first."""
        return self._ends[at] if at >= 0 else 0.0

    def run(self, seconds: float, moves: _Moves, start: int, begin: int) -> None:
        """Run a task.

        Args:
            moves: what is copied before it.
            start: number of tasks before the step, from which positions count.
            begin: position of the task from which on its data may be fetched whatever the tasks in between miss.
        """
        pace, at = self.pace, len(self._starts)
        self._look_ahead(at, moves.added)
        per_read, per_write = pace.num_devices / pace.read, pace.num_devices / pace.write
        far_per_read, far_per_write = per_read, per_write
        if pace.spill is not None:
            far_per_read, far_per_write = pace.num_devices / pace.spill.read, pace.num_devices / pace.spill.write
        spare = self.backlog * (far_per_write if pace.spill is not None and moves.is_far else per_write)
        far_reading = moves.far_read * far_per_read
        reading = (moves.read - moves.far_read) * per_read + far_reading
        fetch_from = self._starts[max(0, min(start + begin, self._oldest, at - 1))] if self._starts else 0.0
        if not pace.duplex and moves.read:  # one direction at a time until `writes`; reads overtake pending writes
            self.writes = max(self.writes, fetch_from) + reading
        for since, nbytes, is_far in moves.evicted:
            self.writes = max(self.writes, self._ended(start + since)) + nbytes * (far_per_write if is_far else per_write)
        if moves.after is not None:
            fetch_from = max(fetch_from, self._ended(start + moves.after))
        if moves.read:
            self.reads = max(self.reads, fetch_from, self.writes - (reading if not pace.duplex else 0.0) - spare) + reading
            if pace.duplex and far_reading:  # the disk serves one direction at a time
                self.writes = max(self.writes, fetch_from) + far_reading
        ready = self.reads if moves.read else self.writes - spare if moves.evicted else 0.0
        begun = max(self.now, ready)
        self.now = begun + seconds * pace.num_devices
        self._starts.append(begun)
        self._ends.append(self.now)

    def _look_ahead(self, at: int, added: int) -> None:
        """Go on to a task that misses so many bytes."""
        self._added.append(added)
        self._missing += added
        while (self._missing > self.reach or at - self._oldest > TASKS) and self._oldest < at:
            self._missing -= self._added[self._oldest]
            self._oldest += 1


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


class Touches:
    """What each task of a step touches, looked up once for forecasts of it in many orders.

    Args:
        plan: the step.

    Attributes:
        data: of each task, (handle, whether it reads what is there, whether it writes), scratch left out.
        scratch: of each task, bytes.
        overwritten: of each task that runs aside, what it writes.
        mortal: handles that die with their last use.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.data = [[(handle, mode != W, mode != R) for handle, mode in task.accesses if mode != SCRATCH] for task in plan.tasks]
        self.scratch = [sum(handle.size for handle, mode in task.accesses if mode == SCRATCH) for task in plan.tasks]
        self.overwritten = {at: {handle for handle, _, writes in self.data[at] if writes} for at, is_aside in enumerate(plan.aside) if is_aside}
        self.mortal = {handle for handle, is_output in plan.owned.items() if not is_output}

    def next_uses(self, positions: Sequence[int]) -> list[list[int]]:
        """Of the tasks at some positions, in their order: for each of their data, which of these tasks uses it next, counted on into the next step;
        `DEAD` if none does."""
        latest: dict[HandleRecord, int] = {}
        last: list[tuple[HandleRecord, list[int], int]] = []
        found: list[list[int]] = []
        for at in range(len(positions) - 1, -1, -1):
            row: list[int] = []
            for handle, _, _ in self.data[positions[at]]:
                following = latest.get(handle, DEAD)
                if following == DEAD and handle not in self.mortal:
                    last.append((handle, row, len(row)))
                row.append(following)
                latest[handle] = at
            found.append(row)
        for handle, row, index in last:
            row[index] = len(positions) + latest[handle]
        found.reverse()
        return found


class _Memory:
    """Tiles in a memory of `capacity` bytes, and the next use of each.

    Args:
        below: the tier below if a disk is under it; None otherwise.
        stays: tiles that may not be evicted.

    Attributes:
        gone: evicted tiles, each with its next use.
        made_aside: tiles that a task aside wrote last, and its position.
    """

    def __init__(self, capacity: int, below: _Below | None = None, stays: Set[HandleRecord] = frozenset()) -> None:
        self.capacity = capacity
        self.below = below
        self.stays = stays
        self.used = 0
        self.next_use: dict[HandleRecord, int] = {}  # of resident tiles
        self.last_use: dict[HandleRecord, int] = {}
        self.dirty: set[HandleRecord] = set()
        self.gone: list[tuple[HandleRecord, int]] = []
        self.made_aside: dict[HandleRecord, int] = {}
        self._written: list[tuple[int, int, bool]] = []  # for the task at hand, as in `_Moves.evicted`
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (-next use, handle), clean and dirty
        self._by_id: dict[int, HandleRecord] = {}

    def bring(self, data: Sequence[tuple[HandleRecord, bool, bool]], scratch: int, now: int) -> _Moves:
        """Bring in what a task touches, and let go what has no room beside it."""
        next_use, added, read, far_read, after = self.next_use, scratch, 0, 0, None
        for handle, reads, _ in data:
            if handle in next_use:
                del next_use[handle]
                continue
            added += handle.size
            if reads:
                read += handle.size
                if self.below is not None and handle in self.below.spilled:
                    far_read += handle.size
                if handle in self.made_aside:
                    after = self.made_aside[handle] if after is None else max(after, self.made_aside[handle])
        self.used += added
        self._written = []
        if self.used > self.capacity:
            self.evict(now)
        moves = _Moves(self.used, added, read, far_read, self._written, after)
        self.used -= scratch
        return moves

    def leave(self, data: Sequence[tuple[HandleRecord, bool, bool]], next_uses: Sequence[int], now: int, start: int) -> None:
        """Release what a task has touched: what is dead goes, the rest may be evicted.

        Args:
            now: the task's position.
            start: number of tasks before the step, from which it and `next_uses` count.
        """
        for (handle, _, writes), following in zip(data, next_uses, strict=True):
            if following == DEAD:
                self._kill(handle)
                continue
            self.next_use[handle] = start + following
            self.last_use[handle] = now
            if handle in self.stays:
                continue
            if writes:
                self.dirty.add(handle)
                if self.below is not None:
                    self.below.forget(handle)
            self._by_id[handle.id] = handle
            heapq.heappush(self._heaps[handle in self.dirty], (-start - following, handle.id))

    def pass_aside(self, data: Sequence[tuple[HandleRecord, bool, bool]], next_uses: Sequence[int], now: int, start: int) -> _Moves:
        """Let a task aside use tiles that may be here: what it reads is written down first, what it overwrites is dropped; as `leave`."""
        self._written, far_read, far_written = [], 0, 0
        for (handle, reads, writes), following in zip(data, next_uses, strict=True):
            self._send(handle, now, reads=reads, drops=writes or following == DEAD)
            if handle in self.next_use:
                self.leave([(handle, reads, False)], [following], now, start)
            if writes:
                self.made_aside[handle] = now
            if self.below is not None:
                if handle in self.below.spilled:
                    far_read += handle.size if reads else 0
                    far_written += handle.size if writes else 0
                if following == DEAD:
                    self.below.forget(handle)
        return _Moves(self.used, 0, 0, far_read, self._written, far_written=far_written)

    def drop_overwritten(self, handle: HandleRecord, now: int) -> None:
        """What a task aside overwrites next goes first, unless it is dirty."""
        if handle not in self.dirty:
            self._send(handle, now, reads=False, drops=True)

    def _send(self, handle: HandleRecord, now: int, *, reads: bool, drops: bool) -> None:
        """Write a tile down if a task aside reads it and it is nowhere else; drop it if it is overwritten there or dead."""
        if handle not in self.next_use:
            return
        if handle in self.dirty and reads:
            self._written.append((self.last_use.get(handle, now), handle.size, False))
            self.dirty.discard(handle)
        if drops:
            self.used -= handle.size
            del self.next_use[handle]
            self.dirty.discard(handle)

    def _kill(self, handle: HandleRecord) -> None:
        """Drop a tile that no task uses any more."""
        self.used -= handle.size
        self.next_use.pop(handle, None)
        self.dirty.discard(handle)
        if self.below is not None:
            self.below.forget(handle)

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
                is_far = self.below is not None and not self.below.take(handle)
                self._written.append((self.last_use[handle], handle.size, is_far))
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


def forecast(
    step: Touches, positions: Sequence[int], budget: int, pace: Pace | None = None, *, only_files: bool = False, share: float = SHARE
) -> Forecast:
    """Traffic and duration of a step within a budget.

    A task whose data exceeds the budget goes unnoticed here; it costs nothing extra.

    Args:
        positions: of the tasks, in the order in which they run; those of one device only where others run the rest.
        budget: bytes.
        pace: rates of the machine; without them only bytes are forecast.
        only_files: whether only tiles that lie in files may be evicted, because there is no tier below.
        share: fraction of the budget that holds tiles between their uses.
    """
    capacity = int(budget * share)
    passed = _run(step, positions, capacity, budget, pace, only_files=only_files)
    read = sum(moves.read for moves in passed.moves)
    written = sum(nbytes for moves in passed.moves for _, nbytes, _ in moves.evicted)
    return Forecast(read, written, 0.0 if pace is None else _seconds(step, positions, passed, capacity, budget, pace))


def _seconds(step: Touches, positions: Sequence[int], passed: _Passed, capacity: int, budget: int, pace: Pace) -> float:
    """Duration of a step behind one that was alike."""
    begins = {position: begin for begin, position in _returns(passed, capacity)}
    clock, period = _Clock(pace, budget // AHEAD, budget // CLEAN), len(positions)
    seconds = [pace.seconds[step.plan.tasks[at]] for at in positions]
    before = 0.0
    for start in (0, period):
        before = clock.end
        for position, moves in enumerate(passed.moves):
            if positions[position] in step.overwritten:
                clock.run_aside(pace.aside.get(step.plan.tasks[positions[position]], 0.0), moves, start)
            else:
                clock.run(seconds[position], moves, start, begins.get(position, position))
    return clock.end - before


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a plan knows of the copies of a step.

    Attributes:
        leaves: handles that leave the memory where tasks run, and positions of the uses before which they have left.
        returns: (from, position) of each task that misses such data, in planned order: from which task on the memory has bytes for it that
            nothing else needs until then; below 0 for one of the step before.
    """

    leaves: dict[HandleRecord, set[int]]
    returns: list[tuple[int, int]]


def foresee(step: Touches, positions: Sequence[int], budget: int, share: float = SHARE) -> Foreseen:
    """What leaves a memory of `budget` bytes, and when it may come back; arguments as of `forecast`, and positions count in that order."""
    capacity = int(budget * share)
    passed = _run(step, positions, capacity, budget)
    leaves: dict[HandleRecord, set[int]] = {}
    for handle, position in passed.gone:
        leaves.setdefault(handle, set()).add(position % len(positions))
    return Foreseen(leaves, _returns(passed, capacity))


def _returns(passed: _Passed, capacity: int) -> list[tuple[int, int]]:
    """`Foreseen.returns`: each task's data as early as there are bytes for it beside that of the tasks before."""
    spare = [capacity - moves.used for moves in passed.moves]
    found, most = [], min(MOST_AHEAD, len(spare) - 1)
    for position, moves in enumerate(passed.moves):
        if nbytes := moves.read:
            begin = position
            for begin in range(position, position - most, -1):  # below 0 the list goes on from its end, as the step before does
                if spare[begin - 1] < nbytes:
                    break
                spare[begin - 1] -= nbytes
            found.append((begin, position))
    return found


def _run(step: Touches, positions: Sequence[int], capacity: int, budget: int, pace: Pace | None = None, *, only_files: bool = False) -> _Passed:
    """Two passes through the step, of which the second counts.

    Args:
        capacity: bytes of the budget that hold tiles between their uses.
    """
    below, plan = None, step.plan
    if pace is not None and pace.spill is not None:
        below = _filled(plan, int(pace.spill.capacity * SHARE_BESIDE) - budget // CLEAN)  # tiles written early lie in both
    stays = {handle for handle in plan.uses if not plan.stays_in_file(handle)} if only_files else frozenset[HandleRecord]()
    memory = _Memory(capacity, below, stays)
    next_uses, period, found = step.next_uses(positions), len(positions), list[_Moves]()
    for start in (0, period):
        memory.gone.clear()
        found.clear()
        for now, position in enumerate(positions):
            data, following = step.data[position], next_uses[now]
            if position in step.overwritten:
                found.append(memory.pass_aside(data, following, now, start))
                continue
            found.append(memory.bring(data, step.scratch[position], start + now))
            memory.leave(data, following, now, start)
            if step.overwritten:
                for (handle, _, _), at in zip(data, following, strict=True):
                    if at != DEAD and handle in step.overwritten.get(positions[at % period], ()):
                        memory.drop_overwritten(handle, now)
        memory.last_use = {handle: now - period for handle, now in memory.last_use.items()}
        memory.made_aside = {handle: now - period for handle, now in memory.made_aside.items()}
    return _Passed(found, memory.gone)


def _filled(plan: StepPlan, capacity: int) -> _Below:
    """The tier below at the start: it holds the data that exists, in the order of first use, as far as its capacity goes."""
    below = _Below(capacity)
    for handle, use in plan.uses.items():
        if use.needs_data and handle not in plan.owned and not plan.stays_in_file(handle):
            below.take(handle)
    return below
