"""``--auto-tile measured``: tile sizes by trial, before a run begins.

The search climbs from the table's limits (tokens, features, vocabulary rows per tile; `tiling.Limits`): along one axis after the other it halves or
doubles the limit, as long as that is faster. The three fastest tilings are then tried twice more, in turn, and the medians decide, so that a lull of
the machine does not. Sizes given by flags stay as they are. A trial runs real steps on random tokens within the budgets of
the run. Where the whole step fits into memory, the trial's model has two layers and its batch two minibatches for each memory at most, and

    seconds of a step = seconds of the trial's step x kernel seconds of the whole step / kernel seconds of the trial's,

in which every task of the whole step is taken to last as long as the trial's tasks of its kind. Where memory is short, the whole step runs, because
what moves does not shrink with the model in proportion. Nothing is searched for a run that is resumed: its sizes are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Final, cast

import numpy as np

from scheduler.core import errors as scheduler_errors
from scheduler.core.perf import footprint
from scheduler.core.records import Task
from scheduler.core.steps import RecordedTask, StepPlan
from scheduler.runtime import Runtime
from scheduler.trace import Accesses, Trace

from ..checkpoints import Checkpoint
from ..data import Batch, open_dataset
from ..errors import UsageError
from ..models.interface import ModelConfig
from ..tiletable import FLAG, add_row, read_table, shape_of
from ..tiling import Limits, ModelTiling, cut, table_limits
from .fitting import capture, count_minibatches, least_needs, no_collections
from .gpus import device_class
from .machine import FAILURES, open_runtime, told
from .outputs import check_writable
from .places import this_machine
from .prepare import Prepared, open_tiles, prepare, with_tiling
from .recorded import RecordedEngine
from .rules import resolve
from .settings import TrainSettings
from .signals import Interrupts

LAYERS: Final = 2
"""Layers of a trial's model: tasks of all kinds occur, and twice."""
LEAST_STEPS, MOST_STEPS, LEAST_SECONDS = 2, 10, 1.0
"""Steps of a trial after the first, which does not count: at least two, more until a second is over; the fastest counts."""
FINALISTS, FINALS = 3, 2
"""Tilings that are tried again, and how often."""
SMALLEST: Final = Limits(tokens=64, features=64, vocab=256)
"""Where halving ends."""
LARGEST: Final = 1 << 20
"""Where doubling ends; no dimension is larger."""

Say = Callable[[str], None]
Stopped = Callable[[], bool]


class _Stopped(Exception):
    """A signal came."""


class _Stopwatch(Trace):
    """Seconds in the kernel of each task of the step under way, instead of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}

    def add_task(self, worker: int, name: str, task: int, start_ns: int, end_ns: int, node: int, accesses: Accesses) -> None:
        """A kernel ran."""
        self.seconds[task] = (end_ns - start_ns) * 1e-9

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        """Copies are part of the step's seconds."""

    def add_counters(self, at_ns: int, used: list[int], num_ready: int) -> None:
        """Nobody asks."""


@dataclass(frozen=True, slots=True)
class _Lap:
    """One step of a trial: its seconds, and those of its tasks in planned order."""

    seconds: float
    tasks: Sequence[float]


def prepare_in_best_tiles(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None, say: Say) -> Prepared | int:
    """`prepare`, and the search where --auto-tile measured asks for one; the exit code instead when a signal ended that.

    Raises:
        UsageError, DataError: as `prepare`.
        StorageError: the disk tier failed, or the tile table could not be written.
        Diverged: --check-finite found NaN.
    """
    prepared = prepare(settings, config, resumed)
    if settings.tiling.auto_tile != "measured":
        return prepared
    if not open_tiles(settings):
        say("--auto-tile measured has nothing to search: every tile size is given")
        return prepared
    table = settings.tiling.tile_table
    if table:
        check_writable(Path(table), FLAG)
        if Path(table).exists():
            read_table(table)
    open_dataset(prepared.data, say)  # what is wrong with the data is better heard before the search than after it
    asked = resolve(settings, config)
    with Interrupts() as interrupts:
        try:
            tiling = search(asked, config, say, interrupts.pending)
        except _Stopped:
            say("interrupted while tiles were measured; nothing was saved yet, so there is nothing to continue")
            return interrupts.exit_code
    resolved, tiling = with_tiling(asked, tiling, config)
    if table and not settings.run.dry_run:
        add_row(table, shape_of(config, resolved.tiling.minibatch, resolved.model.seq_len or config.n_positions), tiling)
        say(f"auto-tile: entered into {table}")
    return replace(prepared, settings=resolved, tiling=tiling)


