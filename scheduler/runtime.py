"""The runtime: real workers around the state machine.

Rules. One lock guards the machine. Whoever brings an event (a worker that finished a task, a copy engine, the program) takes the lock, advances
the machine itself and carries out what it asks; nothing waits for a scheduler thread and nothing polls. Finalizers only append to an inbox that
is drained at the next event, because a garbage collection may run while its own thread holds the lock.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from .codelet import Codelet
from .core.errors import HandleLost, SchedulerError, TaskError
from .core.events import (
    CopyFinished,
    CopyTile,
    Event,
    HandleReleased,
    ReportFailure,
    ReportStepDone,
    RunTask,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from .core.machine import Machine
from .core.memory import MemoryNode, rounded
from .core.policies import DEFAULT_POLICY, POLICIES
from .core.records import (
    HOST,
    RAM,
    DataClass,
    HandleId,
    HandleRecord,
    Kind,
    Mode,
    NodeId,
    R,
    Replay,
    Task,
    TaskId,
    W,
    Worker,
    WorkerId,
)
from .core.records import WorkerKind as WorkerKind
from .core.steps import StepPlan
from .drivers.cpu import Inspect, WorkerThread
from .drivers.sim import CopyEngine
from .frontend import Access, Handle, TaskRuntime, View
from .recording import Recorder, RecordingError, Step, Ticket
from .storage import HostArena
from .storage.limits import default_ram_budget
from .trace import Trace

WINDOW: Final = 8192
"""Unrecorded tasks that may be unfinished before `submit` waits."""

SIM_DEPTH: Final = 2
"""Tasks admitted to a simulated device at a time: one runs while the next one's data arrives."""


class Waiter:
    """Something a thread sleeps on until it happens, or until the runtime breaks."""

    __slots__ = ("_event", "error")

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None

    def set(self) -> None:
        """It happened."""
        self._event.set()

    def wait(self) -> None:
        """Sleep until it happened.

        Raises:
            SchedulerError: the runtime broke.
        """
        self._event.wait()
        if self.error is not None:
            raise self.error


