"""The parts of recorded steps that programs use: the `Step` that `record()` yields, and the `Ticket` of each replay; `recording` captures steps.

At most two replays of a step are in progress. Each has its own instance of an output, readable through its ticket until the replay after the next one
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..core.errors import HandleLost
from ..core.records import HandleRecord, Mode, R, Replay, WorkerKind
from ..core.step_plan import Clone, StepPlan
from ..execution.executor import Executor
from ..execution.waiting import Waiter
from ..planning.evaluation import PlannedOrder
from .lanes import Handle
from .recording import RecordingError

Acquire = Callable[[HandleRecord, Mode, Callable[[], BaseException | None]], AbstractContextManager[Any]]
"""Function that acquires a record for a ticket; the last argument returns the failure that explains lost data."""


class Instance:
    """One of a step's two instances: a replay, and its own twins of the handles created while recording.

    The step and its tickets keep the instance alive; its twins are released with the last of them.

    Attributes:
        reported: the latest failure of its replays that has been raised in the program.
    """

    __slots__ = ("_inbox", "replay", "reported", "twins")

    def __init__(self, executor: Executor, plan: StepPlan, clone: Clone, kept: Mapping[HandleRecord, Handle]) -> None:
        self._inbox = executor.inbox
        self.reported: BaseException | None = None
        self.twins: dict[HandleRecord, HandleRecord] = {}
        first_id = executor.take_numbers(len(plan.tasks))
        bound = {record: handle.record for record, handle in kept.items()}
        self.replay, self.twins = plan.instantiate(clone, first_id, computes_on_last=executor.machine.computes_on_last, bound=bound)

    def __del__(self) -> None:
        for twin in self.twins.values():
            self._inbox.append(twin)


class Step:
    """A recorded step, which can be replayed any number of times."""

    def __init__(self, executor: Executor, clone: Clone, acquire: Acquire) -> None:
        self._executor = executor
        self._clone = clone
        self._acquire = acquire
        self.plan: StepPlan | None = None
        self.order: PlannedOrder | None = None
        self._instances: list[Instance] = []
        self._waiters: list[Waiter | None] = [None, None]
        self._number = 0
        self._kept: Mapping[HandleRecord, Handle] = {}
        self._num_tasks = 0

    def complete(self, order: PlannedOrder, kept: Mapping[HandleRecord, Handle]) -> None:
        """Take the planned tasks, and the program's handles that they use, which the step keeps alive.

        Args:
            kept: the program's handle for each record in the tasks that is not the step's own; the record may be symbolic (`binding`).
        """
        self.order, self._kept = order, kept
        self.plan, self._num_tasks = order.plan, order.num_tasks

    @property
    def num_tasks(self) -> int:
        """Number of tasks per replay; tasks that are fused count one by one."""
        self._planned()
        return self._num_tasks

    @property
    def first_tasks(self) -> list[int]:
        """Number of the first task of each existing instance. Replay k runs instance k mod 2, whose tasks are numbered in the planned order."""
        return [instance.replay.tasks[0].id for instance in self._instances if instance.replay.tasks]

    @property
    def kinds(self) -> list[WorkerKind]:
        """Kind of worker that ran each task of the latest replay, by position in the planned order; `Runtime.record` takes it.

        Raises:
            RecordingError: the latest replay has not ended or has failed, or there was none.
        """
        latest = max(self._instances, key=lambda instance: instance.replay.number, default=None)
        if latest is None or latest.replay.num_unfinished or latest.replay.failure is not None:
            raise RecordingError("the kinds of workers are known when the latest replay of a step has ended", "wait for its ticket first")
        kinds = {worker.id: worker.kind for worker in (*self._executor.machine.workers, self._executor.machine.program)}
        return [kinds[task.worker] for task in latest.replay.tasks]

    def replay(self) -> Ticket:
        """Start the next replay and return its ticket at once; waits only while two replays are in flight.

        Raises:
            RecordingError: the block that records the step has not ended.
            RunStopped: the callback of `Runtime.on_task` has stopped the run.
            HandleLost: a failure has lost data that the step shares with the program.
            TaskError, DoesNotFit: a failure has lost such data, and no ticket has raised it yet.
        """
        executor = self._executor
        executor.watch.refuse_inside("replay()")
        executor.watch.check()
        plan = self._planned()
        which = self._number % 2
        waiter = self._waiters[which]
        if waiter is not None:
            _refuse_circle(executor, self._instances[which].replay, waiter, "replay(), which allows two replays in progress,")
            waiter.wait()
            executor.watch.check()  # the callback may have stopped the run at one of its tasks
        if which == len(self._instances):
            self._instances.append(Instance(executor, plan, self._clone, self._kept))
        instance = self._instances[which]
        for use in instance.replay.shared:
            why = use.handle.lost
            if why is not None and use.needs_data:
                self._raise_unreported()
                raise HandleLost(repr(use.handle), why, is_step=True)
        instance.replay.number = self._number
        ticket = Ticket(executor, instance, self._acquire)
        self._waiters[which] = ticket.done
        self._number += 1
        executor.start_replay(instance.replay, ticket.end)
        return ticket

    def _raise_unreported(self) -> None:
        """Raise the first failure of an earlier replay, in flight or not, that has not been raised in the program."""
        for instance in sorted(self._instances, key=lambda instance: instance.replay.number):
            failure = self._executor.failure_of(instance.replay)
            if failure is not None and failure is not instance.reported:
                instance.reported = failure
                raise failure

    def _planned(self) -> StepPlan:
        if self.plan is None:
            raise RecordingError("the step is still being recorded (or recording failed)", "leave the `with runtime.record()` block first")
        return self.plan


class Ticket:
    """One replay of a step.

    Attributes:
        done: waiter that is woken when all tasks of the replay have ended.
        failure: first failure of the replay; None without one.
        changed_nothing: whether the replay failed before it changed any of the program's data that the step updates, so that it can be skipped.
    """

    def __init__(self, executor: Executor, instance: Instance, acquire: Acquire) -> None:
        self.number = instance.replay.number
        self.done = executor.waiters.enter()
        self.failure: BaseException | None = None
        self.changed_nothing = False
        self._executor = executor
        self._instance = instance
        self._acquire = acquire

    def end(self, failure: BaseException | None) -> None:
        """Note that every task of the replay has ended, with the first failure, if any."""
        self.failure = failure
        self.changed_nothing = failure is not None and self._instance.replay.changed_nothing
        self._executor.waiters.wake(self.done)

    def wait_done(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Wait until every task of the replay has ended, successfully or not; `meanwhile` is called repeatedly while waiting."""
        self._executor.watch.refuse_inside("the wait of a ticket")
        _refuse_circle(self._executor, self._instance.replay, self.done, "the wait of a ticket")
        self.done.wait(meanwhile)

    def wait(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Wait until every task of the replay has ended.

        Args:
            meanwhile: function that is called repeatedly while waiting.

        Raises:
            TaskError: a task of the replay failed.
        """
        self.wait_done(meanwhile)
        if self.failure is not None:
            self._instance.reported = self.failure
            raise self.failure

    def read(self, data: Any) -> Any:
        """Return a copy of the value that this replay gives to an output, or of the present value of persistent data.

        Args:
            data: a handle, or an object with ``gather(borrow)`` such as a tile tensor; `borrow` returns a context manager with the view of a handle.

        Raises:
            HandleLost: the replay failed before it wrote the data; ``__cause__`` is the failure.
            RecordingError: the handle died inside the step, or a later replay has overwritten it.
        """
        if isinstance(data, Handle):
            with self.borrow(data) as view:
                return view.copy()
        return data.gather(self.borrow)

    def borrow(self, handle: Handle) -> Any:
        """Acquire this replay's instance of an output for reading, as `Runtime.acquire(handle, "R")` does."""
        record = handle.record
        twin = self._instance.twins.get(record)
        if twin is None:
            return self._acquire(record, R, lambda: self.failure)
        if twin.released:
            raise RecordingError(f"{handle!r} is not an output of the step: nothing referenced it when the recording ended")
        if self._instance.replay.number != self.number:
            raise RecordingError(f"{handle!r} of replay {self.number} was overwritten by replay {self._instance.replay.number}", "read it earlier")
        return self._acquire(twin, R, lambda: self.failure)


def _refuse_circle(executor: Executor, replay: Replay, done: Waiter, call: str) -> None:
    """Raise `Deadlock` if waiting for the end of a replay would never end, because a task of it waits for data that this thread holds."""
    if not done.is_set:
        executor.refuse_circle(lambda task: task.step is replay, call)
