"""Comparison of two kinds of workers: both run the same training steps, task by task, until the first task whose results differ.

Each side is a runtime with one worker of its kind, driven by its own thread. Both submit the same tasks in the same order, so a task is identified by
its number. The first side to finish a task keeps a copy of the results; the other compares its own with the copy and drops it. A side that is far
ahead waits. Of all tasks that differ, the first in submission order is reported: its inputs were equal within the tolerance, so the error is in that
task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from scheduler import FinishedTask, OnTask, R, Runtime, W

Array = npt.NDArray[Any]

AHEAD: Final = 64 << 20
"""Number of bytes of results that a side may keep for the other before it waits. It does not wait while the other does, so one always goes on."""


@dataclass(frozen=True, slots=True)
class TileDifference:
    """Tile of results that differs between the sides.

    Attributes:
        name: name of the tile.
        shape, dtype: shape and type of the tile.
        largest: largest difference of two elements; infinite if only one of them is NaN or infinite.
        index: index of that element in the tile.
        a, b: values of that element on each side.
        num_beyond: number of elements that differ beyond the tolerance.
        num_elements: number of all elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    largest: float
    index: tuple[int, ...]
    a: float
    b: float
    num_beyond: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class TaskDifference:
    """Task whose results differ between the sides.

    Attributes:
        name: name of its codelet.
        number: position in the order of all tasks.
        replay: index of the training step, from 0; None for a task before the first one.
        reads: names of the tiles that the task read.
        tiles: differing tiles among its results.
    """

    name: str
    number: int
    replay: int | None
    reads: tuple[str, ...]
    tiles: tuple[TileDifference, ...]


class Comparison:
    """Comparison of the results of two sides, for the tasks that both have run.

    Args:
        rtol, atol: tolerances: elements differ if |a - b| > atol + rtol |b|, so with 0 and 0 if they are unequal. NaN equals NaN.

    Attributes:
        num_tasks, num_tiles: number of tasks and tiles compared so far.
        largest: largest difference of two elements so far, within or beyond the tolerance.
        first: first task beyond the tolerance; None if there is none.
    """

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.num_tasks = self.num_tiles = 0
        self.largest = 0.0
        self.first: TaskDifference | None = None
        self._kept: tuple[dict[int, tuple[FinishedTask, list[Array]]], ...] = ({}, {})
        self._nbytes = [0, 0]
        self._is_over = [False, False]
        self._is_waiting = False
        self._has_failed = False
        self._changed = threading.Condition()

    def side(self, which: int) -> OnTask:
        """Return the callback for `on_task` of the runtime of side 0 or 1."""
        return lambda task: self._see(which, task)

    def end(self, which: int, *, failed: bool) -> None:
        """Report that a side runs no more tasks: the other does not wait for it, and stops if this one failed."""
        with self._changed:
            self._is_over[which] = True
            self._has_failed = self._has_failed or failed
            self._changed.notify_all()

    def num_alone(self) -> int:
        """Return the number of tasks that only one side has run."""
        return sum(map(len, self._kept))

    def _see(self, which: int, task: FinishedTask) -> None:
        written = [tile for tile in task.tiles if tile.mode != R]
        with self._changed:
            if self._has_failed:
                raise _OtherSideFailed
            other = self._kept[1 - which].pop(task.number, None)
            if other is None:
                self._keep(which, task, [np.array(tile.data) for tile in written])
                return
            self._nbytes[1 - which] -= sum(array.nbytes for array in other[1])
            self._changed.notify_all()
        theirs, arrays = other
        if theirs.name != task.name or [tile.name for tile in theirs.tiles] != [tile.name for tile in task.tiles]:
            raise AssertionError(f"task {task.number} is {task.name} on {task.worker} and {theirs.name} on {theirs.worker}")
        differences, largest = [], 0.0
        for tile, array in zip(written, arrays, strict=True):
            a, b = (array, tile.data) if which else (tile.data, array)
            gap, difference = compare(tile.name, a, b, self.rtol, self.atol)
            largest = max(largest, gap)
            if difference is not None:
                differences.append(difference)
        with self._changed:
            self.num_tasks += 1
            self.num_tiles += len(written)
            self.largest = max(self.largest, largest)
            if differences and (self.first is None or task.number < self.first.number):
                reads = tuple(tile.name for tile in task.tiles if tile.mode != W)
                self.first = TaskDifference(task.name, task.number, task.replay, reads, tuple(differences))

    def _keep(self, which: int, task: FinishedTask, arrays: list[Array]) -> None:
        """Keep results for the other side, and wait while it is far back. Only one side waits at a time, so one always goes on."""
        self._kept[which][task.number] = task, arrays
        self._nbytes[which] += sum(array.nbytes for array in arrays)
        if self._is_waiting:
            return
        self._is_waiting = True
        self._changed.wait_for(lambda: self._nbytes[which] <= AHEAD or self._is_over[1 - which])
        self._is_waiting = False


class _OtherSideFailed(Exception):
    """Raised to stop a side whose results are no longer needed."""


def compare(name: str, a: Array, b: Array, rtol: float, atol: float) -> tuple[float, TileDifference | None]:
    """Return the largest difference of two arrays of equal shape and type, and a report if an element is beyond the tolerance."""
    if a.tobytes() == b.tobytes():
        return 0.0, None
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(x - y)
        gap[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
        gap[np.isnan(gap)] = np.inf  # NaN on one side only
        beyond = gap > atol + rtol * np.abs(np.where(np.isfinite(y), y, 0))
    largest = float(gap.max(initial=0.0))
    if not beyond.any():
        return largest, None
    index = np.unravel_index(int(np.argmax(np.where(beyond, gap, -1))), gap.shape)
    worst = tuple(int(i) for i in index)
    reported = TileDifference(
        name, a.shape, str(a.dtype), float(gap[worst]), worst, float(x[worst]), float(y[worst]), int(np.count_nonzero(beyond)), int(gap.size)
    )
    return largest, reported


def run_side_by_side(comparison: Comparison, sides: tuple[Callable[[], Runtime], Callable[[], Runtime]], program: Callable[[Runtime], None]) -> None:
    """Run `program` on the runtimes of both sides at once, and compare them.

    Args:
        sides: functions that make the runtimes, each with one worker.
        program: function that submits the same tasks in the same order on any runtime.

    Raises:
        Exception: the exception that a side raised.
    """
    errors: list[BaseException] = []

    def drive(which: int) -> None:
        failed = True
        try:
            with sides[which]() as runtime:
                runtime.on_task(comparison.side(which))
                program(runtime)
                runtime.wait()
            failed = False
        except BaseException as error:  # raised again by the calling thread
            errors.append(error)
        finally:
            comparison.end(which, failed=failed)

    threads = [threading.Thread(target=drive, args=(which,), name=f"nntask compare {which}", daemon=True) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if alone := comparison.num_alone():
        raise AssertionError(f"{alone} tasks ran on one side only")
