"""Work of a training besides its steps: validation, the sample, closing lines and summary.json."""

from __future__ import annotations

from contextlib import suppress

from scheduler import RecordingError, Step

from ..config.run_config import LanguageRun
from ..data.sampler import in_order
from ..engine.evaluation import Evaluation, evaluate
from ..planning.assignment import ASSIGNMENT, assignment_text
from ..telemetry.metrics import Journal
from ..telemetry.traffic import is_worth_telling, traffic_report
from .run_directory import summary_of, write_file, write_summary
from .session import Session


def validate(session: Session, step: int) -> Evaluation | None:
    """Score the validation data and print the result. Return None if a signal stopped it, or if there is nothing to score."""
    run = session.run
    validation = session.dataset.scored_examples(run.model.seed)
    if validation is None:
        return None
    batches = in_order(validation, run.step.minibatch, run.settings.run.eval_batches)
    if not batches:
        session.printer.say(f"{validation.name} is shorter than one sequence of {validation.length} tokens; nothing to validate on")
        return None
    result = evaluate(session.engine, batches, session.byte_lengths, session.interrupts.pending)
    if result is not None:
        line = f"loss {result.loss:.4f} | {result.tokens} labels" if run.data.objective.kind == "classify" else result.line()
        session.printer.say(f"step {step}: validation {line}")
    return result


def close(session: Session, journal: Journal) -> None:
    """Print the closing lines and a sample; the sample is skipped after a signal."""
    settings, printer = session.run.settings, session.printer
    timed = journal.timed
    if timed.steps:
        seconds, tokens = timed.seconds, timed.tokens
        flops = (session.counts.forward + session.counts.backward) * tokens / session.stream.length
        printer.say(f"Training time: {seconds} seconds")
        printer.say(f"Training throughput tokens/sec: {tokens / seconds}")
        printer.say(f"Training performance: {flops / seconds / 1e12} Tflops/s")
        printer.say(f"Model flops utilisation ({session.counts.formula}): {timed.mfu_seconds / seconds:.1%} of gemm peak")
        printer.say(f"Loss on the last batch: {timed.loss_last}")
    stats = session.runtime.stats()
    if is_worth_telling(journal.own, stats):
        printer.say("\n".join(traffic_report(journal.warm if journal.warm.steps else journal.own, stats)))
    if settings.run.sample_tokens and not session.interrupts.pending():
        text = session.engine.sample(session.dataset, session.stream.length, session.interrupts.pending)
        printer.say(f"--- sample\n{text}\n---")


def summarise(session: Session, journal: Journal) -> None:
    """Write summary.json, however the training ended."""
    found = summary_of(journal.whole, journal.own, session.runtime.stats(), session.engine.num_tasks, session.fallbacks, session.dataset.findings)
    write_summary(session.run.directory, {**found, "bits_depend_on_schedule": session.run.machine.sharing == "mixed"})


def write_assignment(run: LanguageRun, step: Step) -> None:
    """Write the workers of the last step's tasks if CPU workers and devices shared them, and if that step has ended without a failure."""
    if run.machine.sharing == "mixed" and step.plan is not None:
        with suppress(RecordingError):
            write_file(run.directory / ASSIGNMENT, assignment_text(step.plan, step.kinds))
