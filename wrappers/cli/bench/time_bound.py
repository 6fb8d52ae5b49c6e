"""A lower bound on the seconds of a step whose tasks run in a given order, where data stays, moves or is made again, by linear programming.

The model is that of `byte_bound`, with one more way to have a tile that did not stay: to make it again. A value that a planner may make again
(`scheduler.planning.Values`) is made again at most in the interval that ends at the first of its late uses, those from `Value.wanted` on.

- Its *production* (the tasks that make it, or the tail of the one) then runs once more. It may make several values, and runs as often as any of them
  is made; where a tail is enough, the whole production does as well.
- Nothing else about a clone costs anything: what it reads is there, and it needs no memory while it runs.
- Copies in each direction follow one another, and so do tasks, clones among them; otherwise everything overlaps, whatever waits for what.

Any machine with one queue of tasks takes at least the bound on average over many steps, if it executes the tasks of the step in this order, one after
another, with clones in between as `scheduler.planning.recompute` enters them: whole tiles, the inputs of clones and the memory they take, finite
queues and fragmentation can only cost more. The bound holds for no other order: one that sorts tasks better may be faster. The least of the bounds of
several orders holds for these.

The program. With the variables of `intervals`, r_j for intervals that end where a value may have been made again, n_p the runs of production p, and T
the seconds:

    minimise    T
    subject to  T >= sum of all tasks + sum_p seconds_p n_p
                T >= sum_j load_j (1 - x_j - r_j)              load_j: seconds to copy the tiles of j in
                T >= sum_e store_e y_e                         store_e: seconds to copy them out
                sum of n_p that make j >= r_j

or, where both directions share a link, T >= the sum of what the second and the third say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduler import SCRATCH, R
from scheduler.machine import RecordedTask, StepPlan
from scheduler.planning import PlannedOrder, Value, Values

from .access_trace import AccessTrace, tiles_of, trace_of
from .intervals import Intervals, Tight, enter, intervals_of, tight_of
from .linear_program import Indices, LinearProgram, Numbers

METHOD: Final = "highs-ipm"
"""Interior points take a tenth of the time of the simplex method here: 4 s for a step of 9,000 tasks."""

Seconds = Callable[[StepPlan], Mapping[RecordedTask, float]]
"""Seconds of each task of a plan."""
Copy = Callable[[int], float]
"""Seconds to copy a tile of so many bytes."""


@dataclass(frozen=True, slots=True)
class Remade:
    """How a tile may be made again.

    Attributes:
        before: position of the access that it is made again for, if at all.
        productions: indices of those that make it.
    """

    before: int
    productions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs beside the bytes that it holds.

    Attributes:
        tasks: seconds of all its tasks.
        load, store: of each tile, seconds of a copy into the fast memory and out of it.
        remade: of each tile, how it may be made again; None where it cannot be.
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
    """Least seconds of a period, as in the module's docstring.

    Args:
        trace: the accesses.
        capacity: bytes of the fast memory.
        cost: of the tiles of the trace.

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
    """Terms of a condition that is one row."""
    return np.zeros(len(columns), int), columns, values


def _of_intervals(intervals: Intervals, tight: Tight, seconds: Sequence[float]) -> Numbers:
    """Seconds of a copy of all tiles of each tight interval, shape (intervals,)."""
    groups = np.array([sum(seconds[tile] for tile in tiles) for tiles in intervals.tiles], float)
    found: Numbers = groups[np.array(intervals.group, int)[tight.chosen]]
    return found


def _makers(trace: AccessTrace, intervals: Intervals, tight: Tight, remade: Sequence[Remade | None]) -> tuple[Indices, tuple[Indices, Indices]]:
    """Which of the tight intervals may be made again, and pairs of their number among these and a production that does it."""
    again, lines, productions = list[int](), list[int](), list[int]()
    for at, chosen in enumerate(tight.chosen):
        how = remade[intervals.tiles[intervals.group[chosen]][0]]
        if how is not None and (intervals.last[chosen] + 1) % len(trace.accesses) == how.before:
            lines += [len(again)] * len(how.productions)
            productions += how.productions
            again.append(at)
    return np.array(again, np.int64), (np.array(lines, np.int64), np.array(productions, np.int64))


class TimedStep:
    """A step whose bounds are asked for in several orders.

    Args:
        plan: the step in submission order, nothing made again.
        seconds: of tasks, those of productions among them.
        load, store: of a tile into the fast memory and out of it.
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
            if numbers.setdefault(_production(value), len(tasks)) == len(tasks):
                tasks.append(values.tasks(value))
        whole = {at: number for (production, is_tail), number in numbers.items() if not is_tail for at in production}
        self._makers = {handle: _numbers_of(value, numbers, whole) for handle, value in self._values.items()}
        known = seconds(StepPlan([task for each in tasks for task in each], plan.owned))
        self._productions = [sum(known[task] for task in each) for each in tasks]

    def least_seconds(self, order: Sequence[int], capacity: int, *, again: bool = True) -> float:
        """Least seconds in an order (positions of tasks).

        Args:
            again: whether values may be made again.

        Raises:
            ValueError, RuntimeError, ImportError: as of the function `least_seconds`.
        """
        handles = tiles_of(self.plan, order)
        rank = {at: number for number, at in enumerate(order)}
        remade: list[Remade | None] = []
        for handle in handles:
            value = self._values.get(handle) if again else None
            late = [] if value is None else [rank[at] for at in self.plan.uses[handle].positions if at >= value.wanted]
            remade.append(Remade(min(late), self._makers[handle]) if late else None)
        load, store = ([copy(handle.nbytes) for handle in handles] for copy in (self._load, self._store))
        return least_seconds(trace_of(self.plan, order), capacity, StepCost(self.tasks, load, store, remade, self._productions, self._duplex))


def _production(value: Value) -> tuple[tuple[int, ...], bool]:
    """What productions of equal values have in common."""
    return value.production, value.tail is not None


def _numbers_of(value: Value, numbers: Mapping[tuple[tuple[int, ...], bool], int], whole: Mapping[int, int]) -> tuple[int, ...]:
    """The productions that make a value: its own, and that of other results of the same task."""
    own = numbers[_production(value)]
    return tuple(dict.fromkeys([own, whole.get(value.production[0], own)]))


def order_in(plan: StepPlan, planned: PlannedOrder) -> list[int]:
    """The order in which a planned step executes the tasks of the recorded one, clones left out.

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
    """What tells a task from all but those that write the same after it or before it."""
    return (task.name, *(handle for handle, mode in task.accesses if mode not in (R, SCRATCH)))
