"""The training loop: at most two steps in flight; the loss of a step is read while the next one runs.

Guarantees:

- A checkpoint holds exactly the state after its step, with the position in the data.
- A loss, gradient norm or weight that is not finite is never saved and ends the run.
- After a first Ctrl-C or SIGTERM, or when data can no longer be read or lines no longer be printed, the steps in flight finish and are saved, if any
  step was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ..checkpoints.store import AGAINST_DIVERGENCE, save_checkpoint
from ..config.run_config import Saving
from ..data.batch import Batch, Cursor
from ..data.sampler import BatchStream
from ..data.tokenizer import Tokenizer
from ..engine.evaluation import Evaluation
from ..engine.interface import Counters, Engine, Pending
from ..errors import DataError, Diverged
from ..telemetry.metrics import Journal, Meter, StepPrinter, step_line
from ..telemetry.step_record import StepRecord
from .signals import Interrupts


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Settings of the loop.

    Args:
        steps: number of the last step.
        first: number of steps that a continued run has done already.
        lr: function from a step (from 1) to its learning rate.
        saving: rules for writing checkpoints.
        eval_every: validation period in steps, 0 for never.
        sum_loss: whether the printed loss is the sum over a step's tokens instead of their mean.
        flops: model flops of a step.
        peak_flops: flop/s that the workers reach in matrix products.
    """

    steps: int
    first: int
    lr: Callable[[int], float]
    saving: Saving
    eval_every: int
    sum_loss: bool
    flops: float
    peak_flops: float


