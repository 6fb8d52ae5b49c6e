"""Parts of a run that its checkpoints store: its settings, and the source of the frozen weights of its adapters."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from ..adapters.frozen_base import FrozenBase
from ..checkpoints.store import STATE, Checkpoint
from ..errors import DataError
from ..gguf.model_file import is_gguf
from .init_from import initial_model
from .settings import SUFFIXES, TrainSettings, flag_of, from_dict, typed
from .validation import rank_of

LOCKED: Final = ("model", "tiling", "data", "optimizer")
"""Groups that a resumed run must share with the run that it continues; the others may differ."""

_NAMES: Final = ("model", "config_path", "dataset_path", "val_path", "tokenizer_path", "chat_template")
"""Names and places, which may differ; their contents are compared by the model's config and the fingerprint of the data."""


def stored_settings(checkpoint: Checkpoint) -> TrainSettings:
    """Return the settings of a checkpoint's run, with those of earlier versions under their present names.

    Raises:
        DataError: a value has another type than its flag.
        UsageError: settings of an earlier version contradict each other.
    """
    return from_dict(checkpoint.state["settings"], str(checkpoint.path / STATE))


def differences(stored: TrainSettings, now: TrainSettings) -> list[str]:
    """Return the flags that a resumed run may not change and that differ, as "--flag (was A, is B)"; names of models and paths may change."""
    differing = []
    for group in LOCKED:
        before, after = getattr(stored, group), getattr(now, group)
        for f in fields(before):
            if f.name in SUFFIXES or f.name in _NAMES:
                continue
            was, value = typed(before, f.name), typed(after, f.name)
            if was != value:
                differing.append(f"{flag_of(f.name)} (was {was or None}, is {value or None})")
    return differing


def frozen_base_of(checkpoint: Checkpoint) -> FrozenBase | None:
    """Return the frozen base weights of a checkpoint with adapters, after a check of their files; None for a checkpoint of a whole model.

    Raises:
        DataError: the weights are missing, or differ from the weights that the adapters were trained with.
    """
    base = _recorded(checkpoint)
    if base is not None:
        base.check(checkpoint.path)
    return base


def _recorded(checkpoint: Checkpoint) -> FrozenBase | None:
    """Return the frozen base weights that a checkpoint names, unchecked; None for a checkpoint of a whole model."""
    file = checkpoint.path / STATE
    if rank_of(stored_settings(checkpoint)) is None:
        return None
    base = FrozenBase.of_state(checkpoint.state, str(file))
    if base is None:
        raise DataError(f"{file} does not name the frozen weights that its adapters belong to", "use another checkpoint")
    return base


def frozen_base_to_start_from(settings: TrainSettings, resumed: Checkpoint | None) -> FrozenBase | None:
    """Return the source of the frozen base weights for a run with adapters that is about to start; None if all weights are trained. No file is read.

    Args:
        settings: settings of the run.
        resumed: checkpoint that the run continues; None for a new run.

    Raises:
        DataError: the checkpoint does not name the source.
    """
    if rank_of(settings) is None:
        return None
    if resumed is not None:
        return _recorded(resumed)
    begin = initial_model(settings.checkpoints.init_from)
    if begin.directory is not None:
        path = begin.directory.resolve()
        return FrozenBase("gguf" if is_gguf(path) else "directory", str(path))
    return FrozenBase("seed") if begin.weights is None else FrozenBase("file", str(begin.weights.resolve()))
