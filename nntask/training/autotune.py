"""``--auto-tile measured``: search for tile sizes by trial, before a run begins.

The search climbs from the table's limits (tokens, features, vocabulary rows per tile; `tiling.Limits`): along one axis after the other it halves or
doubles the limit as long as that is faster. The three fastest tilings are tried twice more, in turn, and the medians decide, so that a lull of the
machine does not. Sizes given by flags are kept, and a resumed run keeps all its sizes. A trial runs real steps on random tokens within the budgets
of the run. If the whole step fits into memory, the trial's model has two layers, and its batch at most two minibatches for each memory:

    seconds of a step = seconds of the trial's step x kernel seconds of the whole step / kernel seconds of the trial's

This assumes that a task of the whole step lasts as long as the trial's tasks of its kind. If memory is short, the whole step runs, because its
traffic does not shrink in proportion to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Final, NamedTuple

import scheduler
from scheduler import Runtime, Trace
from scheduler.machine import Accesses, RecordedTask, StepPlan, key_of

from ..config.run_config import RunConfig
from ..config.tile_sizes import TILE_FLAGS, retiled
from ..data.batch import Batch
from ..data.dataset import open_dataset
from ..data.objectives import random_batch
from ..engine.opening import runtime_for
from ..engine.recorded import PlannedStep, RecordedEngine
from ..errors import UsageError
from ..hardware.machine_model import this_machine
from ..hardware.machine_spec import check_budgets
from ..hardware.runtimes import FAILURES, as_user_error
from ..io.writable import check_writable
from ..planning.memory_fit import CapturedStep, capture, choose_order, least_needs, no_collections
from ..tiling.model_tiling import Limits, ModelTiling, cut, table_limits
from ..tiling.tile_table import add_row, read_table, shape_of
from .signals import Interrupts

LAYERS: Final = 2
"""Layers of a trial's model: with two, tasks of all kinds occur, each at least twice."""
LEAST_STEPS, MOST_STEPS, LEAST_SECONDS = 2, 10, 1.0
"""Limits of a trial: at least two steps after the first, which does not count, and more until a second has passed. The fastest step counts."""
FINALISTS, FINALS = 3, 2
"""Number of tilings that are tried again, and number of further trials of each."""
SMALLEST: Final = Limits(tokens=64, features=64, vocab=256)
"""Limits at which halving ends."""
LARGEST: Final = 1 << 20
"""Limit at which doubling ends; no dimension is larger."""

Say = Callable[[str], None]
Stopped = Callable[[], bool]


class _MeasuringStopped(Exception):
    """Raised when a signal ends the measurement."""


class _Stopwatch(Trace):
    """Recorder of the kernel seconds of each task of the current step, in place of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}

    def add_task(self, worker: int, name: str, task: int, start_ns: int, end_ns: int, node: int, accesses: Accesses) -> None:
        """Record the seconds of a kernel."""
        self.seconds[task] = (end_ns - start_ns) * 1e-9

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        """Ignore copies; the step's seconds include them."""

    def add_counters(self, at_ns: int, used: list[int], num_ready: int) -> None:
        """Ignore counters."""


class _Lap(NamedTuple):
    """Step of a trial: its seconds, and those of its tasks in planned order."""

    seconds: float
    tasks: Sequence[float]


