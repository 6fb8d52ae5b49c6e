"""A training run from settings to exit code."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from scheduler.ordering import PlannedOrder
from tiles import TileTensor

from ..checkpoints import AGAINST_DIVERGENCE, Checkpoint, find_checkpoint, step_directories
from ..data import BatchStream, Cursor, Dataset, in_order, open_dataset
from ..errors import DataError, Diverged, UsageError
from ..models.interface import ModelConfig
from ..schedule import make_schedule
from ..tensorfile import STORAGE, save_tensors
from .autotile import prepare_in_best_tiles
from .base import Base, base_to_start_from
from .claim import Claim
from .engine import Cluster, Counters, NodesChanged, Trained
from .evaluation import evaluate
from .eventfile import EventFile, check_installed
from .explain import Explainer, matching
from .fitting import check_fit, sketch
from .flops import FlopCounts, flop_counts_of
from .gpus import check_fallbacks
from .loop import Loop, Plan
from .machine import FAILURES, open_runtime, told
from .metrics import Journal, StepPrinter
from .outputs import CONFIG, METRICS, machine_of, summary_of, write_file, write_machine, write_summary
from .prepare import Prepared, check_run, claimed_by, state_of, warn_of_disk
from .recorded import RecordedEngine
from .rules import rank_of, trace_range
from .running import Running, print_header, print_totals
from .sample import sample_prompt
from .settings import ClusterSettings, StorageDtype, TrainSettings
from .signals import Interrupts
from .text import to_toml
from .timing import print_timing
from .traced import Tracer
from .traffic import is_worth_telling, traffic_report
from .weights import check_weights, load_weights, model_to_start_from


@dataclass(frozen=True, slots=True)
class Watchers:
    """What looks on while a run trains; nothing unless given. The first four as in `Loop`."""

    on_step: Callable[[int | None], None] = lambda step: None
    tell: Callable[[], None] = lambda: None
    starts_alone: Callable[[int], bool] = lambda step: False
    at_end: Callable[[], None] = lambda: None
    on_saved: Callable[[], None] = lambda: None


def train(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None = None, cluster: Cluster | None = None) -> int:
    """Run a training; returns 0, or 130 or 143 when it was interrupted.

    Args:
        cluster: the machines that train; None for this one.

    Raises:
        NntaskError: see `nntask.errors` for kinds and exit codes.
    """
    printer = StepPrinter()
    if settings.observe.report_to == "tensorboard":
        check_installed()
    prepared = prepare_in_best_tiles(settings, config, resumed, printer.say)
    if isinstance(prepared, int):
        return prepared
    settings = prepared.settings
    base = base_to_start_from(settings, resumed)
    if cluster is None:
        warn_of_disk(settings.resources.disk)
        sketched, order = check_fit(settings, prepared.config, prepared.tiling, base)
        fallbacks = check_fallbacks(sketched.plan.tasks, settings)
    else:
        sketched, order = sketch(settings, prepared.config, prepared.tiling, base=base), None  # each node checks what it has
        fallbacks = {}
    check_weights(prepared, base, sketched)
    explained = matching(settings.observe.explain, {task.name for task in sketched.plan.tasks})
    if settings.run.dry_run:
        _stream(prepared, open_dataset(prepared.data, printer.say))
        printer.say(to_toml(settings))
        return 0
    interrupts = Interrupts()
    interrupts.what_there_is = partial(_left_behind, prepared.run)
    with Claim(prepared.run, claimed_by(resumed), partial(check_run, settings, prepared.run, resumed)) as claim, interrupts:
        if cluster is not None:
            return _on_cluster(prepared, base, cluster, claim, printer, interrupts)
        assert order is not None  # chosen above
        return _here(prepared, base, order, fallbacks, explained, claim, printer, interrupts)


def _here(
    prepared: Prepared,
    base: Base | None,
    order: PlannedOrder,
    fallbacks: Mapping[str, int],
    explained: Collection[str],
    claim: Claim,
    printer: StepPrinter,
    interrupts: Interrupts,
) -> int:
    """Train on this machine."""
    settings = prepared.settings
    runtime = open_runtime(settings)
    try:
        with runtime:  # in the try: it waits at its end for tasks that may have failed
            start = model_to_start_from(prepared, base, runtime)
            engine = RecordedEngine(prepared.config, prepared.tiling, runtime, settings, start, order.name)
            dataset = open_dataset(prepared.data, printer.say)
            running = _running(prepared, base, _stream(prepared, dataset), dataset, runtime, engine, printer, interrupts, fallbacks)
            claim.take()
            _begin(running, order)
            if prepared.resumed is None:
                print_timing(engine, settings, running.counts, prepared.config.vocab_size, printer, interrupts.pending)
            tracer = Tracer(runtime, settings, prepared.run, prepared.resumed.step if prepared.resumed else 0)
            explainer = Explainer(runtime, explained, printer.say)
            return _go(running, Watchers(tracer.on_step, explainer.tell, tracer.is_edge, partial(tracer.write, engine.step)))
    except FAILURES as error:
        lower = None if prepared.resumed is None else ""  # which has model and tiling of its checkpoint
        raise told(error, runtime, settings.resources, _left_behind(prepared.run), lower=lower) from error


def _on_cluster(prepared: Prepared, base: Base | None, cluster: Cluster, claim: Claim, printer: StepPrinter, interrupts: Interrupts) -> int:
    """Train on a cluster; when its nodes change, go on from the last checkpoint with those that there are."""
    dataset = open_dataset(prepared.data, printer.say)
    while True:
        try:
            with cluster.open(prepared, base, dataset, printer.say) as (counters, engine):
                stream = _stream(prepared, dataset, rows=())  # nodes read what they need
                running = _running(prepared, base, stream, dataset, counters, engine, printer, interrupts)
                claim.take()
                _begin(running, None)
                return _go(running, Watchers(on_saved=cluster.check_members))
        except NodesChanged as change:
            if interrupts.pending():
                printer.say(f"{change}; {_interrupted(prepared, None)}")
                return interrupts.exit_code
            saved = bool(step_directories(prepared.run))
            prepared = replace(prepared, resumed=find_checkpoint(prepared.run) if saved else prepared.resumed)
            where = f"after step {prepared.resumed.step}" if prepared.resumed is not None else "from the beginning, since nothing was saved yet"
            printer.say(f"{change}; going on {where}")


def _running(
    prepared: Prepared,
    base: Base | None,
    stream: BatchStream,
    dataset: Dataset,
    runtime: Counters,
    engine: Trained,
    printer: StepPrinter,
    interrupts: Interrupts,
    fallbacks: Mapping[str, int] | None = None,
) -> Running:
    """A run whose model and data are there."""
    if prepared.settings.run.sample_tokens:
        sample_prompt(prepared.settings, dataset.tokenizer, stream.length)  # refused now rather than after the training
    return Running(prepared, base, dataset, stream, runtime, engine, _counts(prepared, engine), printer, interrupts, fallbacks or {})


def _begin(running: Running, order: PlannedOrder | None) -> None:
    """Say what is trained, write down how, and load the weights that it begins with."""
    print_header(running, order)
    write_file(running.prepared.run / CONFIG, to_toml(running.settings))
    load_weights(running.prepared, running.engine)


def _go(running: Running, watchers: Watchers) -> int:
    """Training and closing lines."""
    prepared, settings, printer = running.prepared, running.settings, running.printer
    interrupts = running.interrupts
    steps, warmup = _steps(settings, running.stream)
    if steps == 0:
        if interrupts.pending():
            printer.say("interrupted in the timing loops; no training was asked for and nothing was saved")
        return interrupts.exit_code
    first = prepared.resumed.step if prepared.resumed else 0
    print_totals(running.stream, printer)
    events = EventFile(prepared.run, first) if settings.observe.report_to == "tensorboard" else None
    journal = Journal(prepared.run / METRICS, first, timed_after=max(first, warmup), events=events)
    loop = _loop(running, journal, watchers, steps, first)
    write_machine(prepared.run, machine_of(running.runtime.stats(), loop.plan.peak_flops, running.engine.num_tasks))
    endings = (journal.close, partial(_summarise, running, loop, journal), watchers.at_end)
    try:
        loop.train()
    except BaseException as error:
        for ending in endings:
            with contextlib.suppress(Exception):  # what ended the training is what the user must hear
                ending()
        if isinstance(error, DataError):
            raise DataError(f"{error}; {_until_restored(prepared)}") from error
        raise
    for ending in endings:
        ending()
    interrupts.what_there_is = partial(_all_there, prepared, loop.step, steps)
    if loop.step < steps:
        printer.say(_interrupted(prepared, loop.step))
    else:
        _close(running, loop, journal)
    return interrupts.exit_code


def _interrupted(prepared: Prepared, step: int | None) -> str:
    """What a signal before the last step has left behind; None for a step that was not saved."""
    if not step_directories(prepared.run):
        return "interrupted before the first checkpoint; nothing was saved yet, so there is nothing to continue"
    return f"interrupted{'' if step is None else f' after step {step}'}; continue with: {_command(prepared)}"


def _all_there(prepared: Prepared, step: int, steps: int) -> str:
    """What a run has left behind that had nothing more to save when it was stopped."""
    return f"all {steps} steps were done" if step == steps else _interrupted(prepared, step)


def _command(prepared: Prepared) -> str:
    """What continues a run."""
    return f"nntask train --resume {shlex.quote(str(prepared.run))}{_on(prepared.settings.cluster)}"


def _on(cluster: ClusterSettings) -> str:
    """The flags that say on which machines a run was, as it was told; a resumed run does not know them."""
    found = ((f.name.replace("_", "-"), getattr(cluster, f.name)) for f in fields(cluster) if getattr(cluster, f.name) != f.default)
    return "".join(f" --{name} {shlex.quote(str(value))}" for name, value in found)


def _until_restored(prepared: Prepared) -> str:
    """What a run whose data can no longer be read has left behind."""
    steps = step_directories(prepared.run)
    if not steps:
        return "nothing was saved, so there is nothing to continue"
    return f"the newest checkpoint is {steps[-1]}; restore the data, then continue with: {_command(prepared)}"


def _left_behind(run: Path) -> str:
    """What a run that ended too soon has left behind."""
    steps = step_directories(run)
    if not steps:
        return "nothing was saved, so there is nothing to continue"
    return f"nothing more was saved, the newest checkpoint is {steps[-1]}; continue with: nntask train --resume {shlex.quote(str(run))}"


def _loop(running: Running, journal: Journal, watchers: Watchers, steps: int, first: int) -> Loop:
    settings, prepared, dataset = running.settings, running.prepared, running.dataset
    optimizer, checkpoints = settings.optimizer, settings.checkpoints
    tokenizer = dataset.tokenizer

    def on_step(step: int | None) -> None:
        watchers.on_step(step)
        watchers.tell()

    running.runtime.wait()  # initialisation ends first: the peak below is that of idle workers
    plan = Plan(
        steps=steps,
        first=first,
        lr=make_schedule(
            optimizer.schedule,
            optimizer.lr or 0.0,
            steps=steps,
            warmup_steps=optimizer.warmup_steps or 0,
            min_lr=optimizer.min_lr,
            start_lr=optimizer.start_lr,
            full_lr_iter=optimizer.full_lr_iter,
        ),
        save_every=checkpoints.save_every or 0,
        save_at_end=checkpoints.save_every != 0,
        eval_every=settings.run.eval_every,
        keep=checkpoints.keep_checkpoints,
        sum_loss=optimizer.loss_reduction == "sum",
        flops=running.counts.model * running.stream.batch,
        peak_flops=running.engine.peak_flops(),
    )
    return Loop(
        plan,
        running.engine,
        running.stream,
        running.runtime,
        run=prepared.run,
        state=state_of(prepared, dataset.fingerprint, tokenizer.name if tokenizer else None, running.base),
        journal=journal,
        printer=running.printer,
        interrupts=running.interrupts,
        tokenizer=tokenizer,
        validate=partial(_validate, running),
        on_step=on_step,
        starts_alone=watchers.starts_alone,
        on_saved=watchers.on_saved,
    )


def _stream(prepared: Prepared, dataset: Dataset, rows: Sequence[int] | None = None) -> BatchStream:
    """Batches from where the run begins.

    Args:
        rows: see `BatchStream`.

    Raises:
        UsageError: --eval-every asks for validation data and there is none, or --trace-steps names steps that the run does not do.
        DataError: there is too little data, or the run that is continued learnt from other data.
    """
    settings, resumed = prepared.settings, prepared.resumed
    if settings.run.eval_every and dataset.validation is None:
        raise UsageError(f"--eval-every {settings.run.eval_every} needs validation data and {dataset.name} brings none; add --val-path or drop it")
    cursor = None
    if resumed is not None:
        if resumed.state.get("data") != dataset.fingerprint:
            raise DataError(f"--resume {resumed.path} learnt from other data than {dataset.train.path} holds now; restore it, or start a new run")
        epoch, position = resumed.state["cursor"]
        cursor = Cursor(epoch, position)
    stream = BatchStream(
        dataset.train,
        settings.model.seq_len or prepared.config.n_positions,
        settings.tiling.batch or 1,
        seed=settings.data.seed,
        cursor=cursor,
        select=dataset.select_sequences,
        rows=rows,
    )
    traced, first, last = trace_range(settings.observe.trace_steps), resumed.step + 1 if resumed else 1, _steps(settings, stream)[0]
    if traced is not None and not first <= traced[0] <= traced[1] <= last:
        raise UsageError(f"--trace-steps must lie within steps {first} to {last} of this run, got {settings.observe.trace_steps}; change or drop it")
    return stream


def _steps(settings: TrainSettings, stream: BatchStream) -> tuple[int, int]:
    """Optimizer steps of the run, and how many of them are warm-up epochs, which do not count in the closing figures."""
    warmup = settings.run.nepochs_warmup * stream.batches_per_epoch
    if settings.run.steps is not None:
        return settings.run.steps, 0
    return warmup + settings.run.nepochs * stream.batches_per_epoch, warmup


def _counts(prepared: Prepared, engine: Trained) -> FlopCounts:
    config, model = prepared.config, prepared.settings.model
    num_adapter_weights = 0 if rank_of(prepared.settings) is None else engine.num_trained
    return flop_counts_of(config, model.seq_len or config.n_positions, flash=model.flashattention, num_adapter_weights=num_adapter_weights)


def _validate(running: Running, step: int) -> None:
    """Score the validation data and print the result."""
    validation = running.dataset.validation
    if validation is None:
        return
    settings = running.settings
    batches = in_order(validation, running.stream.length, settings.tiling.minibatch, settings.run.eval_batches)
    if not batches:
        running.printer.say(f"{validation.path} is shorter than one sequence of {running.stream.length} tokens; nothing to validate on")
        return
    tokenizer = running.dataset.tokenizer
    result = evaluate(running.engine, batches, tokenizer.byte_lengths() if tokenizer else None, running.interrupts.pending)
    if result is not None:
        running.printer.say(f"step {step}: validation {result.line()}")


def _close(running: Running, loop: Loop, journal: Journal) -> None:
    """Last validation, files asked for, sample, closing lines; a signal leaves out validation and sample."""
    settings, printer = running.settings, running.printer
    if settings.run.eval_every and loop.step % settings.run.eval_every:
        _validate(running, loop.step)
    files = settings.checkpoints
    if files.save_checkpoint:
        _save_file("--save-checkpoint", files.save_checkpoint, running.engine.model_tensors(), files.save_checkpoint_dtype)
    if files.save_optimizer:
        _save_file("--save-optimizer", files.save_optimizer, running.engine.optimizer_tensors(), files.save_optimizer_dtype)
    timed = journal.timed
    if timed.steps:
        seconds, tokens = timed.seconds, timed.tokens
        flops = (running.counts.forward + running.counts.backward) * tokens / running.stream.length
        printer.say(f"Training time: {seconds} seconds")
        printer.say(f"Training throughput tokens/sec: {tokens / seconds}")
        printer.say(f"Training performance: {flops / seconds / 1e12} Tflops/s")
        formula = "6N" if running.base is None else "4N + 6A"
        printer.say(f"Model flops utilisation ({formula} + 12Ldn): {timed.mfu_seconds / seconds:.1%} of gemm peak")
        printer.say(f"Loss on the last batch: {timed.loss_last}")
    stats = running.runtime.stats()
    if is_worth_telling(journal.own, stats):
        printer.say("\n".join(traffic_report(journal.warm if journal.warm.steps else journal.own, stats)))
    if settings.run.sample_tokens and not running.interrupts.pending():
        text = running.engine.sample(running.dataset, running.stream.length, running.interrupts.pending)
        printer.say(f"--- sample\n{text}\n---")


def _save_file(flag: str, path: str, tensors: Mapping[str, TileTensor], dtype: StorageDtype) -> None:
    """Write a file that was asked for beside the checkpoints."""
    try:
        save_tensors(path, tensors, dtype=STORAGE[dtype], finite=True)
    except Diverged as error:
        raise Diverged(f"{flag} {path} was not written: {error}; {AGAINST_DIVERGENCE}") from None
    except UsageError as error:
        raise UsageError(f"{flag} {path} was not written: {error}") from None


def _summarise(running: Running, loop: Loop, journal: Journal) -> None:
    """Write summary.json, whichever way the training ended."""
    write_summary(
        running.prepared.run,
        summary_of(journal.whole, journal.own, running.runtime.stats(), running.engine.num_tasks, running.fallbacks),
    )
