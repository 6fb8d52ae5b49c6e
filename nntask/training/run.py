"""A training run, from its configuration to its exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from scheduler.planning import PlannedOrder

from ..checkpoints.store import find_checkpoint, step_directories
from ..config.run_config import RunConfig
from ..config.toml import to_toml
from ..data.dataset import Dataset, open_dataset
from ..data.sampler import BatchStream, Cursor
from ..engine.interface import Cluster, NodesChanged
from ..engine.recorded import RecordedEngine
from ..errors import DataError, UsageError
from ..hardware.gpus import check_fallbacks
from ..hardware.runtimes import FAILURES, as_user_error, runtime_for
from ..inference.samples import sample_prompt
from ..planning.memory_fit import capture, check_fit
from ..telemetry.explain import Explainer, matching
from ..telemetry.metrics import Journal, StepPrinter
from ..telemetry.tensorboard import EventFile, check_installed
from ..telemetry.timing import print_timing
from ..telemetry.tracing import Tracer
from .autotune import in_best_tiles
from .closing import close, summarise, validate
from .continuation import all_there, interrupted, left_behind, until_restored
from .initial_weights import check_weights, load_weights, model_to_start_from
from .loop import Hooks, Loop, LoopPlan, Saver
from .preflight import check_directory, check_start, warn_of_disk
from .run_directory import CONFIG, METRICS, machine_of, versions, write_file, write_machine
from .run_lock import RunLock
from .session import Session, print_header, print_totals
from .signals import Interrupts


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """What is known of the step before anything runs: its order, the names of tasks to explain, and tasks that fall back to the CPU."""

    order: PlannedOrder
    explained: Collection[str]
    fallbacks: Mapping[str, int]


def train(run: RunConfig, cluster: Cluster | None = None) -> int:
    """Run a training; returns 0, or 130 or 143 when it was interrupted.

    Args:
        cluster: the machines that train; None for this one.

    Raises:
        NntaskError: see `nntask.errors` for kinds and exit codes.
    """
    printer = StepPrinter()
    if run.settings.observe.report_to == "tensorboard":
        check_installed()
    check_start(run)
    if run.tiles.is_measured:
        found = in_best_tiles(run, printer.say)
        if isinstance(found, int):
            return found
        run = found
    foreseen = None
    if cluster is None:
        warn_of_disk(run.machine.disk)
        step, order = check_fit(run)
        fallbacks = check_fallbacks(step.plan.tasks, run.machine.gpus, run.machine.num_cpu, strict=run.machine.asked.strict)
        foreseen = _Foreseen(order, matching(run.settings.observe.explain, {task.name for task in step.plan.tasks}), fallbacks)
    else:
        step = capture(run, frozen_base=run.start.frozen_base)  # each node checks what it has
    check_weights(run, step)
    if run.settings.run.dry_run:
        _stream(run, open_dataset(run.data, printer.say))
        printer.say(to_toml(run.settings))
        return 0
    interrupts = Interrupts()
    interrupts.say_what_is_left = partial(left_behind, run.directory)
    with RunLock(run.directory, run.start.flag, partial(check_directory, run)) as lock, interrupts:
        if cluster is not None:
            return _on_cluster(run, cluster, lock, printer, interrupts)
        assert foreseen is not None  # there is no cluster
        return _here(run, foreseen, lock, printer, interrupts)


def _here(run: RunConfig, foreseen: _Foreseen, lock: RunLock, printer: StepPrinter, interrupts: Interrupts) -> int:
    """Train on this machine."""
    runtime = runtime_for(run)
    try:
        with runtime:  # in the try: it waits at its end for tasks that may have failed
            engine = RecordedEngine(run, runtime, model_to_start_from(run, runtime), foreseen.order.name)
            dataset = open_dataset(run.data, printer.say)
            session = Session(run, dataset, _stream(run, dataset), runtime, engine, printer, interrupts, foreseen.fallbacks)
            _begin(session, lock, foreseen.order)
            if run.start.resumed is None:
                print_timing(engine, run, session.counts, printer, interrupts.pending)
            tracer, explainer = Tracer(runtime, run), Explainer(runtime, foreseen.explained, printer.say)

            def on_step(step: int | None) -> None:
                tracer.on_step(step)
                explainer.tell()

            return _go(session, Hooks(on_step, tracer.is_edge, partial(validate, session), at_end=partial(tracer.write, engine.step)))
    except FAILURES as error:
        lower = None if run.start.resumed is None else ""  # which has model and tiling of its checkpoint
        raise as_user_error(error, runtime, run.machine, left_behind(run.directory), lower=lower) from error


def _on_cluster(run: RunConfig, cluster: Cluster, lock: RunLock, printer: StepPrinter, interrupts: Interrupts) -> int:
    """Train on a cluster; when its nodes change, go on from the last checkpoint with those that there are."""
    dataset = open_dataset(run.data, printer.say)
    while True:
        try:
            with cluster.open(run, dataset, printer.say) as (counters, engine):
                stream = _stream(run, dataset, rows=())  # nodes read what they need
                session = Session(run, dataset, stream, counters, engine, printer, interrupts, {})
                _begin(session, lock, None)
                return _go(session, Hooks(validate=partial(validate, session), on_saved=cluster.check_members))
        except NodesChanged as change:
            if interrupts.pending():
                printer.say(f"{change}; {interrupted(run, None)}")
                return interrupts.exit_code
            if step_directories(run.directory):
                run = run.after(find_checkpoint(run.directory))
            where = f"after step {run.start.step}" if run.start.resumed is not None else "from the beginning, since nothing was saved yet"
            printer.say(f"{change}; going on {where}")


def _stream(run: RunConfig, dataset: Dataset, rows: Sequence[int] | None = None) -> BatchStream:
    """Batches from where the run begins.

    Args:
        rows: see `BatchStream`.

    Raises:
        UsageError: --eval-every asks for validation data and there is none, or --trace-steps names steps that the run does not do.
        DataError: there is too little data, or the run that is continued learnt from other data.
    """
    settings, resumed = run.settings, run.start.resumed
    if settings.run.eval_every and dataset.validation is None:
        raise UsageError(f"--eval-every {settings.run.eval_every} needs validation data and {dataset.name} brings none; add --val-path or drop it")
    cursor = None
    if resumed is not None:
        if resumed.state.get("data") != dataset.fingerprint:
            raise DataError(f"--resume {resumed.path} learnt from other data than {dataset.train.path} holds now; restore it, or start a new run")
        epoch, position = resumed.state["cursor"]
        cursor = Cursor(epoch, position)
    stream = BatchStream(
        dataset.train, run.model.seq_len, run.step.batch, seed=run.model.seed, cursor=cursor, select=dataset.select_sequences, rows=rows
    )
    first, last = run.start.step + 1, run.length.on(stream.batches_per_epoch)[0]
    if run.traced is not None and not first <= run.traced[0] <= run.traced[1] <= last:
        raise UsageError(f"--trace-steps must lie within steps {first} to {last} of this run, got {settings.observe.trace_steps}; change or drop it")
    return stream


def _begin(session: Session, lock: RunLock, order: PlannedOrder | None) -> None:
    """Take the directory, say what is trained, write down how, and load the weights that it begins with."""
    run = session.run
    if run.settings.run.sample_tokens:
        sample_prompt(run, session.dataset.tokenizer, session.stream.length)  # refused now rather than after the training
    lock.take()
    print_header(session, order)
    write_file(run.directory / CONFIG, to_toml(run.settings))
    load_weights(run.start, session.engine)


def _go(session: Session, hooks: Hooks) -> int:
    """Training and closing lines."""
    run, printer, interrupts = session.run, session.printer, session.interrupts
    steps, warmup = run.length.on(session.stream.batches_per_epoch)
    if steps == 0:
        if interrupts.pending():
            printer.say("interrupted in the timing loops; no training was asked for and nothing was saved")
        return interrupts.exit_code
    print_totals(session.stream, printer)
    events = EventFile(run.directory, run.start.step) if run.settings.observe.report_to == "tensorboard" else None
    journal = Journal(run.directory / METRICS, run.start.step, timed_after=max(run.start.step, warmup), events=events)
    loop = _loop(session, journal, hooks, steps)
    write_machine(run.directory, machine_of(session.runtime.stats(), loop.plan.peak_flops, session.engine.num_tasks))
    endings = (journal.close, partial(summarise, session, journal), hooks.at_end)
    try:
        loop.train()
    except BaseException as error:
        for ending in endings:
            with contextlib.suppress(Exception):  # what ended the training is what the user must hear
                ending()
        if isinstance(error, DataError):
            raise DataError(f"{error}; {until_restored(run)}") from error
        raise
    for ending in endings:
        ending()
    interrupts.say_what_is_left = partial(all_there, run, loop.step, steps)
    if loop.step < steps:
        printer.say(interrupted(run, loop.step))
    else:
        close(session, journal, loop.step)
    return interrupts.exit_code


def _loop(session: Session, journal: Journal, hooks: Hooks, steps: int) -> Loop:
    """The loop of so many steps, ready to begin."""
    run, dataset, engine = session.run, session.dataset, session.engine
    session.runtime.wait()  # initialisation ends first: the peak below is that of idle workers
    files = run.settings.checkpoints
    plan = LoopPlan(
        steps=steps,
        first=run.start.step,
        lr=run.schedule.over(steps),
        save_every=files.save_every or 0,
        save_at_end=files.save_every != 0,
        eval_every=run.settings.run.eval_every,
        sum_loss=run.settings.optimizer.loss_reduction == "sum",
        flops=session.counts.model * session.stream.batch,
        peak_flops=engine.peak_flops(),
    )
    return Loop(
        plan,
        engine,
        session.stream,
        session.runtime,
        saver=Saver(run.directory, engine, _state_of(run, dataset), files.keep_checkpoints, dataset.tokenizer),
        journal=journal,
        printer=session.printer,
        interrupts=session.interrupts,
        hooks=hooks,
    )


def _state_of(run: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """What state.json holds besides step and cursor."""
    return {
        "seed": run.model.seed,
        "model": run.model.config.to_dict(),
        "settings": asdict(run.settings),
        "data": dataset.fingerprint,
        "tokenizer": dataset.tokenizer.name if dataset.tokenizer else None,
        "versions": versions(),
        **({} if run.start.frozen_base is None else {"base": run.start.frozen_base.to_dict()}),
    }
