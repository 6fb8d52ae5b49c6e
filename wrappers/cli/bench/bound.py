"""A lower bound on the bytes that a fast memory must exchange with a slow one while a step runs in a given order, by linear programming.

The model. Tasks run one after another, and after the last one the step begins again in the same order. While a task runs, every tile it accesses is
wholly in the fast memory, and so is its scratch. Between two consecutive accesses of a tile any fraction of it may stay; a constant fraction is best,
since only the smallest counts.

- `in`: the fraction that did not stay is loaded before the next access.
- `out`: a leaving fraction that differs from the slow copy is written back first, each byte once per write epoch (the time from one write of the
  tile to the next): the epoch's write-back is the largest fraction missing in any of its intervals.
- An interval before a pure write costs nothing in either direction: its data is dead.
- Temporaries are dead before their first access and after their last. Persistent tiles live on: the interval after their last access ends at
  their first access in the next period.

Whole tiles, finite queues, concurrent tasks and fragmentation can only cost more, so any machine moves at least the bound in this order.

The program. x_j is the fraction of interval j that stays, y_e the fraction of epoch e that is written back, u_p the bytes that stay across
position p without being accessed there:

    minimise    sum_j in_j (1 - x_j) + sum_e size_e y_e        in_j: size of j's tile
    subject to  u_p = u_(p-1) + sum_{j begins after p-1} size_j x_j - sum_{j ends at p} size_j x_j
                0 <= u_p <= capacity - accessed_p - scratch_p;   y_e >= 1 - x_j for the j of e;   0 <= x, y <= 1

Before solving: intervals without a position in between stay; tiles with the same accesses are merged; positions where everything fits, and
positions between which no interval begins or ends, need no row of their own.

SciPy (extra `bench`) solves the program; it is imported when a bound is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from scheduler import SCRATCH
from scheduler.machine import HandleRecord, StepPlan

UNIT: Final = 1 << 20
"""Bytes per unit of the linear program, which improves its conditioning."""

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AccessTrace:
    """The accesses of a serial execution.

    Args:
        accesses: for each position, (tile, mode) pairs, each tile once; modes are R, W and RW.
        sizes: bytes of each tile.
        persistent: for each tile, whether it outlives the period.
        scratch: bytes of scratch memory at each position.

    Raises:
        ValueError: lengths differ, a tile appears twice at a position, or a temporary is read before it is written.
    """

    accesses: list[list[tuple[int, str]]]
    sizes: list[int]
    persistent: list[bool]
    scratch: list[int]

    def __post_init__(self) -> None:
        if len(self.accesses) != len(self.scratch) or len(self.sizes) != len(self.persistent):
            raise ValueError(
                f"a trace has one scratch size per position and one persistent flag per tile, got {len(self.scratch)} for {len(self.accesses)} "
                f"positions and {len(self.persistent)} for {len(self.sizes)} tiles"
            )
        seen = set()
        for position, accesses in enumerate(self.accesses):
            if len(dict(accesses)) != len(accesses):
                raise ValueError(f"position {position} accesses a tile twice ({accesses}); merge the two into one RW")
            for tile, mode in accesses:
                if tile not in seen and not self.persistent[tile] and mode != "W":
                    raise ValueError(f"position {position} reads temporary tile {tile} (mode {mode}) before anything wrote it; is the order valid?")
                seen.add(tile)

    def needed(self) -> list[int]:
        """Bytes accessed at each position, scratch included."""
        return [sum(self.sizes[tile] for tile, _ in accesses) + extra for accesses, extra in zip(self.accesses, self.scratch, strict=True)]

    def live(self) -> list[int]:
        """Bytes of live data at each position: persistent tiles always, temporaries from first to last access, and scratch."""
        changes = [0] * (len(self.accesses) + 1)
        span: dict[int, tuple[int, int]] = {}
        for position, accesses in enumerate(self.accesses):
            for tile, _ in accesses:
                span[tile] = (span[tile][0] if tile in span else position, position)
        always = 0
        for tile, (first, last) in span.items():
            if self.persistent[tile]:
                always += self.sizes[tile]
            else:
                changes[first] += self.sizes[tile]
                changes[last + 1] -= self.sizes[tile]
        found = []
        for change, extra in zip(changes, self.scratch, strict=False):
            always += change
            found.append(always + extra)
        return found


@dataclass(frozen=True, slots=True)
class Bound:
    """Least bytes that move per period.

    Args:
        bytes_in: bytes loaded into the fast memory.
        bytes_out: bytes written back from it.
    """

    bytes_in: float
    bytes_out: float

    @property
    def total(self) -> float:
        """Bytes in both directions."""
        return self.bytes_in + self.bytes_out


@dataclass(slots=True)
class _Intervals:
    """Parallel lists of the intervals that cost bytes if the tile does not stay.

    Attributes:
        first, last: positions strictly inside; first > last where the interval wraps around the end of the period.
        size: bytes of the tile.
        epoch: index of the write epoch; -1 where nothing has to be written back.
        num_epochs: number of write epochs.
    """

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    epoch: list[int] = field(default_factory=list)
    num_epochs: int = 0


def trace_of(plan: StepPlan, order: Sequence[int]) -> AccessTrace:
    """The accesses of `plan` when its tasks run in `order` (positions of tasks); sizes are rounded to pages.

    Outputs count as persistent: they exist until the next period writes them.
    """
    tiles: dict[HandleRecord, int] = {}
    accesses, scratch = [], []
    for position in order:
        row = []
        extra = 0
        for handle, mode in plan.tasks[position].accesses:
            if mode == SCRATCH:
                extra += handle.size
            else:
                row.append((tiles.setdefault(handle, len(tiles)), str(mode)))
        accesses.append(row)
        scratch.append(extra)
    return AccessTrace(accesses, [handle.size for handle in tiles], [plan.owned.get(handle, True) for handle in tiles], scratch)


def lower_bound(trace: AccessTrace, capacity: int) -> Bound:
    """Least bytes that any fractional eviction of `trace` moves per period.

    Args:
        trace: the accesses.
        capacity: bytes of the fast memory.

    Raises:
        ValueError: a single position needs more than `capacity`.
        RuntimeError: the solver failed.
        ImportError: SciPy is not installed.
    """
    needed = np.array(trace.needed(), np.float64)
    if len(needed) and needed.max() > capacity:
        worst = int(needed.argmax())
        raise ValueError(f"position {worst} alone needs {int(needed[worst]):,} B, more than the capacity of {capacity:,} B; raise the capacity")
    intervals = _intervals(trace)
    free = (capacity - needed) / UNIT
    return _solve(intervals, free)


def _intervals(trace: AccessTrace) -> _Intervals:
    """All intervals with a position inside; tiles with equal accesses are merged."""
    history: dict[int, list[tuple[int, str]]] = {}
    for position, accesses in enumerate(trace.accesses):
        for tile, mode in accesses:
            history.setdefault(tile, []).append((position, mode))
    merged: dict[tuple[bool, tuple[tuple[int, str], ...]], int] = {}
    for tile, uses in history.items():
        key = trace.persistent[tile], tuple(uses)
        merged[key] = merged.get(key, 0) + trace.sizes[tile]
    found = _Intervals()
    for (persistent, uses_of_all), size in merged.items():
        _enter(found, uses_of_all, size, persistent, len(trace.accesses))
    return found


def _enter(found: _Intervals, uses: tuple[tuple[int, str], ...], size: int, persistent: bool, period: int) -> None:
    """Add the intervals of one tile and their epochs."""
    writes = [at for at, (_, mode) in enumerate(uses) if mode != "R"]
    dirty = bool(writes) and persistent  # at the beginning of a period the last write of the previous one counts
    epochs: dict[int, int] = {}
    current = writes[-1] if writes else -1
    last = len(uses) - 1
    for at, (position, mode) in enumerate(uses):
        if mode != "R":
            current, dirty = at, True
        if at == last and not persistent:
            return
        after, next_mode = uses[(at + 1) % len(uses)]
        first, end = (position + 1) % period, (after - 1) % period
        inside = (after - position - 1) % period
        if inside == 0 or next_mode == "W":
            continue
        if dirty and current not in epochs:
            epochs[current] = found.num_epochs
            found.num_epochs += 1
        found.first.append(first)
        found.last.append(end)
        found.size.append(size)
        found.epoch.append(epochs[current] if dirty else -1)


def _solve(intervals: _Intervals, free: npt.NDArray[np.float64]) -> Bound:
    """Assemble and solve the program of the module's docstring.

    Args:
        intervals: the intervals.
        free: units of the fast memory that each position leaves beside its own accesses.
    """
    first, last = np.array(intervals.first, int), np.array(intervals.last, int)
    size, epoch = np.array(intervals.size, float) / UNIT, np.array(intervals.epoch, int)
    row_of = _rows(first, last, size, free)
    tight = row_of >= 0
    if not tight.any():
        return Bound(0.0, 0.0)
    limits = np.full(int(row_of.max()) + 1, np.inf)
    np.minimum.at(limits, row_of[tight], free[tight])
    first, last = _narrow(first, last, row_of, len(limits))
    crossing = first >= 0  # the other intervals cost nothing
    return _solve_rows(first[crossing], last[crossing], size[crossing], epoch[crossing], intervals.num_epochs, limits)


def _rows(first: Indices, last: Indices, size: Numbers, free: Numbers) -> Indices:
    """The row of each position; -1 where everything fits. The positions of a row are consecutive and within the same intervals."""
    period = len(free)
    change, edges = np.zeros(period + 1), np.zeros(period + 1, bool)
    np.add.at(change, first, size)
    np.add.at(change, last + 1, -size)
    change[0] += size[first > last].sum()
    edges[first] = edges[last + 1] = True
    tight = np.cumsum(change[:period]) > free + 1e-9
    group = np.cumsum(edges[:period])
    rows: Indices = np.full(period + 1, -1)
    rows[np.unique(group[tight])] = np.arange(len(np.unique(group[tight])))
    found: Indices = rows[group]
    return found


def _narrow(first: Indices, last: Indices, row_of: Indices, num_rows: int) -> tuple[Indices, Indices]:
    """First and last row inside each cyclic interval of positions, -1 for intervals without a row."""
    starts = np.concatenate([[row_of[0] >= 0], (row_of[1:] >= 0) & (row_of[1:] != row_of[:-1])])
    begun = np.cumsum(starts)  # rows that begin at or before each position
    next_row = np.where(row_of >= 0, row_of, begun)  # num_rows where no row follows
    low, high = next_row[first], begun[last] - 1
    wraps = first > last
    inside = np.where(wraps, (low < num_rows) | (high >= 0), low <= high)
    low = np.where(wraps & (low == num_rows), 0, low)
    high = np.where(wraps & (high < 0), num_rows - 1, high)
    return np.where(inside, low, -1), np.where(inside, high, -1)


def _solve_rows(first: Indices, last: Indices, size: Numbers, epoch: Indices, num_epochs: int, limits: Numbers) -> Bound:
    """Solve over rows; the columns are x of each interval, y of each epoch, u of each row."""
    number, rows = len(size), len(limits)
    columns = number + num_epochs + rows
    x, u = np.arange(number), number + num_epochs + np.arange(rows)
    wraps = first > last
    ended = last + 1 < rows
    flow = _matrix(
        (np.arange(rows), u, np.ones(rows)),
        (np.arange(1, rows), u[:-1], -np.ones(rows - 1)),
        (first, x, -size),
        (np.zeros(number, int)[wraps], x[wraps], -size[wraps]),
        ((last + 1)[ended], x[ended], size[ended]),
        shape=(rows, columns),
    )
    from scipy.optimize import linprog

    dirty = np.flatnonzero(epoch >= 0)
    lines, ones = np.arange(len(dirty)), np.ones(len(dirty))
    write_back = _matrix((lines, x[dirty], ones), (lines, number + epoch[dirty], ones), shape=(len(dirty), columns))
    epoch_size = np.zeros(num_epochs)
    epoch_size[epoch[dirty]] = size[dirty]
    upper = np.concatenate([np.ones(number + num_epochs), limits])
    solved = linprog(
        np.concatenate([-size, epoch_size, np.zeros(rows)]),
        A_ub=-write_back,
        b_ub=-ones,
        A_eq=flow,
        b_eq=np.zeros(rows),
        bounds=np.column_stack([np.zeros(columns), upper]),
        method="highs",
    )
    if solved.status != 0:
        raise RuntimeError(f"HiGHS found no bound for {number} intervals over {rows} rows: {solved.message}")
    stays, written = solved.x[:number], solved.x[number : number + num_epochs]
    return Bound(UNIT * float(size @ (1 - stays)), UNIT * float(epoch_size @ written))


def _matrix(*entries: tuple[Indices, Indices, Numbers], shape: tuple[int, int]) -> Any:
    """Sparse matrix from (rows, columns, values) triples; values of equal indices add up."""
    from scipy import sparse

    rows, columns, values = (np.concatenate([entry[at] for entry in entries]) for at in range(3))
    return sparse.csr_array((values, (rows, columns)), shape=shape)
