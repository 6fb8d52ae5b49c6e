"""Weights that a run begins with: the model directory of --init-from, checked before anything is computed and read when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tiles import TileTensor

from ..hf.directory import ModelDirectory
from ..models.language import LanguageModel
from .prepare import Prepared
from .recorded import build_model

if TYPE_CHECKING:
    from scheduler.runtime import Runtime


def _directory(prepared: Prepared) -> Path | None:
    """The directory that a new run begins with; a continued one has its own weights."""
    begin = prepared.settings.checkpoints.init_from
    return Path(begin) if begin and prepared.resumed is None else None


def check_start(prepared: Prepared, model: Mapping[str, TileTensor]) -> None:
    """Compare names and shapes of the directory's tensors with the model's; reads headers only.

    Raises:
        DataError: see `ModelDirectory`.
    """
    directory = _directory(prepared)
    if directory is not None:
        ModelDirectory.open(directory).check({name: tensor.shape for name, tensor in model.items()})


def model_to_start_from(prepared: Prepared, runtime: Runtime) -> LanguageModel | None:
    """The directory's model, each tile to be read when it is first used; None where there is no directory."""
    directory = _directory(prepared)
    if directory is None:
        return None
    model = build_model(prepared.config, prepared.tiling, runtime, prepared.settings, fill=False)
    ModelDirectory.open(directory).attach(model.tensors())
    return model