def in_best_tiles(run: RunConfig, say: Say) -> RunConfig | int:
    """Return the run in the fastest tiles that a search finds, or the exit code if a signal ended the search.

    Raises:
        UsageError, DataError: the table of tiles or the data cannot be used.
        DoesNotFit: a budget is larger than the machine allows.
        StorageError: the disk tier failed, or the tile table could not be written.
        Diverged: --check-finite found NaN.
    """
    if len(run.tiles.given) == len(TILE_FLAGS):
        say("--auto-tile measured has nothing to search: every tile size is given")
        return run
    table = run.tiles.table
    if table:
        check_writable(Path(table), "the tile table")
        if Path(table).exists():
            read_table(table)
    open_dataset(run.data, say)  # report broken data before the search rather than after it
    check_budgets(run.machine)
    with Interrupts() as interrupts, suppress(_MeasuringStopped):
        run = retiled(run, search(run, say, interrupts.pending))
        if table and not run.settings.run.dry_run:
            add_row(table, shape_of(run.model.config, run.step.minibatch, run.model.seq_len), run.model.tiling)
            say(f"auto-tile: entered into {table}")
    if interrupts.pending():
        say("interrupted while tiles were measured; no checkpoint was saved yet, so there is nothing to continue")
        return interrupts.exit_code
    return run


