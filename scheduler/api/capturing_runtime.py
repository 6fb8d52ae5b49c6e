"""A runtime that only captures: it builds a recorded step from shapes alone, without memory, workers or kernels.

    runtime = CapturingRuntime()
    model = GPT2(config, tiling, runtime)      # tasks outside the block are dropped
    with runtime.record():
        loss = model(tokens, targets)
    plan = runtime.plan

Its handles have the same records, and its tasks go to the same `Recorder`, as those of the real runtime. So the plan is the one that a run would
replay, except that the workers are unknown: every task with a CPU kernel may run on CPU workers and simulated devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..core.codelet import Codelet
from ..core.memory.extents import rounded
from ..core.records import FILE, Mode, Replica, WorkerId
from ..core.step_plan import StepPlan
from ..drivers.disk import Source, readers_nbytes
from .lanes import Access, Eligible, Handle, Terms
from .recording import RecordingError, RecordingRuntime


class CapturingRuntime(RecordingRuntime):
    """A runtime that captures the tasks of one block; tasks outside it are dropped.

    Args:
        lanes: L, the number of partial accumulators of REDUX accesses.
        workers: names of the workers on which the program may place tasks, in the order of their numbers; `simulate` must get the same names.
        has_gpus: whether the step is for a runtime with CUDA workers.
        aside: whether the step is for a runtime whose CPU workers run only codelets that devices may not.
        mixed: whether the step is for a runtime whose CPU workers and devices both run what both can run.

    Attributes:
        reading_nbytes: bytes of host memory, in whole pages, that readers of the attached sources need.
    """

    def __init__(self, lanes: int = 1, workers: Sequence[str] = (), *, has_gpus: bool = False, aside: bool = False, mixed: bool = False) -> None:
        super().__init__(lanes)
        self.has_gpus, self._is_mixed = has_gpus, mixed
        if aside:
            self.devices_beside = "cuda" if has_gpus else "sim"
        self._worker_names = {WorkerId(number): name for number, name in enumerate(workers)}
        self.reading_nbytes = 0
        self._plan: StepPlan | None = None

    @property
    def worker_names(self) -> Mapping[WorkerId, str]:
        """Name of each worker that `workers` listed."""
        return self._worker_names

    @property
    def plan(self) -> StepPlan:
        """The captured step, in submission order.

        Raises:
            RecordingError: no `record()` block has ended.
        """
        if self._plan is None:
            raise RecordingError("nothing has been captured yet", "emit tasks inside `with runtime.record()` and leave the block first")
        return self._plan

    def acquire(self, handle: Handle, mode: Mode, *, is_shared: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager with the view of new memory, which is never read again."""
        return nullcontext(handle.view(bytearray(max(handle.nbytes, 1)), 0))

    def wait(self) -> None:
        """Return at once: no task is ever pending."""

    def _attach(self, handle: Handle, source: Source) -> None:
        handle.record.replicas[FILE] = Replica(handle.record, FILE, 0, "shared", is_backing=True)
        if source.scratch_nbytes:
            nbytes = readers_nbytes(handle.spec.size, source, has_gpus=self.has_gpus)
            self.reading_nbytes = max(self.reading_nbytes, rounded(nbytes))

    @contextmanager
    def record(self) -> Iterator[None]:
        """Capture the tasks of the block; afterwards they are in `plan`.

        Raises:
            RecordingError: a captured task reads data that no earlier task wrote.
        """
        with self._captured() as recorder:
            yield
        self._plan = recorder.finish()

    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Eligible:
        return self._eligible(codelet, combines=combines)

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        if self._recorder is not None:
            self._recorder.enter_task(codelet, accesses, constants, priority, terms)
