"""What a program sees of recorded steps: the recorder inside `record()`, the `Step` it yields, and the `Ticket` of each replay.

At most two replays of a step are in flight. Inputs (handles of kind "input") are copied into the step by its very first tasks, so the program
may write the next batch while a replay still runs. A handle made while recording that Python still references when the block ends is an
output: each replay has its own, readable through its ticket until the replay after the next one starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .codelet import Codelet
from .core.errors import HandleLost, SchedulerError
from .core.records import HandleRecord, Mode, R, Replay, W, WorkerKind
from .core.steps import RecordedTask, StepPlan
from .frontend import Handle

if TYPE_CHECKING:
    from .runtime import Runtime

FIRST: Final = 1 << 40
"""Priority of the copies of inputs: they run as soon as any worker is free."""


class RecordingError(SchedulerError, RuntimeError):
    """Something was asked for that a recorded step cannot do."""


def _copy_bytes(source: Any, target: Any) -> None:
    memoryview(target).cast("B")[:] = memoryview(source).cast("B")


COPY_INPUT: Final = Codelet("copy input", cpu=_copy_bytes)


class Recorder:
    """Collects the tasks submitted while recording."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tasks: list[RecordedTask] = []
        self.created: dict[HandleRecord, weakref.ref[Handle]] = {}
        self.inputs: dict[HandleRecord, HandleRecord] = {}

    def enter_handle(self, handle: Handle) -> None:
        """Note a handle made while recording; persistent ones belong to the program, not to the step."""
        if handle.kind != "persistent":
            self.created[handle.record] = weakref.ref(handle)

    def enter_task(
        self,
        codelet: Codelet,
        kinds: tuple[WorkerKind, ...],
        accesses: Sequence[tuple[Handle, Mode]],
        constants: Mapping[str, Any],
        priority: int,
    ) -> None:
        """Capture one task."""
        plain = tuple((self._input(handle, mode) if handle.kind == "input" else handle.record, mode) for handle, mode in accesses)
        self.tasks.append(RecordedTask(codelet, codelet.name, kinds, plain, constants, priority))

    def _input(self, handle: Handle, mode: Mode) -> HandleRecord:
        record: HandleRecord = handle.record
        if record in self.created:
            return record
        if mode != R:
            raise RecordingError(f"{handle!r} is an input; a recorded task may only read it (got mode {mode}); copy it first")
        own = self.inputs.get(record)
        if own is None:
            own = self.inputs[record] = self.runtime.clone_record(record)
        return own

    def finish(self) -> StepPlan:
        """The plan of what was captured.

        Raises:
            RecordingError: a task reads a handle of the step that no earlier one wrote.
        """
        copies = [
            RecordedTask(COPY_INPUT, COPY_INPUT.name, ("cpu", "sim"), ((record, R), (own, W)), {}, FIRST) for record, own in self.inputs.items()
        ]
        owned = {record: reference() is not None for record, reference in self.created.items()}
        owned.update(dict.fromkeys(self.inputs.values(), False))
        plan = StepPlan([*copies, *self.tasks], owned)
        for task, record in plan.unwritten():
            raise RecordingError(
                f"{task.name} reads {record!r}, which no earlier task of the step writes; write it inside the step or before recording"
            )
        return plan


class Step:
    """A recorded step; `replay` it as often as you like."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.plan: StepPlan | None = None
        self._replays: list[Replay] = []
        self._twins: list[dict[HandleRecord, HandleRecord]] = []
        self._tickets: list[Ticket | None] = [None, None]
        self._number = 0
        self._outputs: dict[HandleRecord, None] = {}

    @property
    def num_tasks(self) -> int:
        """Tasks per replay."""
        return len(self._planned().tasks)

    def replay(self) -> Ticket:
        """Start the next replay and return at once; waits only while two are in flight.

        Raises:
            RecordingError: the block that records the step has not ended.
            HandleLost: data the step shares with the program was lost by a failure.
        """
        plan = self._planned()
        instance = self._number % 2
        previous = self._tickets[instance]
        if previous is not None:
            previous.wait_done()
        if instance == len(self._replays):
            replay, twins = self._runtime.instantiate(plan)
            self._replays.append(replay)
            self._twins.append(twins)
        replay = self._replays[instance]
        for use in replay.shared:
            if use.handle.lost is not None and use.first_readers:
                raise HandleLost(f"the step reads {use.handle!r}, which is lost because {use.handle.lost}; restore or overwrite it first")
        replay.number = self._number
        ticket = self._tickets[instance] = Ticket(self, self._runtime, replay, self._twins[instance])
        self._number += 1
        self._runtime.start_replay(replay, ticket)
        return ticket

    def _planned(self) -> StepPlan:
        if self.plan is None:
            raise RecordingError("the step is still being recorded (or recording failed); leave the `with runtime.record()` block first")
        return self.plan

    def __del__(self) -> None:
        for twins in getattr(self, "_twins", ()):
            for twin in twins.values():
                self._runtime.inbox.append(twin)


class Ticket:
    """One replay of a step."""

    def __init__(self, step: Step, runtime: Runtime, replay: Replay, twins: dict[HandleRecord, HandleRecord]) -> None:
        self.number = replay.number
        self.done = runtime.waiter()
        self.failure: BaseException | None = None
        self._step = step
        self._runtime = runtime
        self._replay = replay
        self._twins = twins

    def wait_done(self) -> None:
        """Wait until every task of the replay has ended, well or not."""
        self.done.wait()

    def wait(self) -> None:
        """Wait until every task of the replay has ended.

        Raises:
            TaskError: one of them failed.
        """
        self.wait_done()
        if self.failure is not None:
            raise self.failure

    def read(self, data: Any) -> Any:
        """The value of an output (or of persistent data) as this replay leaves it, as a copy.

        Args:
            data: a handle, or anything with ``gather(lend)`` such as a tile tensor; `lend` gives a context manager with the view of a handle.

        Raises:
            TaskError: the replay failed before it wrote the data.
            RecordingError: the handle died inside the step, or a later replay has overwritten it.
        """
        if isinstance(data, Handle):
            with self.lend(data) as view:
                return view.copy()
        return data.gather(self.lend)

    def lend(self, handle: Handle) -> Any:
        """Like `Runtime.acquire(handle, "R")` for this replay's instance of an output."""
        record = handle.record
        twin = self._twins.get(record)
        if twin is None:
            return self._runtime.acquire_record(record, R, self)
        if twin.released:
            raise RecordingError(f"{handle!r} is not an output of the step: nothing referenced it when the recording ended")
        if self._replay.number != self.number:
            raise RecordingError(f"{handle!r} of replay {self.number} was overwritten by replay {self._replay.number}; read it earlier")
        return self._runtime.acquire_record(twin, R, self)
