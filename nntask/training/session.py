"""Prepared training session: its data from the right position, and its output and files before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from math import inf, prod
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from scheduler import Runtime
from scheduler.machine import DEFAULT_EVICTION
from scheduler.planning import NONE, SUBMISSION, PlannedOrder

from ..adapters.lora import num_idle_factors
from ..checkpoints.store import Checkpoint
from ..config.machine import PINNED
from ..config.run_config import LanguageRun, Length, RunConfig
from ..config.stored_run import stored_settings
from ..config.toml import to_toml
from ..data.batch import Cursor
from ..data.dataset import Dataset
from ..data.foreign_tokenizer import TOKENIZER_FILE
from ..data.sampler import BatchStream
from ..data.tokenizer import BpeTokenizer, load_tokenizer
from ..engine.interface import Counters, StepEngine, Trained
from ..errors import DataError, UsageError
from ..hardware.flops import FlopCounts, flop_counts_of
from ..hardware.machine_model import MachineModel
from ..hardware.machine_spec import free_bytes
from ..inference.samples import sample_prompt
from ..io.units import format_size
from ..optim.adamw8bit import LEAST
from ..planning.assignment import ASSIGNMENT
from ..planning.memory_fit import CapturedStep
from ..planning.needs import Needs
from ..planning.run_candidates import Updater, told_updater
from ..telemetry.metrics import StepPrinter
from .initial_weights import load_weights
from .run_directory import CONFIG, computing_versions, write_file, write_plan
from .run_lock import RunLock
from .signals import Interrupts

MOST_NAMES: Final = 8
"""Largest number of workers whose names are listed one by one."""


@dataclass(frozen=True, slots=True)
class Session:
    """Run with its data, its engine, and its output.

    Args:
        runtime: counters of the workers.
        counts: floating-point operations of one sequence.
        fallbacks: number of tasks of a step that run on the CPU for lack of a CUDA kernel, by name.
        byte_lengths: (V,) number of bytes of text of each id, if validation reports bits per byte.
        config: content of a config.json of each checkpoint, as in `Opened`.
    """

    run: LanguageRun
    dataset: Dataset
    stream: BatchStream
    runtime: Counters
    engine: Trained
    counts: FlopCounts
    printer: StepPrinter
    interrupts: Interrupts
    fallbacks: Mapping[str, int]
    byte_lengths: npt.NDArray[np.int64] | None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """Parts of a training that depend on the kind of model.

    Args:
        engine: engine that runs the steps.
        counts: floating-point operations of one sequence.
        about: function that returns the lines about the model; it may record the step for them.
        says_bits: whether the loss covers all of a text, so that validation may report bits per byte.
        config: content of a config.json stored with each checkpoint, which makes it a model directory; None for none.
    """

    engine: StepEngine
    counts: FlopCounts
    about: Callable[[], Sequence[str]]
    says_bits: bool = True
    config: Mapping[str, Any] | None = None


class UntiledModel(Protocol):
    """Model that is not made of tiles: another package captures its step and makes its engine."""

    def check(self, run: LanguageRun) -> None:
        """Refuse data that the model cannot be trained on.

        Raises:
            UsageError: the data lacks something that the model needs.
        """

    def capture(self, run: LanguageRun) -> CapturedStep:
        """Capture the run's step from shapes. Weights that start from files are attached, and their names and shapes checked.

        Raises:
            DataError: a file of weights is missing or broken, or has the weights of another model.
        """

    def changes(self, run: LanguageRun, target: MachineModel, needs: Needs, full: str = "") -> Sequence[str]:
        """Return changes of flags, each of which would make the step fit.

        Args:
            full: memory that was too small although the machine has the least that the step needs; "" for none.
        """

    def open(self, run: LanguageRun, runtime: Runtime, step: CapturedStep, order: PlannedOrder) -> AbstractContextManager[Opened]:
        """Open the engine on the runtime of the run, with the lines about it; it is closed before the runtime.

        Args:
            step: result of `capture` for this run.
            order: planned order in which the engine runs that step.
        """


def stream_of(run: LanguageRun, dataset: Dataset, rows: Sequence[int] | None = None) -> BatchStream:
    """Return the stream of batches from the position at which the run begins.

    Args:
        rows: rows of each batch to read, as for `BatchStream`.

    Raises:
        UsageError: --eval-every asks for validation data and there is none, or --trace-steps names steps outside the run.
        DataError: there is too little data, or the continued run was trained on other data.
    """
    settings, resumed = run.settings, run.start.resumed
    if settings.run.eval_every and dataset.validation is None:
        raise UsageError(
            f"needs validation data, and {dataset.name} has none",
            "add --val-path, or drop --eval-every",
            flag="--eval-every",
            value=settings.run.eval_every,
        )
    cursor = None
    if resumed is not None:
        if resumed.state.get("data") != dataset.fingerprint:
            raise DataError(
                f"was trained on other data than {dataset.train.name} holds now",
                "restore the data, or start a new run",
                flag="--resume",
                value=resumed.path,
            )
        _check_tokenizer(resumed, dataset)
        epoch, position = resumed.state["cursor"]
        cursor = Cursor(epoch, position)
    stream = BatchStream(
        dataset.examples(run.model.seed), run.step.batch, seed=run.model.seed, cursor=cursor, select=dataset.select_sequences, rows=rows
    )
    first, last = run.start.step + 1, run.length.on(stream.batches_per_epoch)[0]
    if run.traced is not None and not first <= run.traced[0] <= run.traced[1] <= last:
        raise UsageError(
            f"must lie within steps {first} to {last} of this run, got {settings.observe.trace_steps}", "change or drop it", flag="--trace-steps"
        )
    return stream


def _check_tokenizer(resumed: Checkpoint, dataset: Dataset) -> None:
    """Check that the tokenizer of the data is the one that the checkpoint was saved with.

    Raises:
        DataError: it is another one, which gives texts other ids.
    """
    now = dataset.tokenizer
    if not isinstance(now, BpeTokenizer) or not (resumed.path / TOKENIZER_FILE).is_file():
        return
    then = load_tokenizer(resumed.path)
    if isinstance(then, BpeTokenizer) and then.content() != now.content():
        raise DataError(
            f"was trained with its {TOKENIZER_FILE}, and the tokenizer of {dataset.train.name} is another one now, so texts would have other ids",
            "restore it, or start a new run",
            flag="--resume",
            value=resumed.path,
        )


def counts_of(run: RunConfig, engine: Trained) -> FlopCounts:
    """Return the floating-point operations of one sequence."""
    model = run.model
    num_adapter_weights = 0 if model.adapters is None else engine.num_trained - num_idle_factors(model.config, model.adapters)
    target_len = run.data.objective.target_length
    return flop_counts_of(model.config, model.seq_len, flash=model.flash, num_adapter_weights=num_adapter_weights, target_len=target_len)


def begin(
    session: Session, lock: RunLock, about: Callable[[], Sequence[str]], order: PlannedOrder | None, planned: Mapping[str, Any] | None = None
) -> None:
    """Lock the directory, print the header, write settings and plan, and load the initial weights.

    Args:
        about: function that returns the lines about the model.
        order: order in which a step executes; None if this process does not know it.
        planned: figures of the order, from `order_figures`.
    """
    run = session.run
    if run.settings.run.sample_tokens:
        sample_prompt(run, session.dataset.tokenizer, session.stream.length)  # refuse a bad prompt now rather than after the training
    lock.take()
    print_header(session, about, order)
    write_file(run.directory / CONFIG, to_toml(run.settings))
    if planned is not None:
        write_plan(run.directory, planned)
    load_weights(run.start, session.engine)


def about_tiled(run: RunConfig, engine: Trained, gpus: Sequence[Any], by_update: Mapping[Updater, float | None] | None = None) -> Sequence[str]:
    """Return the lines about a model of tiles.

    Args:
        by_update: forecast seconds of a step under each updater, as in `PlannedRun`.
    """
    config, cut, settings = run.model.config, run.model.tiling, run.settings
    lines = [
        f"{run.name}: {config.num_parameters / 1e6:.1f} M parameters, {config.n_layer} layers, width {config.n_embd}; "
        f"{run.step.batch} x {run.model.seq_len} tokens a step"
    ]
    if run.start.frozen_base is not None:
        chosen, place = settings.optimizer, run.start.frozen_base.path or "the seed"
        lines.append(
            f"{chosen.train}: {engine.num_trained / 1e6:.2f} M weights of adapters are trained, alpha {chosen.lora_alpha:g}; "
            f"the others are frozen and come from {place}"
        )
    if run.model.dtype == "tf32" and not gpus:
        lines.append("tf32 on a CPU computes in fp32")
    lines.append(
        f"tiles: minibatch {cut.minibatch_tile}, seq {cut.seq_tile}, embd {cut.embd_tile}, inner {cut.inner_tile}, head {cut.head_tile}, "
        f"vocab {cut.vocab_tile}; {engine.num_tasks} tasks a step; {run.step.lanes} lane{'' if run.step.lanes == 1 else 's'}"
    )
    if settings.optimizer.optimizer == "adamw8bit":
        sizes = [prod(tensor.shape) for tensor in engine.model_tensors().values()]
        small = sum(size for size in sizes if size < LEAST)
        if 2 * small > sum(sizes):
            share = f"{small / sum(sizes):.0%}"
            lines.append(f"adamw8bit: {share} of the trained weights have fp32 moments, in parameters of fewer than {LEAST:,} elements")
    if run.step.update_on == "cpu" or by_update:
        lines.append(f"weights are updated {told_updater(run.step.update_on, by_update or {})}")
    return lines


def print_header(session: Session, about: Callable[[], Sequence[str]], order: PlannedOrder | None) -> None:
    """Print the header: the model, the machine, and the directory."""
    run, stats, say = session.run, session.runtime.stats(), session.printer.say
    for line in about():
        say(line)
    for finding in session.dataset.findings:
        say(finding.sentence)
    budgets = ", ".join(f"{node} {format_size(nbytes)}" for node, nbytes in stats["budget_bytes"].items())
    say(f"workers: {', '.join(in_ranges(list(stats['busy_seconds'])))}; policy {stats['policy']}; budgets: {budgets}")
    if run.machine.sharing == "mixed":
        say(f"CPU workers and devices share tasks: if they round differently, losses depend on the schedule; {ASSIGNMENT} repeats its last step")
    if run.machine.sharing == "pinned":
        say(f"tasks of a step run where {run.settings.resources.assignment.removeprefix(PINNED)} says")
    if session.fallbacks:
        say("on the CPU, without a CUDA kernel: " + ", ".join(f"{count} {name} a step" for name, count in sorted(session.fallbacks.items())))
    if order is not None and order.forecasts:
        plain = order.forecasts[SUBMISSION]
        under = "" if run.machine.scheduling.evict == DEFAULT_EVICTION else f" under {DEFAULT_EVICTION}"
        say(
            f"order: {order.name}, forecast{under} to move {order.moved_bytes / 1e9:.3g} GB and to take {order.seconds:.3g} s a step "
            f"(submission: {plain.total / 1e9:.3g} GB, {plain.seconds:.3g} s)"
            + (f"; in virtual time it takes {order.judged_seconds:.3g} s" if order.judged_seconds else "")
        )
        without = order.recomputation.seconds_without
        if order.recompute != NONE and without is not None:
            cost = "the step would not fit" if without == inf else f"forecast to take {without:.3g} s a step"
            say(f"recomputed instead of kept: {order.recompute}; without, {cost}")
    saved = (*session.engine.model_tensors().values(), *session.engine.optimizer_tensors().values())
    needed, free = sum(tensor.nbytes for tensor in saved), free_bytes(run.directory)
    if free < needed and run.settings.checkpoints.save_every:
        say(
            f"a checkpoint needs {format_size(needed)}, and {format_size(free)} are free at {run.directory}: none can be saved; "
            "delete files there, or name a directory on another disk by --run-dir"
        )
    resumed = run.start.resumed
    say(f"run: {run.directory}" + (f", continued after step {resumed.step}" if resumed else ""))
    if resumed is not None:
        if lifted := other_rates(run, session.stream.batches_per_epoch):
            say(lifted)
        for name, version in computing_versions().items():
            was = resumed.state.get("versions", {}).get(name, version)
            if was != version:
                say(f"{name.replace('_', ' ')} was {was} and is {version}: losses continue within rounding, not bit by bit")


def other_rates(run: LanguageRun, batches_per_epoch: int) -> str:
    """Return a sentence if the schedule of a continued run gives another rate to its last step; "" if the rates are those with which the run began.

    Args:
        run: continued or new run.
        batches_per_epoch: batches of a pass over the data.
    """
    resumed = run.start.resumed
    if resumed is None or not resumed.step:
        return ""
    stored = stored_settings(resumed).run
    before, now = Length(stored.steps or 0, stored.nepochs).on(batches_per_epoch)[0], run.length.on(batches_per_epoch)[0]
    if not before or not now:
        return ""
    was, would_be = run.schedule.over(before)(resumed.step), run.schedule.over(now)(resumed.step)
    if was == would_be:
        return ""
    following = run.schedule.over(now)(resumed.step + 1)
    return (
        f"the schedule {run.schedule.kind} ends after {now} steps and ended after {before}: the learning rate goes from {was:.3g} in step "
        f"{resumed.step} to {following:.3g} in step {resumed.step + 1}, so losses are not those of one run of {now} steps"
    )


def in_ranges(names: Sequence[str]) -> Sequence[str]:
    """Return names of workers; if there are many, neighbours of one kind become a range, such as ``cpu:0..199``."""
    if len(names) <= MOST_NAMES:
        return names
    kinds = [list(found) for _, found in groupby(names, key=lambda name: name.partition(":")[0])]
    return [found[0] + (f"..{found[-1].partition(':')[2]}" if len(found) > 1 else "") for found in kinds]


def print_totals(stream: BatchStream, printer: StepPrinter) -> None:
    """Print the amount of data."""
    batches = stream.batches_per_epoch
    printer.say(f"Total train batches: {batches}")
    printer.say(f"Total train sequences: {batches * stream.batch}")
    printer.say(f"Total train tokens: {batches * stream.batch * stream.length}")
