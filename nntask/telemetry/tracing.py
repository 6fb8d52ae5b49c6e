"""The trace of a run, a file for a viewer and for ``nntask report``. Facts of the run are written under ``otherData.nntask``:

    format            format of the file, `scheduler.execution.trace.TRACE_FORMAT`
    unix_ns           nanoseconds to add to the trace's times for the time since 1970
    seconds_per_step  seconds of a traced step, from the first task of the first to the last task of the last
    steps             numbers of the steps that are whole
    codelets          name -> tasks, flops, and bytes read and written in one step, if the codelet has them
    bounds_seconds    lower bounds from `scheduler.planning.bounds`, with the median duration of each task in the trace, the mean of a conditional one

The last four need at least one whole step in the trace.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from scheduler import Runtime, SchedulerError, Step
from scheduler.machine import Ran, RecordedTask, StepPlan

from ..config.run_config import LanguageRun
from ..errors import StorageError
from ..io.atomic_write import written_aside

TRACE: Final = "trace.json.gz"
"""Default name of the file in the directory of a run."""


class Tracer:
    """Switches the runtime's trace on and off with the steps of --trace-steps, and writes it at the end.

    A range holds only the tasks of its steps: at its edges, one step is in flight, and work between steps is left out.
    """

    def __init__(self, runtime: Runtime, run: LanguageRun) -> None:
        self._runtime, self._first = runtime, run.start.step
        self.path = Path(run.settings.observe.trace or run.directory / TRACE)
        self._range = run.traced

    def is_edge(self, step: int) -> bool:
        """Return whether the step before `step` must be over when it starts."""
        return self._range is not None and step in (self._range[0], self._range[1] + 1)

    def on_step(self, step: int | None) -> None:
        """Note that step `step` is about to start; None if no step is in flight and other work is about to begin."""
        if self._range is not None and self._runtime.trace is not None:
            active = step is not None and self._range[0] <= step <= self._range[1]
            if active != self._runtime.trace.active:
                self._runtime.wait()  # on a GPU, the times of a step's last tasks come later than its loss
            self._runtime.trace.active = active

    def write(self, step: Step) -> None:
        """Write the file, if one was asked for.

        Args:
            step: step that the run has replayed.

        Raises:
            StorageError: the disk is full or failed.
        """
        trace = self._runtime.trace
        if trace is None:
            return
        with suppress(SchedulerError):  # on a GPU, times of the last tasks come later than their results; a run that failed is traced too
            self._runtime.wait()
        trace.active = False
        ran = list(trace.tasks())
        begin = self._first + 1
        assert step.plan is not None  # the run has replayed it
        placed = steps_of_tasks(ran, step.first_tasks, len(step.plan.tasks), begin, max(self._range[0] if self._range else begin, begin))
        about: dict[str, Any] = {"unix_ns": time.time_ns() - time.perf_counter_ns()}
        about |= facts_of(ran, placed, step.plan, self._runtime)
        try:
            names, nodes = dict(enumerate(self._runtime.stats()["busy_seconds"])), self._runtime.node_names
            with written_aside(self.path) as new:
                written = new.with_suffix(self.path.suffix)  # the suffix determines compression
                trace.write(written, names, nodes, steps=[at and at[0] for at in placed], about=about)
                written.rename(new)
        except OSError as error:
            raise StorageError(f"cannot write the trace {self.path}: {error.strerror}", "choose another file with --trace-steps A:B@FILE") from error


StepPosition = tuple[int, int]
"""(step, position in its plan) of a task that ran."""


def steps_of_tasks(ran: Sequence[Ran], first_tasks: Sequence[int], num_tasks: int, begin: int, since: int) -> list[StepPosition | None]:
    """Return the step of each task that ran; None for tasks of no step.

    Replay k of a recorded step runs instance k mod 2, which has task numbers of its own; they recur every second replay.

    Args:
        first_tasks: number of the first task of each instance (`Step.first_tasks`).
        begin: number of the step of the first replay.
        since: number of the first traced step.
    """
    positions: list[StepPosition | None] = []
    times: Counter[int] = Counter()
    for _, _, number, *_ in ran:
        instance = next((at for at, first in enumerate(first_tasks) if first <= number < first + num_tasks), None)
        if instance is None:
            positions.append(None)
            continue
        earliest = since + (since - begin + instance) % 2
        positions.append((earliest + 2 * times[number], number - first_tasks[instance]))
        times[number] += 1
    return positions


def facts_of(ran: Sequence[Ran], placed: Sequence[StepPosition | None], plan: StepPlan, runtime: Runtime) -> dict[str, Any]:
    """Return the facts of all whole traced steps; empty if there is none."""
    tasks = [(at, start, end) for (_, _, _, start, end, *_), at in zip(ran, placed, strict=True) if at is not None]
    counts = Counter(step for (step, _), _, _ in tasks)
    whole = sorted(step for step, count in counts.items() if count == len(plan.tasks))
    if not whole:
        return {}
    durations: list[list[float]] = [[] for _ in plan.tasks]
    in_whole = [each for each in tasks if each[0][0] in set(whole)]
    for (_, position), start, end in in_whole:
        durations[position].append((end - start) / 1e9)
    span = max(end for _, _, end in in_whole) - min(start for _, start, _ in in_whole)
    return {
        "steps": whole,
        "seconds_per_step": span / 1e9 / len(whole),
        "codelets": codelets_of(plan),
        "bounds_seconds": runtime.lower_bounds(plan, [_typical(*each) for each in zip(plan.tasks, durations, strict=True)]),
    }


def _typical(task: RecordedTask, durations: Sequence[float]) -> float:
    """Return the median duration of a task, or the mean of a conditional one, which is skipped in some steps and takes no time there."""
    is_conditional = task.condition is not None and task.condition.guard >= 0
    return mean(durations) if is_conditional else median(durations)


def codelets_of(plan: StepPlan) -> Mapping[str, Mapping[str, float]]:
    """Return the totals of each codelet in a step: number of tasks, floating-point operations, and bytes read and written, by its cost function.

    Operations and bytes of conditional tasks count with their share.
    """
    totals: dict[str, dict[str, float]] = {}
    for task in plan.tasks:
        row = totals.setdefault(task.name, {"tasks": 0, "flops": 0.0, "bytes": 0.0})
        row["tasks"] += 1
        cost = getattr(task.codelet, "cost", None)
        if cost is not None:
            flops, nbytes = cost([handle.spec.view for handle, _ in task.accesses], task.constants)
            row["flops"] += flops * task.share
            row["bytes"] += nbytes * task.share
    return totals