def search(run: RunConfig, say: Say, stopped: Stopped = lambda: False) -> ModelTiling:
    """Return the fastest tiling found. If none fits, return the table's, with the sizes that were given."""
    config, minibatch, length = run.model.config, run.step.minibatch, run.model.seq_len

    def tiling_within(limits: Limits) -> ModelTiling:
        return retiled(run, cut(config, minibatch, length, limits)).model.tiling

    def measure_once(tiling: ModelTiling) -> None:
        step_seconds, how = measure(run, tiling, stopped)
        seconds.setdefault(tiling, []).append(step_seconds)
        say(f"auto-tile: {_words(tiling)}: {how if step_seconds == inf else f'{step_seconds:.4g} s a step{how}'}")

    def measured(tiling: ModelTiling) -> float:
        if tiling not in seconds:
            measure_once(tiling)
        return median(seconds[tiling])

    seconds: dict[ModelTiling, list[float]] = {}
    first = limits = table_limits(config, minibatch, length, device=run.machine.gpus.device_class)
    while measured(best := tiling_within(limits)) == inf:
        smaller = Limits(*(min(size, max(size // 2, least)) for size, least in zip(limits, SMALLEST, strict=True)))
        if smaller == limits:
            break
        limits = smaller
    for axis in Limits._fields:
        start = best
        for neighbours in (_halved, _doubled):
            for trial in neighbours(limits, axis):
                tiling = tiling_within(trial)
                if tiling == best:
                    continue
                if measured(tiling) >= measured(best):
                    break
                limits, best = trial, tiling
            if best != start:
                break
    if measured(best) == inf:
        say(f"auto-tile: none of {len(seconds)} tilings fits")
        return tiling_within(first)
    finalists = sorted((tiling for tiling in seconds if measured(tiling) < inf), key=measured)[:FINALISTS]
    if len(finalists) > 1:
        for tiling in finalists * FINALS:
            measure_once(tiling)
        best = min(finalists, key=measured)
    say(f"auto-tile: the fastest of {len(seconds)} tilings is {_words(best)}")
    return best


def _halved(limits: Limits, axis: str) -> Iterator[Limits]:
    """Yield `limits` with the limit of `axis` halved once, twice, and so on."""
    value, least = getattr(limits, axis), getattr(SMALLEST, axis)
    while value > least:
        value = max(value // 2, least)
        yield limits._replace(**{axis: value})


def _doubled(limits: Limits, axis: str) -> Iterator[Limits]:
    """Yield `limits` with the limit of `axis` doubled once, twice, and so on."""
    value = getattr(limits, axis)
    while value < LARGEST:
        value *= 2
        yield limits._replace(**{axis: value})


def _words(tiling: ModelTiling) -> str:
    return ", ".join(f"{name.removesuffix('_tile')} {getattr(tiling, name)}" for name in tiling.__slots__)


def measure(run: RunConfig, tiling: ModelTiling, stopped: Stopped = lambda: False) -> tuple[float, str]:
    """Return the seconds of an optimizer step in these tiles, and a note on layers left out of the trial; infinity and the reason if it does not fit.

    Raises:
        StorageError: the disk tier failed.
    """
    run, config = retiled(run, tiling), run.model.config
    run = replace(run, start=replace(run.start, directory=None))  # a trial starts from no files
    try:
        with no_collections():
            whole = capture(run)
            target = this_machine(run.machine)
            fits = least_needs(whole.plan, target, run.step.recompute, run.step.order, quick=True).fit(target)
    except UsageError:
        return inf, "too many tasks"
    if not fits:
        return inf, "does not fit"
    count, small = run.step.num_minibatches, config
    if whole.plan.needed_bytes() <= target.memory:
        small = config.with_layers(min(config.n_layer, LAYERS))
        count = min(count, 2 * len(target.compute_nodes))
    trial = run.cut(batch=count * run.step.minibatch).with_model(config=small)
    try:
        plan, lap = _run(trial, whole if trial == run else None, stopped)
    except scheduler.DoesNotFit:
        return inf, "does not fit"
    kernels = _kernel_seconds(whole.plan, plan, lap.tasks)
    left_out = f" (from {small.n_layer} of {config.n_layer} layers)" if small.n_layer < config.n_layer else ""
    return lap.seconds * kernels / sum(lap.tasks), left_out


def _run(run: RunConfig, step: CapturedStep | None, stopped: Stopped) -> tuple[StepPlan, _Lap]:
    """Run a trial and return its plan and its fastest step.

    Args:
        step: captured step of the trial; None to capture it.
    """
    with no_collections():
        step = step or capture(run)
        assert step.symbols is not None  # the model is made of tiles
        planned = PlannedStep(choose_order(step, run, this_machine(run.machine)), step.symbols)
    watch = _Stopwatch()
    batch = random_batch(run.data.objective, run.step.batch, run.model.config.vocab_size, run.model.seed)
    machine = replace(run.machine, scheduling=replace(run.machine.scheduling, graphs=False))  # graphs on GPUs would hide the times of tasks
    runtime = runtime_for(run.on(machine), watch)
    try:
        with runtime:
            engine = RecordedEngine(run, runtime, planned=planned)
            runtime.wait()
            plan = engine.order.plan
            return plan, min(_laps(engine, runtime, watch, batch, stopped), key=lambda lap: lap.seconds)
    except FAILURES as error:
        raise as_user_error(error, runtime, machine, "the run has not begun, name another place with --disk") from error


def _laps(engine: RecordedEngine, runtime: Runtime, watch: _Stopwatch, batch: Batch, stopped: Stopped) -> list[_Lap]:
    """Run the steps of a trial, and return all but the first."""
    laps: list[_Lap] = []
    total = 0.0
    for number in range(1, MOST_STEPS + 2):
        if stopped():
            raise _MeasuringStopped
        watch.seconds.clear()
        begin = perf_counter()
        engine.start(number, 0.0, batch).result()
        runtime.wait()  # on a GPU, kernels and their times finish after the loss
        seconds = perf_counter() - begin
        if number > 1:
            laps.append(_Lap(seconds, [watch.seconds[task] for task in sorted(watch.seconds)]))  # ids rise in planned order
            total += seconds
        if len(laps) >= LEAST_STEPS and total >= LEAST_SECONDS:
            break
    return laps


def _kernel_seconds(whole: StepPlan, trial: StepPlan, seconds: Sequence[float]) -> float:
    """Return the kernel seconds of a step if each task lasts as long as the trial's tasks of its kind do on average."""
    kinds: dict[object, list[float]] = {}
    for task, lasted in zip(trial.tasks, seconds, strict=True):
        kinds.setdefault(_kind(task), []).append(lasted)
        kinds.setdefault(task.name, []).append(lasted)  # for kinds that only deeper layers contain
    means = {kind: fmean(each) for kind, each in kinds.items()}
    return sum(means.get(_kind(task)) or means[task.name] for task in whole.tasks)


def _kind(task: RecordedTask) -> tuple[str, int]:
    """Return a key that is equal for tasks of equal cost."""
    return key_of(task)
