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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .codelet import Codelet
from .core.memory import rounded
from .core.records import FILE, Mode, Replica, WorkerId
from .core.steps import StepPlan
from .drivers.disk import Source, readers_nbytes
from .frontend import Access, Handle, Terms, lent
from .placing import kinds_on
from .recording import Recorder, RecordingError, RecordingRuntime

"""Workers that run CPU kernels."""


class _Nowhere:
    """Takes the records of handles that are gone, and forgets them."""

    def append(self, record: object) -> None:
        """Nothing holds memory."""


class CapturingRuntime(RecordingRuntime):
    """Captures the tasks of one block; what is submitted outside it is dropped.

    Args:
        lanes: L of REDUX accesses.
        workers: names of those that tasks can be placed on, in the order of their numbers; `simulate` must be given the same.
        has_gpus: whether the tasks are for a runtime with CUDA workers.

    Attributes:
        reading_nbytes: bytes of host memory, in whole pages, that readers of the attached sources need.
    """

    def __init__(self, lanes: int = 1, workers: Sequence[str] = (), *, has_gpus: bool = False) -> None:
        super().__init__(lanes)
        self.has_gpus = has_gpus
        self._worker_names = {WorkerId(number): name for number, name in enumerate(workers)}
        self.inbox = _Nowhere()
        self.reading_nbytes = 0
        self._plan: StepPlan | None = None

    @property
    def worker_names(self) -> Mapping[WorkerId, str]:
        """The names that were given."""
        return self._worker_names

    @property
    def plan(self) -> StepPlan:
        """The step that was captured, in submission order.

        Raises:
            RecordingError: no `record()` block has ended.
        """
        if self._plan is None:
            raise RecordingError("nothing has been captured yet; emit tasks inside `with runtime.record()` and leave the block first")
        return self._plan

    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Lend memory that nobody reads again."""
        return lent(handle.view(bytearray(max(handle.nbytes, 1)), 0))

    def wait(self) -> None:
        """Nothing is ever pending."""

    def _attach(self, handle: Handle, source: Source) -> None:
        handle.record.replicas[FILE] = Replica(handle.record, FILE, 0, "shared", is_home=True)
        if source.scratch_nbytes:
            nbytes = readers_nbytes(handle.record.size, source, has_gpus=self.has_gpus)
            self.reading_nbytes = max(self.reading_nbytes, rounded(nbytes))

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the tasks of the block; `plan` has them afterwards.

        Raises:
            RecordingError: the captured tasks read data nobody writes.
        """
        self._combine_all()
        recorder = self._recorder = Recorder(self)
        try:
            yield
            self._combine_all()
        finally:
            self._recorder = None
        self._plan = recorder.finish()

    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Terms:
        pin = None if combines or not self._placed else self._pin()
        return (codelet.kinds, None) if pin is None else (kinds_on(codelet, self._worker_names[pin]), pin)

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        if self._recorder is not None:
            kinds, pin = terms
            self._recorder.enter_task(codelet, kinds, accesses, constants, priority, pin)
