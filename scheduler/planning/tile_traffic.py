"""Simulation of the contents of a memory during a recorded step, and of the bytes that are copied: whole tiles, one task after another.

The memory holds the tiles of the running task and as many others as fit. The tile with the lowest cost per task until its next use is evicted first
(`core.memory.eviction_policies.NextUse`). The step is simulated twice in a row and the second pass counts, because a step begins with the contents
that the one before it leaves. This module knows bytes and positions; `forecast` turns them into seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R, W
from ..core.step_plan import StepPlan

DEAD: Final = -1
"""Next use of a tile that no later task uses."""


@dataclass(slots=True)
class Moves:
    """Copies for one task.

    Attributes:
        used: bytes in use while it runs.
        added: bytes of its data that are missing before it, including its results and scratch.
        read: bytes that are fetched for it.
        far_read: number of those bytes that come from the disk under the tier below.
        evicted: (position of the last use, bytes, whether they go to that disk) of each tile that is written back for it.
        after: position of the last task that runs aside and writes fetched data; None without one.
        far_written: bytes that a task that runs aside writes to that disk.
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
        """Whether the disk under the tier below takes part in the copies."""
        return self.far_read > 0 or any(is_far for _, _, is_far in self.evicted)


@dataclass(frozen=True, slots=True)
class Passed:
    """Result of a simulated step that follows an equal one.

    Attributes:
        moves: copies for each task; their positions count from the start of this step and are negative in the step before.
        evictions: evicted tiles, each with the position of its next use, which counts from the start of the step before.
    """

    moves: list[Moves]
    evictions: list[tuple[HandleRecord, int]]


class _Below:
    """Contents of the tier below, and of the disk under it.

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
        """Store a tile in the tier if it has enough free bytes, else on the disk; return whether the tier had them."""
        if handle.size > self.free:
            self.spilled.add(handle)
            return False
        self.free -= handle.size
        self._held.add(handle)
        return True

    def forget(self, handle: HandleRecord) -> None:
        """Drop the copy of a tile that has been overwritten or is dead."""
        self.spilled.discard(handle)
        if handle in self._held:
            self._held.remove(handle)
            self.free += handle.size


class Touches:
    """Data that each task of a step touches, computed once for forecasts of the step in many orders.

    Args:
        plan: the step.

    Attributes:
        data: for each task, (handle, whether it reads present data, whether it writes) of each access except scratch.
        scratch: for each task, its bytes of scratch.
        overwritten: for each task that runs aside, the handles that it writes.
        mortal: handles whose data is dead after its last use.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.data = [[(handle, mode != W, mode != R) for handle, mode in task.accesses if mode != SCRATCH] for task in plan.tasks]
        self.scratch = [sum(handle.size for handle, mode in task.accesses if mode == SCRATCH) for task in plan.tasks]
        aside = (position for position, is_aside in enumerate(plan.aside) if is_aside)
        self.overwritten = {position: {handle for handle, _, writes in self.data[position] if writes} for position in aside}
        self.mortal = {handle for handle, is_output in plan.owned.items() if not is_output}

    def next_uses(self, positions: Sequence[int]) -> list[list[int]]:
        """Return the next use of every access of some tasks.

        Args:
            positions: positions of the tasks, in the order in which they run.

        Returns:
            For each task, and each entry of its `data`, the index in `positions` of the next task that uses the handle, counted on into the next
            step; `DEAD` if there is none.
        """
        latest: dict[HandleRecord, int] = {}
        last: list[tuple[HandleRecord, list[int], int]] = []
        rows: list[list[int]] = []
        for now in range(len(positions) - 1, -1, -1):
            row: list[int] = []
            for handle, _, _ in self.data[positions[now]]:
                following = latest.get(handle, DEAD)
                if following == DEAD and handle not in self.mortal:
                    last.append((handle, row, len(row)))
                row.append(following)
                latest[handle] = now
            rows.append(row)
        for handle, row, index in last:
            row[index] = len(positions) + latest[handle]
        rows.reverse()
        return rows


