"""Recording a step: the base of the runtimes that record, and the recorder, which builds a plan from the tasks submitted inside `record()`.

The first tasks of a step copy its inputs (handles of kind "input") into the step, so the program may write the next batch while a replay still runs.
A handle that was created while recording and that Python still references when the block ends is an output.
"""

from __future__ import annotations

import abc
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from ..core.codelet import Codelet
from ..core.errors import PlacementError, SchedulerError
from ..core.records import HandleId, HandleRecord, HandleSpec, Mode, R, W, WorkerId, WorkerKind
from ..core.step_plan import RecordedTask, StepPlan
from ..drivers.cuda import copy_on_gpu
from .labels import current_label
from .lanes import Eligible, Handle, Terms
from .placement import kinds_beside, kinds_of, kinds_on
from .task_runtime import TaskRuntime

FIRST: Final = 1 << 40
"""Priority of the copies of inputs, above all others, so that they run as soon as any worker is free."""


class RecordingError(SchedulerError, RuntimeError):
    """The program used a recorded step, or recorded one, in a way that steps do not support."""


def _copy_bytes(source: Any, target: Any) -> None:
    try:
        memoryview(target).cast("B")[:] = memoryview(source).cast("B")
    except (TypeError, ValueError):  # an element type the buffer protocol does not know (bfloat16), or no elements
        target[...] = source


COPY_INPUT: Final = Codelet("copy input", cpu=_copy_bytes, cuda=copy_on_gpu)


@dataclass(slots=True, eq=False)
class _Pin:
    """A block of `RecordingRuntime.place` that a thread has entered."""

    thread: threading.Thread
    worker: WorkerId


class RecordingRuntime(TaskRuntime):
    """Common base of runtimes that record: handles, which a step being recorded notes, and placement of tasks.

    Attributes:
        devices_beside: kind of the devices, if CPU workers run only codelets that these devices may not run; None without such workers.
    """

    devices_beside: WorkerKind | None = None
    _is_mixed = False

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self._handle_ids = itertools.count()
        self._recorder: Recorder | None = None
        self._pins: list[_Pin] = []

    @property
    @abc.abstractmethod
    def worker_names(self) -> Mapping[WorkerId, str]:
        """Name of each worker, such as "cpu:0" and "sim:1"."""

    @contextmanager
    def place(self, worker: str) -> Iterator[None]:
        """Pin the tasks that are submitted or recorded inside the block to one worker: ``with runtime.place("sim:0")``.

        The tasks wait for that worker, whatever the policy and the placement of minibatches; their data moves to it. Results are bit-identical.
        Blocks may nest; the innermost block that the calling thread has entered counts. Tasks that combine lanes are not pinned. A task that the
        worker cannot run is refused when it is submitted or recorded. `PlacementError` is raised if the worker has no implementation of it, and
        `DoesNotFit` if its data exceeds the budget of the worker's memory, if budgets are known (`CapturingRuntime` knows none).

        Args:
            worker: one of the names in `worker_names`.

        Raises:
            PlacementError: there is no such worker.
        """
        names = self.worker_names
        pin = next((number for number, name in names.items() if name == worker), None)
        if pin is None:
            raise PlacementError(worker, workers=list(names.values()))
        entered = _Pin(threading.current_thread(), pin)
        self._pins.append(entered)
        try:
            yield
        finally:
            self._pins.remove(entered)

    def _pin(self) -> WorkerId | None:
        """Return the worker of the innermost `place` block that this thread has entered; None outside."""
        me = threading.current_thread()
        return next((entered.worker for entered in reversed(tuple(self._pins)) if entered.thread is me), None)

    def _eligible(self, codelet: Codelet, *, combines: bool) -> Eligible:
        """Return the workers that may run a codelet by its implementations, whether or not there are such workers, as `TaskRuntime._examine` does.

        Raises:
            PlacementError: it is placed on a worker of a kind that it has no implementation for.
        """
        pin = None if combines or not self._pins else self._pin()
        if pin is not None:
            return kinds_on(codelet, self.worker_names[pin]), pin
        return kinds_of(codelet, self.devices_beside, has_gpus=self.has_gpus, is_mixed=self._is_mixed), None

    def _record(self, spec: HandleSpec) -> HandleRecord:
        return HandleRecord(HandleId(next(self._handle_ids)), spec)

    def clone_record(self, record: HandleRecord) -> HandleRecord:
        """Return a new record of the same data as `record`, without replicas."""
        return HandleRecord(HandleId(next(self._handle_ids)), record.spec)

    @contextmanager
    def _captured(self) -> Iterator[Recorder]:
        """Capture the tasks of the block. The recording neither begins nor ends with partial sums."""
        self._combine_all()
        self._recorder = Recorder(self)
        self._note_handle = self._recorder.enter_handle
        try:
            yield self._recorder
            self._combine_all()
        finally:
            self._recorder = self._note_handle = None

    @property
    def recording(self) -> bool:
        """Whether tasks are being captured instead of run."""
        return self._recorder is not None


