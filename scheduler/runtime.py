"""The runtime as programs see it: data handles, tasks, recorded steps, waiting. The machine and its threads are in `engine`.

Rules. One program thread submits, records and replays; any thread may read through `acquire` and tickets. Submitting waits when too many tasks
are unfinished, so a loop that submits forever uses bounded memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from .bounds import lower_bounds
from .codelet import Codelet
from .core.errors import DoesNotFit, HandleLost, TierFailed
from .core.events import TaskFailed, TaskFinished, TaskSubmitted
from .core.eviction import DEFAULT_EVICTION, EVICTION_POLICIES
from .core.memory import rounded
from .core.policies import POLICIES, Placement, choose
from .core.records import RAM, HandleId, HandleRecord, Mode, R, Replay, Task, TaskId, Worker, WorkerId
from .core.steps import StepPlan
from .crew import worker_name
from .drivers.cpu import usable_cores
from .drivers.disk import THREADS, Source, staging_nbytes
from .drivers.gpu import Gpu
from .engine import WINDOW, Engine
from .frontend import Access, Handle, Terms
from .ordering import PlannedOrder, plan_order, reach_of
from .placing import Ability, find_ability, too_large
from .recording import Recorder, RecordingError, RecordingRuntime, Step, Ticket
from .storage import DiskTier
from .storage.device import STAGE_NBYTES
from .storage.limits import memory_budgets
from .stretches import Block, stretched_to_fit
from .trace import Trace
from .waiting import Waiter
from .watching import OnTask

NEW: Final = TaskId(-1)
"""Id of a task that has not been submitted yet."""


class Runtime(RecordingRuntime):
    """Workers, memory nodes and a scheduler.

    Args:
        cpu_workers: threads that run kernels; None for one per usable core. Zero needs a simulated device.
        sim_gpus: simulated devices, each a worker with its own memory.
        gpus: real ones, instead of simulated ones; closed with the runtime.
        ram: budget of host memory in bytes; None for 0.9 x (limit - resident now).
        gpu_memory: budget of each device in bytes; of simulated ones None for as much as host memory, or what that leaves.
        sim_bandwidth: bytes per second of each simulated link; None for as fast as memory copies.
        disk: directory of the disk tier, or it and the tier's size in bytes (default: what is free there); None for no disk tier.
        sched: a policy's name, or "auto".
        evict: an eviction policy's name.
        prefetch: whether data moves ahead of the tasks that ask for it.
        lanes: L of REDUX accesses.
        trace: records what runs when; None for no tracing.
        graphs: whether tasks that follow each other on a GPU, in a recorded step that fits it, run as one (see `stretches`).
        kernels: versions of what computes; durations that earlier runs have measured with others are not used.

    Attributes:
        gpus: as given.

    Raises:
        ValueError: no worker, an unknown policy, or a budget that is not positive.
        DoesNotFit: the budget of host memory is above what this process may use.
        MemoryError: a GPU has less than its budget.
        OSError: the directory of the disk tier cannot be made or written.
    """

    def __init__(
        self,
        cpu_workers: int | None = None,
        *,
        sim_gpus: int = 0,
        gpus: Sequence[Gpu] = (),
        ram: int | None = None,
        gpu_memory: int | None = None,
        sim_bandwidth: float | None = None,
        disk: str | Path | tuple[str | Path, int | None] | None = None,
        sched: str = "auto",
        evict: str = DEFAULT_EVICTION,
        prefetch: bool = True,
        lanes: int = 1,
        trace: Trace | None = None,
        graphs: bool = True,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(lanes)
        cpu_workers = usable_cores() if cpu_workers is None else cpu_workers
        place, size = disk if isinstance(disk, tuple) else (disk, None)
        if gpus and sim_gpus:
            raise ValueError(f"devices must be real or simulated, got {len(gpus)} and {sim_gpus}; leave one kind out")
        _check_machine(cpu_workers, sim_gpus or len(gpus), {"ram": ram, "gpu_memory": gpu_memory, "disk": size}, sched, evict)
        if gpus and gpu_memory is None:
            raise ValueError("GPUs need a budget; give gpu_memory, the bytes of each")
        ram, simulated = memory_budgets(ram, None if gpus else gpu_memory, sim_gpus)  # those of real ones are no RAM
        ram -= staging_nbytes(len(gpus), has_tier=place is not None)
        if ram <= 0:
            raise DoesNotFit(f"the budget of host memory is below the {THREADS * STAGE_NBYTES:,} B between the disk and GPUs; raise it", "ram")
        self.gpus = list(gpus)
        self.has_gpus = bool(gpus)
        self._graphs = graphs and self.has_gpus
        devices = [f"cuda:{i}" for i in range(len(gpus))] or [f"sim:{i}" for i in range(sim_gpus)]
        budgets = [("ram", ram), *((name, gpu_memory or simulated) for name in devices)]
        self.policy_name = choose(sim_gpus or len(gpus)) if sched == "auto" else sched
        self._engine = Engine(
            budgets,
            None if place is None else (DiskTier(place), size),
            gpus,
            policy=self.policy_name,
            eviction=evict,
            prefetch=prefetch,
            trace=trace,
            kernels=kernels or {},
        )
        self.inbox = self._engine.inbox
        self._abilities: dict[tuple[bool, bool, WorkerId | None], Ability] = {}
        self._engine.hire(cpu_workers, sim_gpus, sim_bandwidth)

    def on_task(self, callback: OnTask | None) -> OnTask | None:
        """Show each task that finishes from now on to `callback`; also a decorator.

        It is called on the thread of the worker that ran the task, by several at a time, and the worker waits for it; without a callback a task
        pays one comparison. What it raises stops the run in an orderly way (see `watching`): everything submitted so far runs, then `wait`, and
        `submit` and `replay` at once, raise `RunStopped`; data can still be read.

        The callback may look at the tiles of its task and raise. It must not call back: `wait`, `acquire`, `submit`, `replay`, `close` and the waits
        of tickets raise `SchedulerError` on its thread, because the worker they may wait for waits for the callback.

        Args:
            callback: takes a `FinishedTask`; there is one at a time. None for nobody. Setting it ends an earlier stop.
        """
        self._engine.watch.begin(callback)
        return callback

    def check_stop(self) -> None:
        """Raise what has stopped the run, if anything has.

        Raises:
            RunStopped: the callback of `on_task` has raised.
        """
        self._engine.watch.check()

    def refuse_inside(self, call: str) -> None:
        """Raise if a callback of `on_task` has called this.

        Raises:
            SchedulerError: it has.
        """
        self._engine.watch.refuse_inside(call)

    @property
    def trace(self) -> Trace | None:
        """Records what runs when."""
        return self._engine.trace

    @property
    def worker_names(self) -> dict[WorkerId, str]:
        """Name of each worker, such as "cpu:0" and "sim:1"."""
        return {worker.id: worker_name(worker) for worker in self._engine.machine.dispatch.crew}

    @property
    def node_names(self) -> list[str]:
        """Name of each memory node."""
        return [node.name for node in self._engine.machine.nodes]

    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Wait for the handle's data in host memory and lend it: ``with runtime.acquire(h, "R") as view``.

        Raises:
            HandleLost: the data's producer failed, or there is none (R and RW).
            DoesNotFit: the data does not fit host memory.
            TierFailed: there is no room in host memory, and the disk tier below takes no more.
            RecordingError: a step is being recorded.
        """
        self._refuse_while_recording(handle.record)
        self._make_whole(handle, mode)
        return self.acquire_record(handle.record, mode, None)

    def _attach(self, handle: Handle, source: Source) -> None:
        if self._recorder is not None:
            raise RecordingError(f"{handle!r} was attached to a source while a step is being recorded; attach it before")
        self._engine.attach(handle.record, source)

    @contextmanager
    def acquire_record(self, record: HandleRecord, mode: Mode, ticket: Ticket | None) -> Iterator[Any]:
        """`acquire` for the runtime's own record; `ticket` is the replay whose failure would explain lost data."""
        self._refuse_while_recording(record)
        engine = self._engine
        engine.watch.refuse_inside("acquire()")
        ready = engine.room.enter()
        task = Task(NEW, None, "program", ("host",), ((record, mode),), {}, token=ready)
        try:
            engine.bring(TaskSubmitted(task), task)
            ready.wait()
            if task.state != "running":
                raise self._refusal(ready, record, ticket)
            view = engine.crew.view_of(task.replicas[0])
        except BaseException:
            engine.room.leave(ready)
            engine.abandon(task)
            raise
        try:
            yield view
        except BaseException as error:
            engine.bring(TaskFinished(task) if mode == R else TaskFailed(task, error))  # what is half written is lost
            raise
        engine.bring(TaskFinished(task))

    @staticmethod
    def _refusal(ready: Waiter, record: HandleRecord, ticket: Ticket | None) -> Exception:
        """Why the program cannot have the data."""
        if isinstance(ready.refusal, DoesNotFit | TierFailed):
            return ready.refusal
        error = HandleLost(f"{record!r} cannot be read: {record.lost or 'nothing has written it; write it first'}")
        told = ready.refusal.__cause__ if ready.refusal is not None else None
        error.__cause__ = told or (ticket.failure if ticket is not None else None)
        return error

    def _refuse_while_recording(self, record: HandleRecord) -> None:
        if self._recorder is not None:
            raise RecordingError(f"{record!r} was asked for while a step is being recorded; read values through the ticket of a replay")

    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Terms:
        engine = self._engine
        machine = engine.machine
        pin = None
        if not combines:
            if self._placed:
                pin = self._pin()
            if self._recorder is None:
                if engine.watch.inside:
                    engine.watch.refuse_inside("submit()")
                if machine.num_unfinished >= WINDOW:
                    engine.wait_for_room()
                if engine.watch.stop is not None:
                    engine.watch.check()
        key = (codelet.cpu is not None, codelet.cuda is not None, pin)
        ability = self._abilities.get(key)
        if ability is None:
            ability = self._abilities[key] = find_ability(codelet, machine, pin)
        kinds, capacity, _, _ = ability
        nbytes = 0
        for handle, _ in accesses:
            nbytes += handle.record.size
        if nbytes > capacity:
            raise too_large(codelet, accesses, nbytes, ability, machine)
        return kinds, pin

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        kinds, pin = terms
        if self._recorder is not None:
            self._recorder.enter_task(codelet, kinds, accesses, constants, priority, pin)
            return
        plain = tuple([(handle.record, mode) for handle, mode in accesses])
        task = Task(NEW, codelet, codelet.name, kinds, plain, constants, priority)
        if pin is not None:
            task.pin = pin
        self._engine.bring(TaskSubmitted(task), task)

    def wait(self) -> None:
        """Wait until every submitted task is done.

        Raises:
            TaskError: a task failed since the last wait; it names the task and its data, ``__cause__`` is the kernel's exception.
            RunStopped: a callback of `on_task` has stopped the run, and the program has not been told.
        """
        self.refuse_inside("wait()")
        failure = self._engine.wait()
        if failure is not None:
            raise failure

    @contextmanager
    def record(self, order: str = "auto") -> Iterator[Step]:
        """Capture the tasks of the block as a step, running nothing.

        Args:
            order: in which its tasks execute: "auto", "submission", or another candidate of `core.orders`.

        Raises:
            RecordingError: another step is being recorded, the captured tasks read data nobody writes, or the step has no order of that name.
        """
        if self._recorder is not None:
            raise RecordingError("a step is already being recorded; recordings do not nest")
        self._combine_all()
        step = Step(self)
        recorder = self._recorder = Recorder(self)
        try:
            yield step
            self._combine_all()
        finally:
            self._recorder = None
        step.complete(recorder, order)

    def plan_order(self, plan: StepPlan, order: str) -> PlannedOrder:
        """The order of that name in which a recorded step will execute here.

        Raises:
            RecordingError: the step has no order of the name that was asked for.
        """
        nodes, last, readers = self._engine.machine.nodes, self._engine.machine.residency.last, self._engine.machine.residency.readers_bytes
        reach = reach_of(self._engine.machine, self._engine.models)
        try:
            found = plan_order(
                plan,
                order,
                memory=reach.memory,
                last=nodes[last].budget - (readers if last == RAM else 0),
                computes_on_last=self._engine.machine.computes_on_last,
                num_devices=len(reach.places) if self._engine.machine.policy.keeps_parts and RAM not in reach.places else 1,
                pace=reach.pace,
            )
        except ValueError as error:
            raise RecordingError(str(error)) from error
        if not self._graphs or self._engine.watch.callback is not None:  # who watches wants to see single tasks
            return found
        return stretched_to_fit(found, [node.budget for node in nodes if node.name.startswith("cuda")], self._inner_record)

    def _inner_record(self, nbytes: int, view: Block) -> HandleRecord:
        """Of the scratch memory of a stretch."""
        return HandleRecord(HandleId(next(self._handle_ids)), nbytes, rounded(nbytes), view, "inner data", "temporary", "scratch")

    def lower_bounds(self, plan: StepPlan, seconds: Sequence[float]) -> dict[str, float]:
        """Seconds that no schedule of a step falls below here, by bound (`scheduler.bounds`), from the seconds of each task of its plan."""
        reach = reach_of(self._engine.machine, self._engine.models)
        return lower_bounds(plan, seconds, num_workers=len(self.worker_names), memory=reach.memory, pace=reach.pace(plan))

    def instantiate(self, plan: StepPlan) -> tuple[Replay, dict[HandleRecord, HandleRecord]]:
        """Make one instance of a recorded step."""
        first_id = self._engine.take_numbers(len(plan.tasks))
        return plan.instantiate(self.clone_record, first_id, computes_on_last=self._engine.machine.computes_on_last)

    def waiter(self) -> Waiter:
        """A waiter that is woken if the runtime breaks."""
        return self._engine.room.enter()

    def wake(self, waiter: Waiter) -> None:
        """What the waiter stands for happened."""
        self._engine.room.wake(waiter)

    def start_replay(self, replay: Replay, ticket: Ticket) -> None:
        """Begin a replay; `ticket` learns how it ends."""
        self._engine.start_replay(replay, ticket.end)

    def failure_of(self, replay: Replay) -> BaseException | None:
        """The first error of a task of a replay, in flight or not, since it began."""
        return self._engine.failure_of(replay)

    @property
    def tier_failure(self) -> TierFailed | None:
        """The first failure of the disk tier, which explains whatever data is lost since."""
        return self._engine.tier_failure

    @property
    def source_failure(self) -> BaseException | None:
        """What the first source that failed has raised, which explains the data that is lost since."""
        return self._engine.source_failure

    @property
    def refusal(self) -> DoesNotFit | None:
        """The first task that found no room, which explains what is lost and cancelled since."""
        return self._engine.refusal

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """What happened so far: bytes per node and link, tasks, evictions, seconds in kernels and stalled (see `core.stalls`).

        Args:
            forget_recent_peak: begin a new period of "recent_peak_bytes".
        """
        return {**self._engine.stats(forget_recent_peak=forget_recent_peak), "policy": self.policy_name}

    def explain(self, names: Collection[str], count: int = 3) -> Sequence[Placement]:
        """Why workers got the tasks they got: the next placements of recorded tasks of these names, with what every worker would have cost.

        Costs nothing until it is called, and the policy decides as without it.

        Returns:
            A list that grows to `count` placements while replays run.
        """
        return self._engine.explain(names, count)

    def story(self, handle: Handle | None = None) -> str:
        """The last events, or those that touched `handle`."""
        return self._engine.story(None if handle is None else handle.record)

    def close(self) -> None:
        """Stop the workers after the kernels they are in; tasks not yet run are abandoned. Idempotent."""
        self.refuse_inside("close()")
        self._engine.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    @staticmethod
    def worker_name(worker: Worker) -> str:
        """A worker's name in reports: "cpu:0", "sim:1"."""
        return worker_name(worker)


def _check_machine(cpu_workers: int, sim_gpus: int, budgets: Mapping[str, int | None], sched: str, evict: str) -> None:
    if cpu_workers < 0 or sim_gpus < 0 or cpu_workers + sim_gpus == 0:
        raise ValueError(f"a runtime needs at least one worker, got {cpu_workers} CPU workers and {sim_gpus} simulated devices")
    if sched != "auto" and sched not in POLICIES:
        raise ValueError(f"unknown scheduling policy {sched!r}; there are auto, {', '.join(POLICIES)}")
    if evict not in EVICTION_POLICIES:
        raise ValueError(f"unknown eviction policy {evict!r}; there are {', '.join(EVICTION_POLICIES)}")
    for name, budget in budgets.items():
        if budget is not None and budget <= 0:
            raise ValueError(f"{name} must be a positive number of bytes, got {budget}")
