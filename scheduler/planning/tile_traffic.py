"""Simulation of the contents of a memory during a recorded step, and of the bytes that are copied: whole tiles, one task after another.

The memory holds the tiles of the running task and as many others as fit. The tile with the lowest cost per task until its next use is evicted first
(`core.memory.eviction_policies.NextUse`). The step is simulated twice in a row and the second pass counts, because a step begins with the contents
that the one before it leaves. This module knows bytes and positions; `forecast` turns them into seconds.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R, W
from ..core.step_plan import StepPlan

DEAD: Final = -1
"""Next use of a tile that no later task uses."""
_ABSENT: Final = -1
"""Next use of a tile that is not in the memory, or in use."""


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

    def expected(self, spared: float) -> Moves:
        """Return the copies less `spared` bytes, the mean that need not be fetched; bytes in use stay, because memory must hold them."""
        share = max(0.0, 1.0 - spared / self.read)
        evicted = [(since, int(nbytes * share), is_far) for since, nbytes, is_far in self.evicted]
        return replace(self, read=int(self.read * share), far_read=int(self.far_read * share), evicted=evicted)


class Touches:
    """Data that each task of a step touches, computed once for forecasts of the step in many orders. Tiles are numbered by the ids of their handles.

    Args:
        plan: the step.

    Attributes:
        handles: handle of each tile.
        sizes: bytes of each tile.
        data: for each task, (tile, whether it reads present data, whether it writes) of each access except scratch.
        scratch: for each task, its bytes of scratch.
        overwritten: for each task that runs aside, the tiles that it writes.
        shares: for each task, the share of executions in which it is not skipped; empty without conditional tasks.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.handles = sorted(plan.uses, key=lambda handle: handle.id)
        self.sizes = [handle.spec.size for handle in self.handles]
        tile = {handle: number for number, handle in enumerate(self.handles)}
        self.data = [[(tile[handle], mode != W, mode != R) for handle, mode in task.accesses if mode != SCRATCH] for task in plan.tasks]
        self.scratch = [sum(handle.spec.size for handle, mode in task.accesses if mode == SCRATCH) for task in plan.tasks]
        aside = (position for position, is_aside in enumerate(plan.aside) if is_aside)
        self.overwritten = {position: {tile for tile, _, writes in self.data[position] if writes} for position in aside}
        shares = [task.share for task in plan.tasks]
        self.shares = shares if min(shares, default=1.0) < 1.0 else []
        self._is_mortal = [plan.owned.get(handle) is False for handle in self.handles]

    def next_uses(self, positions: Sequence[int]) -> list[list[int]]:
        """Return the next use of every access of some tasks.

        Args:
            positions: positions of the tasks, in the order in which they run.

        Returns:
            For each task, and each entry of its `data`, the index in `positions` of the next task that uses the tile, counted on into the next
            step; `DEAD` if there is none.
        """
        latest = [DEAD] * len(self.sizes)
        last: list[tuple[int, list[int], int]] = []
        rows: list[list[int]] = []
        for now in range(len(positions) - 1, -1, -1):
            row: list[int] = []
            for tile, _, _ in self.data[positions[now]]:
                following = latest[tile]
                if following == DEAD and not self._is_mortal[tile]:
                    last.append((tile, row, len(row)))
                row.append(following)
                latest[tile] = now
            rows.append(row)
        for tile, row, index in last:
            row[index] = len(positions) + latest[tile]
        rows.reverse()
        return rows


