"""Forecast of the traffic and the duration of a step in a given order within a memory budget: one queue of tasks, whole tiles, next-use eviction.

The model is coarse so that a candidate costs a planner a fifth of a second for 10,000 tasks: bytes instead of extents (`tile_traffic`), all workers
as one, all links as two. Missing tiles are fetched ahead of their task as far as the prefetcher looks ahead, or from the task on from which the
memory has bytes for them that nothing else needs. Dirty victims are written after their last use, and behind the task that wants their bytes as far
as there is clean memory. The step before is taken to have been alike, so time passes twice in a row and the second pass counts.

Devices may have a disk under host memory (`Spill`). Host memory is no cache then: a tile evicted from a device goes to host memory while that has
free bytes, else straight to the disk; it stays there until it is overwritten or dead, and is read from there.

Tasks that run aside (`StepPlan.aside`), by CPU workers in host memory, are a second queue: each begins when what it reads has come down from the
device, and what it writes can be fetched from its end on. What only they touch takes no bytes of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..core.memory.prefetch import AHEAD, TASKS
from ..core.memory.write_back import CLEAN
from ..core.records import HandleRecord
from ..core.step_plan import RecordedTask
from .tile_traffic import Moves, Passed, Touches, pass_through

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


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast cost of one step.

    Attributes:
        read, written: bytes from and to the tier below.
        seconds: from the end of the step before to its own end; 0 without a pace.
        last_bytes: what the last tier must hold, if that is known (`ordered_step`).
    """

    read: int
    written: int
    seconds: float = 0.0
    last_bytes: int = 0

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

    def run_aside(self, seconds: float, moves: Moves, start: int) -> None:
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

    def run(self, seconds: float, moves: Moves, start: int, begin: int) -> None:
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
    below = None
    if pace is not None and pace.spill is not None:
        below = int(pace.spill.capacity * SHARE_BESIDE) - budget // CLEAN  # tiles written early lie in both
    passed = pass_through(step, positions, capacity, below=below, only_files=only_files)
    read = sum(moves.read for moves in passed.moves)
    written = sum(nbytes for moves in passed.moves for _, nbytes, _ in moves.evicted)
    return Forecast(read, written, 0.0 if pace is None else _seconds(step, positions, passed, capacity, budget, pace))


def _seconds(step: Touches, positions: Sequence[int], passed: Passed, capacity: int, budget: int, pace: Pace) -> float:
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
    passed = pass_through(step, positions, capacity)
    leaves: dict[HandleRecord, set[int]] = {}
    for handle, position in passed.evictions:
        leaves.setdefault(handle, set()).add(position % len(positions))
    return Foreseen(leaves, _returns(passed, capacity))


def _returns(passed: Passed, capacity: int) -> list[tuple[int, int]]:
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