@dataclass(frozen=True, slots=True)
class Saver:
    """Writer of an engine's checkpoints.

    Args:
        directory: directory of the run.
        engine: engine whose tensors are written.
        state: entries of every state.json besides step and cursor.
        keep: number of checkpoints to keep.
        tokenizer: tokenizer stored in each checkpoint; None for none.
        config: content of a config.json stored in each checkpoint; None for none.
    """

    directory: Path
    engine: Engine
    state: Mapping[str, Any]
    keep: int
    tokenizer: Tokenizer | None = None
    config: Mapping[str, Any] | None = None

    def save(self, step: int, cursor: Cursor) -> Path:
        """Write a checkpoint of the state after a step."""
        state = {"step": step, "cursor": [cursor.epoch, cursor.position], **self.state}
        model, optimizer = self.engine.model_tensors(), self.engine.optimizer_tensors()
        return save_checkpoint(self.directory, state, model, optimizer, tokenizer=self.tokenizer, config=self.config, keep=self.keep)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks between and around steps; each does nothing by default.

    Args:
        on_step: called before each step starts, with its number, and with None when no step is in flight and something else follows (tracing).
        starts_alone: returns whether a step may start only after the one before it has finished.
        validate: scores the validation data after a step, by `LoopPlan.eval_every` and after the last step; returns None for no result.
        on_saved: called after each checkpoint that is followed by further training.
        at_end: called when the training has ended, for any reason.
    """

    on_step: Callable[[int | None], None] = lambda step: None
    starts_alone: Callable[[int], bool] = lambda step: False
    validate: Callable[[int], Evaluation | None] = lambda step: None
    on_saved: Callable[[], None] = lambda: None
    at_end: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Flight:
    """Step in flight."""

    step: int
    lr: float
    cursor: Cursor
    pending: Pending


class Loop:
    """Training loop that executes a `LoopPlan`."""

    def __init__(
        self,
        plan: LoopPlan,
        engine: Engine,
        stream: BatchStream,
        runtime: Counters,
        *,
        saver: Saver,
        journal: Journal,
        printer: StepPrinter,
        interrupts: Interrupts,
        hooks: Hooks,
    ) -> None:
        self.plan, self.engine, self.stream, self.runtime, self.hooks = plan, engine, stream, runtime, hooks
        self.saver, self.journal, self.printer, self.interrupts = saver, journal, printer, interrupts
        self.step = plan.first
        self.seconds = 0.0
        self._cursor = stream.cursor
        self._saved = plan.first
        self._meter = Meter(runtime.stats(forget_recent_peak=True))
        self._budgets: Mapping[str, int] = runtime.stats()["budget_bytes"]
        self._last_end = perf_counter()

    def train(self) -> None:
        """Run the remaining steps.

        Raises:
            Diverged: a loss, a gradient norm, or a weight to be saved is not finite.
            DataError: training or validation data cannot be read any more; the steps done are saved.
            StorageError: a checkpoint or a line of metrics.jsonl could not be written, or a line could not be printed. If the printer defers failed
                writes, such a line ends the training instead, and the steps done are saved.
            RunStopped: a callback of `Runtime.on_task` stopped the run; the checkpoints so far are whole.
        """
        plan = self.plan
        flying: _Flight | None = None
        self._last_end = perf_counter()
        for step in range(plan.first + 1, plan.steps + 1):
            if self.interrupts.pending() or self.printer.failure is not None:
                break
            if flying is not None and self.hooks.starts_alone(step):
                self._land(flying)
                flying = None
            self.hooks.on_step(step)
            lr = plan.lr(step)
            batch = self._next_batch(flying)
            started = _Flight(step, lr, self.stream.cursor, self.engine.start(step, lr, batch))
            if flying is not None:
                self._land(flying)
            flying = started
            if _is_multiple(step, plan.saving.every) or _is_multiple(step, plan.eval_every) or step == plan.steps:
                self._land(flying)
                flying = None
                self._pause(step)
        if flying is not None:
            self._land(flying)
        self._finish()
        if self.step == plan.steps and plan.eval_every and not _is_multiple(self.step, plan.eval_every):
            self._validate(self.step)

    def save(self) -> None:
        """Write a checkpoint of the last finished step unless it is saved already."""
        if self.step == self._saved:
            return
        self.journal.sync()
        path = self.saver.save(self.step, self._cursor)
        self._saved = self.step
        self.printer.say(f"saved {path}")

    def _finish(self) -> None:
        """End the training after the last step or before it, with no step in flight."""
        self.hooks.on_step(None)
        if self.step < self.plan.steps or self.plan.saving.at_end:
            self.save()

    def _next_batch(self, flying: _Flight | None) -> Batch:
        """Return the batch of the next step. If it cannot be read, finish and save the steps in flight first."""
        try:
            return self.stream.next()
        except DataError:
            if flying is not None:
                self._land(flying)
            self._finish()
            raise

    def _pause(self, step: int) -> None:
        """Save and validate between steps, with no step in flight; the time and traffic of this belong to no step."""
        begin = perf_counter()
        self.hooks.on_step(None)
        if _is_multiple(step, self.plan.saving.every):
            self.save()
        if _is_multiple(step, self.plan.eval_every):
            try:
                self._validate(step)
            except DataError:
                self._finish()
                raise
        if _is_multiple(step, self.plan.saving.every) and step < self.plan.steps:
            self.hooks.on_saved()
        self._meter.skip(self.runtime.stats(forget_recent_peak=True))
        self._last_end += perf_counter() - begin

    def _validate(self, step: int) -> None:
        """Score the validation data and add the result to the line of the step."""
        result = self.hooks.validate(step)
        if result is not None:
            self.journal.add_validation(step, result.figures())

    def _land(self, flight: _Flight) -> None:
        """Wait for a step, check it, and write its line."""
        outcome = flight.pending.result()
        now = perf_counter()
        seconds, self._last_end = now - self._last_end, now
        self.seconds += seconds
        tokens = self.stream.batch * self.stream.length
        lap = self._meter.lap(self.runtime.stats(forget_recent_peak=True), seconds)
        tflops = self.plan.flops / seconds / 1e12
        record = StepRecord(
            step=flight.step,
            loss=outcome.loss * (tokens if self.plan.sum_loss else 1),
            lr=flight.lr,
            grad_norm=outcome.grad_norm,
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            tflops=tflops,
            mfu=tflops * 1e12 / self.plan.peak_flops,
            **lap,
        )
        self.journal.add(record)
        done = flight.step - self.plan.first
        eta = (self.plan.steps - flight.step) * self.seconds / done
        self.printer.step(step_line(record, self.plan.steps, eta, self._budgets), keep=flight.step == self.plan.steps or flight.step % 10 == 0)
        self.runtime.check_stop()
        if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
            what = f"loss {outcome.loss}" if not math.isfinite(outcome.loss) else f"gradient norm {outcome.grad_norm}"
            raise Diverged(f"step {flight.step} has {what} at learning rate {flight.lr:g}", AGAINST_DIVERGENCE)
        self.step, self._cursor = flight.step, flight.cursor


def _is_multiple(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
