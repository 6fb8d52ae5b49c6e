"""Workers as threads: each runs its tasks' CPU kernels and advances the machine itself when one ends.

A worker sleeps in its mailbox (a C queue, no polling) only when it has nothing to run; a task that its own finished task led to never passes
through a queue or another thread. Simulated devices use the same threads over their own memory.

Where there is a worker for every core that the process may use, each keeps to one (`cores_for`), so that its tiles stay in that core's caches.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, Protocol

from ..core.events import TaskFailed, TaskFinished
from ..core.records import Task, Worker
from ..watching import Watch


class Engine(Protocol):
    """What a worker thread needs of the runtime."""

    closing: bool
    watch: Watch

    @property
    def trace(self) -> object | None:
        """Whoever wants to know of tasks."""

    def advance(self, event: TaskFinished | TaskFailed, worker: Worker, seconds: float | None) -> Task | None:
        """Advance the machine after so many seconds in a kernel, if that is known; return the worker's next task, if it has one now."""

    def fail(self, error: BaseException) -> None:
        """The runtime is broken: wake everybody with the reason."""

    def observe(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Take note of a task's duration; called only where `trace` is something."""

    def show(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Show a finished task, whose data is still in place, to who watches."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_for(num_workers: int) -> Sequence[int | None]:
    """The core each worker keeps to; None for any.

    Workers keep to cores only where they are as many as the cores this process may use. Fewer are left to the system: two programs that chose the
    same core would share it while another is idle. More would have to share. Only Linux says and sets which cores a thread may use.
    """
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return usable if len(usable) == num_workers else [None] * num_workers


class WorkerThread(threading.Thread):
    """One worker.

    Args:
        core: where it keeps to, if anywhere.

    Attributes:
        mailbox: tasks to run; None ends the thread.
        busy_ns: nanoseconds spent in kernels so far.
    """

    def __init__(self, engine: Engine, worker: Worker, memory: object, name: str, core: int | None = None) -> None:
        super().__init__(name=f"nntask {name}", daemon=True)
        self.core = core
        self.engine = engine
        self.worker = worker
        self.memory = memory
        self.mailbox: SimpleQueue[Task | None] = SimpleQueue()
        self.busy_ns = 0
        self._seconds: float | None = None
        self.num_tasks = 0

    def run(self) -> None:
        """Run tasks until told to stop."""
        if self.core is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):  # the process was moved off this core since: then anywhere
                os.sched_setaffinity(0, {self.core})
        engine, worker = self.engine, self.worker
        while (task := self.mailbox.get()) is not None:
            try:
                while task is not None and not engine.closing:
                    task = engine.advance(self._execute(task), worker, self._seconds)
            except BaseException as error:  # not of a kernel: a bug of ours, and nobody may be left waiting
                engine.fail(error)
            del task

    def stop(self) -> None:
        """End the thread after the kernel it is in."""
        self.mailbox.put(None)

    def views_of(self, task: Task) -> list[Any]:
        """The arguments of the task's kernel."""
        views: list[Any] = []
        memory = self.memory
        for replica in task.replicas:
            view = replica.view
            if view is None:
                view = replica.view = replica.handle.view(memory, replica.offset)  # type: ignore[operator]
            views.append(view)
        return views

    def _execute(self, task: Task) -> TaskFinished | TaskFailed:
        engine = self.engine
        start = perf_counter_ns()
        try:
            constants: Mapping[str, Any] = task.constants
            task.codelet.cpu(*self.views_of(task), **constants)  # type: ignore[attr-defined]
        except BaseException as error:  # a kernel may raise anything, SystemExit included; the worker must survive it
            return TaskFailed(task, error)
        finally:
            end = perf_counter_ns()
            self._seconds = (end - start) * 1e-9
            self.busy_ns += end - start
            self.num_tasks += 1
            if engine.trace is not None:
                engine.observe(self.worker, task, start, end)
        if engine.watch.callback is not None:
            engine.show(self.worker, task, start, end)
        return TaskFinished(task)
