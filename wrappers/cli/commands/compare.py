"""``nntask compare``: two kinds of workers on the same training steps; the first task whose results differ."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..options.help import parse
from ..options.runtime_flags import open_source

if TYPE_CHECKING:
    from nntask.architecture import ModelConfig
    from nntask.config import ResourceSettings, RunConfig, TrainSettings
    from nntask.engine import PlannedStep
    from nntask.hardware import MachineSpec
    from nntask.inference import ModelSource
    from nntask.models import LanguageModel
    from nntask.training import Comparison
    from scheduler import Runtime, TaskRuntime

DIFFERENT: Final = 1
"""Exit code if results differ, because one kind of workers has a bug."""
DEFAULT_LENGTH: Final = 256
"""Largest number of tokens of a sequence if neither a flag nor a run sets the length."""


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """Run training steps on two kinds of workers, one worker each, on the same random tokens, and name the first task whose results differ.

    MODEL is a preset, a config (JSON file), a run directory or checkpoint, a model directory of Hugging Face, or a GGUF file. Exit code 0: equal;
    1: different.
    """

    a: Literal["cpu", "sim"] = "cpu"
    """first kind of workers"""
    b: Literal["cpu", "sim"] = "sim"
    """second kind of workers; sim is a simulated device, with memory of its own"""
    rtol: float = 1e-5
    """relative tolerance: elements differ if |a - b| > atol + rtol |b|"""
    atol: float = 1e-8
    """absolute tolerance; 0 for both requires equal numbers"""
    steps: int = 1
    """number of optimizer steps"""
    batch: int | None = None
    """number of sequences per step, in one minibatch (default: the run's, else 1)"""
    seq_len: int | None = None
    """number of tokens per sequence (default: the run's, else at most 256)"""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """arithmetic (auto: the run's, else fp32)"""
    seed: int = 0
    """seed of tokens, dropout, and the weights of a preset or a config"""
    ram: str = ""
    """budget of each memory (three with sim), e.g. 2GiB (default: equal shares of the free memory)"""
    json: bool = False
    """print JSON"""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The run to compare, the source of the model's weights (None for new weights), and the machine of each side, with budgets."""

    name: str
    run: RunConfig
    source: ModelSource | None
    machines: tuple[MachineSpec, MachineSpec]


def run(argv: Sequence[str]) -> int:
    """Compare two kinds of workers; returns 0 if all results are equal within the tolerance, else 1."""
    settings, words = parse(CompareSettings, argv, "nntask compare", words=("MODEL",))
    _check(settings)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from nntask.training import Comparison

    subject = _subject(words[0], settings)
    comparison = Comparison(settings.rtol, settings.atol)
    _compare(settings, subject, comparison)
    print(json.dumps(_figures(settings, subject, comparison), indent=1) if settings.json else "\n".join(_lines(settings, subject, comparison)))
    return DIFFERENT if comparison.first is not None else 0


def _check(settings: CompareSettings) -> None:
    """Check the values of the flags.

    Raises:
        UsageError: the first value that breaks its rule.
    """
    from nntask import UsageError
    from nntask.io import LARGEST

    if settings.a == settings.b:
        other = "sim" if settings.a == "cpu" else "cpu"
        raise UsageError(f"and --b must be two kinds of workers, got {settings.a} for both", f"for example --b {other}", flag="--a")
    for flag, value, least in (("--steps", settings.steps, 1), ("--batch", settings.batch, 1), ("--seq-len", settings.seq_len, 1)):
        if value is not None and value < least:
            raise UsageError(f"must be at least {least}, got {value}", f"the nearest legal value is {least}", flag=flag)
    for flag, tolerance in (("--rtol", settings.rtol), ("--atol", settings.atol)):
        if not 0 <= tolerance < math.inf:
            raise UsageError(f"must be 0 or more, and finite, got {tolerance}", "the nearest legal value is 0", flag=flag)
    if not 0 <= settings.seed <= LARGEST:
        raise UsageError(f"must be at least 0 and at most {LARGEST}, got {settings.seed}", "the nearest legal value is 0", flag="--seed")


def _subject(word: str, asked: CompareSettings) -> _Subject:
    """Return the subject that the argument MODEL names.

    Raises:
        UsageError: MODEL names nothing known, or a flag does not fit the model.
        DataError: the files of MODEL are broken.
    """
    from nntask import PRESETS, UsageError
    from nntask.config import CheckpointSettings, ModelSettings, ObserveSettings, TrainSettings, devices_of, resolve
    from nntask.gguf import is_gguf
    from nntask.hardware import with_budgets
    from scheduler.storage import memory_budgets

    from ..options.sources import model_config

    path, source = Path(word), None
    if word in PRESETS:
        settings = TrainSettings(model=ModelSettings(model=word))
    elif path.is_file() and not is_gguf(path):
        settings = TrainSettings(model=ModelSettings(config_path=word))
    elif path.exists():
        source = open_source(path)
        settings = replace(source.settings, checkpoints=CheckpointSettings(), observe=ObserveSettings())
    else:
        raise UsageError(
            f"MODEL must be a preset ({', '.join(PRESETS)}), a config file, a run, a model directory or a GGUF file, got {word!r}",
            "name one of these",
        )
    config = model_config(settings) if source is None else source.config
    settings = _with_flags(settings, asked, config, is_new=source is None or source.checkpoint is None)
    share = asked.ram or str(memory_budgets(None, None, 2)[0])
    sides = [_resources(kind, share) for kind in (asked.a, asked.b)]
    a, b = (with_budgets(devices_of(each, settings.model.dtype)) for each in sides)
    return _Subject(word, resolve(settings, config, machine=a), source, (a, b))


def _with_flags(settings: TrainSettings, asked: CompareSettings, config: ModelConfig, *, is_new: bool) -> TrainSettings:
    """Return the settings with the values of the flags; one minibatch per step unless a flag or a run sets its size."""
    model, tiling = settings.model, settings.tiling
    length, batch = asked.seq_len, asked.batch
    if is_new:
        length = min(config.n_positions, DEFAULT_LENGTH) if length is None else length
        batch = 1 if batch is None else batch
    if length is not None:
        model = replace(model, seq_len=length)
        tiling = replace(tiling, seq_tile=None)
    if batch is not None:
        tiling = replace(tiling, batch=batch, minibatch=-1, minibatch_tile=None)
    if asked.dtype != "auto":
        model = replace(model, dtype=asked.dtype)
    return replace(settings, model=model, tiling=tiling, data=replace(settings.data, seed=asked.seed))


def _compare(asked: CompareSettings, subject: _Subject, comparison: Comparison) -> None:
    """Run both sides.

    Raises:
        DoesNotFit: a budget is too small, or not available.
    """
    import scheduler
    from nntask import DoesNotFit, NntaskError
    from nntask.engine import runtime_for
    from nntask.hardware import check_budgets
    from nntask.training import run_side_by_side

    def side(machine: MachineSpec) -> Runtime:
        check_budgets(machine)
        return runtime_for(subject.run.on(machine))

    a, b = subject.machines
    planned = _planned(asked, subject)
    try:
        run_side_by_side(comparison, (lambda: side(a), lambda: side(b)), lambda runtime: _train(runtime, asked, subject, planned))
    except scheduler.DoesNotFit as error:
        remedy = f"raise --ram (now {asked.ram or 'equal shares of the free memory'}), or lower --batch or --seq-len"
        raise DoesNotFit(error.fact, remedy, shortage=error.shortage) from error
    except scheduler.TaskError as error:
        if isinstance(error.__cause__, NntaskError):  # weights that cannot be read
            raise error.__cause__ from error
        raise


def _resources(kind: str, share: str) -> ResourceSettings:
    """Return settings for one worker of a kind, and the memory it may use."""
    from nntask.config import ResourceSettings

    if kind == "cpu":
        return ResourceSettings(ncpu=1, ram=share)
    return ResourceSettings(ncpu=0, sim_gpu=1, ram=share, gpu_memory=share)


def _planned(asked: CompareSettings, subject: _Subject) -> PlannedStep:
    """Return the training step in the order in which both sides run it, planned for the first one."""
    from nntask.engine import PlannedStep
    from nntask.hardware import this_machine
    from nntask.planning import capture, no_collections, order_or_needs

    run = subject.run.on(subject.machines[0])
    with no_collections():
        step = capture(run, build=lambda runtime: _model(runtime, asked, subject, read=False))
        order, _ = order_or_needs(step, run, this_machine(run.machine))
    assert step.symbols is not None  # the model is made of tiles
    return PlannedStep(order, step.symbols)


def _model(runtime: TaskRuntime, asked: CompareSettings, subject: _Subject, *, read: bool = True) -> LanguageModel:
    """Build the model; `read` is an argument of `ModelSource.build`."""
    from nntask.engine import build_model

    run, source = subject.run, subject.source
    return build_model(run.model, runtime) if source is None else source.build(runtime, run.model.tiling, asked.dtype, read=read)


def _train(runtime: Runtime, asked: CompareSettings, subject: _Subject, planned: PlannedStep) -> None:
    """Build the model and take its steps; every call submits the same tasks."""
    from nntask.data import random_batch
    from nntask.engine import RecordedEngine

    run = subject.run
    engine = RecordedEngine(run, runtime, _model(runtime, asked, subject), planned=planned)
    for step in range(1, asked.steps + 1):
        batch = random_batch(run.data.objective, run.step.batch, run.model.config.vocab_size, [asked.seed, step])
        engine.start(step, run.optimizer.lr, batch).result()


def _figures(asked: CompareSettings, subject: _Subject, found: Comparison) -> dict[str, Any]:
    """Return the figures of --json; infinities and NaN, which JSON does not have, become texts."""
    return {
        "equal": found.first is None,
        "model": subject.name,
        "a": asked.a,
        "b": asked.b,
        "rtol": asked.rtol,
        "atol": asked.atol,
        "steps": asked.steps,
        "tasks": found.num_tasks,
        "tiles": found.num_tiles,
        "largest_difference": _finite(found.largest),
        "first": None if found.first is None else _finite(asdict(found.first)),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _lines(asked: CompareSettings, subject: _Subject, found: Comparison) -> Iterator[str]:
    """Yield the result as lines of text."""
    run = subject.run
    yield (
        f"{subject.name}: {asked.steps} step{'' if asked.steps == 1 else 's'} of {run.step.batch} x {run.model.seq_len} tokens; "
        f"{found.num_tasks} tasks on {asked.a} and on {asked.b}, {found.num_tiles} tiles compared"
    )
    first = found.first
    if first is None:
        yield f"equal within rtol {asked.rtol:g} and atol {asked.atol:g}; largest difference {found.largest:g}"
        return
    when = "before the first step" if first.replay is None else f"of step {first.replay + 1}"
    yield f"the first task that differs: {first.name}, task {first.number} {when}"
    yield f"it reads {', '.join(first.reads) or 'nothing'}"
    for tile in first.tiles:
        yield (
            f"{tile.name} {list(tile.shape)} {tile.dtype}: largest difference {tile.largest:g} at {list(tile.index)}, {tile.a:.9g} on {asked.a} and "
            f"{tile.b:.9g} on {asked.b}; {tile.num_beyond:,} of {tile.num_elements:,} elements beyond rtol {asked.rtol:g} and atol {asked.atol:g}"
        )
