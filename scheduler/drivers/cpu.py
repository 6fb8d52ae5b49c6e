"""Worker threads: each runs the CPU kernels of its tasks, and advances the machine itself when a kernel ends.

A worker waits in its mailbox (a C queue, no polling) only when it has no task. A task that becomes ready when its worker ends another one passes
through no queue and no other thread. Simulated devices use the same threads over their own memory.

If there are as many workers as cores that the process may use, each is pinned to one core (`cores_for`), so that its tiles stay in that core's
caches.
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
from .callbacks import Watch
from .gpu import Ended


class WorkerRuntime(Protocol):
    """The part of the runtime that a worker thread uses."""

    closing: bool
    watch: Watch

    @property
    def trace(self) -> object | None:
        """Trace that records tasks; None without one."""

    def advance(self, event: TaskFinished | TaskFailed, worker: Worker, seconds: float | None) -> Task | None:
        """Advance the machine by an event, given the duration of the kernel if known; return the worker's next task, if one is ready."""

    def fail(self, error: BaseException) -> None:
        """Mark the runtime as broken and wake all waiting threads with the reason."""

    def observe(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Record the duration of a task; called only if `trace` is set."""

    def show(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Call the program's callback with a finished task, whose data is still in memory."""

    def ended(self, worker: Worker, tasks: Sequence[Ended]) -> None:
        """Record the durations of tasks on a GPU."""


def cores_for(num_workers: int) -> Sequence[int | None]:
    """Return the core that each worker is pinned to; None for any core.

    Workers are pinned only if their number equals that of the cores that this process may use. Fewer workers are left to the system: two programs
    that chose the same core would share it while another is idle. More workers would have to share cores. Only Linux lists and sets the cores of a
    thread.
    """
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return usable if len(usable) == num_workers else [None] * num_workers


class WorkerThread(threading.Thread):
    """The thread of one worker.

    Args:
        executor: runtime that takes the events and returns the next task.
        worker: the worker's record.
        memory: memory of the worker's node.
        name: name of the worker.
        core: core that the thread is pinned to; None for any.

    Attributes:
        mailbox: tasks to run; None ends the thread.
        busy_ns: nanoseconds spent in kernels so far.
        num_tasks: number of tasks run so far.
        clone_ns: nanoseconds of `busy_ns` spent on recomputation; fused tasks count with their share.
        num_clones: number of recomputing tasks among those run.
        num_skipped: number of conditional tasks of fused tasks that were skipped.
    """

    def __init__(self, executor: WorkerRuntime, worker: Worker, memory: object, name: str, core: int | None = None) -> None:
        super().__init__(name=f"nntask {name}", daemon=True)
        self.core = core
        self.executor = executor
        self.worker = worker
        self.memory = memory
        self.mailbox: SimpleQueue[Task | None] = SimpleQueue()
        self.busy_ns = 0
        self._seconds: float | None = None
        self.num_tasks = 0
        self.clone_ns = 0.0
        self.num_clones = 0
        self.num_skipped = 0

    def run(self) -> None:
        """Run tasks until `stop`."""
        if self.core is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):  # the process may no longer use this core: the thread then runs on any
                os.sched_setaffinity(0, {self.core})
        executor, worker = self.executor, self.worker
        while (task := self.mailbox.get()) is not None:
            try:
                while task is not None and not executor.closing:
                    task = executor.advance(self._execute(task), worker, self._seconds)
            except BaseException as error:  # not from a kernel: a bug of ours; every waiting thread must be woken
                executor.fail(error)
            del task

    def stop(self) -> None:
        """End the thread after its current kernel."""
        self.mailbox.put(None)

    def views_of(self, task: Task) -> list[Any]:
        """Return the arguments of the task's kernel: a view of each replica."""
        views: list[Any] = []
        memory = self.memory
        for replica in task.replicas:
            view = replica.view
            if view is None:
                view = replica.view = replica.handle.spec.view(memory, replica.offset)  # type: ignore[operator]
            views.append(view)
        return views

    def _execute(self, task: Task) -> TaskFinished | TaskFailed:
        executor, flags = self.executor, None
        start = perf_counter_ns()
        try:
            constants: Mapping[str, Any] = task.spec.constants
            views = self.views_of(task)
            result = task.spec.codelet.cpu(*views, **constants)  # type: ignore[attr-defined]
            if task.spec.counts_skips:
                self.num_skipped += result
            if task.spec.condition is not None and task.spec.condition.flags >= 0:
                flags = bytes(views[task.spec.condition.flags])
        except BaseException as error:  # a kernel may raise anything, SystemExit included; the worker must survive it
            return TaskFailed(task, error)
        finally:
            end = perf_counter_ns()
            self._seconds = (end - start) * 1e-9
            self.busy_ns += end - start
            self.num_tasks += 1
            if task.spec.num_clones:
                self.clone_ns += (end - start) * task.spec.clone_share
                self.num_clones += task.spec.num_clones
            if executor.trace is not None:
                executor.observe(self.worker, task, start, end)
        if executor.watch.callback is not None:
            executor.show(self.worker, task, start, end)
        return TaskFinished(task, flags)
