"""A lower bound, by linear programming, on the seconds of a step in a given order whose data stays, moves or is recomputed.

The model is that of `byte_bound`, extended by recomputation of a tile that did not stay. A value that a planner may recompute
(`scheduler.planning.Values`) is recomputed at most in the interval that ends at the first of its late uses, those from `Value.wanted` on.

- Its *production* (the tasks that compute it, or the tail of a single one) then runs once more. A production may compute several values, and runs
  as often as the most frequent of them; if its tail is enough, the whole production is, too.
- A clone has no other cost: its inputs are present, and it needs no memory while it runs.
- Copies in each direction follow one another, and so do tasks, clones among them; otherwise everything overlaps, without regard to dependencies.

Any machine with one queue of tasks takes at least the bound on average over many steps, if it executes the tasks of the step in this order, one after
another, with clones in between as `scheduler.planning.recompute` enters them: whole tiles, the inputs of clones and the memory they take, finite
queues and fragmentation can only cost more. The bound holds for no other order: one that sorts tasks better may be faster. The minimum of the bounds
of several orders holds for all of these orders.

The program. With the variables of `intervals`, r_j for intervals that end where a value may have been recomputed, n_p the runs of production p, and
T the seconds:

    minimise    T
    subject to  T >= sum of all tasks + sum_p seconds_p n_p
                T >= sum_j load_j (1 - x_j - r_j)              load_j: seconds to copy the tiles of j in
                T >= sum_e store_e y_e                         store_e: seconds to copy them out
                sum of n_p that compute j >= r_j

or, if both directions share a link, T >= the sum of the right sides of the second and the third condition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from access_trace import AccessTrace, tiles_of, trace_of
from intervals import Intervals, Tight, enter, intervals_of, tight_of
from linear_program import Indices, LinearProgram, Numbers

from scheduler import SCRATCH, R
from scheduler.machine import RecordedTask, StepPlan
from scheduler.planning import PlannedOrder, Value, Values

METHOD: Final = "highs-ipm"
"""Interior points take a tenth of the time of the simplex method here: 4 s for a step of 9,000 tasks."""

Seconds = Callable[[StepPlan], Mapping[RecordedTask, float]]
"""Seconds of each task of a plan."""
Copy = Callable[[int], float]
"""Seconds to copy a tile, as a function of its bytes."""


@dataclass(frozen=True, slots=True)
class Remade:
    """The recomputation of a tile.

    Attributes:
        before: position of the access before which the tile may be recomputed.
        productions: indices of the productions that compute the tile.
    """

    before: int
    productions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepCost:
    """The costs of a step other than memory.

    Attributes:
        tasks: seconds of all its tasks.
        load, store: seconds of a copy of each tile into the fast memory and out of it.
        remade: recomputation of each tile; None if it cannot be recomputed.
        productions: seconds of each production.
        duplex: whether copies run in both directions at once.
    """

    tasks: float
    load: Sequence[float]
    store: Sequence[float]
    remade: Sequence[Remade | None]
    productions: Sequence[float]
    duplex: bool = True


def least_seconds(trace: AccessTrace, capacity: int, cost: StepCost) -> float:
    """Return the minimum duration of a period in seconds, by the program of the module's docstring.

    Args:
        trace: the accesses.
        capacity: bytes of the fast memory.
        cost: costs of the tasks and of the tiles of the trace.

    Raises:
        ValueError: a single position needs more than `capacity`.
        RuntimeError: the solver failed.
        ImportError: SciPy is not installed.
    """
    intervals = intervals_of(trace, cost.remade)
    tight = tight_of(trace, intervals, capacity)
    if not len(tight.limits):
        return cost.tasks
    load, store = (_of_intervals(intervals, tight, seconds) for seconds in (cost.load, cost.store))
    scale = max(cost.tasks, float(load.max(initial=0.0)), float(store.max(initial=0.0)))  # the unit of T
    if not scale:
        return 0.0
    load, store, productions = load / scale, store / scale, np.array(cost.productions, float) / scale
    again, maker = _makers(trace, intervals, tight, cost.remade)
    stored = np.zeros(len(tight.epoch_size))
    dirty = tight.epoch >= 0
    stored[tight.epoch[dirty]] = store[dirty]
    program = LinearProgram()
    shares = enter(program, tight, again)
    runs, time = program.variables(np.full(len(productions), np.inf)), program.variables(np.array([np.inf]))
    lines = np.arange(len(again))
    program.at_least(np.zeros(len(again)), (maker[0], runs[maker[1]], np.ones(len(maker[0]))), (lines, shares.again, -np.ones(len(again))))
    seconds = _row(time, np.ones(1))
    loads, stores = (_row(shares.stays, load), _row(shares.again, load[again])), _row(shares.written, -stored)
    program.at_least(np.array([cost.tasks / scale]), seconds, _row(runs, -productions))
    program.at_least(np.array([load.sum()]), seconds, *loads, *(() if cost.duplex else (stores,)))
    program.at_least(np.zeros(1), seconds, stores)
    return scale * float(program.minimise((time, np.ones(1)), method=METHOD)[time[0]])


def _row(columns: Indices, values: Numbers) -> tuple[Indices, Indices, Numbers]:
    """Return the terms of a condition that is one row."""
    return np.zeros(len(columns), int), columns, values


def _of_intervals(intervals: Intervals, tight: Tight, seconds: Sequence[float]) -> Numbers:
    """Return the seconds of a copy of all tiles of each tight interval, shape (intervals,)."""
    groups = np.array([sum(seconds[tile] for tile in tiles) for tiles in intervals.tiles], float)
    found: Numbers = groups[np.array(intervals.group, int)[tight.chosen]]
    return found


def _makers(trace: AccessTrace, intervals: Intervals, tight: Tight, remade: Sequence[Remade | None]) -> tuple[Indices, tuple[Indices, Indices]]:
    """Return the tight intervals that may be recomputed, and pairs of their number among these and a production that computes them."""
    again, lines, productions = list[int](), list[int](), list[int]()
    for at, chosen in enumerate(tight.chosen):
        how = remade[intervals.tiles[intervals.group[chosen]][0]]
        if how is not None and (intervals.last[chosen] + 1) % len(trace.accesses) == how.before:
            lines += [len(again)] * len(how.productions)
            productions += how.productions
            again.append(at)
    return np.array(again, np.int64), (np.array(lines, np.int64), np.array(productions, np.int64))


class TimedStep:
    """A step for which the bounds of several orders are computed.

    Args:
        plan: the step in submission order, without recomputation.
        seconds: function that returns the seconds of tasks, including those of productions.
        load, store: functions that return the seconds to copy a tile into the fast memory and out of it.
        duplex: whether copies run in both directions at once.
    """

    def __init__(self, plan: StepPlan, seconds: Seconds, load: Copy, store: Copy, *, duplex: bool = True) -> None:
        self.plan = plan
        known = seconds(plan)
        self.tasks = sum(known.values())
        self._load, self._store, self._duplex = load, store, duplex
        values = Values(plan)
        self._values = {handle: value for handle in plan.uses if (value := values.of(handle)) is not None}
        numbers: dict[tuple[tuple[int, ...], bool], int] = {}
        tasks: list[list[RecordedTask]] = []
        for value in self._values.values():
            if numbers.setdefault(_production(value, plan), len(tasks)) == len(tasks):
                tasks.append(value.production.tasks)
        whole = {at: number for (production, is_tail), number in numbers.items() if not is_tail for at in production}
        self._makers = {handle: _numbers_of(value, _production(value, plan), numbers, whole) for handle, value in self._values.items()}
        known = seconds(StepPlan([task for each in tasks for task in each], plan.owned))
        self._productions = [sum(known[task] for task in each) for each in tasks]

    def least_seconds(self, order: Sequence[int], capacity: int, *, again: bool = True) -> float:
        """Return the minimum duration in seconds in an order (positions of tasks).

        Args:
            again: whether values may be recomputed.

        Raises:
            ValueError, RuntimeError, ImportError: errors of the function `least_seconds`.
        """
        handles = tiles_of(self.plan, order)
        rank = {at: number for number, at in enumerate(order)}
        remade: list[Remade | None] = []
        for handle in handles:
            value = self._values.get(handle) if again else None
            late = [] if value is None else [rank[at] for at in self.plan.uses[handle].positions if at >= value.wanted]
            remade.append(Remade(min(late), self._makers[handle]) if late else None)
        load, store = ([copy(handle.spec.nbytes) for handle in handles] for copy in (self._load, self._store))
        return least_seconds(trace_of(self.plan, order), capacity, StepCost(self.tasks, load, store, remade, self._productions, self._duplex))


def _production(value: Value, plan: StepPlan) -> tuple[tuple[int, ...], bool]:
    """Return the key of a value's production, and whether it is the tail of a task; equal keys mean the same production."""
    positions = value.production.positions
    return positions, value.production.tasks[0] is not plan.tasks[positions[0]]


def _numbers_of(
    value: Value, key: tuple[tuple[int, ...], bool], numbers: Mapping[tuple[tuple[int, ...], bool], int], whole: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the productions that compute a value: its own, and that of other results of the same task."""
    own = numbers[key]
    return tuple(dict.fromkeys([own, whole.get(value.production.positions[0], own)]))


def order_in(plan: StepPlan, planned: PlannedOrder) -> list[int]:
    """Return the order in which a planned step executes the tasks of the recorded one, without clones.

    Args:
        plan: the recorded step, in submission order.

    Returns:
        Positions of all tasks of `plan`.
    """
    waiting = defaultdict[tuple[object, ...], list[int]](list)
    for at in reversed(range(len(plan.tasks))):
        waiting[_results(plan.tasks[at])].append(at)
    return [waiting[key].pop() for task in planned.plan.tasks if waiting[key := _results(task)]]


def _results(task: RecordedTask) -> tuple[object, ...]:
    """Return the key of a task: its name and outputs. Only tasks that write the same data one after another share a key."""
    return (task.name, *(handle for handle, mode in task.accesses if mode not in (R, SCRATCH)))
