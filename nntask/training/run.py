"""A training run, from its configuration to its exit code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import Runtime
from scheduler.planning import PlannedOrder

from ..checkpoints.store import find_checkpoint, step_directories
from ..config.run_config import LanguageRun, RunConfig
from ..config.toml import to_toml
from ..data.dataset import Dataset, open_dataset
from ..engine.interface import Cluster, ModelShapes, NodesChanged
from ..engine.opening import runtime_for
from ..engine.recorded import PlannedStep, RecordedEngine
from ..errors import StorageError
from ..hardware.gpus import check_fallbacks
from ..hardware.machine_model import this_machine
from ..hardware.runtimes import FAILURES, as_user_error
from ..inference.samples import sample_text
from ..planning.assignment import pinned_kinds
from ..planning.memory_fit import capture, check_num_tasks, fitting_order
from ..planning.run_candidates import Updater, planned_run
from ..planning.value_figures import headline, order_figures, value_lines
from ..telemetry.explain import Explainer, matching
from ..telemetry.metrics import StepPrinter
from ..telemetry.tensorboard import check_installed
from ..telemetry.tracing import Tracer
from .attention_choice import choose_attention, told_attention
from .autotune import in_best_tiles
from .closing import validate, write_assignment
from .continuation import interrupted, left_behind
from .initial_weights import check_files, check_weights, model_to_start_from, new_weights
from .loop import Hooks
from .preflight import check_directory, check_start, warn_of_disk, with_known_base
from .run_directory import own_directory
from .run_lock import RunLock
from .run_loop import run_loop
from .session import Opened, Session, UntiledModel, about_tiled, begin, counts_of, stream_of
from .signals import Interrupts

AroundTraining = Callable[[Session], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Results of the preparation of a step, before anything runs.

    Attributes:
        order: order of the step.
        planned: figures of the order.
        explained: names of the tasks to explain.
        fallbacks: number of tasks that fall back to the CPU, by name.
        by_update: forecast seconds by which the updater was chosen.
    """

    order: PlannedOrder
    planned: Mapping[str, Any]
    explained: Collection[str]
    fallbacks: Mapping[str, int]
    by_update: Mapping[Updater, float | None] = field(default_factory=dict)


def train(run: RunConfig, cluster: Cluster | None = None, around: AroundTraining | None = None) -> int:
    """Run a training. Return 0, or 129, 130 or 143 if it was interrupted.

    Args:
        cluster: machines that train, for a run that `check_start` accepted before they were opened; None for this machine.
        around: function that returns a context manager for the session of a run on this machine, which is entered after the run's header and left
            after its last line; None for none.

    Raises:
        NntaskError: any kind of `nntask.errors`, which also lists the exit codes.
    """
    with _directory_of(run) as directory:
        return _train(run if directory == run.directory else replace(run, directory=directory), cluster, around)


def _train(run: RunConfig, cluster: Cluster | None, around: AroundTraining | None) -> int:
    """Run a training in its final directory, like `train`."""
    printer = StepPrinter(is_dry=run.settings.run.dry_run)
    if run.settings.observe.report_to == "tensorboard":
        check_installed()
    if cluster is None:
        check_start(run)
    if run.tiles.is_measured:
        tiled = in_best_tiles(run, printer.say)
        if isinstance(tiled, int):
            return tiled
        run = tiled
    run = with_known_base(run)
    run, attention = choose_attention(run, printer.say)
    foreseen = None
    if cluster is None:
        warn_of_disk(run.machine.disk)
        chosen = planned_run(run)
        run, step, order = chosen.run, chosen.step, chosen.order
        fallbacks = check_fallbacks(step.plan.tasks, run.machine.gpus, run.machine.num_cpu)
        explained = matching(run.settings.observe.explain, {task.name for task in step.plan.tasks})
        if run.model.library:
            printer.say(told_attention(step.plan.tasks))
        kinds = pinned_kinds(run, order)
        figures = {**order_figures(order, run, this_machine(run.machine)), **attention}
        foreseen = _Foreseen(order, figures, explained, fallbacks, chosen.seconds)
    else:
        check_num_tasks(run, run.step.num_minibatches)
        step = capture(run, 1, run.start.frozen_base)  # its tensors; each node captures and checks its own share of a step
    check_weights(run, step)
    if new := new_weights(run, step):
        printer.say(f"{run.settings.checkpoints.init_from} is of a model with another head; new, from the seed: {', '.join(new)}")
    if cluster is not None:
        return _begun(run, printer, partial(_on_cluster, run, cluster, step, printer))
    assert foreseen is not None  # set above, without a cluster
    assert step.symbols is not None  # the model is made of tiles
    known, planned = foreseen, PlannedStep(foreseen.order, step.symbols, kinds)
    del step, chosen  # the captured step is large
    lower = None if run.start.resumed is None else ""  # a resumed run keeps the model and tiling of its checkpoint

    @contextmanager
    def open_on(runtime: Runtime) -> Iterator[Opened]:
        engine = RecordedEngine(run, runtime, model_to_start_from(run, runtime), sampler=sample_text, planned=planned)
        counts = counts_of(run, engine)
        yield Opened(engine, counts, partial(about_tiled, run, engine, runtime.gpus, known.by_update))

    return _begun(run, printer, lambda lock, interrupts: _here(run, known, open_on, lower, lock, printer, interrupts, around))


def train_untiled(run: LanguageRun, model: UntiledModel) -> int:
    """Train a model that is not made of tiles on this machine, like `train`."""
    with _directory_of(run) as directory:
        return _train_untiled(run if directory == run.directory else replace(run, directory=directory), model)