def search(settings: TrainSettings, config: ModelConfig, say: Say, stopped: Stopped = lambda: False) -> ModelTiling:
    """The fastest tiling found; the table's, with the sizes that were given, if none fits.

    Args:
        settings: resolved but for tile sizes.
    """
    minibatch, length = settings.tiling.minibatch, settings.model.seq_len or config.n_positions

    def tiling_within(limits: Limits) -> ModelTiling:
        return with_tiling(settings, cut(config, minibatch, length, limits), config)[1]

    def measure_once(tiling: ModelTiling) -> None:
        found, how = measure(settings, config, tiling, stopped)
        seconds.setdefault(tiling, []).append(found)
        say(f"auto-tile: {_words(tiling)}: {how if found == inf else f'{found:.4g} s a step{how}'}")

    def measured(tiling: ModelTiling) -> float:
        if tiling not in seconds:
            measure_once(tiling)
        return median(seconds[tiling])

    seconds: dict[ModelTiling, list[float]] = {}
    first = limits = table_limits(config, minibatch, length, device=device_class(settings))
    while measured(best := tiling_within(limits)) == inf:
        smaller = Limits(*(min(size, max(size // 2, least)) for size, least in zip(limits, SMALLEST, strict=True)))
        if smaller == limits:
            break
        limits = smaller
    for axis in Limits._fields:
        start = best
        for neighbours in (_smaller, _larger):
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


def _smaller(limits: Limits, axis: str) -> Iterator[Limits]:
    """`limits` with one of them halved, again and again."""
    value, least = getattr(limits, axis), getattr(SMALLEST, axis)
    while value > least:
        value = max(value // 2, least)
        yield limits._replace(**{axis: value})


def _larger(limits: Limits, axis: str) -> Iterator[Limits]:
    """`limits` with one of them doubled, again and again."""
    value = getattr(limits, axis)
    while value < LARGEST:
        value *= 2
        yield limits._replace(**{axis: value})


def _words(tiling: ModelTiling) -> str:
    return ", ".join(f"{name.removesuffix('_tile')} {getattr(tiling, name)}" for name in tiling.__slots__)


def measure(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling, stopped: Stopped = lambda: False) -> tuple[float, str]:
    """Seconds of an optimizer step in these tiles and what was left out in measuring; infinity and the reason if the step does not fit.

    Args:
        settings: resolved but for tile sizes.

    Raises:
        StorageError: the disk tier failed.
    """
    settings, tiling = with_tiling(settings, tiling, config)
    try:
        with no_collections():
            whole = capture(settings, config, tiling)
            target = this_machine(settings)
            fits = least_needs(whole, settings, target).fit(target)
    except UsageError:
        return inf, "too many tasks"
    if not fits:
        return inf, "does not fit"
    count = count_minibatches(settings)
    if whole.needed_bytes() <= target.memory:
        small = config.with_layers(min(config.n_layer, LAYERS))
        count = min(count, 2 * len(target.places))
    else:
        small = config
    minibatch = settings.tiling.minibatch
    cut_settings = replace(settings, tiling=replace(settings.tiling, batch=count * minibatch))
    try:
        plan, lap = _run(cut_settings, small, tiling, stopped)
    except scheduler_errors.DoesNotFit:
        return inf, "does not fit"
    kernels = _kernel_seconds(whole, plan, lap.tasks)
    left_out = f" (from {small.n_layer} of {config.n_layer} layers)" if small.n_layer < config.n_layer else ""
    return lap.seconds * kernels / sum(lap.tasks), left_out


def _run(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling, stopped: Stopped) -> tuple[StepPlan, _Lap]:
    """The fastest step of a trial."""
    watch = _Stopwatch()
    tokens = np.random.Generator(np.random.PCG64(settings.data.seed)).integers(
        0, config.vocab_size, (settings.tiling.batch or 1, (settings.model.seq_len or config.n_positions) + 1), np.int32
    )
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    settings = replace(settings, resources=replace(settings.resources, graphs=False))  # on GPUs, so that each task has a time
    runtime = open_runtime(settings, watch)
    try:
        with runtime:
            engine = RecordedEngine(config, tiling, runtime, settings)
            runtime.wait()
            plan = engine.order.plan
            return plan, min(_laps(engine, runtime, watch, batch, stopped), key=lambda lap: lap.seconds)
    except FAILURES as error:
        raise told(error, runtime, settings.resources, "the run has not begun, name another place with --disk") from error


def _laps(engine: RecordedEngine, runtime: Runtime, watch: _Stopwatch, batch: Batch, stopped: Stopped) -> list[_Lap]:
    """Steps of a trial without the first."""
    laps: list[_Lap] = []
    total = 0.0
    for number in range(1, MOST_STEPS + 2):
        if stopped():
            raise _Stopped
        watch.seconds.clear()
        begin = perf_counter()
        engine.start(number, 0.0, batch).result()
        runtime.wait()  # on a GPU kernels, and then their times, come later than the loss
        seconds = perf_counter() - begin
        if number > 1:
            laps.append(_Lap(seconds, [watch.seconds[task] for task in sorted(watch.seconds)]))  # ids rise in planned order
            total += seconds
        if len(laps) >= LEAST_STEPS and total >= LEAST_SECONDS:
            break
    return laps


def _kernel_seconds(whole: StepPlan, trial: StepPlan, seconds: Sequence[float]) -> float:
    """Sum over the tasks of a step if each lasts as long as the trial's tasks of its kind do on average."""
    kinds: dict[object, list[float]] = {}
    for task, lasted in zip(trial.tasks, seconds, strict=True):
        kinds.setdefault(_kind(task), []).append(lasted)
        kinds.setdefault(task.name, []).append(lasted)  # for kinds that only deeper layers have
    means = {kind: fmean(each) for kind, each in kinds.items()}
    return sum(means.get(_kind(task)) or means[task.name] for task in whole.tasks)


def _kind(task: RecordedTask) -> tuple[str, int]:
    """What tasks of equal cost share."""
    return task.name, footprint(cast(Task, task))