class _Memory:
    """Tiles in a memory, and the next use of each.

    Args:
        step: the step.
        capacity: bytes of the memory.
        below: bytes of the tier below if there is a disk under it, which gets what exceeds them; None without a disk.
        stays: tiles that may not be evicted.

    Attributes:
        used: bytes of resident tiles.
        evictions: evicted tiles, each with its next use.
    """

    def __init__(self, step: Touches, capacity: int, below: int | None, stays: Set[int]) -> None:
        self.capacity, self.evictions, self.used = capacity, list[tuple[int, int]](), 0
        self._sizes, self._stays, self._below = step.sizes, stays, below
        self._held, self._spilled = set[int](), set[int]()  # tiles in the tier below, and on the disk under it
        num = len(step.sizes)
        self._next_use, self._last_use, self._dirty = [_ABSENT] * num, [0] * num, bytearray(num)
        self._written_aside: dict[int, int] = {}  # position of the last writer of a tile, if that ran aside
        self._written: list[tuple[int, int, bool]] = []  # `Moves.evicted` of the present task
        self._heaps: tuple[list[int], list[int]] = ([], [])  # clean and dirty tiles, the latest next use first

    def run(self, data: Sequence[tuple[int, bool, bool]], scratch: int, next_uses: Sequence[int], now: int, start: int) -> Moves:
        """Fetch the data that a task misses, evict tiles until it fits, and release the data; return the copies.

        Args:
            data: entry of `Touches.data` of the task.
            scratch: its bytes of scratch.
            next_uses: next use of each entry of `data`, counted from `start`.
            now: position of the task, counted from `start`.
            start: number of tasks before the step.
        """
        added, read, far_read, after, next_use = scratch, 0, 0, None, self._next_use
        for tile, reads, _ in data:
            if next_use[tile] != _ABSENT:
                next_use[tile] = _ABSENT
                continue
            size = self._sizes[tile]
            added += size
            if reads:
                read += size
                far_read += size if tile in self._spilled else 0
                if tile in self._written_aside:
                    after = self._written_aside[tile] if after is None else max(after, self._written_aside[tile])
        self.used += added
        self._written = []
        if self.used > self.capacity:
            self._evict(start + now)
        moves = Moves(self.used, added, read, far_read, self._written, after)
        self.used -= scratch
        last_use, dirty, heaps, stays, num = self._last_use, self._dirty, self._heaps, self._stays, len(self._sizes)
        has_disk = self._below is not None
        for (tile, _, writes), following in zip(data, next_uses, strict=True):
            if following == DEAD:
                self.used -= self._sizes[tile]
                dirty[tile] = 0
            else:
                next_use[tile] = start + following
                last_use[tile] = now
                if tile not in stays:
                    dirty[tile] |= writes
                    heappush(heaps[dirty[tile]], tile - (start + following) * num)
            if has_disk and (writes or following == DEAD):
                self._forget(tile)
        return moves

    def run_aside(self, data: Sequence[tuple[int, bool, bool]], next_uses: Sequence[int], now: int, start: int) -> Moves:
        """Account for a task that runs aside; arguments as in `run`.

        Of the resident tiles, dirty ones that it reads are written back first, and those that it overwrites are dropped.
        """
        self._written, far_read, far_written = [], 0, 0
        for (tile, reads, writes), following in zip(data, next_uses, strict=True):
            self.send(tile, reads=reads, drops=writes or following == DEAD)
            if self._next_use[tile] != _ABSENT:
                self._next_use[tile], self._last_use[tile] = start + following, now
                heappush(self._heaps[self._dirty[tile]], tile - (start + following) * len(self._sizes))
            if writes:
                self._written_aside[tile] = now
            if tile in self._spilled:
                far_read += self._sizes[tile] if reads else 0
                far_written += self._sizes[tile] if writes else 0
            if following == DEAD:
                self._forget(tile)
        return Moves(self.used, 0, 0, far_read, self._written, far_written=far_written)

    def send(self, tile: int, *, reads: bool, drops: bool) -> None:
        """Release a resident tile for a task that runs aside.

        Args:
            tile: the tile.
            reads: whether the task reads the tile, which is written back for it if it is dirty.
            drops: whether the tile is dropped, because it is overwritten by the task or dead after it.
        """
        if self._next_use[tile] == _ABSENT:
            return
        if self._dirty[tile] and reads:
            self._written.append((self._last_use[tile], self._sizes[tile], False))
            self._dirty[tile] = 0
        if drops:
            self.used -= self._sizes[tile]
            self._next_use[tile] = _ABSENT
            self._dirty[tile] = 0

    def _evict(self, now: int) -> None:
        """Evict tiles until the others fit, or none may be evicted."""
        while self.used > self.capacity:
            clean, dirty = self._latest(0), self._latest(1)
            if clean is None and dirty is None:
                return
            which = 1 if clean is None or (dirty is not None and 2 / max(dirty - now, 1) < 1 / max(clean - now, 1)) else 0
            tile = heappop(self._heaps[which]) % len(self._sizes)
            self.evictions.append((tile, self._next_use[tile]))
            self._next_use[tile] = _ABSENT
            self.used -= self._sizes[tile]
            if which:
                self._written.append((self._last_use[tile], self._sizes[tile], self.spills(tile)))
                self._dirty[tile] = 0

    def _latest(self, which: int) -> int | None:
        """Return the next use of the first tile of a heap, after stale entries are removed; None if it is empty."""
        heap, num = self._heaps[which], len(self._sizes)
        while heap:
            tile, following = heap[0] % num, -(heap[0] // num)
            if self._next_use[tile] == following and self._dirty[tile] == which:
                return following
            heappop(heap)
        return None

    def spills(self, tile: int) -> bool:
        """Store a tile in the tier below; return whether it goes to the disk, because the tier is full."""
        if self._below is None:
            return False
        if self._sizes[tile] > self._below:
            self._spilled.add(tile)
            return True
        self._below -= self._sizes[tile]
        self._held.add(tile)
        return False

    def _forget(self, tile: int) -> None:
        """Drop the copy below of a tile that has been overwritten or is dead."""
        if self._below is None:
            return
        self._spilled.discard(tile)
        if tile in self._held:
            self._held.remove(tile)
            self._below += self._sizes[tile]

    def begin_again(self, period: int) -> None:
        """Count positions of earlier uses from the end of the step."""
        self._last_use = [now - period for now in self._last_use]
        self._written_aside = {tile: now - period for tile, now in self._written_aside.items()}

    def drop_overwritten(self, tile: int) -> None:
        """Drop a tile that a task that runs aside overwrites next, unless the tile is dirty."""
        if not self._dirty[tile]:
            self.send(tile, reads=False, drops=True)


def pass_through(
    step: Touches, positions: Sequence[int], capacity: int, *, below: int | None = None, only_files: bool = False
) -> tuple[list[Moves], list[tuple[HandleRecord, int]]]:
    """Simulate a step twice in a row, of which the second time counts.

    Args:
        step: the step.
        positions: positions of the tasks, in the order in which they run.
        capacity: bytes that hold tiles between their uses.
        below: bytes of the tier below, which may spill to a disk; None if it holds everything.
        only_files: whether only tiles with data in files may be evicted, because there is no tier below.

    Returns:
        Copies for each task, whose positions count from the start of this step and are negative in the step before; and evicted tiles, each with the
        position of its next use, which counts from the start of the step before.
    """
    plan, overwritten = step.plan, step.overwritten
    stays = {tile for tile, handle in enumerate(step.handles) if not plan.stays_in_file(handle)} if only_files else set[int]()
    memory = _Memory(step, capacity, below, stays)
    if below is not None:
        exists = (tile for tile, handle in enumerate(step.handles) if plan.uses[handle].needs_data and handle not in plan.owned)
        for tile in sorted(exists, key=lambda tile: plan.uses[step.handles[tile]].positions[0]):
            if not plan.stays_in_file(step.handles[tile]):
                memory.spills(tile)
    next_uses, period, moves = step.next_uses(positions), len(positions), list[Moves]()
    for start in (0, period):
        memory.evictions.clear()
        moves.clear()
        for now, (position, following) in enumerate(zip(positions, next_uses, strict=True)):
            data = step.data[position]
            if position in overwritten:
                moves.append(memory.run_aside(data, following, now, start))
                continue
            moves.append(memory.run(data, step.scratch[position], following, now, start))
            if overwritten:
                for (tile, _, _), next_use in zip(data, following, strict=True):
                    if next_use != DEAD and tile in overwritten.get(positions[next_use % period], ()):
                        memory.drop_overwritten(tile)
        memory.begin_again(period)
    return moves, [(step.handles[tile], position) for tile, position in memory.evictions]


def expected_moves(step: Touches, positions: Sequence[int], moves: Sequence[Moves], evictions: Sequence[tuple[HandleRecord, int]]) -> list[Moves]:
    """Return the expected copies of a step with conditional tasks; arguments after the first two are the results of `pass_through`.

    A tile that was evicted is fetched unless all tasks that use it until the next fetch are skipped; these are taken to be independent.
    """
    period, wanted = len(positions), {handle for handle, _ in evictions}
    uses: dict[HandleRecord, list[int]] = {}
    for now, position in enumerate(positions):
        for tile, _, _ in step.data[position]:
            if (handle := step.handles[tile]) in wanted:
                uses.setdefault(handle, []).append(now)
    fetches: dict[HandleRecord, set[int]] = {}
    for handle, position in evictions:
        fetches.setdefault(handle, set()).add(position % period)
    spared = [0.0] * period
    for handle, starts in fetches.items():
        idle = dict.fromkeys(starts, 1.0)  # probability that no task uses the tile after that fetch
        latest = max(starts)
        for now in uses[handle]:
            latest = now if now in starts else latest
            idle[latest] *= 1.0 - step.shares[positions[now]]
        for start, chance in idle.items():
            spared[start] += handle.spec.size * chance
    return [each.expected(nbytes) if nbytes and each.read else each for each, nbytes in zip(moves, spared, strict=True)]
