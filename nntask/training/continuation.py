"""Sentences about an ended run: its newest checkpoint, and the command that continues it."""

from __future__ import annotations

import shlex
from dataclasses import fields

from ..checkpoints.store import step_directories
from ..config.run_config import LanguageRun
from ..config.settings import SUFFIXES, ClusterSettings, TrainSettings, typed


def interrupted(run: LanguageRun, step: int | None) -> str:
    """Describe a run that a signal ended before its last step.

    Args:
        step: step of the newest checkpoint; None to leave it out.
    """
    if not step_directories(run.directory):
        return "interrupted before the first checkpoint; nothing was saved yet, so there is nothing to continue"
    return f"interrupted{'' if step is None else f' after step {step}'}; continue with: {_command(run)}"


def all_there(run: LanguageRun, step: int, steps: int) -> str:
    """Describe a run that was stopped when it had nothing left to save."""
    return f"all {steps} steps were done" if step == steps else interrupted(run, step)


def how_to_continue(run: LanguageRun, before: str = "") -> str:
    """Describe a run that an error ended after its last steps were saved.

    Args:
        before: clause for what to do first.
    """
    steps = step_directories(run.directory)
    if not steps:
        return "nothing was saved, so there is nothing to continue"
    return f"the newest checkpoint is {steps[-1]}; {before}continue with: {_command(run)}"


def left_behind(run: LanguageRun) -> str:
    """Describe a run that ended too soon."""
    steps = step_directories(run.directory)
    if not steps:
        return "nothing was saved, so there is nothing to continue"
    return f"nothing more was saved, the newest checkpoint is {steps[-1]}; continue with: {_resume(run)}"


def _command(run: LanguageRun) -> str:
    """Return the command that continues a run on the same machines."""
    return f"{_resume(run)}{_besides(run.settings)}"


def _resume(run: LanguageRun) -> str:
    """Return the command that continues a run."""
    return f"{run.command} --resume {shlex.quote(str(run.directory))}"


def _besides(settings: TrainSettings) -> str:
    """Return the flags that name machines and paths to write to, as the user gave them; a resumed run does not know them."""
    cluster, disk = settings.cluster, settings.resources.disk
    names = [f.name for f in fields(cluster) if f.name not in SUFFIXES]
    flags = {name: typed(cluster, name) for name in names if typed(cluster, name) != typed(ClusterSettings(), name)}
    if disk:
        flags["disk"] = disk
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in flags.items())
