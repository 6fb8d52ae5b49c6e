"""Training loop of a prepared session, with the files and lines around it: from the amount of data to the closing lines."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from functools import partial
from typing import Any

from ..config.run_config import LanguageRun
from ..data.dataset import Dataset
from ..errors import DataError
from ..telemetry.metrics import Journal
from ..telemetry.tensorboard import EventFile
from .closing import close, summarise
from .continuation import all_there, how_to_continue, interrupted
from .loop import Hooks, Loop, LoopPlan, Saver
from .run_directory import METRICS, machine_of, versions, write_machine
from .session import Session, print_totals


def run_loop(session: Session, hooks: Hooks) -> None:
    """Train, and print and write the results.

    Raises:
        NntaskError: any error of `Loop.train`; the remaining files are written where possible.
    """
    run, printer, interrupts = session.run, session.printer, session.interrupts
    steps, warmup = run.length.on(session.stream.batches_per_epoch)
    if steps == 0:
        if interrupts.pending():
            interrupts.cut_short = True
            printer.say("interrupted before training; no training was asked for and nothing was saved")
        return
    print_totals(session.stream, printer)
    events = EventFile(run.directory, run.start.step) if run.settings.observe.report_to == "tensorboard" else None
    journal = Journal(run.directory / METRICS, run.start.step, timed_after=max(run.start.step, warmup), events=events)
    session.runtime.wait()  # initialisation ends first, so that the peak below is that of idle workers
    peak_flops = session.engine.peak_flops()
    write_machine(run.directory, machine_of(session.runtime.stats(), peak_flops, session.engine.num_tasks))
    loop = _loop(session, journal, hooks, steps, peak_flops)
    endings = (journal.close, partial(summarise, session, journal), hooks.at_end)
    try:
        loop.train()
    except BaseException as error:
        for ending in endings:
            with contextlib.suppress(Exception):  # the user must see the error that ended the training
                ending()
        if isinstance(error, DataError):
            raise DataError(str(error), how_to_continue(run, "restore the data, then ")) from error
        raise
    for ending in endings:
        ending()
    interrupts.say_what_is_left = partial(all_there, run, loop.step, steps)
    if loop.step < steps:
        interrupts.cut_short = True
        printer.say(interrupted(run, loop.step))
    else:
        close(session, journal)


def _loop(session: Session, journal: Journal, hooks: Hooks, steps: int, peak_flops: float) -> Loop:
    """Build the loop of `steps` steps."""
    run, dataset, engine = session.run, session.dataset, session.engine
    plan = LoopPlan(
        steps=steps,
        first=run.start.step,
        lr=run.schedule.over(steps),
        saving=run.saving,
        eval_every=run.settings.run.eval_every,
        sum_loss=run.sums_loss,
        flops=session.counts.model * session.stream.batch,
        peak_flops=peak_flops,
    )
    return Loop(
        plan,
        engine,
        session.stream,
        session.runtime,
        saver=Saver(run.directory, engine, _state_of(run, dataset), run.saving.keep, dataset.tokenizer, session.config),
        journal=journal,
        printer=session.printer,
        interrupts=session.interrupts,
        hooks=hooks,
    )


def _state_of(run: LanguageRun, dataset: Dataset) -> dict[str, Any]:
    """Return the entries of state.json besides step and cursor."""
    return {
        "seed": run.model.seed,
        "model": run.model.config.to_dict(),
        "settings": asdict(run.settings),
        "data": dataset.fingerprint,
        "tokenizer": dataset.tokenizer.name if dataset.tokenizer else None,
        "form": dataset.spec.objective.form,
        "versions": versions(),
        **({} if run.start.frozen_base is None else {"base": run.start.frozen_base.to_dict()}),
    }
