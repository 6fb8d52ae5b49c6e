"""Reports of tasks: to the trace, to the performance models, to the program's callback and to the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter_ns

from ..core.machine import Machine
from ..core.performance_model import Models
from ..core.records import Task, Worker
from ..core.story import standstill
from ..drivers.callbacks import Watch
from ..drivers.gpu import Ended
from .trace import Trace
from .workers import WorkerPool, worker_name


class TaskReports:
    """The part of an executor that worker threads call for every task outside its lock, and the watchdog.

    Attributes:
        machine: the machine.
        models: performance models, guarded by the lock.
        pool: memory and threads of the nodes.
        trace: records the start and end of tasks; None for no tracing.
        watch: the program's callback for finished tasks.
    """

    machine: Machine
    models: Models
    pool: WorkerPool
    trace: Trace | None
    watch: Watch
    _lock: threading.Lock

    def progress(self) -> tuple[int, int]:
        """Return the numbers of tasks that have ended, and of unfinished tasks without those that are acquisitions of the program."""
        machine = self.machine
        num_acquired = sum(task.spec.codelet is None for task in [*machine.program.assigned])  # an exchange with another node has a codelet
        return machine.num_finished, machine.num_unfinished - num_acquired

    def standstill(self) -> str:
        """Return which tasks run, which wait, and why, and the latest events, as text."""
        machine = self.machine
        with self._lock:
            stalls = machine.stalls
            return f"{standstill(stalls.dispatch, stalls.copying, machine.memory.name_of, machine.num_unfinished)}\n{machine.story()}"

    def observe(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Record a task in the trace, if there is one."""
        trace = self.trace
        if trace is not None and trace.active:
            trace.add_task(worker.id, task.spec.name, task.id, start_ns, end_ns, worker.node, task.accesses)
            if end_ns >= trace.counters_at_ns:
                trace.add_counters(end_ns, [node.used for node in self.machine.memory.usage()], self.machine.num_ready)

    def observe_skips(self) -> None:
        """Record the tasks in the trace that the latest event has skipped; called under the lock.

        A skip after an acquisition of the program, which has no track, is on the track of the first worker.
        """
        skips, trace = self.machine.conditions.log, self.trace
        if trace is not None and trace.active:
            now = perf_counter_ns()
            for task, worker in skips:
                trace.add_skip(0 if worker is None else max(0, worker.id), task.spec.name, task.id, now)
        skips.clear()

    def ended(self, worker: Worker, tasks: Sequence[Ended]) -> None:
        """Record the durations of tasks that have ended on a GPU."""
        for task, start_ns, end_ns in tasks:
            if self.trace is not None:
                self.observe(worker, task, start_ns, end_ns)
        with self._lock:
            for task, start_ns, end_ns in tasks:
                if task.step is not None or task.spec.model_key is not None:
                    self.models.record(task, worker.kind, (end_ns - start_ns) * 1e-9)

    def show(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Call the program's callback with a finished task."""
        node = worker.node
        self.watch.show(task, worker_name(worker), self.machine.memory.name_of(node), self.pool.arenas[node].look, start_ns, end_ns)
