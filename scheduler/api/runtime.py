"""The runtime for programs: data handles, tasks, recorded steps, waiting. `execution.executor` has the machine and its threads.

One program thread submits, records and replays; any thread may read through `acquire` and tickets. `submit` waits while too many tasks are
unfinished, so a program that submits in a loop uses bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

from ..core.codelet import Codelet
from ..core.errors import DoesNotFit, TierFailed
from ..core.events import TaskSubmitted
from ..core.memory.eviction_policies import DEFAULT_EVICTION
from ..core.policies import Placement, policy_of
from ..core.records import NEW, HandleRecord, Mode, Task, TaskSpec, WorkerId, WorkerKind
from ..core.step_plan import StepPlan
from ..drivers.callbacks import OnTask
from ..drivers.disk import Source, staging_nbytes
from ..drivers.gpu import Gpu
from ..execution.acquisition import acquired
from ..execution.backlog import WINDOW
from ..execution.executor import Executor
from ..execution.trace import Trace
from ..execution.workers import worker_name
from ..planning.bounds import lower_bounds
from ..planning.evaluation import PlannedOrder
from ..planning.machine_pace import planning_machine
from ..planning.recompute import NONE
from ..storage.limits import memory_budgets, usable_cores, without_staging
from ..storage.tier import DiskTier
from .binding import Binding, bind, check_tasks
from .lanes import Access, Eligible, Handle, Terms
from .placement import Ability, check_policies, check_workers, find_ability, too_large
from .recorded_step import Step
from .recording import RecordingError, RecordingRuntime
from .step_planning import assign_step, fuse_step, plan_step


class Runtime(RecordingRuntime):
    """Workers, memory nodes and a scheduler.

    Args:
        cpu_workers: number of threads that run CPU kernels; None for one per usable core. Zero needs a simulated device.
        sim_gpus: number of simulated devices, each a worker with its own memory.
        gpus: GPUs, instead of simulated devices; closed with the runtime.
        ram: budget of host memory in bytes; None for 0.9 x (limit - resident now).
        gpu_memory: budget of each device in bytes; required for GPUs. None for simulated devices means the budget of host memory, or an equal share
            of the bytes that it leaves.
        sim_bandwidth: bytes per second of each simulated link; None for the speed of memory copies.
        disk: directory of the disk tier, or (directory, size in bytes), with size None for all free space there; None for no disk tier.
        sched: name of a scheduling policy, or "auto".
        evict: name of an eviction policy.
        prefetch: whether data moves ahead of the tasks that need it.
        lanes: L, the number of partial accumulators of REDUX accesses.
        trace: records the start and end of tasks and copies; None for no tracing.
        graphs: whether neighbouring GPU tasks of a recorded step are fused (`fusion.task_fusion`).
        kernels: versions of the libraries whose kernels run; stored durations of other versions are not used.
        watchdog: seconds without an ended task after which a report says once which tasks run, which wait, and why; None for the value of the
            environment variable NNTASK_WATCHDOG, if it is set.
        aside: whether CPU workers run only codelets that devices may not (`Codelet.cpu_only`); tasks of a step then do not run in host memory.
        mixed: whether CPU workers and devices both run the codelets that have kernels for both, by expected end. GPUs round differently, so results
            depend on the schedule; `record(kinds=...)` repeats one.

    Attributes:
        gpus: the GPUs of the runtime.

    Raises:
        ValueError: no worker, an unknown policy, or a budget that is not positive.
        DoesNotFit: the budget of host memory is above what this process may use.
        MemoryError: a GPU has less than its budget.
        OSError: the directory of the disk tier cannot be created or written.
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
        watchdog: float | None = None,
        aside: bool = False,
        mixed: bool = False,
    ) -> None:
        super().__init__(lanes)
        cpu_workers = usable_cores() if cpu_workers is None else cpu_workers
        directory, size = disk if isinstance(disk, tuple) else (disk, None)
        check_workers(cpu_workers, sim_gpus, len(gpus), aside=aside, mixed=mixed)
        check_policies(sched, evict, mixed=mixed)
        _check_budgets({"ram": ram, "gpu_memory": gpu_memory, "disk": size}, has_gpus=bool(gpus))
        ram, simulated = memory_budgets(ram, None if gpus else gpu_memory, sim_gpus)  # a GPU's memory is not RAM
        ram = without_staging(ram, staging_nbytes(len(gpus), has_tier=directory is not None))
        self.gpus, self.has_gpus = list(gpus), bool(gpus)
        self._is_mixed, self._graphs = mixed, graphs and self.has_gpus and not mixed
        if aside:
            self.devices_beside = "cuda" if gpus else "sim"
        devices = [f"cuda:{i}" for i in range(len(gpus))] or [f"sim:{i}" for i in range(sim_gpus)]
        budgets = [("ram", ram), *((name, gpu_memory or simulated) for name in devices)]
        self.policy_name = policy_of(sched, sim_gpus or len(gpus), is_mixed=mixed)
        self._executor = Executor(
            budgets,
            None if directory is None else (DiskTier(directory), size),
            gpus,
            policy=self.policy_name,
            eviction=evict,
            prefetch=prefetch,
            trace=trace,
            kernels=kernels or {},
            watchdog=watchdog,
        )
        self.inbox = self._executor.inbox
        self._abilities: dict[tuple[bool, bool, bool, WorkerId | None], Ability] = {}
        self._executor.start(cpu_workers, sim_gpus, sim_bandwidth, aside=aside)

    def on_task(self, callback: OnTask | None) -> OnTask | None:
        """Call `callback` with each task that finishes from now on; usable as a decorator.

        The worker that ran the task calls it on its own thread and waits for it; several workers may call it at once. Without a callback, a task
        costs one comparison. An exception in the callback stops the run in an orderly way (`drivers.callbacks`). All submitted tasks run; then
        `wait`, and `submit` and `replay` at once, raise `RunStopped`. Data can still be read.

        The callback may read the tiles of its task, and raise. It must not call the runtime: `wait`, `acquire`, `submit`, `replay`, `close` and the
        waits of tickets raise `SchedulerError` on its thread, because they might wait for the worker that waits for the callback.

        Args:
            callback: function that takes a `FinishedTask`, or None to remove the present one; a runtime has one callback at a time. Setting it ends
                an earlier stop.
        """
        self._executor.watch.begin(callback)
        return callback

    def check_stop(self) -> None:
        """Raise the error that has stopped the run, if any.

        Raises:
            RunStopped: the callback of `on_task` has raised.
        """
        self._executor.watch.check()

    @property
    def trace(self) -> Trace | None:
        """The record of tasks and copies; None without tracing."""
        return self._executor.trace

    @property
    def worker_names(self) -> dict[WorkerId, str]:
        """Name of each worker, such as "cpu:0" and "sim:1"."""
        return {worker.id: worker_name(worker) for worker in self._executor.machine.workers}

    @property
    def node_names(self) -> list[str]:
        """Name of each memory node."""
        return list(self._executor.machine.memory.names)

    def acquire(self, handle: Handle, mode: Mode, *, is_shared: bool = False) -> AbstractContextManager[Any]:
        """Wait for the handle's data in host memory, and lock it there for the block: ``with runtime.acquire(h, "R") as view``.

        Args:
            is_shared: whether another thread may end the block; this thread may then wait for tasks that wait for the data.

        Raises:
            HandleLost: the task that writes the data failed, or no task writes it (R and RW).
            DoesNotFit: the data does not fit host memory.
            TierFailed: host memory is full, and the disk tier below takes no more.
            RecordingError: a step is being recorded.
            Deadlock: the data waits for data that this thread holds.
        """
        self._refuse_while_recording(handle.record)
        self._make_whole(handle, mode)
        return acquired(self._executor, handle.record, mode, is_shared=is_shared)

    def _attach(self, handle: Handle, source: Source) -> None:
        if self._recorder is not None:
            raise RecordingError(f"{handle!r} was attached to a source while a step is being recorded", "attach it before")
        self._executor.attach(handle.record, source)

    def _acquire_record(self, record: HandleRecord, mode: Mode, cause: Callable[[], BaseException | None]) -> AbstractContextManager[Any]:
        """Acquire a record for a ticket, as `acquire` does; `cause` returns the failure of its replay."""
        self._refuse_while_recording(record)
        return acquired(self._executor, record, mode, cause=cause)

    def _refuse_while_recording(self, record: HandleRecord) -> None:
        if self._recorder is not None:
            raise RecordingError(f"{record!r} cannot be acquired while a step is being recorded", "read values through the ticket of a replay")

    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Eligible:
        if self._recorder is not None and self._recorder.examines_later:
            return self._eligible(codelet, combines=combines)
        executor = self._executor
        machine = executor.machine
        pin = None
        if not combines:
            if self._pins:
                pin = self._pin()
            if self._recorder is None:
                if executor.watch.inside:
                    executor.watch.refuse_inside("submit()")
                if machine.num_unfinished >= WINDOW:
                    executor.throttle()
                if executor.watch.stop is not None:
                    executor.watch.check()
        key = (codelet.cpu is not None, codelet.cuda is not None, codelet.cpu_only, pin)
        ability = self._abilities.get(key)
        if ability is None:
            ability = self._abilities[key] = find_ability(codelet, machine, pin, is_mixed=self._is_mixed)
        kinds, capacity, _, _ = ability
        nbytes = 0
        for handle, _ in accesses:
            nbytes += handle.spec.size
        if nbytes > capacity:
            raise too_large(codelet, [(handle.record, mode) for handle, mode in accesses], nbytes, ability, machine)
        return kinds, pin

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        if self._recorder is not None:
            self._recorder.enter_task(codelet, accesses, constants, priority, terms)
            return
        kinds, pin, condition = terms
        plain = tuple([(handle.record, mode) for handle, mode in accesses])
        task = Task(NEW, TaskSpec(codelet, codelet.name, kinds, plain, constants, priority, pin, condition), plain)
        self._executor.bring(TaskSubmitted(task), task)

    def wait(self) -> None:
        """Wait until every submitted task is done.

        Raises:
            TaskError: a task failed since the last wait; it names the task and its data, ``__cause__`` is the kernel's exception.
            RunStopped: a callback of `on_task` has stopped the run, and this has not been raised yet.
            Deadlock: this thread holds data.
        """
        self._executor.watch.refuse_inside("wait()")
        self._executor.refuse_circle(lambda task: True, "wait()")
        failure = self._executor.wait()
        if failure is not None:
            raise failure

    @contextmanager
    def record(
        self,
        order: str = "auto",
        recompute: str = NONE,
        *,
        groups: bool = False,
        kinds: Sequence[WorkerKind] | None = None,
        check: Callable[[StepPlan], object] | None = None,
    ) -> Iterator[Step]:
        """Capture the tasks of the block as a step, running nothing.

        Tasks that are fused, as on a GPU, begin only when the data of all of them may be used, and tasks of kind host begin in their order. So a
        program that waits for a result of a step while it holds data that the step writes gets `Deadlock`, even if no task of that result uses it.

        Args:
            order: name of the order of execution: "auto", "submission", or another candidate of `planning.orders`.
            recompute: results to recompute instead of keeping, see `planning.choice.choose_plan`: "none", "auto", "block" or operations.
            groups: whether CPU workers run groups of small tasks as one (`fusion.task_groups`), if there are no other workers and there is memory
                for the step twice. Results do not change.
            kinds: kind of worker that runs each task, as `Step.kinds` has returned it; None for any kind that has a kernel.
            check: function of the captured step that may refuse it by raising, before it is planned. A task that no worker or memory can hold is then
                refused after `check` instead of at its submission.

        Raises:
            RecordingError: another step is being recorded, a captured task reads data that no task writes, or the step has no order of that name, no
                results to recompute by such an operation, or other tasks than `kinds`.
            DoesNotFit, PlacementError, ValueError: a task fits no memory or no worker. Errors of `check` pass through.
        """
        step = self._new_step()
        with self._captured() as recorder:
            recorder.examines_later = check is not None
            yield step
        plan = recorder.finish()
        if check is not None:
            check(plan)
            check_tasks(plan.tasks, self._executor.machine, is_mixed=self._is_mixed)
        planned = assign_step(self._executor, plan_step(self._executor, plan, order, recompute), kinds, is_mixed=self._is_mixed)
        graphs = self._graphs and kinds is None
        step.complete(fuse_step(self._executor, planned, self._record, graphs=graphs, groups=groups), recorder.kept)

    def adopt(
        self, planned: PlannedOrder, symbols: Mapping[str, Binding], data: Mapping[str, Binding], kinds: Sequence[WorkerKind] | None = None
    ) -> Step:
        """Return a step that a `CapturingRuntime` has captured and a planner has ordered, on data of this runtime.

        Args:
            planned: the step, on symbolic handles.
            symbols, data: data that exists before the step, by name: its symbolic handles, and those of this runtime.
            kinds: argument of `record`.

        Raises:
            RecordingError: `symbols`, `data`, `kinds`, the step and the workers disagree (`binding`), or a step is being recorded.
            DoesNotFit: a task of the step exceeds the memory of every worker that may run it.
        """
        step = self._new_step()
        self._combine_all()  # a step neither begins nor ends with partial sums
        check_tasks(planned.plan.tasks, self._executor.machine, is_mixed=self._is_mixed)
        bound = bind(planned.plan, symbols, data)
        planned = assign_step(self._executor, planned, kinds, is_mixed=self._is_mixed)
        graphs = self._graphs and kinds is None
        step.complete(fuse_step(self._executor, planned, self._record, graphs=graphs, groups=False), bound)
        return step

    def _new_step(self) -> Step:
        if self._recorder is not None:
            raise RecordingError("recordings must not nest, and a step is already being recorded", "leave its block first")
        return Step(self._executor, self.clone_record, self._acquire_record)

    def lower_bounds(self, plan: StepPlan, seconds: Sequence[float]) -> dict[str, float]:
        """Return lower bounds in seconds on the time of any schedule of a planned step on this machine, by name of the bound (`planning.bounds`).

        Args:
            seconds: duration of each task, by its position in the planned order.
        """
        machine = planning_machine(self._executor.machine, self._executor.models)
        assert machine.pace is not None  # models are known
        return lower_bounds(plan, seconds, num_workers=len(self.worker_names), memory=machine.memory, pace=machine.pace(plan))

    @property
    def tier_failure(self) -> TierFailed | None:
        """First failure of the disk tier, the reason of later data losses; None without one."""
        return self._executor.failures.tier

    @property
    def source_failure(self) -> BaseException | None:
        """First error of a source, the reason of later data losses; None without one."""
        return self._executor.failures.source

    @property
    def refusal(self) -> DoesNotFit | None:
        """`DoesNotFit` of the first task that no memory could hold, the reason of later losses and cancellations; None without one."""
        return self._executor.failures.refusal

    @property
    def reading_nbytes(self) -> int:
        """Bytes of host memory that readers of the attached sources have."""
        return self._executor.machine.memory.readers_bytes

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """Return counters since the start: bytes per node and link, tasks and recomputing ones among them, evictions, seconds in kernels and stalled
        seconds (`core.stalls`).

        Args:
            forget_recent_peak: whether to start a new period of "recent_peak_bytes".
        """
        return {**self._executor.stats(forget_recent_peak=forget_recent_peak), "policy": self.policy_name}

    def explain(self, names: Collection[str], count: int = 3) -> Sequence[Placement]:
        """Record the next placements of recorded tasks with these names, each with the expected cost on every worker.

        Decisions of the policy stay the same; recording costs nothing unless this is called.

        Args:
            names: names of codelets.
            count: number of placements to record.

        Returns:
            A list that grows to `count` placements while replays run.
        """
        return self._executor.explain(names, count)

    def story(self, handle: Handle | None = None) -> str:
        """Return the latest events of the machine as text: those that concern `handle`, or all."""
        return self._executor.story(None if handle is None else handle.record)

    def close(self) -> None:
        """Stop the workers after their current kernels; other tasks are abandoned. Idempotent."""
        self._executor.watch.refuse_inside("close()")
        self._executor.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()


def _check_budgets(budgets: Mapping[str, int | None], *, has_gpus: bool) -> None:
    for name, budget in budgets.items():
        if budget is not None and (not isinstance(budget, Integral) or budget <= 0):
            raise ValueError(f"{name} must be a positive number of bytes, got {budget!r}; give a whole number such as 1 << 30")
    if has_gpus and budgets["gpu_memory"] is None:
        raise ValueError("GPUs need a budget; give gpu_memory, the bytes of each")
