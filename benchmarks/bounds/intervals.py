"""The intervals between accesses of a trace, and the flow of the data that stays in the fast memory over them: the part of the linear programs that
both lower bounds (`byte_bound`, `time_bound`) share.

The program. x_j is the fraction of interval j that stays, r_j the fraction that is recomputed before the next access (if that is possible), y_e the
fraction of write epoch e that is written back, u_p the bytes that stay across position p without being accessed there:

    u_p = u_(p-1) + sum_{j begins after p-1} size_j x_j - sum_{j ends at p} size_j x_j
    0 <= u_p <= capacity - accessed_p - scratch_p;   y_e >= 1 - x_j - r_j for the j of e;   x_j + r_j <= 1;   0 <= x, r, y <= 1

Before solving: intervals without a position in between stay; tiles with the same accesses are merged; positions where everything fits, and
positions between which no interval begins or ends, need no row of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from access_trace import AccessTrace
from linear_program import Indices, LinearProgram, Numbers

UNIT: Final = 1 << 20
"""Bytes per unit of the linear program, which improves its conditioning."""
NOTHING: Final = np.zeros(0, int)


@dataclass(slots=True)
class Intervals:
    """Parallel lists of the intervals that cost bytes if the tile does not stay.

    Attributes:
        first, last: positions strictly inside; first > last if the interval wraps around the end of the period.
        size: bytes of the tiles.
        epoch: index of the write epoch; -1 if nothing has to be written back.
        group: index of the tiles in `tiles`.
        num_epochs: number of write epochs.
        tiles: groups of tiles that are merged.
    """

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    epoch: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    num_epochs: int = 0
    tiles: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tight:
    """Intervals across positions at which not everything fits; the others stay.

    Attributes:
        chosen: indices of these intervals in `Intervals`, shape (intervals,).
        first, last: rows strictly inside, shape (intervals,); first > last if the interval wraps around.
        size: units, shape (intervals,).
        epoch: index of the write epoch or -1, shape (intervals,).
        epoch_size: units, shape (epochs,); 0 for epochs without a tight interval.
        limits: units of each row that are free for data without an access there, shape (rows,).
    """

    chosen: Indices
    first: Indices
    last: Indices
    size: Numbers
    epoch: Indices
    epoch_size: Numbers
    limits: Numbers


@dataclass(frozen=True, slots=True)
class Shares:
    """Columns of the program.

    Attributes:
        stays: x, shape (intervals,).
        written: y, shape (epochs,).
        again: r, of the intervals that may be recomputed.
    """

    stays: Indices
    written: Indices
    again: Indices


def intervals_of(trace: AccessTrace, marks: Sequence[Hashable] = ()) -> Intervals:
    """Return all intervals with a position inside; tiles with equal accesses are merged.

    Args:
        marks: key of each tile; only tiles with equal keys are merged.
    """
    history: dict[int, list[tuple[int, str]]] = {}
    for position, accesses in enumerate(trace.accesses):
        for tile, mode in accesses:
            history.setdefault(tile, []).append((position, mode))
    merged: dict[tuple[Hashable, bool, tuple[tuple[int, str], ...]], list[int]] = {}
    for tile, uses in history.items():
        merged.setdefault((marks[tile] if marks else None, trace.persistent[tile], tuple(uses)), []).append(tile)
    found = Intervals()
    for (_, persistent, uses_of_all), tiles in merged.items():
        found.tiles.append(tiles)
        _enter(found, uses_of_all, sum(trace.sizes[tile] for tile in tiles), persistent, len(trace.accesses))
    return found


def tight_of(trace: AccessTrace, intervals: Intervals, capacity: int) -> Tight:
    """Return the intervals that cannot all stay.

    Raises:
        ValueError: a single position needs more than `capacity`.
    """
    needed = np.array(trace.needed(), np.float64)
    if len(needed) and needed.max() > capacity:
        worst = int(needed.argmax())
        raise ValueError(f"position {worst} alone needs {int(needed[worst]):,} B, more than the capacity of {capacity:,} B; raise the capacity")
    free = (capacity - needed) / UNIT
    first, last = np.array(intervals.first, int), np.array(intervals.last, int)
    size, epoch = np.array(intervals.size, float) / UNIT, np.array(intervals.epoch, int)
    row_of = _rows(first, last, size, free)
    tight = row_of >= 0
    limits = np.full(1 + int(row_of.max(initial=-1)), np.inf)
    np.minimum.at(limits, row_of[tight], free[tight])
    if len(limits):
        first, last = _narrow(first, last, row_of, len(limits))
    chosen = np.flatnonzero(first >= 0) if len(limits) else NOTHING
    epoch_size = np.zeros(intervals.num_epochs)
    dirty = chosen[epoch[chosen] >= 0]
    epoch_size[epoch[dirty]] = size[dirty]
    return Tight(chosen, first[chosen], last[chosen], size[chosen], epoch[chosen], epoch_size, limits)


def enter(program: LinearProgram, tight: Tight, again: Indices = NOTHING) -> Shares:
    """Enter the variables and conditions of the module's docstring; the caller adds the objective.

    Args:
        again: indices of the tight intervals that may be recomputed.
    """
    number, rows = len(tight.size), len(tight.limits)
    x, y = program.variables(np.ones(number)), program.variables(np.ones(len(tight.epoch_size)))
    u, r = program.variables(tight.limits), program.variables(np.ones(len(again)))
    first, last, size = tight.first, tight.last, tight.size
    wraps = first > last
    ended = last + 1 < rows
    program.equal(
        np.zeros(rows),
        (np.arange(rows), u, np.ones(rows)),
        (np.arange(1, rows), u[:-1], -np.ones(rows - 1)),
        (first, x, -size),
        (np.zeros(number, int)[wraps], x[wraps], -size[wraps]),
        ((last + 1)[ended], x[ended], size[ended]),
    )
    dirty = np.flatnonzero(tight.epoch >= 0)
    line = np.full(number, -1)
    line[dirty] = np.arange(len(dirty))
    is_dirty = line[again] >= 0
    program.at_least(
        np.ones(len(dirty)),
        (line[dirty], x[dirty], np.ones(len(dirty))),
        (line[dirty], y[tight.epoch[dirty]], np.ones(len(dirty))),
        (line[again][is_dirty], r[is_dirty], np.ones(int(is_dirty.sum()))),
    )
    lines = np.arange(len(again))
    program.at_least(-np.ones(len(again)), (lines, x[again], -np.ones(len(again))), (lines, r, -np.ones(len(again))))
    return Shares(x, y, r)


def _enter(found: Intervals, uses: tuple[tuple[int, str], ...], size: int, persistent: bool, period: int) -> None:
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
        found.group.append(len(found.tiles) - 1)
        found.epoch.append(epochs[current] if dirty else -1)


def _rows(first: Indices, last: Indices, size: Numbers, free: Numbers) -> Indices:
    """Return the row of each position; -1 if everything fits. The positions of a row are consecutive and within the same intervals."""
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
    """Return the first and last row inside each cyclic interval of positions; -1 for intervals without a row."""
    starts = np.concatenate([[row_of[0] >= 0], (row_of[1:] >= 0) & (row_of[1:] != row_of[:-1])])
    begun = np.cumsum(starts)  # rows that begin at or before each position
    next_row = np.where(row_of >= 0, row_of, begun)  # num_rows if no row follows
    low, high = next_row[first], begun[last] - 1
    wraps = first > last
    inside = np.where(wraps, (low < num_rows) | (high >= 0), low <= high)
    low = np.where(wraps & (low == num_rows), 0, low)
    high = np.where(wraps & (high < 0), num_rows - 1, high)
    return np.where(inside, low, -1), np.where(inside, high, -1)
