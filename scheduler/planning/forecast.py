"""Forecast of the traffic and the duration of a step in a given order: one queue of tasks, whole tiles, next-use eviction.

The model is coarse, so that a candidate of 10,000 tasks takes a planner 0.2 s: bytes instead of extents (`tile_traffic`), all workers as one, all
links as two. A missing tile is fetched as far ahead of its task as the prefetcher looks, or earlier if it fits next to all data used until then.
Dirty victims are written back after their last use; copies that need their bytes wait for that only if no clean memory is left. The step is assumed
to follow an equal one, so it is simulated twice in a row and the second time counts.

Devices may have a disk under host memory (`Spill`), which is then no cache: a tile evicted from a device stays in host memory if that has free bytes,
otherwise on the disk, until it is overwritten or dead. Tasks that run aside (`StepPlan.aside`), on CPU workers in host memory, form a second queue:
each starts when its inputs have been written back by the device, and its results can be fetched after its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..core.memory.prefetch import AHEAD, TASKS
from ..core.memory.write_back import CLEAN
from ..core.records import HandleRecord
from ..core.step_plan import RecordedTask
from .tile_traffic import Moves, Touches, expected_moves, pass_through

SHARE: Final = 0.84
"""Fraction of a budget that holds tiles between their uses; copies in progress and fragmentation take the rest. With a larger one, forecasts have too
few bytes (0.92: by 1 to 9 % for GPT-2 small at a quarter of its need), especially for the orders that are most sensitive to memory."""

SHARE_BESIDE: Final = 0.92
"""This fraction for memory without tasks that devices spill to, and for devices that share a step, which copy tiles from each other."""

SHARE_LEAVING: Final = 0.88
"""This fraction for the forecast of evictions from devices that share a step. With a larger one, too little is written back early (0.92: a 50B GPT on
eight devices of 80 GiB takes 1.181 times its bound instead of 1.145 times); with a smaller one, more is copied (0.84: 4 % for a small step at a
quarter of its need)."""

FRICTION: Final = 0.2
"""Share of the seconds of copies in the busier direction that is added to a forecast, which overlaps copies and tasks better than a machine does:
by 0.1 to 0.7 of them where computing decides (GPT-2 medium on one device of a half to an eighth of its need)."""

MOST_AHEAD: Final = 512
"""Largest number of tasks between the start of a fetch and the use of the data."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast cost of one step.

    Attributes:
        read, written: bytes copied from and to the tier below.
        seconds: seconds from the end of the step before to its own end; 0 without a pace.
        copy_seconds: seconds of the copies in the busier direction; 0 without a pace.
        last_bytes: bytes that the last tier must hold, if known (`ordered_step`).
    """

    read: int
    written: int
    seconds: float = 0.0
    copy_seconds: float = 0.0
    last_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes copied in both directions."""
        return self.read + self.written

    @property
    def cost(self) -> float:
        """Seconds by which steps are compared: those of the forecast and a share of those of the copies."""
        return self.seconds + FRICTION * self.copy_seconds


@dataclass(frozen=True, slots=True)
class Spill:
    """Disk under the tier below, for data beyond that tier's capacity; reads and writes share the disk.

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
        seconds: duration of each task if all workers shared it, that of a conditional one times its share; 0 for tasks that run aside.
        read, write: bytes per second from and to the tier below, over all links together.
        duplex: whether copies in both directions run at the same time.
        num_devices: number of equal devices of the machine; the forecast simulates one of them.
        spill: disk under a duplex tier below; None without one.
        aside: duration of each task that runs aside, if all CPU workers that stand aside shared it.
    """

    seconds: Mapping[RecordedTask, float]
    read: float
    write: float
    duplex: bool
    num_devices: int = 1
    spill: Spill | None = None
    aside: Mapping[RecordedTask, float] = field(default_factory=dict)


