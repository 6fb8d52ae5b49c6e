"""``nntask bench overhead``: overhead of the runtime per task.

Every task has three handles (two read, one read and written) of 4 KiB, and budgets are on. The overhead of empty tasks on one worker is wall seconds
/ tasks, the call of the kernel included. With kernels, the overhead on two workers is (wall seconds x 2 - processor seconds inside kernels) / tasks:
the time that a kernel waits for the interpreter when it returns counts as overhead, and so does the time of other processes on the two cores. A
kernel is a matrix product that takes about 200 microseconds of one core without the interpreter. "waited" is the fraction of the overhead in which
kernels waited. "mixed" runs as many replayed tasks as the program submits at the same time. Dask's threaded scheduler runs the same empty tasks.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, thread_time_ns
from typing import Any, Final

_CHAINS: Final = 64
_NBYTES: Final = 4096
_KERNEL_SECONDS: Final = 200e-6
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class OverheadSettings:
    """Measure the overhead of the runtime per task, in microseconds."""

    json: bool = False
    """print JSON"""
    tasks: int = 20000
    """number of empty tasks per round; a tenth of it with kernels"""


def run(settings: OverheadSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the same figures as lines of text.

    Raises:
        UsageError: there are too few tasks.
    """
    from nntask import UsageError

    if settings.tasks < 100:
        raise UsageError(f"must be at least 100, got {settings.tasks}", "use --tasks 20000", flag="--tasks")
    figures = overhead(settings.tasks)
    return figures, [f"{name:28} {value:8.2f}" for name, value in figures.items()]


