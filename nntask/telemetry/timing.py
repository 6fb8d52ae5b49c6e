"""Timed loops of NNTile's command line: forward passes, and forward with backward passes, over one minibatch of random tokens, before training."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from ..config.run_config import RunConfig
from ..data.batch import Batch
from ..data.objectives import random_batch
from ..hardware.flops import FlopCounts
from .metrics import StepPrinter


class Timed(Protocol):
    """A model whose passes can be run alone."""

    def forward(self, minibatch: Batch) -> None:
        """Run one forward pass over a minibatch; returns when it is over."""

    def forward_backward(self, minibatch: Batch) -> None:
        """Run one forward and backward pass; parameters stay as they are."""


def print_timing(engine: Timed, run: RunConfig, counts: FlopCounts, printer: StepPrinter, stopped: Callable[[], bool] = lambda: False) -> None:
    """Run the loops of --nforward and --nbackward and print NNTile's lines.

    Args:
        stopped: function that is called before each pass; once it returns True, no pass begins and no further line is printed.
    """
    try:
        _time_loops(engine, run, counts, printer, stopped)
    except _TimingStopped:
        return


class _TimingStopped(Exception):
    """The program asked a loop to end."""


def _time_loops(engine: Timed, run: RunConfig, counts: FlopCounts, printer: StepPrinter, stopped: Callable[[], bool]) -> None:
    timed = run.settings.run
    if not (timed.nforward or timed.nforward_warmup or timed.nbackward or timed.nbackward_warmup):
        return
    minibatch, length = run.step.minibatch, run.model.seq_len
    given = random_batch(run.data.objective, minibatch, run.model.config.vocab_size, run.model.seed)
    forward = _seconds(lambda: engine.forward(given), timed.nforward_warmup, timed.nforward, stopped)
    if timed.nforward:
        _print_lines("forward", forward, timed.nforward, minibatch, length, counts.forward, printer)
    if timed.nbackward or timed.nbackward_warmup:
        both = _seconds(lambda: engine.forward_backward(given), timed.nbackward_warmup, timed.nbackward, stopped)
        if timed.nforward:
            alone = forward / timed.nforward
        else:
            alone = _seconds(lambda: engine.forward(given), 1, max(timed.nbackward, 1), stopped) / max(timed.nbackward, 1)
        if timed.nbackward:
            seconds = max(both - alone * timed.nbackward, 1e-9)
            _print_lines("backward", seconds, timed.nbackward, minibatch, length, counts.backward, printer)


def _seconds(action: Callable[[], None], warmup: int, count: int, stopped: Callable[[], bool]) -> float:
    """Return the wall seconds of `count` calls after `warmup` untimed ones."""
    begin = perf_counter()
    for number in range(warmup + count):
        if stopped():
            raise _TimingStopped
        if number == warmup:
            begin = perf_counter()
        action()
    return perf_counter() - begin


def _print_lines(name: str, seconds: float, count: int, minibatch: int, length: int, flops: float, printer: StepPrinter) -> None:
    """Print NNTile's three lines.

    Args:
        flops: number of operations per sequence, by NNTile's formula.
    """
    printer.say(f"nntask {name} time: {seconds} seconds")
    printer.say(f"nntask {name} throughput (tokens/sec):  {count * minibatch * length / seconds}")
    printer.say(f"nntask {name} performance: {count * minibatch * flops / seconds / 1e12} Tflops/s")
