"""A runtime that only captures: a recorded step from shapes alone, without memory, workers or kernels.

    runtime = CapturingRuntime()
    model = GPT2(config, tiling, runtime)      # what is submitted outside the block is dropped
    with runtime.record():
        loss = model(tokens, targets)
    plan = runtime.plan

Its handles have the same records, and its tasks go to the same `Recorder`, as those of the real runtime; so the plan is the one that a run would
replay, except that nobody knows the workers: every task with a CPU kernel may run on CPU workers and simulated devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from .codelet import Codelet
from .core.memory import rounded
from .core.records import DataClass, HandleId, HandleRecord, Kind, Mode, WorkerKind
from .core.steps import StepPlan
from .frontend import Access, Handle, TaskRuntime, View, lent
from .recording import Recorder, RecordingError

if TYPE_CHECKING:
    from .runtime import Runtime

KINDS: Final[tuple[WorkerKind, ...]] = ("cpu", "sim")
"""Workers that run CPU kernels."""


class _Nowhere:
    """Takes the records of handles that are gone, and forgets them."""

    def append(self, record: object) -> None:
        """Nothing holds memory."""


class CapturingRuntime(TaskRuntime):
    """Captures the tasks of one block; what is submitted outside it is dropped.

    Args:
        lanes: L of REDUX accesses.
    """

    def __init__(self, lanes: int = 1) -> None:
        super().__init__(lanes)
        self._ids = itertools.count()
        self._inbox = _Nowhere()
        self._recorder: Recorder | None = None
        self._plan: StepPlan | None = None

    @property
    def plan(self) -> StepPlan:
        """The step that was captured, in submission order.

        Raises:
            RecordingError: no `record()` block has ended.
        """
        if self._plan is None:
            raise RecordingError("nothing has been captured yet; emit tasks inside `with runtime.record()` and leave the block first")
        return self._plan

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
        """Register data of `nbytes` bytes; no memory is ever taken."""
        record = HandleRecord(HandleId(next(self._ids)), nbytes, rounded(nbytes), view, name, kind, data_class)
        handle = Handle(record, nbytes, view, name=name, kind=kind, data_class=data_class, combine=combine, inbox=self._inbox)
        if self._recorder is not None:
            self._recorder.enter_handle(handle)
        return handle

    def clone_record(self, record: HandleRecord) -> HandleRecord:
        """A new record like `record`."""
        return HandleRecord(HandleId(next(self._ids)), record.nbytes, record.size, record.view, record.name, record.kind, record.data_class)

    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Lend memory that nobody reads again."""
        return lent(handle.view(bytearray(max(handle.nbytes, 1)), 0))

    def wait(self) -> None:
        """Nothing is ever pending."""

    @property
    def recording(self) -> bool:
        """Whether tasks are kept."""
        return self._recorder is not None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the tasks of the block; `plan` has them afterwards.

        Raises:
            RecordingError: the captured tasks read data nobody writes.
        """
        self._combine_all()
        recorder = self._recorder = Recorder(cast("Runtime", self))  # of a runtime it needs clone_record only
        try:
            yield
            self._combine_all()
        finally:
            self._recorder = None
        self._plan = recorder.finish()

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int) -> None:
        if self._recorder is not None:
            self._recorder.enter_task(codelet, KINDS, accesses, constants, priority)