def overhead(num_tasks: int) -> dict[str, float]:
    """Return the microseconds of overhead per task by kind of load; medians of five rounds."""
    from scheduler import Codelet, Trace

    empty = Codelet("empty", cpu=_nothing)
    figures = {}
    with _Load(empty, num_tasks, 1) as load:
        figures["submitted_us_per_task"] = load.submitted()
        figures["replayed_us_per_task"] = load.replayed()
    with _Load(empty, num_tasks, 1, Trace()) as load:
        figures["traced_submitted_us_per_task"] = load.submitted()
        figures["traced_replayed_us_per_task"] = load.replayed()
    product = _Product(_KERNEL_SECONDS)
    with _Load(Codelet("gemm", cpu=product), num_tasks // 10, 2, inside=product.seconds) as load:
        figures["submitted_us_two_workers"] = load.submitted()
        figures["replayed_us_two_workers"] = load.replayed()
        figures["waited_us_two_workers"] = load.waited
        figures["mixed_us_two_workers"] = load.mixed()
    figures["dask_threaded_us_per_task"] = _measure_dask(num_tasks // 4)
    return {name: round(value * 1e6, 3) for name, value in figures.items()}


def _nothing(*views: Any) -> None:
    return None


class _Product:
    """A kernel that takes about `seconds` of one core and sums the processor time of its calls."""

    def __init__(self, seconds: float) -> None:
        import numpy as np

        from tiles.kernels import set_blas_threads

        set_blas_threads(1)  # one thread for each worker, as in training
        self._product: Callable[..., Any] = np.matmul
        self._ones: Callable[[int], Any] = lambda rows: np.ones((rows, 256), np.float32)
        self._weights = self._ones(256)
        self._spent: list[list[int]] = []
        self._mine = threading.local()
        self.rows = 256
        for _ in range(5):
            self._mine = threading.local()
            took = []
            for _ in range(5):
                before = self.seconds()
                self()
                took.append(self.seconds() - before)
            self.rows = int(min(max(self.rows * seconds / min(took), 8), 4096))
        self._mine = threading.local()

    def __call__(self, *views: Any) -> None:
        """Multiply, in buffers of the calling thread."""
        mine = self._mine
        if not hasattr(mine, "spent"):
            mine.left, mine.out, mine.spent = self._ones(self.rows), self._ones(self.rows), [0]
            self._spent.append(mine.spent)
        begin = thread_time_ns()
        self._product(mine.left, self._weights, mine.out)
        mine.spent[0] += thread_time_ns() - begin

    def seconds(self) -> float:
        """Return the processor seconds of all calls so far."""
        return sum(spent[0] for spent in self._spent) * 1e-9


class _Load:
    """A runtime, and chains of tasks over its handles.

    Args:
        codelet: codelet of the tasks.
        num_tasks: number of tasks per measurement.
        workers: number of workers.
        trace: trace of the runtime; None without one.
        inside: returns the processor seconds spent in kernels so far.

    Attributes:
        waited: seconds per task that kernels took beyond their processor time in the last measurement, waiting for the interpreter or for a core.
    """

    waited = 0.0

    def __init__(self, codelet: Any, num_tasks: int, workers: int, trace: Any = None, inside: Callable[[], float] = lambda: 0.0) -> None:
        from scheduler import Runtime

        self.codelet, self.num_tasks, self.workers, self.inside = codelet, num_tasks, workers, inside
        self.runtime = Runtime(cpu_workers=workers, trace=trace)
        self.handles = [self.runtime.handle(_NBYTES, _view, name=f"h{i}", kind="persistent") for i in range(2 * _CHAINS + 4)]
        for handle in self.handles:
            with self.runtime.acquire(handle, "W"):
                pass
        with self.runtime.record() as self.step:
            self.emit(0)

    def __enter__(self) -> _Load:
        return self

    def __exit__(self, *error: object) -> None:
        self.runtime.close()

    def emit(self, first: int) -> None:
        """Submit the tasks over the handles from `first` on."""
        runtime, handles, codelet = self.runtime, self.handles[first:], self.codelet
        for i in range(self.num_tasks):
            runtime.submit(codelet, [(handles[0], "R"), (handles[1], "R"), (handles[2 + i % _CHAINS], "RW")], None)

    def submitted(self) -> float:
        """Return the overhead in seconds per submitted task."""

        def action() -> None:
            self.emit(0)
            self.runtime.wait()

        return self._measure(action, 1)

    def replayed(self) -> float:
        """Return the overhead in seconds per replayed task."""
        return self._measure(lambda: self.step.replay().wait(), 1)

    def mixed(self) -> float:
        """Return the overhead in seconds per task when equally many tasks are submitted and replayed at the same time."""

        def action() -> None:
            ticket = self.step.replay()
            self.emit(_CHAINS + 2)
            ticket.wait()
            self.runtime.wait()

        return self._measure(action, 2)

    def _measure(self, action: Callable[[], None], times: int) -> float:
        """Return the median over the rounds, without the two warm-up rounds, one for each instance of the step."""
        costs, waited = [], []
        for _ in range(2 + _ROUNDS):
            spent, busy = self.inside(), self._busy()
            begin = perf_counter()
            action()
            wall = perf_counter() - begin
            spent, busy = self.inside() - spent, self._busy() - busy
            costs.append((wall * self.workers - spent) / (times * self.num_tasks))
            waited.append((busy - spent) / (times * self.num_tasks))
        self.waited = statistics.median(waited[2:])
        return statistics.median(costs[2:])

    def _busy(self) -> float:
        """Return the seconds inside kernels so far."""
        seconds: dict[str, float] = self.runtime.stats()["busy_seconds"]
        return sum(seconds.values())


def _view(memory: Any, offset: int) -> memoryview:
    return memoryview(memory)[offset : offset + _NBYTES]


def _measure_dask(num_tasks: int) -> float:
    """Return the seconds per empty task of Dask's threaded scheduler with one worker."""
    import dask.threaded

    graph: dict[str, Any] = {f"c{i}": 0 for i in range(_CHAINS)} | {"a": 0, "b": 0}
    last = [f"c{i}" for i in range(_CHAINS)]
    for i in range(num_tasks):
        chain = i % _CHAINS
        graph[f"t{i}"] = (_nothing, "a", "b", last[chain])
        last[chain] = f"t{i}"
    seconds = []
    for _ in range(_ROUNDS):
        begin = perf_counter()
        dask.threaded.get(graph, last, num_workers=1)
        seconds.append((perf_counter() - begin) / num_tasks)
    return statistics.median(seconds)
