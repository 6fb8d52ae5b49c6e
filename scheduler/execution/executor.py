"""The executor: one lock around the state machine, and the threads of `pool` that execute its actions.

Any thread that brings an event (a worker that finished a task, a copy engine, the program) takes the lock, advances the machine itself and
executes its actions; no thread waits for a scheduler thread, and nothing polls. Finalizers only append to an inbox, which is drained at the next
event, because a garbage collection may run while its own thread holds the lock. An exception inside the machine is a bug of ours, and an interrupt
inside it leaves it half advanced. Either breaks the executor permanently: every waiting thread is woken with the reason.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any, Final

from ..core.actions import carry_out
from ..core.dependencies import predecessors
from ..core.errors import DoesNotFit, RuntimeBroken, SchedulerError
from ..core.events import (
    Action,
    CopyFailed,
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    HandleReleased,
    MoveTile,
    ReportFailure,
    ReportStepDone,
    RunTask,
    SourceAttached,
    StepStarted,
    TaskFailed,
    TaskFinished,
    WorkerJoined,
)
from ..core.machine import Machine
from ..core.memory.memory_node import MemoryNode
from ..core.performance_model import Models
from ..core.policies import POLICIES, Placement
from ..core.records import HOST, HandleRecord, Replay, Task, TaskId, W, Worker, WorkerId
from ..drivers.callbacks import Watch
from ..drivers.disk import Source, readers_nbytes
from ..drivers.gpu import Gpu
from ..storage.performance_store import PerfStore, machine_fingerprint
from ..storage.tier import DiskTier
from .backlog import WINDOW, Backlog
from .counters import counters_of
from .failures import Failures
from .holds import Holds
from .reports import TaskReports
from .trace import Trace
from .waiting import Waiter, WaiterSet
from .workers import WorkerPool

ABANDONED: Final = object()
"""Token of an acquisition whose program was interrupted while it waited."""


class Executor(TaskReports):
    """The machine, and the pool of threads that executes its actions.

    Args:
        budgets: (name, bytes) of each memory node except the disk, host memory first.
        disk: the last tier and its size in bytes; None for no disk tier.
        gpus: the GPUs, to which the last entries of `budgets` belong.
        policy: name of the scheduling policy.
        eviction: name of the eviction policy.
        prefetch: whether data moves ahead of the tasks that need it.
        trace: records the start and end of tasks and copies; None for no tracing.
        kernels: versions of the libraries whose kernels run; stored durations of other versions are not used.

    Attributes:
        inbox: handles whose finalizer has run.
        closing: whether workers should stop after their present kernel.
        endings: for each replay, the function to call with its first error, or None, when it has ended.
        failures: the failures so far.
    """

    def __init__(
        self,
        budgets: Sequence[tuple[str, int]],
        disk: tuple[DiskTier, int | None] | None,
        gpus: Sequence[Gpu],
        *,
        policy: str,
        eviction: str,
        prefetch: bool,
        trace: Trace | None,
        kernels: Mapping[str, str],
        watchdog: float | None,
    ) -> None:
        self.trace = trace
        self.watch = Watch()
        self.inbox: deque[HandleRecord] = deque()
        self.closing = False
        self.waiters = WaiterSet()
        num_host = len(budgets) - len(gpus)
        nodes = [MemoryNode(name, budget, keeps_offsets=number >= num_host) for number, (name, budget) in enumerate(budgets)]
        if disk is not None:
            nodes.append(MemoryNode("disk", disk[1] or disk[0].free_bytes(), is_storage=True))
        self.models = Models()
        devices = [gpu.name for gpu in gpus]
        self._store = PerfStore(machine_fingerprint(blas_threads=1, devices=devices, versions=kernels), [node.name for node in nodes])
        self._store.load(self.models)
        self.machine = Machine(nodes, POLICIES[policy](self.models), eviction=eviction, prefetch=prefetch)
        self.models.memory = self.machine.memory
        self.machine.conditions.has_log = trace is not None
        self._stalls = self.machine.stalls
        self.endings: dict[Replay, Callable[[BaseException | None], None]] = {}
        self.failures = Failures()
        self._lock = threading.Lock()
        self.holds = Holds()
        self.pool = WorkerPool(self, budgets, None if disk is None else disk[0], gpus, watchdog)
        self._backlog = Backlog(self.machine, self._lock, self.waiters)
        self._num_tasks = 0
        self._started = perf_counter()

    def start(self, cpu_workers: int, sim_gpus: int, bandwidth: float | None, *, aside: bool = False) -> None:
        """Start the threads and let the workers join, see `WorkerPool.start`."""
        memory = self.machine.memory
        self.models.declare_links(len(memory.names), storage=memory.tier is not None, given=None if bandwidth is None else (0.0, bandwidth))
        for worker in self.pool.start(cpu_workers, sim_gpus, bandwidth, aside=aside):
            self.bring(WorkerJoined(worker))

    def advance(self, event: TaskFinished | TaskFailed, worker: Worker, seconds: float | None) -> Task | None:
        """Advance the machine by a worker's event; return the worker's next task, if it has one now.

        Args:
            seconds: duration of the kernel; None if unknown.
        """
        with self._lock:
            task = event.task
            if seconds is not None and (task.step is not None or task.spec.model_key is not None):  # else no policy has asked for its duration
                self.models.record(task, worker.kind, seconds)
            if self.inbox:
                self._drain_inbox()
            return self._carry_out(self.machine.handle(event), worker.id)

    def bring(self, event: Event, newcomer: Task | None = None, copied_seconds: float = 0.0) -> None:
        """Advance the machine by an event of a thread that is not a worker.

        Args:
            newcomer: the submitted task, which gets its number here.
            copied_seconds: duration of the finished copy.

        Raises:
            Deadlock: the newcomer is an acquisition that would wait for data that this thread holds.
            SchedulerError: the runtime is broken or closed.
        """
        with self._lock:
            if self.waiters.broken is not None:
                raise self.waiters.broken
            if newcomer is not None:
                if newcomer.spec.codelet is None and self.holds.own:
                    call = f"acquire() of {newcomer.accesses[0][0]!r}"
                    self.holds.refuse_circle(set(predecessors(newcomer)).__contains__, call, self.machine.turns)
                newcomer.id = newcomer.order = TaskId(self._num_tasks)
                self._num_tasks += 1
            try:
                if self.inbox:
                    self._drain_inbox()
                if newcomer is None and type(event) is CopyFinished:
                    source, target = event.source, event.target
                    self.models.record_copy(source.node, target.node, source.handle.spec.nbytes, copied_seconds)
                self._carry_out(self.machine.handle(event), None)
            except BaseException as error:
                self.fail(error)
                raise

    def refuse_circle(self, is_awaited: Callable[[Task], bool], call: str) -> None:
        """Raise `Deadlock` if this thread is about to wait for itself, see `Holds.refuse_circle`."""
        if self.holds.own:
            with self._lock:
                self.holds.refuse_circle(is_awaited, call, self.machine.turns)

    def copied(self, action: CopyTile, start_ns: int, end_ns: int) -> None:
        """Report a copy that a copy engine has finished."""
        source, target = action.source, action.target
        if self.trace is not None and self.trace.active:
            self.trace.add_copy(source.node, target.node, source.handle.spec.name, source.handle.spec.nbytes, start_ns, end_ns, source.handle.id)
        if not self.closing:
            self.bring(CopyFinished(source, target), copied_seconds=(end_ns - start_ns) * 1e-9)

    def attach(self, handle: HandleRecord, source: Source) -> None:
        """Attach the data of a handle to a source.

        Raises:
            ValueError: a task uses the handle, or a recorded step has been replayed with it.
            DoesNotFit: host memory has not enough free bytes for the buffers of readers.
            SchedulerError: the runtime is broken or closed.
        """
        with self._lock:
            if self.waiters.broken is not None:
                raise self.waiters.broken
            if handle.num_uses or handle.use_schedule is not None:
                raise ValueError(
                    f"{handle!r} was attached to a source while a task uses it or after a recorded step was replayed with it; attach it before "
                    "its first use"
                )
            try:
                self._drain_inbox()
                self._carry_out(
                    self.machine.handle(SourceAttached(handle, source, readers_nbytes(handle.spec.size, source, has_gpus=bool(self.pool.gpus)))), None
                )
                self.pool.open_files()
            except DoesNotFit:
                raise  # nothing has changed
            except BaseException as error:
                self.fail(error)
                raise

    def not_copied(self, action: CopyTile, error: BaseException) -> None:
        """Report a copy that failed: a file could not be read, or the disk tier could not be written."""
        self.failures.of_copy(error)
        if not self.closing:
            self.bring(CopyFailed(action.source, action.target, error))

    def fail(self, error: BaseException) -> None:
        """Break the executor: wake every waiting thread with the reason."""
        if not isinstance(error, SchedulerError):  # a SystemExit in the thread of a worker would otherwise end the program silently
            broken = RuntimeBroken(f"{type(error).__name__}: {error}", thread=threading.current_thread().name)
            broken.__cause__ = error
            error = broken
        self.waiters.close(error)

    def take_numbers(self, count: int) -> int:
        """Reserve `count` task numbers; return the first one."""
        with self._lock:
            first = self._num_tasks
            self._num_tasks = first + count
        return first

    def _drain_inbox(self) -> None:
        inbox, machine = self.inbox, self.machine
        while inbox:
            self._carry_out(machine.handle(HandleReleased(inbox.popleft())), None)

    def _carry_out(self, actions: Sequence[Action], me: WorkerId | None) -> Task | None:
        """Execute the actions, and return the task for the calling worker instead of posting it."""
        mine: Task | None = None
        for action in actions:
            if type(action) is not RunTask:
                carry_out(action, self)
            elif mine is None and action.worker == me:
                mine = action.task
            else:
                self.run_task(action)
        if self.machine.conditions.log:
            self.observe_skips()
        stalls = self._stalls
        if stalls.copying or stalls.dispatch.num_blocked or stalls.stalled:  # hot path: a property would add a call per event
            stalls.update(perf_counter_ns())
        reached = self._backlog.reached
        if reached >= 0 and self.machine.num_unfinished <= reached:
            self._backlog.wake()
        return mine

    def run_task(self, action: RunTask) -> None:
        """Post a task to its worker, or grant the program the data that it acquires."""
        if action.worker == HOST:
            self._grant(action.task)
        else:
            self.pool.run(action.task)

    def copy_tile(self, action: CopyTile) -> None:
        """Post a copy to the engine of its link."""
        self.pool.copy(action)

    def move_tile(self, action: MoveTile) -> None:
        """Move data within a node immediately."""
        self.pool.move(action)

    def discard_extent(self, action: DiscardExtent) -> None:
        """Return a part of the disk tier's file to the file system."""
        self.pool.discard(action)

    def report_step_done(self, action: ReportStepDone) -> None:
        """Report the end of a replay to its ticket."""
        self.endings.pop(action.replay)(action.replay.failure)

    def report_failure(self, action: ReportFailure) -> None:
        """Keep the first failure for the next `wait`; for a cancelled acquisition, wake its program."""
        task, failures = action.task, self.failures
        error = failures.of_task(task, action.error)
        if task.step is not None:
            if not isinstance(task.step.failure, SchedulerError):
                task.step.failure = error
        elif isinstance(task.token, Waiter):
            task.token.refusal = error
            self.waiters.wake(task.token)
        elif failures.unreported is None and task.token is None:
            failures.unreported = error

    def start_replay(self, replay: Replay, ending: Callable[[BaseException | None], None]) -> None:
        """Start a replay; `ending` is called with its first error, or None, when it has ended."""
        replay.first_order = self.take_numbers(len(replay.tasks))
        self.endings[replay] = ending
        self.bring(StepStarted(replay))

    def failure_of(self, replay: Replay) -> BaseException | None:
        """Return the first error of a task of a replay, once every event so far has been handled."""
        with self._lock:
            return replay.failure

    def _grant(self, task: Task) -> None:
        """Let the program use the data that it has acquired, or start a task that needs no worker.

        If the program was interrupted meanwhile, the data is released at once.
        """
        codelet = task.spec.codelet
        if codelet is not None:
            views = [self.pool.view_of(replica) for replica in task.replicas]
            codelet.host(partial(self._ended, task), *views, **task.spec.constants)  # type: ignore[attr-defined]
        elif isinstance(task.token, Waiter):
            self.waiters.wake(task.token)
        else:
            self._give_back(task)

    def _ended(self, task: Task, error: BaseException | None) -> None:
        """Report the end of a task of kind "host", unless the executor is closing or broken: the machine then takes no more events."""
        if not self.closing and self.waiters.broken is None:
            with contextlib.suppress(SchedulerError):  # raised if it breaks right now; every waiting thread then gets the reason
                self.bring(TaskFinished(task) if error is None else TaskFailed(task, error))

    def _give_back(self, task: Task) -> None:
        _, mode = task.accesses[0]
        event = TaskFailed(task, KeyboardInterrupt("the program was interrupted before it wrote")) if mode == W else TaskFinished(task)
        self._carry_out(self.machine.handle(event), None)

    def abandon(self, task: Task) -> None:
        """Ensure that no task waits for a program that was interrupted while it waited for `task`."""
        with self._lock:
            if self.waiters.broken is None:
                task.token = ABANDONED
                if task.state == "running":
                    self._give_back(task)

    def wait(self) -> BaseException | None:
        """Wait until no task is left; return the first failure since the last wait, or the stop that no call has reported."""
        self._backlog.wait(0)
        try:
            self.pool.wait_for_gpus()
        except BaseException as error:
            self.fail(error)
            raise
        return self.failures.take() or self.watch.unreported()

    def throttle(self) -> None:
        """Wait until half of the window is free; do not wait if the program holds data, since tasks may wait for it."""
        if not self.machine.program.assigned:
            self._backlog.wait(WINDOW // 2)

    def stats(self, *, forget_recent_peak: bool) -> dict[str, Any]:
        """Return the counters since the start."""
        memory = self.machine.memory
        with self._lock:
            self._stalls.update(perf_counter_ns())
            result = counters_of(memory, self._stalls, self.pool, self.machine.conditions)
            result["seconds"] = perf_counter() - self._started
            if forget_recent_peak:
                memory.begin_recent_peaks()
        return result

    def explain(self, names: Collection[str], count: int) -> Sequence[Placement]:
        """Record the next `count` placements of recorded tasks with these names; the returned list grows as they happen."""
        with self._lock:
            return self.machine.explain(self.models, names, count)

    def validate(self) -> None:
        """Check every invariant of the machine between two events, even while tasks and copies are in progress.

        Raises:
            InvalidEvent: an invariant is violated.
        """
        with self._lock:
            self.machine.validate()

    def story(self, record: HandleRecord | None) -> str:
        """Return the latest events as text: those that concern one handle, or all."""
        with self._lock:
            return self.machine.story(record)

    def close(self) -> None:
        """Stop the threads after their present kernels and copies."""
        if self.closing:
            return
        self.closing = True
        self.pool.stop()
        self._store.save(self.models)
        self.waiters.close(SchedulerError("the runtime is closed"))
        self.endings.clear()
        for replica in self.machine.memory.replicas():
            replica.view = None
        self.pool.close()
