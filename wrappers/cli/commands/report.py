"""``nntask report``: a run as one self-contained HTML page, drawn by Bokeh (extra `dashboard`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..options.help import parse


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Draw a run as one HTML page: its steps, memory, links, workers, codelets, and its distance from the lower bounds."""

    output: str = ""
    """HTML file to write (default: RUN/report.html)"""
    trace: str = ""
    """trace file to draw instead of the run's own"""
    steps: str = ""
    """traced steps A:B to draw, both included (default: the first ones that fit on the page)"""


def run(argv: Sequence[str]) -> int:
    """Write the report of a run; returns 0.

    Raises:
        UsageError: a flag is wrong, the place of the page cannot be written, or Bokeh is not installed.
        DataError: there is no run, it has finished no step, or one of its files is broken.
        StorageError: the disk is full or failed.
    """
    from nntask import StorageError, UsageError
    from nntask.config import step_range
    from nntask.io import check_writable, written_aside

    settings, words = parse(ReportSettings, argv, "nntask report", words=("RUN",))
    steps = step_range(settings.steps, "--steps") if settings.steps else None
    directory = Path(words[0])
    target = Path(settings.output) if settings.output else directory / "report.html"
    from wrappers.report.figures import traced_steps
    from wrappers.report.records import read_run

    record = read_run(directory, Path(settings.trace) if settings.trace else None)
    if target.is_dir():
        raise UsageError("is a directory", "give a file", flag="--output", value=target)
    if not target.absolute().parent.is_dir():
        raise UsageError(
            f"cannot be written: there is no directory {target.parent}", "make it, or choose another place", flag="--output", value=target
        )
    check_writable(target, "--output")
    try:
        from wrappers.report.page import page
    except ImportError as error:
        raise UsageError(f"report needs the bokeh package ({error})", "pip install -e '.[dashboard]'") from error
    if steps is not None:
        traced = traced_steps(record.nodes)
        if not any(steps[0] <= step <= steps[1] for step in traced):
            what = f"steps {traced[0]} to {traced[-1]} were" if traced else "none was"
            raise UsageError(f"must name steps that were traced, got {settings.steps}, and {what}", "change or drop it", flag="--steps")
    try:
        with written_aside(target) as new:
            new.write_text(page(record, steps), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}", "choose another file with --output") from None
    print(target)
    return 0