class _Memory:
    """Tiles in a memory, and the next use of each.

    Args:
        capacity: bytes of the memory.
        below: the tier below, if there is a disk under it.
        stays: tiles that may not be evicted.

    Attributes:
        used: bytes of resident tiles.
        next_use: next use of each resident tile.
        last_use: position of the last use of each tile.
        dirty: resident tiles that differ from the copy in the tier below.
        evictions: evicted tiles, each with its next use.
        written_aside: position of the last writer of each tile, if that ran aside.
    """

    def __init__(self, capacity: int, below: _Below | None = None, stays: Set[HandleRecord] = frozenset()) -> None:
        self.capacity = capacity
        self.below = below
        self.stays = stays
        self.used = 0
        self.next_use: dict[HandleRecord, int] = {}
        self.last_use: dict[HandleRecord, int] = {}
        self.dirty: set[HandleRecord] = set()
        self.evictions: list[tuple[HandleRecord, int]] = []
        self.written_aside: dict[HandleRecord, int] = {}
        self._written: list[tuple[int, int, bool]] = []  # `Moves.evicted` of the present task
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (-next use, handle), clean and dirty
        self._by_id: dict[int, HandleRecord] = {}

    def bring(self, data: Sequence[tuple[HandleRecord, bool, bool]], scratch: int, now: int) -> Moves:
        """Fetch the data that a task misses, and evict tiles until it fits; return the copies.

        Args:
            data: entry of `Touches.data` of the task.
            scratch: its bytes of scratch.
            now: position of the task, counted as the next uses are.
        """
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
                if handle in self.written_aside:
                    after = self.written_aside[handle] if after is None else max(after, self.written_aside[handle])
        self.used += added
        self._written = []
        if self.used > self.capacity:
            self.evict(now)
        moves = Moves(self.used, added, read, far_read, self._written, after)
        self.used -= scratch
        return moves

    def leave(self, data: Sequence[tuple[HandleRecord, bool, bool]], next_uses: Sequence[int], now: int, start: int) -> None:
        """Release the data of a task that has ended: drop dead tiles; all others may be evicted from now on.

        Args:
            data: entry of `Touches.data` of the task.
            next_uses: next use of each entry of `data`, counted from `start`.
            now: position of the task, counted from `start`.
            start: number of tasks before the step.
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
        """Account for a task that runs aside; arguments as in `leave`.

        Of the resident tiles, dirty ones that it reads are written back first, and those that it overwrites are dropped.
        """
        self._written, far_read, far_written = [], 0, 0
        for (handle, reads, writes), following in zip(data, next_uses, strict=True):
            self._send(handle, now, reads=reads, drops=writes or following == DEAD)
            if handle in self.next_use:
                self.leave([(handle, reads, False)], [following], now, start)
            if writes:
                self.written_aside[handle] = now
            if self.below is not None:
                if handle in self.below.spilled:
                    far_read += handle.size if reads else 0
                    far_written += handle.size if writes else 0
                if following == DEAD:
                    self.below.forget(handle)
        return Moves(self.used, 0, 0, far_read, self._written, far_written=far_written)

    def drop_overwritten(self, handle: HandleRecord, now: int) -> None:
        """Drop a tile that a task that runs aside overwrites next, unless the tile is dirty."""
        if handle not in self.dirty:
            self._send(handle, now, reads=False, drops=True)

    def _send(self, handle: HandleRecord, now: int, *, reads: bool, drops: bool) -> None:
        """Release a resident tile for a task that runs aside.

        Args:
            handle: the tile.
            now: position of the task.
            reads: whether the task reads the tile, which is written back for it if it is dirty.
            drops: whether the tile is overwritten by the task or dead after it.
        """
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
        """Drop a dead tile."""
        self.used -= handle.size
        self.next_use.pop(handle, None)
        self.dirty.discard(handle)
        if self.below is not None:
            self.below.forget(handle)

    def evict(self, now: int) -> None:
        """Evict tiles until the others fit, or none may be evicted."""
        while self.used > self.capacity:
            tops = [self._top(0), self._top(1)]
            if tops[0] is None and tops[1] is None:
                return
            prices = [(1 + which) / max(top[0] - now, 1) if top is not None else 3.0 for which, top in enumerate(tops)]
            which = 0 if prices[0] <= prices[1] else 1
            _, number = heapq.heappop(self._heaps[which])
            handle = self._by_id[number]
            self.evictions.append((handle, self.next_use.pop(handle)))
            self.used -= handle.size
            if which:
                is_far = self.below is not None and not self.below.take(handle)
                self._written.append((self.last_use[handle], handle.size, is_far))
                self.dirty.discard(handle)

    def _top(self, which: int) -> tuple[int, int] | None:
        """Return (next use, id) of the first candidate of a heap, after stale entries are removed; None if it is empty."""
        heap = self._heaps[which]
        while heap:
            negative, number = heap[0]
            handle = self._by_id[number]
            if self.next_use.get(handle) == -negative and (handle in self.dirty) == bool(which):
                return -negative, number
            heapq.heappop(heap)
        return None


def pass_through(step: Touches, positions: Sequence[int], capacity: int, *, below: int | None = None, only_files: bool = False) -> Passed:
    """Simulate a step twice in a row; return the second pass.

    Args:
        step: the step.
        positions: positions of the tasks, in the order in which they run.
        capacity: bytes that hold tiles between their uses.
        below: bytes of the tier below, which may spill to a disk; None if it holds everything.
        only_files: whether only tiles with data in files may be evicted, because there is no tier below.
    """
    plan = step.plan
    stays = {handle for handle in plan.uses if not plan.stays_in_file(handle)} if only_files else frozenset[HandleRecord]()
    memory = _Memory(capacity, None if below is None else _filled(plan, below), stays)
    next_uses, period, moves = step.next_uses(positions), len(positions), list[Moves]()
    for start in (0, period):
        memory.evictions.clear()
        moves.clear()
        for now, position in enumerate(positions):
            data, following = step.data[position], next_uses[now]
            if position in step.overwritten:
                moves.append(memory.pass_aside(data, following, now, start))
                continue
            moves.append(memory.bring(data, step.scratch[position], start + now))
            memory.leave(data, following, now, start)
            if step.overwritten:
                for (handle, _, _), next_use in zip(data, following, strict=True):
                    if next_use != DEAD and handle in step.overwritten.get(positions[next_use % period], ()):
                        memory.drop_overwritten(handle, now)
        memory.last_use = {handle: now - period for handle, now in memory.last_use.items()}
        memory.written_aside = {handle: now - period for handle, now in memory.written_aside.items()}
    return Passed(moves, memory.evictions)


def _filled(plan: StepPlan, capacity: int) -> _Below:
    """Return the tier below at the start: it holds existing data in the order of first use, as far as its capacity allows."""
    below = _Below(capacity)
    for handle, use in plan.uses.items():
        if use.needs_data and handle not in plan.owned and not plan.stays_in_file(handle):
            below.take(handle)
    return below
