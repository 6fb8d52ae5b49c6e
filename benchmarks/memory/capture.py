"""The recorded training step of a command line, from shapes alone: no memory is taken and no kernel runs.

    plan = capture(STANDARD)            # GPT-2 small, 8 minibatches of one sequence of 1,024 tokens
    plan = capture(STANDARD, model="gpt2-medium", batch=4)

`CapturingRuntime` gives its handles the same records, and hands the step's tasks to the same `Recorder`, as the real runtime; so the plan is the
one that `nntask train` would replay, except that workers and budgets are unknown and every task may run on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final, cast

from nntask.models.config import PRESETS
from nntask.trainer.gpt2 import build_model, build_optimizer, emit_training_step
from nntask.trainer.prepare import with_tiles
from nntask.trainer.rules import resolve
from nntask.trainer.settings import ModelSettings, TilingSettings, TrainSettings
from scheduler import Access, Codelet, DataClass, Handle, Kind, Mode, Runtime, TaskRuntime, View
from scheduler.core.memory import rounded
from scheduler.core.records import HandleId, HandleRecord
from scheduler.core.steps import StepPlan
from scheduler.frontend import lent
from scheduler.recording import Recorder

STANDARD: Final = TrainSettings(
    model=ModelSettings(model="gpt2", seq_len=1024),
    tiling=TilingSettings(batch=8, minibatch=1, minibatch_tile=1, vocab_tile=6283),
)
"""``--model gpt2 --batch 8 --minibatch 1 --minibatch-tile 1 --vocab-tile 6283``: the job that the claims about memory are measured on."""


class _Nowhere:
    """Takes the records of handles that are gone, and forgets them."""

    def append(self, record: object) -> None:
        """Nothing holds memory."""


class CapturingRuntime(TaskRuntime):
    """Captures the tasks of one block; what is submitted outside it is dropped."""

    def __init__(self, lanes: int = 1) -> None:
        super().__init__(lanes)
        self._ids = itertools.count()
        self._inbox = _Nowhere()
        self._recorder: Recorder | None = None
        self.plan: StepPlan | None = None

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
        """Register data of `nbytes` bytes."""
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
        """Keep the tasks of the block; `plan` has them afterwards."""
        self._combine_all()
        recorder = self._recorder = Recorder(cast(Runtime, self))  # of a runtime it needs clone_record only
        try:
            yield
            self._combine_all()
        finally:
            self._recorder = None
        self.plan = recorder.finish()

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int) -> None:
        if self._recorder is not None:
            self._recorder.enter_task(codelet, ("cpu",), accesses, constants, priority)


def capture(
    settings: TrainSettings = STANDARD,
    *,
    model: str | None = None,
    batch: int | None = None,
    recompute: bool = False,
    grad_clip: float = 0.0,
    lanes: int | None = None,
) -> StepPlan:
    """The step that `settings` train with, changed by the other arguments.

    Args:
        model: name of a preset.
        batch: sequences per step.
        recompute: whether blocks keep only their input.
        grad_clip: largest norm of the gradient; 0 is off.
        lanes: of gradient sums.

    Raises:
        UsageError: a rule of `nntask train` is broken.
    """
    settings = replace(
        settings,
        model=replace(settings.model, model=model or settings.model.model, recompute="block" if recompute else settings.model.recompute),
        tiling=replace(settings.tiling, batch=batch or settings.tiling.batch, lanes=lanes or settings.tiling.lanes),
        optimizer=replace(settings.optimizer, grad_clip=grad_clip or settings.optimizer.grad_clip),
    )
    config = PRESETS[settings.model.model or "tiny"]
    settings, tiling = with_tiles(resolve(settings, config), config)
    runtime = CapturingRuntime(settings.tiling.lanes or 1)
    network = build_model(config, tiling, runtime, settings)
    optimizer = build_optimizer(network, settings)
    count = (settings.tiling.batch or 1) // settings.tiling.minibatch
    inputs = [network.input_tensors(settings.tiling.minibatch, settings.model.seq_len) for _ in range(count)]
    with runtime.record():
        outputs = emit_training_step(network, optimizer, inputs)
    del outputs
    assert runtime.plan is not None  # the block above has ended
    return runtime.plan
