"""A run whose parts are all there, and what it says of itself before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.eviction import DEFAULT_EVICTION
from scheduler.ordering import AUTO, SUBMISSION, PlannedOrder
from tiles.kernels.cpu import kernel_versions

from ..data import BatchStream, Dataset
from ..sizes import format_size
from .base import Base
from .engine import Counters, Trained
from .flops import FlopCounts
from .metrics import StepPrinter
from .prepare import Prepared, model_name
from .settings import TrainSettings
from .signals import Interrupts


@dataclass(frozen=True, slots=True)
class Running:
    """What the parts of a run share."""

    prepared: Prepared
    base: Base | None
    dataset: Dataset
    stream: BatchStream
    runtime: Counters
    engine: Trained
    counts: FlopCounts
    printer: StepPrinter
    interrupts: Interrupts
    fallbacks: Mapping[str, int]

    @property
    def settings(self) -> TrainSettings:
        """Resolved settings."""
        return self.prepared.settings


def print_header(running: Running, order: PlannedOrder | None) -> None:
    """What is trained, on what, where."""
    prepared, settings, stats = running.prepared, running.settings, running.runtime.stats()
    config, cut = prepared.config, running.prepared.tiling
    say = running.printer.say
    say(
        f"{model_name(settings)}: {config.num_parameters / 1e6:.1f} M parameters, {config.n_layer} layers, width {config.n_embd}; "
        f"{settings.tiling.batch} x {settings.model.seq_len} tokens a step"
    )
    if running.base is not None:
        chosen, place = settings.optimizer, running.base.path or "the seed"
        say(
            f"{chosen.train}: {running.engine.num_trained / 1e6:.2f} M weights of adapters are trained, alpha {chosen.lora_alpha:g}; "
            f"the others are frozen and come from {place}"
        )
    if settings.model.dtype == "tf32" and not running.runtime.gpus:
        say("tf32 on a CPU computes in fp32")
    say(
        f"tiles: minibatch {cut.minibatch_tile}, seq {cut.seq_tile}, embd {cut.embd_tile}, inner {cut.inner_tile}, head {cut.head_tile}, "
        f"vocab {cut.vocab_tile}; {running.engine.num_tasks} tasks a step; {settings.tiling.lanes} lane{'' if settings.tiling.lanes == 1 else 's'}"
    )
    budgets = ", ".join(f"{node} {format_size(nbytes)}" for node, nbytes in stats["budget_bytes"].items())
    say(f"workers: {', '.join(stats['busy_seconds'])}; policy {stats['policy']}; budgets: {budgets}")
    if running.fallbacks:
        say("on the CPU, without a CUDA kernel: " + ", ".join(f"{count} {name} a step" for name, count in sorted(running.fallbacks.items())))
    if order is not None and order.forecasts:
        plain = order.forecasts[SUBMISSION]
        under = "" if settings.resources.evict == DEFAULT_EVICTION else f" under {DEFAULT_EVICTION}"
        say(
            f"order: {order.name}, forecast{under} to move {order.moved_bytes / 1e9:.3g} GB and to take {order.seconds:.3g} s a step "
            f"(submission: {plain.total / 1e9:.3g} GB, {plain.seconds:.3g} s)"
            + ("; of equally fast ones it moves least" if settings.resources.order == AUTO and order.moves_least_of_equals else "")
        )
    say(f"run: {prepared.run}" + (f", continued after step {prepared.resumed.step}" if prepared.resumed else ""))
    if prepared.resumed is not None:
        for name, version in kernel_versions().items():
            was = prepared.resumed.state.get("versions", {}).get(name, version)
            if was != version:
                say(f"{name.replace('_', ' ')} was {was} and is {version}: losses go on within rounding, not bit by bit")


def print_totals(stream: BatchStream, printer: StepPrinter) -> None:
    """How much data there is."""
    batches = stream.batches_per_epoch
    printer.say(f"Total train batches: {batches}")
    printer.say(f"Total train sequences: {batches * stream.batch}")
    printer.say(f"Total train tokens: {batches * stream.batch * stream.length}")