class Recorder:
    """The tasks and handles of a step that is being recorded.

    Attributes:
        examines_later: whether tasks are compared with workers and memories after the recording instead of at their submission.
    """

    def __init__(self, runtime: RecordingRuntime) -> None:
        self.runtime, self.examines_later = runtime, False
        self.tasks: list[RecordedTask] = []
        self.created: dict[HandleRecord, weakref.ref[Handle]] = {}
        self.kept: dict[HandleRecord, Handle] = {}
        self.inputs: dict[HandleRecord, HandleRecord] = {}

    def enter_handle(self, handle: Handle) -> None:
        """Note a handle created while recording; persistent ones belong to the program, not to the step."""
        if handle.spec.kind != "persistent":
            self.created[handle.record] = weakref.ref(handle)

    def enter_task(
        self,
        codelet: Codelet,
        accesses: Sequence[tuple[Handle, Mode]],
        constants: Mapping[str, Any],
        priority: int,
        terms: Terms,
    ) -> None:
        """Capture one task. The step keeps references to the program's handles that it uses."""
        kinds, pin, condition = terms
        for handle, _ in accesses:
            if handle.record not in self.created:
                self.kept[handle.record] = handle
        plain = tuple((self._input(handle, mode) if handle.spec.kind == "input" else handle.record, mode) for handle, mode in accesses)
        aside = self.runtime.devices_beside is not None and kinds == ("cpu",) and pin is None
        task = RecordedTask(codelet, codelet.name, kinds, plain, constants, priority, pin, condition, label=current_label(), aside=aside)
        task.num_clones, task.clone_share = int(codelet.again > 0), codelet.again
        self.tasks.append(task)

    def _input(self, handle: Handle, mode: Mode) -> HandleRecord:
        record: HandleRecord = handle.record
        if record in self.created:
            return record
        if mode != R:
            raise RecordingError(f"a recorded task may only read an input, and {handle!r} was given with mode {mode}", "copy it first")
        own = self.inputs.get(record)
        if own is None:
            own = self.inputs[record] = self.runtime.clone_record(record)
        return own

    def finish(self) -> StepPlan:
        """Return the plan of the captured tasks.

        Raises:
            RecordingError: a task reads a handle of the step that no earlier task wrote.
        """
        device = self.runtime.devices_beside
        kinds = COPY_INPUT.kinds if device is None else kinds_beside(COPY_INPUT.kinds, device)
        copies = [RecordedTask(COPY_INPUT, COPY_INPUT.name, kinds, ((record, R), (own, W)), {}, FIRST) for record, own in self.inputs.items()]
        owned = {record: reference() is not None for record, reference in self.created.items()}
        owned.update(dict.fromkeys(self.inputs.values(), False))
        plan = StepPlan([*copies, *self.tasks], owned)
        for task, record in plan.unwritten():
            raise RecordingError(
                f"{task.name} reads {record!r}, which no earlier task of the step writes", "write it inside the step or before recording"
            )
        return plan
