"""Output paths outside a run's directory. A run directory may come from another person, so a resumed run does not take them from its files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from .settings import TrainSettings

OUTPUT_FLAGS: Final = ("disk", "save-checkpoint", "save-optimizer")
"""Flags that name a path to write to."""


def output_paths(settings: TrainSettings) -> dict[str, str]:
    """Return the flags of `OUTPUT_FLAGS` that are set, with their values."""
    values = {
        "disk": settings.resources.disk,
        "save-checkpoint": settings.checkpoints.save_checkpoint,
        "save-optimizer": settings.checkpoints.save_optimizer,
    }
    return {flag: value for flag, value in values.items() if value}


def words_of(flags: Mapping[str, Any]) -> str:
    """Return flags with their values in the form that a shell reads, such as ``--disk scratch``."""
    return " ".join(f"--{flag} {shlex.quote(str(value))}" for flag, value in flags.items())
