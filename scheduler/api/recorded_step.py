"""The parts of recorded steps that programs use: the `Step` that `record()` yields, and the `Ticket` of each replay; `recording` captures steps.

At most two replays of a step are in progress. Each has its own instance of an output, readable through its ticket until the replay after the next one
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import HandleLost
from ..core.records import HandleRecord, Mode, R, Replay
from ..core.step_plan import StepPlan
from ..execution.waiting import Waiter
from .recording import Recorder, RecordingError
from .task_runtime import Handle, ReleaseInbox

if TYPE_CHECKING:
    from ..planning.choose_order import PlannedOrder


class Replayer(Protocol):
    """The part of a runtime that a step uses to replay itself.

    Attributes:
        inbox: receives the records of released handles.
    """

    inbox: ReleaseInbox

    def plan_step(self, plan: StepPlan, order: str, recompute: str, *, groups: bool) -> PlannedOrder:
        """Plan the named order and the recomputation, and, if `groups`, the tasks that CPU workers run as one."""

    def instantiate(self, plan: StepPlan) -> tuple[Replay, dict[HandleRecord, HandleRecord]]:
        """Create one instance of a recorded step, and a twin of each handle that the step owns."""

    def start_replay(self, replay: Replay, ticket: Ticket) -> None:
        """Start a replay; `ticket` receives its outcome."""

    def failure_of(self, replay: Replay) -> BaseException | None:
        """Return the first error of a replay's tasks since it began; None without one."""

    def waiter(self) -> Waiter:
        """Return a waiter that is woken if the runtime breaks."""

    def wake(self, waiter: Waiter) -> None:
        """Wake the thread that waits on `waiter`."""

    def check_stop(self) -> None:
        """Raise the error that has stopped the run, if any."""

    def refuse_inside(self, call: str) -> None:
        """Raise if a callback of `Runtime.on_task` makes this call."""

    def refuse_circle(self, replay: Replay, done: Waiter, call: str) -> None:
        """Raise if waiting for the end of a replay would deadlock, because a task of it waits for data that this thread holds."""

    def acquire_record(self, record: HandleRecord, mode: Mode, ticket: Ticket | None) -> AbstractContextManager[Any]:
        """Return a context manager with the view of a record's data; `ticket` is the replay whose failure explains lost data."""


class Instance:
    """One of a step's two instances: a replay, and its own twins of the handles created while recording.

    The step and its tickets keep the instance alive; its twins are released with the last of them.

    Attributes:
        reported: the latest failure of its replays that has been raised in the program.
    """

    __slots__ = ("_inbox", "replay", "reported", "twins")

    def __init__(self, runtime: Replayer, plan: StepPlan) -> None:
        self._inbox = runtime.inbox
        self.reported: BaseException | None = None
        self.twins: dict[HandleRecord, HandleRecord] = {}
        self.replay, self.twins = runtime.instantiate(plan)

    def __del__(self) -> None:
        for twin in self.twins.values():
            self._inbox.append(twin)


