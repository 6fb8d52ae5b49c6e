"""Which tiles a memory holds while a step passes through it, and which bytes move: whole tiles, evicted by next use, one task after another.

The memory holds the tiles of the running task and as many others as fit; the tile that costs least per task until its next use is evicted first
(`core.memory.eviction_policies.NextUse`). Its contents at the start are those that the step before leaves, so a step is passed through twice in a row
and the second pass counts. Knows bytes and positions; `forecast` makes seconds of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R, W
from ..core.step_plan import StepPlan

DEAD: Final = -1
"""In place of a next use: there is none."""


@dataclass(slots=True)
class Moves:
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
class Passed:
    """A pass through a step, the one before it done.

    Attributes:
        moves: of each task; positions count from the start of the pass, those of the pass before are below 0.
        gone: what was evicted, with the position of its next use, counted from the start of the pass before.
    """

    moves: list[Moves]
    gone: list[tuple[HandleRecord, int]]


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
        self._written: list[tuple[int, int, bool]] = []  # for the task at hand, as in `Moves.evicted`
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (-next use, handle), clean and dirty
        self._by_id: dict[int, HandleRecord] = {}

    def bring(self, data: Sequence[tuple[HandleRecord, bool, bool]], scratch: int, now: int) -> Moves:
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
        moves = Moves(self.used, added, read, far_read, self._written, after)
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

    def pass_aside(self, data: Sequence[tuple[HandleRecord, bool, bool]], next_uses: Sequence[int], now: int, start: int) -> Moves:
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
        return Moves(self.used, 0, 0, far_read, self._written, far_written=far_written)

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


def pass_through(step: Touches, positions: Sequence[int], capacity: int, *, below: int | None = None, only_files: bool = False) -> Passed:
    """Pass through a step twice.

    Args:
        positions: of the tasks, in the order in which they run.
        capacity: bytes that hold tiles between their uses.
        below: bytes of the tier below, which may spill to a disk; None where it holds everything.
        only_files: whether only tiles that lie in files may be evicted, because there is no tier below.
    """
    plan = step.plan
    stays = {handle for handle in plan.uses if not plan.stays_in_file(handle)} if only_files else frozenset[HandleRecord]()
    memory = _Memory(capacity, None if below is None else _filled(plan, below), stays)
    next_uses, period, found = step.next_uses(positions), len(positions), list[Moves]()
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
    return Passed(found, memory.gone)


def _filled(plan: StepPlan, capacity: int) -> _Below:
    """The tier below at the start: it holds the data that exists, in the order of first use, as far as its capacity goes."""
    below = _Below(capacity)
    for handle, use in plan.uses.items():
        if use.needs_data and handle not in plan.owned and not plan.stays_in_file(handle):
            below.take(handle)
    return below