class _Clock:
    """Virtual time of a step: a queue of tasks and a queue of copies in each direction, each of whose entries starts as early as the rules allow.

    Args:
        pace: rates of the machine.
        reach: number of missing bytes of upcoming tasks up to which the prefetcher looks ahead.
        backlog: bytes of dirty victims that need not be written back yet when other tiles are fetched.

    Attributes:
        now: end of the last task of the device.
        reads, writes: ends of the queues of copies.
    """

    def __init__(self, pace: Pace, reach: int, backlog: int) -> None:
        self.pace, self.reach, self.backlog = pace, reach, backlog
        self.now = self.reads = self.writes = 0.0
        far = pace.spill or pace
        self._per_read, self._per_write = pace.num_devices / pace.read, pace.num_devices / pace.write  # seconds a byte
        self._far_per_read, self._far_per_write = pace.num_devices / far.read, pace.num_devices / far.write
        self._aside = 0.0  # end of the latest task aside
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._oldest = 0  # earliest task during which the prefetcher fetches for the next one
        self._missing = 0  # bytes that the tasks from `_oldest` to the next one miss
        self._added: list[int] = []

    @property
    def end(self) -> float:
        """Time at which all tasks so far have ended."""
        return max(self.now, self._aside)

    def run_aside(self, seconds: float, moves: Moves, start: int) -> None:
        """Run a task aside, after the data that is written back for it has arrived.

        Args:
            seconds: its duration if all CPU workers that stand aside share it.
            moves: copies for it.
            start: number of tasks before the step, from which positions count.
        """
        self._write_back(moves, start)
        seconds = seconds * self.pace.num_devices + moves.far_read * self._far_per_read + moves.far_written * self._far_per_write
        self._aside = max(self._aside, self.writes if moves.evicted else self.now) + seconds
        self._look_ahead(len(self._starts), 0)
        self._starts.append(self.now)
        self._ends.append(self._aside)

    def _ended(self, number: int) -> float:
        """Return the end of a task; 0 for one before the first."""
        return self._ends[number] if number >= 0 else 0.0

    def run(self, seconds: float, moves: Moves, start: int, begin: int) -> None:
        """Run a task of the device.

        Args:
            seconds: its duration if all workers share it.
            moves: copies before it.
            start: number of tasks before the step, from which positions count.
            begin: position of the first task during which its data may be fetched, because it fits next to the data of all tasks in between.
        """
        self._look_ahead(len(self._starts), moves.added)
        started = max(self.now, self._copied(moves, start, start + begin)) if moves.read or moves.evicted else self.now
        self.now = started + seconds * self.pace.num_devices
        self._starts.append(started)
        self._ends.append(self.now)

    def _copied(self, moves: Moves, start: int, begin: int) -> float:
        """Enter the copies for the next task into the queues; return the time at which it may start."""
        is_far = moves.far_read > 0 or any(is_far for _, _, is_far in moves.evicted)
        spare = self.backlog * (self._far_per_write if is_far else self._per_write)
        far_reading = moves.far_read * self._far_per_read
        reading = (moves.read - moves.far_read) * self._per_read + far_reading
        fetch_from = self._starts[max(0, min(begin, self._oldest, len(self._starts) - 1))] if self._starts else 0.0
        if not self.pace.duplex and moves.read:  # both directions share the link until `writes`; reads overtake pending writes
            self.writes = max(self.writes, fetch_from) + reading
        self._write_back(moves, start)
        if not moves.read:
            return self.writes - spare
        if moves.after is not None:
            fetch_from = max(fetch_from, self._ended(start + moves.after))
        self.reads = max(self.reads, fetch_from, self.writes - (reading if not self.pace.duplex else 0.0) - spare) + reading
        if self.pace.duplex and far_reading:  # the disk serves one direction at a time
            self.writes = max(self.writes, fetch_from) + far_reading
        return self.reads

    def _write_back(self, moves: Moves, start: int) -> None:
        """Enter the dirty tiles that leave for a task into the queue of writes, each after its last use."""
        for since, nbytes, is_far in moves.evicted:
            self.writes = max(self.writes, self._ended(start + since)) + nbytes * (self._far_per_write if is_far else self._per_write)

    def _look_ahead(self, number: int, added: int) -> None:
        """Advance the prefetcher to the task of that number, which misses `added` bytes."""
        self._added.append(added)
        self._missing += added
        while (self._missing > self.reach or number - self._oldest > TASKS) and self._oldest < number:
            self._missing -= self._added[self._oldest]
            self._oldest += 1


