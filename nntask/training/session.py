"""A training whose parts are all there, and what it says of itself before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.machine import DEFAULT_EVICTION
from scheduler.planning import AUTO, SUBMISSION, PlannedOrder
from tiles.kernels import kernel_versions

from ..config.run_config import RunConfig
from ..config.units import format_size
from ..data.dataset import Dataset
from ..data.sampler import BatchStream
from ..engine.interface import Counters, Trained
from ..hardware.flops import FlopCounts, flop_counts_of
from ..telemetry.metrics import StepPrinter
from .signals import Interrupts


@dataclass(frozen=True, slots=True)
class Session:
    """A run with its data, its engine, and the user it talks to.

    Args:
        runtime: counters of the workers.
        fallbacks: tasks of a step that run on the CPU because they have no CUDA kernel, by name.
    """

    run: RunConfig
    dataset: Dataset
    stream: BatchStream
    runtime: Counters
    engine: Trained
    printer: StepPrinter
    interrupts: Interrupts
    fallbacks: Mapping[str, int]

    @property
    def counts(self) -> FlopCounts:
        """Floating-point operations of one sequence."""
        model = self.run.model
        num_adapter_weights = 0 if model.adapters is None else self.engine.num_trained
        return flop_counts_of(model.config, model.seq_len, flash=model.flash, num_adapter_weights=num_adapter_weights)


def print_header(session: Session, order: PlannedOrder | None) -> None:
    """What is trained, on what, where."""
    run, stats = session.run, session.runtime.stats()
    config, cut, settings, say = run.model.config, run.model.tiling, run.settings, session.printer.say
    say(
        f"{run.name}: {config.num_parameters / 1e6:.1f} M parameters, {config.n_layer} layers, width {config.n_embd}; "
        f"{run.step.batch} x {run.model.seq_len} tokens a step"
    )
    if run.start.frozen_base is not None:
        chosen, place = settings.optimizer, run.start.frozen_base.path or "the seed"
        say(
            f"{chosen.train}: {session.engine.num_trained / 1e6:.2f} M weights of adapters are trained, alpha {chosen.lora_alpha:g}; "
            f"the others are frozen and come from {place}"
        )
    if run.model.dtype == "tf32" and not session.runtime.gpus:
        say("tf32 on a CPU computes in fp32")
    say(
        f"tiles: minibatch {cut.minibatch_tile}, seq {cut.seq_tile}, embd {cut.embd_tile}, inner {cut.inner_tile}, head {cut.head_tile}, "
        f"vocab {cut.vocab_tile}; {session.engine.num_tasks} tasks a step; {run.step.lanes} lane{'' if run.step.lanes == 1 else 's'}"
    )
    budgets = ", ".join(f"{node} {format_size(nbytes)}" for node, nbytes in stats["budget_bytes"].items())
    say(f"workers: {', '.join(stats['busy_seconds'])}; policy {stats['policy']}; budgets: {budgets}")
    if session.fallbacks:
        say("on the CPU, without a CUDA kernel: " + ", ".join(f"{count} {name} a step" for name, count in sorted(session.fallbacks.items())))
    if order is not None and order.forecasts:
        plain = order.forecasts[SUBMISSION]
        under = "" if run.machine.asked.evict == DEFAULT_EVICTION else f" under {DEFAULT_EVICTION}"
        say(
            f"order: {order.name}, forecast{under} to move {order.moved_bytes / 1e9:.3g} GB and to take {order.seconds:.3g} s a step "
            f"(submission: {plain.total / 1e9:.3g} GB, {plain.seconds:.3g} s)"
            + ("; of equally fast ones it moves least" if run.step.order == AUTO and order.moves_least_of_equals else "")
        )
    resumed = run.start.resumed
    say(f"run: {run.directory}" + (f", continued after step {resumed.step}" if resumed else ""))
    if resumed is not None:
        for name, version in kernel_versions().items():
            was = resumed.state.get("versions", {}).get(name, version)
            if was != version:
                say(f"{name.replace('_', ' ')} was {was} and is {version}: losses go on within rounding, not bit by bit")


def print_totals(stream: BatchStream, printer: StepPrinter) -> None:
    """How much data there is."""
    batches = stream.batches_per_epoch
    printer.say(f"Total train batches: {batches}")
    printer.say(f"Total train sequences: {batches * stream.batch}")
    printer.say(f"Total train tokens: {batches * stream.batch * stream.length}")
