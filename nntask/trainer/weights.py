"""Weights that a run begins with, and that a checkpoint stands for: compared with the model before anything is computed.

Weights of a model directory, and those that adapters stand beside, are read tile by tile when they are first used; others before the first step.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tiles import TileTensor

from ..checkpoints import MODEL, OPTIMIZER, STATE, Checkpoint
from ..errors import UsageError
from ..hf.directory import ModelDirectory
from ..models.interface import ModelConfig
from ..models.language import LanguageModel
from ..tensorfile import TensorFile, load_tensors
from ..tiling import ModelTiling
from .base import Base, base_of
from .engine import Trained
from .fitting import Sketch
from .prepare import Prepared
from .recorded import DTYPES, build_model
from .rules import rank_of
from .settings import TrainSettings, from_dict

if TYPE_CHECKING:
    from scheduler import TaskRuntime


def _directory(prepared: Prepared) -> Path | None:
    """The directory that a new run of all weights begins with; a continued one has its own weights."""
    begin = prepared.settings.checkpoints.init_from
    return Path(begin) if begin and prepared.resumed is None else None


def check_weights(prepared: Prepared, base: Base | None, sketch: Sketch) -> None:
    """Compare every file of weights that will be read with the model, and with its checksum, before anything is computed or written.

    Raises:
        DataError: one is missing or broken, or holds weights of another model.
    """
    if prepared.resumed is not None:
        prepared.resumed.verify(MODEL, OPTIMIZER)
    for path, tensors, exact in _files(prepared, sketch.trained, sketch.optimizer):
        with TensorFile(path) as file:
            file.check({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, exact=exact)
    directory = _directory(prepared)
    if base is not None:
        base.weights({name: (tensor.shape, tensor.dtype) for name, tensor in sketch.frozen.items()})
    elif directory is not None:
        ModelDirectory.open(directory).check({name: tensor.shape for name, tensor in sketch.trained.items()})


def load_weights(prepared: Prepared, engine: Trained) -> None:
    """Read the files of weights that are not read tile by tile."""
    for path, tensors, exact in _files(prepared, engine.model_tensors(), engine.optimizer_tensors()):
        load_tensors(path, tensors, exact=exact)
    files = prepared.settings.checkpoints
    if prepared.resumed is None and files.load_checkpoint and not files.load_optimizer:
        engine.reset_optimizer()  # masters are copies of the weights


def _files(
    prepared: Prepared, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor]
) -> list[tuple[Path, Mapping[str, TileTensor], bool]]:
    """Files to load: path, tensors they fill, and whether element types must be equal."""
    if prepared.resumed is not None:
        return [(prepared.resumed.path / MODEL, model, True), (prepared.resumed.path / OPTIMIZER, optimizer, True)]
    files: list[tuple[Path, Mapping[str, TileTensor], bool]] = []
    if prepared.settings.checkpoints.load_checkpoint and rank_of(prepared.settings) is None:  # else it is the base
        files.append((Path(prepared.settings.checkpoints.load_checkpoint), model, False))
    if prepared.settings.checkpoints.load_optimizer:
        files.append((Path(prepared.settings.checkpoints.load_optimizer), optimizer, False))
    return files


def model_to_start_from(prepared: Prepared, base: Base | None, runtime: TaskRuntime) -> LanguageModel | None:
    """The model whose weights are in files, each tile to be read when it is first used; None where a new model begins with none."""
    directory = _directory(prepared)
    if base is not None:
        return _beside(base, prepared.config, prepared.tiling, runtime, prepared.settings)
    if directory is None:
        return None
    model = build_model(prepared.config, prepared.tiling, runtime, prepared.settings, fill=False)
    ModelDirectory.open(directory).attach(model.tensors())
    return model


def load_model(checkpoint: Checkpoint, tiling: ModelTiling, runtime: TaskRuntime, settings: TrainSettings, *, read: bool = True) -> LanguageModel:
    """The model of a checkpoint as it was saved, adapters and what they stand beside included: what scores text.

    Args:
        settings: of its run, resolved.
        read: False leaves the checkpoint's own weights unread.

    Raises:
        DataError: the checkpoint is broken, or the weights that its adapters stand beside are not there or are others.
        UsageError: the settings ask for a finer element type than that in which adapters met the weights beside them.
    """
    config, base = checkpoint.config, base_of(checkpoint)
    trained, asked = (DTYPES[each.model.dtype] for each in (from_dict(checkpoint.state["settings"], str(checkpoint.path / STATE)), settings))
    if base is not None and asked.itemsize > trained.itemsize:
        raise UsageError(
            f"{checkpoint.path} holds adapters for weights in {trained.name}, and in {asked.name} those weights are others; "
            f"drop --dtype, or use a whole model: nntask export {shlex.quote(str(checkpoint.path))} DIR --merge"
        )
    if base is None:
        model = build_model(config, tiling, runtime, settings, fill=False)
    else:
        model = _beside(base, config, tiling, runtime, settings)
    if read:
        checkpoint.load(model.trained_tensors(), exact=False)  # a text may be scored in another type than it was trained in
    return model


def _beside(base: Base, config: ModelConfig, tiling: ModelTiling, runtime: TaskRuntime, settings: TrainSettings) -> LanguageModel:
    """A model with adapters in their first state, beside the weights of `base`."""
    model = build_model(config, tiling, runtime, settings, fill=base.kind == "seed")
    base.attach(model.frozen_tensors())
    return model