class Runtime(TaskRuntime):
    """Workers, memory nodes and a scheduler.

    Args:
        cpu_workers: threads that run kernels; None for one per usable core. Zero needs a simulated device.
        sim_gpus: simulated devices, each a worker with its own memory.
        ram: budget of host memory in bytes; None for 0.9 x (limit - resident now).
        gpu_memory: budget of each simulated device in bytes; None for as much as host memory.
        sim_bandwidth: bytes per second of each simulated link; None for as fast as memory copies.
        sched: a policy's name, or "auto".
        lanes: L of REDUX accesses.
        trace: records what runs when; None for no tracing.
        inspect: called after each kernel with the task's name, views, modes and handle names; what it raises fails the task.

    Raises:
        ValueError: no worker, an unknown policy, or a budget that is not positive.
    """

    def __init__(
        self,
        cpu_workers: int | None = None,
        *,
        sim_gpus: int = 0,
        ram: int | None = None,
        gpu_memory: int | None = None,
        sim_bandwidth: float | None = None,
        sched: str = "auto",
        lanes: int = 1,
        trace: Trace | None = None,
        inspect: Inspect | None = None,
    ) -> None:
        super().__init__(lanes)
        cpu_workers = usable_cores() if cpu_workers is None else cpu_workers
        _check_machine(cpu_workers, sim_gpus, ram, gpu_memory, sched)
        ram = default_ram_budget() if ram is None else ram
        budgets = [("ram", ram)] + [(f"sim:{i}", gpu_memory or ram) for i in range(sim_gpus)]
        self.policy_name = DEFAULT_POLICY if sched == "auto" else sched
        self.inspect = inspect
        self.trace = trace
        self.closing = False
        self.inbox: deque[HandleRecord] = deque()
        self._lock = threading.Lock()
        self._machine = Machine([MemoryNode(name, budget) for name, budget in budgets], POLICIES[self.policy_name]())
        self._arenas = [HostArena(budget) for _, budget in budgets]
        self._threads: dict[WorkerId, WorkerThread] = {}
        self._engines: dict[tuple[NodeId, NodeId], CopyEngine] = {}
        self._ids = itertools.count()
        self._next_task = 0
        self._tickets: dict[Replay, Ticket] = {}
        self._drained: list[Waiter] = []
        self._roomy: list[Waiter] = []
        self._waiters: set[Waiter] = set()
        self._failure: BaseException | None = None
        self._broken: BaseException | None = None
        self._recorder: Recorder | None = None
        self._started = perf_counter()
        self._kinds: set[WorkerKind] = set()
        self._hire(cpu_workers, sim_gpus, sim_bandwidth)

    def _hire(self, cpu_workers: int, sim_gpus: int, bandwidth: float | None) -> None:
        """Start the threads and let the workers join."""
        workers = [Worker(WorkerId(i), "cpu", RAM, depth=1) for i in range(cpu_workers)]
        workers += [Worker(WorkerId(cpu_workers + i), "sim", NodeId(1 + i), depth=SIM_DEPTH) for i in range(sim_gpus)]
        nodes = [RAM, *(NodeId(1 + i) for i in range(sim_gpus))]
        for source, target in itertools.permutations(nodes, 2):
            engine = self._engines[source, target] = CopyEngine(self._arenas, self._copied, bandwidth, f"copy {source}->{target}")
            engine.start()
        for worker in workers:
            name = self.worker_name(worker)
            thread = self._threads[worker.id] = WorkerThread(self, worker, self._arenas[worker.node].memory, name)
            thread.start()
            self._kinds.add(worker.kind)
            self._bring(WorkerJoined(worker))

    # --- the program's side -------------------------------------------------------------------------------------------

    def handle(
        self,
        nbytes: int,
        view: View,
        *,
        name: str = "",
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        combine: Codelet | None = None,
    ) -> Handle:
        """Register data of `nbytes` bytes; no memory is taken before the first task writes it."""
        record = HandleRecord(HandleId(next(self._ids)), nbytes, rounded(nbytes), view, name, kind, data_class)
        handle = Handle(record, nbytes, view, name=name, kind=kind, data_class=data_class, combine=combine, inbox=self.inbox)
        if self._recorder is not None:
            self._recorder.enter_handle(handle)
        return handle

    def clone_record(self, record: HandleRecord) -> HandleRecord:
        """A new record like `record`, without replicas."""
        return HandleRecord(HandleId(next(self._ids)), record.nbytes, record.size, record.view, record.name, record.kind, record.data_class)

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int) -> None:
        kinds = self._kinds_of(codelet)
        if self._recorder is not None:
            self._recorder.enter_task(codelet, kinds, accesses, constants, priority)
            return
        plain = tuple((handle.record, mode) for handle, mode in accesses)
        number = self._next_task
        self._next_task = number + 1
        task = Task(TaskId(number), codelet, codelet.name, kinds, plain, constants, priority, order=number)
        self._bring(TaskSubmitted(task))
        if self._machine.num_unfinished > WINDOW:
            self._wait_for_room()

    def acquire(self, handle: Handle, mode: Mode) -> Any:
        """Wait for the handle's data in host memory and lend it: ``with runtime.acquire(h, "R") as view``.

        Raises:
            HandleLost: the data's producer failed (R and RW).
            RecordingError: a step is being recorded.
        """
        if handle.lanes is not None:
            self._combine(handle, keep=mode != W)
        if mode != R:
            handle.written = True
        return self.acquire_record(handle.record, mode, None)

    @contextmanager
    def acquire_record(self, record: HandleRecord, mode: Mode, ticket: Ticket | None) -> Iterator[Any]:
        """`acquire` for the runtime's own record; `ticket` is the replay whose failure would explain lost data."""
        if self._recorder is not None:
            raise RecordingError(f"{record!r} was asked for while a step is being recorded; read values through the ticket of a replay")
        ready = self.waiter()
        task = Task(TaskId(self._next_task), None, "program", ("host",), ((record, mode),), {}, order=self._next_task, token=ready)
        self._next_task += 1
        self._bring(TaskSubmitted(task))
        ready.wait()
        if task.state != "running":
            cause = ticket.failure if ticket is not None and ticket.failure is not None else None
            raise HandleLost(f"{record!r} cannot be read: {record.lost or 'nothing has written it'}") from cause
        try:
            replica = task.replicas[0]
            if replica.view is None:
                replica.view = record.view(self._arenas[RAM].memory, replica.offset)  # type: ignore[operator]
            yield replica.view
        finally:
            self._bring(TaskFinished(task))

    def wait(self) -> None:
        """Wait until every submitted task is done.

        Raises:
            TaskError: a task failed since the last wait; it names the task and its data, ``__cause__`` is the kernel's exception.
        """
        waiter = self.waiter()
        with self._lock:
            if self._machine.num_unfinished:
                self._drained.append(waiter)
            else:
                waiter.set()
        waiter.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def recording(self) -> bool:
        """Whether tasks are being captured instead of run."""
        return self._recorder is not None

    @contextmanager
    def record(self) -> Iterator[Step]:
        """Capture the tasks of the block as a step, running nothing.

        Raises:
            RecordingError: another step is being recorded, or the captured tasks read data nobody writes.
        """
        if self._recorder is not None:
            raise RecordingError("a step is already being recorded; recordings do not nest")
        step = Step(self)
        recorder = self._recorder = Recorder(self)
        try:
            yield step
        finally:
            self._recorder = None
        step.plan = recorder.finish()

    def instantiate(self, plan: StepPlan) -> tuple[Replay, dict[HandleRecord, HandleRecord]]:
        """Make one instance of a recorded step."""
        first = self._next_task
        self._next_task += len(plan.tasks)
        return plan.instantiate(self.clone_record, first, 2 * len(plan.tasks))

    def start_replay(self, replay: Replay, ticket: Ticket) -> None:
        """Begin a replay; `ticket` learns how it ends."""
        self._tickets[replay] = ticket
        self._bring(StepStarted(replay))

    def waiter(self) -> Waiter:
        """A waiter that is woken if the runtime breaks."""
        waiter = Waiter()
        if self._broken is not None:
            raise self._broken
        self._waiters.add(waiter)
        return waiter

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """What happened so far: bytes per node and link, tasks, evictions, seconds in kernels.

        Args:
            forget_recent_peak: begin a new period of "recent_peak_bytes".
        """
        machine = self._machine
        with self._lock:
            nodes = machine.nodes
            result: dict[str, Any] = {
                "tasks": sum(thread.num_tasks for thread in self._threads.values()),
                "evictions": machine.num_evictions,
                "moved_bytes": {f"{nodes[a].name}->{nodes[b].name}": n for (a, b), n in machine.moved_bytes.items()},
                "resident_bytes": {node.name: node.used for node in nodes},
                "peak_bytes": {node.name: node.peak for node in nodes},
                "peak_bytes_by_class": {node.name: dict(node.peak_by_class) for node in nodes},
                "recent_peak_bytes": {node.name: node.recent_peak for node in nodes},
                "budget_bytes": {node.name: node.budget for node in nodes},
                "busy_seconds": {self.worker_name(t.worker): t.busy_ns / 1e9 for t in self._threads.values()},
                "seconds": perf_counter() - self._started,
                "policy": self.policy_name,
            }
            if forget_recent_peak:
                for node in nodes:
                    node.forget_recent_peak()
        return result

    def story(self, handle: Handle | None = None) -> str:
        """The last events, or those that touched `handle`."""
        with self._lock:
            return self._machine.story(None if handle is None else handle.record)

    def close(self) -> None:
        """Stop the workers after the kernels they are in; tasks not yet run are abandoned. Idempotent."""
        if self.closing:
            return
        self.closing = True
        for worker in self._threads.values():
            worker.mailbox.put(None)
        for engine in self._engines.values():
            engine.stop()
        threads: list[threading.Thread] = [*self._threads.values(), *self._engines.values()]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self._break(SchedulerError("the runtime is closed"))

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    # --- the machine's side -------------------------------------------------------------------------------------------

    def advance(self, event: TaskFinished | TaskFailed, worker: Worker) -> Task | None:
        """Advance the machine by a worker's event; return the worker's next task, if it has one now."""
        try:
            with self._lock:
                if self.inbox:
                    self._drain_inbox()
                return self._carry_out(self._machine.handle(event), worker.id)
        except BaseException as error:  # a bug of ours: nobody may be left waiting
            self._break(error)
            return None

    def observe(self, worker: Worker, task: Task, start_ns: int, end_ns: int) -> None:
        """Record a task in the trace."""
        trace = self.trace
        if trace is not None and trace.active:
            machine = self._machine
            trace.add_task(worker.id, task.name, task.id, start_ns, end_ns)
            trace.add_counters(end_ns, [node.used for node in machine.nodes], len(machine.policy))

    def _copied(self, action: CopyTile, start_ns: int, end_ns: int) -> None:
        source, target = action.source, action.target
        if self.trace is not None and self.trace.active:
            self.trace.add_copy(source.node, target.node, source.handle.name, source.handle.nbytes, start_ns, end_ns)
        try:
            self._bring(CopyFinished(source, target))
        except BaseException as error:
            self._break(error)

    def _bring(self, event: Event) -> None:
        """Advance the machine by an event of a thread that is not a worker."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self.inbox:
                self._drain_inbox()
            self._carry_out(self._machine.handle(event), None)

    def _drain_inbox(self) -> None:
        inbox, machine = self.inbox, self._machine
        while inbox:
            self._carry_out(machine.handle(HandleReleased(inbox.popleft())), None)

    def _carry_out(self, actions: Sequence[object], me: WorkerId | None) -> Task | None:
        """Do what the machine asks; returns the task for the calling worker instead of posting it."""
        mine: Task | None = None
        for action in actions:
            kind = type(action)
            if kind is RunTask:
                assert isinstance(action, RunTask)
                if action.worker == me and mine is None:
                    mine = action.task
                elif action.worker == HOST:
                    self._tell(action.task)
                else:
                    self._threads[action.worker].mailbox.put(action.task)
            elif kind is CopyTile:
                assert isinstance(action, CopyTile)
                self._engines[action.source.node, action.target.node].mailbox.put(action)
            elif kind is ReportFailure:
                assert isinstance(action, ReportFailure)
                self._note_failure(action)
            else:
                assert isinstance(action, ReportStepDone)
                ticket = self._tickets.pop(action.replay)
                ticket.failure = action.replay.failure
                ticket.done.set()
                self._waiters.discard(ticket.done)
        remaining = self._machine.num_unfinished
        if self._drained and not remaining:
            self._wake(self._drained)
        if self._roomy and remaining <= WINDOW // 2:
            self._wake(self._roomy)
        return mine

    def _tell(self, task: Task) -> None:
        waiter = task.token
        assert isinstance(waiter, Waiter)
        self._waiters.discard(waiter)
        waiter.set()

    def _wake(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            self._waiters.discard(waiter)
            waiter.set()
        waiters.clear()

    def _note_failure(self, action: ReportFailure) -> None:
        """Keep the first failure for whoever waits; a cancelled acquisition wakes its program."""
        task, error = action.task, action.error
        if not isinstance(error, SchedulerError):
            data = ", ".join(f"{mode} {handle.name or handle.id}" for handle, mode in task.accesses)
            named = TaskError(f"kernel {task.name!r} (task {task.id}) over {data} raised {type(error).__name__}: {error}")
            named.__cause__ = error
            error = named
        if task.step is not None:
            if not isinstance(task.step.failure, SchedulerError):
                task.step.failure = error
        elif task.token is not None:
            self._tell(task)
        elif self._failure is None:
            self._failure = error

    def _wait_for_room(self) -> None:
        waiter = self.waiter()
        with self._lock:
            if self._machine.num_unfinished <= WINDOW // 2:
                return
            self._roomy.append(waiter)
        waiter.wait()

    def _break(self, error: BaseException) -> None:
        """Something is wrong with the runtime itself: wake everybody with the reason."""
        if self._broken is None:
            self._broken = error
        for waiter in list(self._waiters):
            waiter.error = self._broken
            waiter.set()

    def _kinds_of(self, codelet: Codelet) -> tuple[WorkerKind, ...]:
        """Worker kinds that can run the codelet.

        Raises:
            ValueError: no worker of this runtime can.
        """
        kinds: tuple[WorkerKind, ...] = ("cpu", "sim") if codelet.cpu is not None else ()
        if codelet.cuda is not None:
            kinds = (*kinds, "cuda")
        if not self._kinds.intersection(kinds):
            raise ValueError(f"{codelet!r} runs on {', '.join(kinds) or 'nothing'}, and there are only {', '.join(sorted(self._kinds))} workers")
        return kinds

    @staticmethod
    def worker_name(worker: Worker) -> str:
        """A worker's name in reports: "cpu:0", "sim:1"."""
        return f"cpu:{worker.id}" if worker.kind == "cpu" else f"{worker.kind}:{worker.node - 1}"


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_machine(cpu_workers: int, sim_gpus: int, ram: int | None, gpu_memory: int | None, sched: str) -> None:
    if cpu_workers < 0 or sim_gpus < 0 or cpu_workers + sim_gpus == 0:
        raise ValueError(f"a runtime needs at least one worker, got {cpu_workers} CPU workers and {sim_gpus} simulated devices")
    if sched != "auto" and sched not in POLICIES:
        raise ValueError(f"unknown scheduling policy {sched!r}; there are auto, {', '.join(POLICIES)}")
    for name, budget in (("ram", ram), ("gpu_memory", gpu_memory)):
        if budget is not None and budget <= 0:
            raise ValueError(f"{name} must be a positive number of bytes, got {budget}")
