"""``nntask bench overhead``: what the runtime costs per task.

Overhead is (wall seconds x workers - seconds inside kernels) / tasks. Every task has three handles (two read, one read and written) of 4 KiB and
budgets are on. Two workers run kernels of about 200 microseconds, so that both are busy; Dask's threaded scheduler runs the same empty tasks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

_CHAINS: Final = 64
_NBYTES: Final = 4096
_KERNEL_SECONDS: Final = 200e-6
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class OverheadSettings:
    """Measure what the task runtime costs per task, in microseconds."""

    json: bool = False
    """print JSON"""
    tasks: int = 20000
    """empty tasks per round; a tenth as many with kernels"""


def run(settings: OverheadSettings) -> tuple[dict[str, Any], list[str]]:
    """Figures, and the same as lines of text.

    Raises:
        UsageError: too few tasks.
    """
    from nntask.errors import UsageError

    if settings.tasks < 100:
        raise UsageError(f"--tasks must be at least 100, got {settings.tasks}; use --tasks 20000")
    figures = overhead(settings.tasks)
    return figures, [f"{name:28} {value:8.2f}" for name, value in figures.items()]


def overhead(num_tasks: int) -> dict[str, float]:
    """Microseconds per task; medians of three rounds."""
    from scheduler import Codelet

    empty = Codelet("empty", cpu=_nothing)
    product = Codelet("gemm", cpu=_kernel_of(_KERNEL_SECONDS))
    submitted, replayed = _measure(empty, num_tasks, 1)
    submitted_two, replayed_two = _measure(product, num_tasks // 10, 2)
    figures = {
        "submitted_us_per_task": submitted,
        "replayed_us_per_task": replayed,
        "submitted_us_two_workers": submitted_two,
        "replayed_us_two_workers": replayed_two,
        "dask_threaded_us_per_task": _measure_dask(num_tasks // 4),
    }
    return {name: round(value * 1e6, 3) for name, value in figures.items()}


def _nothing(*views: Any) -> None:
    return None


def _kernel_of(seconds: float) -> Callable[..., None]:
    """A matrix product that takes about `seconds` on one core."""
    import numpy as np

    from tiles.kernels.cpu.blas import gemm

    weights = np.ones((256, 256), np.float32)
    rows = 256

    def product(*views: Any) -> None:
        gemm(ones[:rows], weights, out[:rows])

    ones, out = np.ones((4096, 256), np.float32), np.empty((4096, 256), np.float32)
    for _ in range(3):
        product()
        begin = perf_counter()
        product()
        rows = int(min(max(rows * seconds / (perf_counter() - begin), 8), len(ones)))
    return lambda *views: gemm(ones[:rows], weights, np.empty((rows, 256), np.float32))


def _measure(codelet: Any, num_tasks: int, workers: int) -> tuple[float, float]:
    """Overhead in seconds per submitted and per replayed task."""
    from scheduler.runtime import Runtime

    with Runtime(cpu_workers=workers) as runtime:
        handles = [runtime.handle(_NBYTES, _view, name=f"h{i}", kind="persistent") for i in range(_CHAINS + 2)]
        for handle in handles:
            with runtime.acquire(handle, "W"):
                pass

        def emit() -> None:
            for i in range(num_tasks):
                chain = i % _CHAINS
                shared = [(handles[-1], "R"), (handles[-2], "R"), (handles[chain], "RW")]
                runtime.submit(codelet, shared, None)  # type: ignore[arg-type]

        def timed(action: Callable[[], object]) -> float:
            busy = sum(runtime.stats()["busy_seconds"].values())
            begin = perf_counter()
            action()
            wall = perf_counter() - begin
            kernels: float = sum(runtime.stats()["busy_seconds"].values()) - busy
            return (wall * workers - kernels) / num_tasks

        def submit_all() -> None:
            emit()
            runtime.wait()

        submitted = [timed(submit_all) for _ in range(_ROUNDS + 1)][1:]
        with runtime.record() as step:
            emit()
        replayed = [timed(lambda: step.replay().wait()) for _ in range(_ROUNDS + 2)][2:]
    return statistics.median(submitted), statistics.median(replayed)


def _view(memory: Any, offset: int) -> memoryview:
    return memoryview(memory)[offset : offset + _NBYTES]


def _measure_dask(num_tasks: int) -> float:
    """Seconds per empty task of Dask's threaded scheduler with one worker."""
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