class Step:
    """A recorded step, which can be replayed any number of times."""

    def __init__(self, runtime: Replayer) -> None:
        self._runtime = runtime
        self.plan: StepPlan | None = None
        self.order: PlannedOrder | None = None
        self._instances: list[Instance] = []
        self._waiters: list[Waiter | None] = [None, None]
        self._number = 0
        self._kept: dict[HandleRecord, Handle] = {}
        self._num_tasks = 0

    def complete(self, recorder: Recorder, order: str, recompute: str, *, groups: bool) -> None:
        """Take the captured tasks and plan their execution.

        Args:
            recorder: the recorder of the tasks.
            order: name of the order of execution.
            recompute: name of the recomputation.
            groups: whether CPU workers may run groups of small tasks as one.
        """
        plan = recorder.finish()
        self.order = self._runtime.plan_step(plan, order, recompute, groups=groups)
        self._num_tasks = self.order.num_tasks
        self.plan = self.order.plan
        self._kept = recorder.kept

    @property
    def num_tasks(self) -> int:
        """Number of tasks per replay; tasks that are fused count one by one."""
        self._planned()
        return self._num_tasks

    @property
    def first_tasks(self) -> list[int]:
        """Number of the first task of each existing instance. Replay k runs instance k mod 2, whose tasks are numbered in the planned order."""
        return [instance.replay.tasks[0].id for instance in self._instances if instance.replay.tasks]

    def replay(self) -> Ticket:
        """Start the next replay and return its ticket at once; waits only while two replays are in flight.

        Raises:
            RecordingError: the block that records the step has not ended.
            RunStopped: the callback of `Runtime.on_task` has stopped the run.
            HandleLost: a failure has lost data that the step shares with the program.
            TaskError, DoesNotFit: a failure has lost such data, and no ticket has raised it yet.
        """
        self._runtime.refuse_inside("replay()")
        self._runtime.check_stop()
        plan = self._planned()
        which = self._number % 2
        waiter = self._waiters[which]
        if waiter is not None:
            self._runtime.refuse_circle(self._instances[which].replay, waiter, "replay(), which allows two replays in progress,")
            waiter.wait()
            self._runtime.check_stop()  # the callback may have stopped the run at one of its tasks
        if which == len(self._instances):
            self._instances.append(Instance(self._runtime, plan))
        instance = self._instances[which]
        for use in instance.replay.shared:
            why = use.handle.lost
            if why is not None and use.needs_data:
                self._raise_unreported()
                raise HandleLost(f"the step reads {use.handle!r}, which is lost because {why}; restore or overwrite it first")
        instance.replay.number = self._number
        ticket = Ticket(self._runtime, instance)
        self._waiters[which] = ticket.done
        self._number += 1
        self._runtime.start_replay(instance.replay, ticket)
        return ticket

    def _raise_unreported(self) -> None:
        """Raise the first failure of an earlier replay, in flight or not, that has not been raised in the program."""
        for instance in sorted(self._instances, key=lambda instance: instance.replay.number):
            failure = self._runtime.failure_of(instance.replay)
            if failure is not None and failure is not instance.reported:
                instance.reported = failure
                raise failure

    def _planned(self) -> StepPlan:
        if self.plan is None:
            raise RecordingError("the step is still being recorded (or recording failed); leave the `with runtime.record()` block first")
        return self.plan


class Ticket:
    """One replay of a step.

    Attributes:
        done: waiter that is woken when all tasks of the replay have ended.
        failure: first failure of the replay; None without one.
        changed_nothing: whether the replay failed before it changed any of the program's data that the step updates, so that it can be skipped.
    """

    def __init__(self, runtime: Replayer, instance: Instance) -> None:
        self.number = instance.replay.number
        self.done = runtime.waiter()
        self.failure: BaseException | None = None
        self.changed_nothing = False
        self._runtime = runtime
        self._instance = instance

    def end(self, failure: BaseException | None) -> None:
        """Note that every task of the replay has ended, with the first failure, if any."""
        self.failure = failure
        self.changed_nothing = failure is not None and self._instance.replay.changed_nothing
        self._runtime.wake(self.done)

    def wait_done(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Wait until every task of the replay has ended, successfully or not; `meanwhile` is called repeatedly while waiting."""
        self._runtime.refuse_inside("the wait of a ticket")
        self._runtime.refuse_circle(self._instance.replay, self.done, "the wait of a ticket")
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
            return self._runtime.acquire_record(record, R, self)
        if twin.released:
            raise RecordingError(f"{handle!r} is not an output of the step: nothing referenced it when the recording ended")
        if self._instance.replay.number != self.number:
            raise RecordingError(f"{handle!r} of replay {self.number} was overwritten by replay {self._instance.replay.number}; read it earlier")
        return self._runtime.acquire_record(twin, R, self)
