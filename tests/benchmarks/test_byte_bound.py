"""The lower bound on moved bytes (`benchmarks/bounds/byte_bound.py`) on traces small enough to solve by hand or by exhaustion."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.access_traces import UNIT, traces
from support.bounds import AccessTrace, byte_bound
from support.search import search

pytest.importorskip("scipy.optimize")


def exhaustive(trace: AccessTrace, capacity: int) -> int:
    """Fewest bytes when every tile stays whole or leaves whole in each interval: all subsets tried."""
    period = len(trace.accesses)
    intervals, epochs = _intervals(trace)
    best = None
    for stays in itertools.product((True, False), repeat=len(intervals)):
        used = trace.needed()
        for keep, (tile, inside, _) in zip(stays, intervals, strict=True):
            for position in inside if keep else ():
                used[position % period] += trace.sizes[tile]
        if max(used) <= capacity:
            gone = [interval for keep, interval in zip(stays, intervals, strict=True) if not keep]
            written = {(tile, epochs[tile, inside[0]]) for tile, inside, dirty in gone if dirty}
            cost = sum(trace.sizes[tile] for tile, _, _ in gone) + sum(trace.sizes[tile] for tile, _ in written)
            best = cost if best is None else min(best, cost)
    assert best is not None
    return best


def _intervals(trace: AccessTrace) -> tuple[list[tuple[int, range, bool]], dict[tuple[int, int], int]]:
    """(tile, positions inside, dirty) of each interval that can cost something, and the write its data comes from."""
    period, intervals, epochs = len(trace.accesses), [], {}
    for tile in range(len(trace.sizes)):
        uses = [(at, mode) for at, row in enumerate(trace.accesses) for each, mode in row if each == tile]
        if trace.persistent[tile]:
            uses += [(at + period, mode) for at, mode in uses]
        writes = [at for at, mode in uses if mode != "R"]
        for (at, _), (after, mode) in itertools.pairwise(uses):
            if at < period and after > at + 1 and mode != "W":
                before = [write for write in writes if write <= at] or [write - period for write in writes]
                intervals.append((tile, range(at + 1, after), bool(before)))
                epochs[tile, at + 1] = before[-1] % period if before else -1
    return intervals, epochs


@search(150)
@given(traces(), st.integers(1, 4))
def test_the_bound_is_below_every_schedule_and_nothing_where_all_fits(trace: AccessTrace, units: int) -> None:
    """Never above the best whole-tile schedule; 0 with room for everything; not larger with more memory."""
    capacity = units * UNIT
    assume(max(trace.needed()) <= capacity)
    bound = byte_bound.lower_bound(trace, capacity)
    assert -1e-6 <= bound.total <= exhaustive(trace, capacity) + 1e-3
    assert byte_bound.lower_bound(trace, max(trace.live())).total == 0
    assert byte_bound.lower_bound(trace, capacity + UNIT).total <= bound.total + 1e-3


CYCLE = [[(0, "R")], [(1, "R")], [(2, "R")]]
CASES: list[Any] = [
    pytest.param(CYCLE, 2, (1.5, 0), id="three clean tiles, room for two: half of each stays"),
    pytest.param(CYCLE, 1, (3, 0), id="three clean tiles, room for one"),
    pytest.param([[(0, "RW")], [(1, "R")]], 1, (2, 1), id="a dirty tile is written back once"),
    pytest.param([[(0, "W")], [(1, "R")]], 1, (1, 0), id="what is overwritten next is dead, even in the next period"),
    pytest.param([[(0, "W")], [(1, "R")], [(0, "R")], [(1, "R")], [(0, "R")], [(1, "R")]], 1, (5, 1), id="one write-back per epoch"),
    pytest.param([[(0, "RW")], [(1, "RW")], [(0, "RW")], [(1, "RW")]], 1, (4, 4), id="each write begins an epoch"),
]


@pytest.mark.parametrize(("accesses", "units", "moved"), CASES)
def test_known_bounds(accesses: list[list[tuple[int, str]]], units: int, moved: tuple[float, int]) -> None:
    """Units in and out of small traces of persistent tiles, worked out by hand; where they are integral, the exhaustive search agrees."""
    count = 1 + max(tile for row in accesses for tile, _ in row)
    trace = AccessTrace(accesses, [UNIT] * count, [True] * count, [0] * len(accesses))
    bound = byte_bound.lower_bound(trace, units * UNIT)
    assert (bound.bytes_in, bound.bytes_out) == pytest.approx((moved[0] * UNIT, moved[1] * UNIT))
    if isinstance(moved[0], int):
        assert exhaustive(trace, units * UNIT) == pytest.approx(bound.total)


def test_what_cannot_be_bounded_is_refused() -> None:
    """A position larger than the memory, a temporary that is read unwritten, a tile twice at one position."""
    with pytest.raises(ValueError, match=r"position 0 alone needs 1,048,576 B"):
        byte_bound.lower_bound(AccessTrace([[(0, "R")]], [UNIT], [True], [0]), UNIT - 1)
    with pytest.raises(ValueError, match="before anything wrote it"):
        AccessTrace([[(0, "R")]], [UNIT], [False], [0])
    with pytest.raises(ValueError, match="twice"):
        AccessTrace([[(0, "R"), (0, "W")]], [UNIT], [True], [0])