def forecast(
    step: Touches, positions: Sequence[int], budget: int, pace: Pace | None = None, *, only_files: bool = False, share: float = SHARE
) -> Forecast:
    """Forecast the traffic and the duration of a step within a budget.

    A task whose data exceeds the budget is not detected and costs nothing extra. Seconds of a conditional task count with its share, and copies with
    the probability that a task needs them.

    Args:
        step: the step.
        positions: positions of the tasks in order of execution; only those of one device if several share the step.
        budget: bytes of the memory where tasks run.
        pace: rates of the machine; without them only bytes are forecast.
        only_files: whether only tiles with data in files may be evicted, because there is no tier below.
        share: fraction of the budget that holds tiles between their uses.
    """
    capacity = int(budget * share)
    below = None
    if pace is not None and pace.spill is not None:
        below = int(pace.spill.capacity * SHARE_BESIDE) - budget // CLEAN  # tiles that are written back early occupy both
    steps, evictions = pass_through(step, positions, capacity, below=below, only_files=only_files)
    if step.shares:
        steps = expected_moves(step, positions, steps, evictions)
    read = sum(moves.read for moves in steps)
    written = sum(nbytes for moves in steps for _, nbytes, _ in moves.evicted)
    if pace is None:
        return Forecast(read, written)
    copy_seconds = pace.num_devices * max(read / pace.read, written / pace.write)
    return Forecast(read, written, _seconds(step, positions, steps, capacity, budget, pace), copy_seconds)


def _seconds(step: Touches, positions: Sequence[int], steps: Sequence[Moves], capacity: int, budget: int, pace: Pace) -> float:
    """Return the duration of a step that follows an equal one."""
    begins = {position: begin for begin, position in _returns(steps, capacity)}
    clock, period = _Clock(pace, budget // AHEAD, budget // CLEAN), len(positions)
    seconds = [pace.seconds[step.plan.tasks[position]] for position in positions]
    before = 0.0
    for start in (0, period):
        before = clock.end
        for now, moves in enumerate(steps):
            if positions[now] in step.overwritten:
                clock.run_aside(pace.aside.get(step.plan.tasks[positions[now]], 0.0), moves, start)
            else:
                clock.run(seconds[now], moves, start, begins.get(now, now))
    return clock.end - before


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Forecast evictions and fetches of a step. All positions count in its planned order.

    Attributes:
        leaves: for each handle that is evicted from the memory where tasks run, the positions of the uses before which that happens.
        returns: (begin, position) of each task that misses evicted data, in planned order. From the task at `begin` on, the data fits next to all
            data used until `position`; `begin` is negative in the step before.
    """

    leaves: dict[HandleRecord, set[int]]
    returns: list[tuple[int, int]]


def foresee(step: Touches, positions: Sequence[int], budget: int, share: float = SHARE) -> Foreseen:
    """Forecast the evictions from a memory of `budget` bytes, and the earliest fetches of evicted data; arguments as in `forecast`."""
    capacity = int(budget * share)
    steps, evictions = pass_through(step, positions, capacity)
    leaves: dict[HandleRecord, set[int]] = {}
    for handle, position in evictions:
        leaves.setdefault(handle, set()).add(position % len(positions))
    return Foreseen(leaves, _returns(steps, capacity))


def _returns(steps: Sequence[Moves], capacity: int) -> list[tuple[int, int]]:
    """Return `Foreseen.returns`: each task's missing data is fetched as early as it fits next to the data of the tasks before."""
    spare = [capacity - moves.used for moves in steps]
    returns, most = [], min(MOST_AHEAD, len(spare) - 1)
    for position, moves in enumerate(steps):
        if nbytes := moves.read:
            begin = position
            for begin in range(position, position - most, -1):  # negative positions are those of the equal step before
                left = spare[begin - 1] - nbytes
                if left < 0:
                    break
                spare[begin - 1] = left
            returns.append((begin, position))
    return returns