def _directory_of(run: LanguageRun) -> AbstractContextManager[Path]:
    """Return the directory of a run. A new run without a given directory gets its own, except for a dry run."""
    if run.settings.checkpoints.run_dir or run.start.resumed is not None or run.settings.run.dry_run:
        return nullcontext(run.directory)
    return own_directory(run.directory, run.name)


def _train_untiled(run: LanguageRun, model: UntiledModel) -> int:
    printer = StepPrinter(is_dry=run.settings.run.dry_run)
    if run.settings.observe.report_to == "tensorboard":
        check_installed()
    check_start(run)
    model.check(run)
    warn_of_disk(run.machine.disk)
    step = model.capture(run)
    order = fitting_order(step, run, partial(model.changes, run))
    check_files(run.start, step)
    explained = matching(run.settings.observe.explain, {task.name for task in step.plan.tasks})
    foreseen = _Foreseen(order, order_figures(order, run, this_machine(run.machine)), explained, {})
    lower = "--minibatch" if run.start.resumed is None else ""

    def open_on(runtime: Runtime) -> AbstractContextManager[Opened]:
        return model.open(run, runtime, step, order)

    return _begun(run, printer, lambda lock, interrupts: _here(run, foreseen, open_on, lower, lock, printer, interrupts))


def _begun(run: LanguageRun, printer: StepPrinter, go_on: Callable[[RunLock, Interrupts], None]) -> int:
    """Continue a run that has passed all checks, with its directory locked, and return its exit code. A dry run only prints its settings.

    The code is determined when everything is closed, so that no signal and no failed write in between is lost.

    Raises:
        StorageError: standard output could not be written, and no signal ended the run.
        BrokenPipeError: standard output of a dry run is a pipe without a reader.
    """
    if run.settings.run.dry_run:
        stream_of(run, open_dataset(run.data, printer.say))
        printer.say(to_toml(run.settings))
        return 0
    interrupts = Interrupts()
    interrupts.say_what_is_left = partial(left_behind, run)
    with RunLock(run.directory, run.start.flag, partial(check_directory, run)) as lock, interrupts, printer.deferring():
        go_on(lock, interrupts)
    if printer.failure is not None and not interrupts.pending():
        raise StorageError(printer.failure.fact, interrupts.say_what_is_left())
    return interrupts.exit_code


def _here(
    run: LanguageRun,
    foreseen: _Foreseen,
    open_on: Callable[[Runtime], AbstractContextManager[Opened]],
    lower: str | None,
    lock: RunLock,
    printer: StepPrinter,
    interrupts: Interrupts,
    around: AroundTraining | None = None,
) -> None:
    """Train on this machine.

    Args:
        lower: flag to lower if memory does not suffice, as for `as_user_error`.
        around: function that returns a context manager for the session, as for `train`; None for none.
    """
    runtime = runtime_for(run)
    try:
        with runtime, open_on(runtime) as opened:  # inside the try: on exit, a runtime waits for tasks that may have failed
            engine, dataset = opened.engine, open_dataset(run.data, printer.say)
            stream, lengths = stream_of(run, dataset), _byte_lengths(dataset) if opened.says_bits else None
            session = Session(run, dataset, stream, runtime, engine, opened.counts, printer, interrupts, foreseen.fallbacks, lengths, opened.config)
            begin(session, lock, opened.about, foreseen.order, foreseen.planned)
            decisions = [f"recomputed instead of kept: {headline(foreseen.planned)}", *value_lines(foreseen.planned)]
            tracer, explainer = Tracer(runtime, run), Explainer(runtime, foreseen.explained, decisions, printer.say)

            def on_step(step: int | None) -> None:
                tracer.on_step(step)
                explainer.tell()

            def at_end() -> None:
                tracer.write(engine.step)
                write_assignment(run, engine.step)

            hooks = Hooks(on_step, tracer.is_edge, partial(validate, session), at_end=at_end)
            with nullcontext() if around is None else around(session):
                run_loop(session, hooks)
    except FAILURES as error:
        raise as_user_error(error, runtime, run.machine, left_behind(run), lower=lower) from error


def _byte_lengths(dataset: Dataset) -> npt.NDArray[np.int64] | None:
    """Return the number of bytes of text of each id; None if validation does not score text itself."""
    return dataset.tokenizer.byte_lengths() if dataset.tokenizer and dataset.spec.objective.kind == "causal" else None


def _on_cluster(run: RunConfig, cluster: Cluster, shapes: ModelShapes, printer: StepPrinter, lock: RunLock, interrupts: Interrupts) -> None:
    """Train on a cluster. When its nodes change, continue from the last checkpoint with the remaining ones."""
    dataset = open_dataset(run.data, printer.say)
    while True:
        try:
            with cluster.open(run, shapes, dataset, printer.say) as (counters, engine):
                stream = stream_of(run, dataset, rows=())  # nodes read their own rows
                counts, lengths = counts_of(run, engine), _byte_lengths(dataset)
                session = Session(run, dataset, stream, counters, engine, counts, printer, interrupts, {}, lengths)
                begin(session, lock, partial(about_tiled, run, engine, counters.gpus), None)
                return run_loop(session, Hooks(validate=partial(validate, session), on_saved=cluster.check_members))
        except NodesChanged as change:
            if interrupts.pending():
                printer.say(f"{change}; {interrupted(run, None)}")
                return
            if step_directories(run.directory):
                run = run.after(find_checkpoint(run.directory))
            where = f"after step {run.start.step}" if run.start.resumed is not None else "from the beginning, since nothing was saved yet"
            printer.say(f"{change}; going on {where}")
