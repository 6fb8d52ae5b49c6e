"""Weights that a run begins with, and that a checkpoint stands for: compared with the model before anything is computed.

Weights of a model directory, and those that adapters stand beside, are read tile by tile when they are first used; others before the first step.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tiles import TileTensor

from ..adapters.frozen_base import FrozenBase, frozen_base_of
from ..adapters.lora import is_factor
from ..checkpoints.store import MODEL, OPTIMIZER, STATE, Checkpoint
from ..config.resolution import dtype_of
from ..config.run_config import ModelSpec, RunConfig, Start
from ..config.settings import from_dict
from ..engine.interface import Trained
from ..engine.recorded import DTYPES, build_model
from ..errors import UsageError
from ..hf.model_directory import ModelDirectory
from ..io.safetensors_file import TensorFile, load_tensors
from ..models.language import LanguageModel
from ..planning.memory_fit import CapturedStep

if TYPE_CHECKING:
    from scheduler import TaskRuntime


def check_weights(run: RunConfig, captured: CapturedStep) -> None:
    """Compare every file of weights that will be read with the model, and with its checksum, before anything is computed or written.

    Raises:
        DataError: one is missing or broken, or holds weights of another model.
    """
    start = run.start
    check_files(start, captured)
    if start.frozen_base is not None:
        start.frozen_base.weights({name: (tensor.shape, tensor.dtype) for name, tensor in _base(captured).items()}, run.model.config)
    elif start.directory is not None:
        ModelDirectory.open(start.directory, run.model.config).check({name: tensor.shape for name, tensor in captured.trained.items()})


def new_weights(run: RunConfig, captured: CapturedStep) -> list[str]:
    """Names in files of the weights of a head that the directory of a new run lacks, and which the seed makes."""
    begin = run.settings.checkpoints.init_from
    if not begin or run.start.is_continued or run.start.resumed is not None:
        return []
    return list(ModelDirectory.open(Path(begin), run.model.config).new({name: tensor.shape for name, tensor in _base(captured).items()}).values())


def _base(captured: CapturedStep) -> dict[str, TileTensor]:
    """The tensors of a model but for its adapters."""
    return {name: tensor for name, tensor in {**captured.frozen, **captured.trained}.items() if not is_factor(name)}


def check_files(start: Start, captured: CapturedStep) -> None:
    """`check_weights` of a checkpoint and of single files; those of a model directory and of frozen weights are looked at where they are attached."""
    if start.resumed is not None:
        start.resumed.verify(MODEL, OPTIMIZER)
    for path, tensors, exact in _files(start, captured.trained, captured.optimizer):
        with TensorFile(path) as file:
            file.check({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, exact=exact)


def load_weights(start: Start, engine: Trained) -> None:
    """Read the files of weights that are not read tile by tile."""
    for path, tensors, exact in _files(start, engine.model_tensors(), engine.optimizer_tensors()):
        load_tensors(path, tensors, exact=exact)
    if start.resumed is None and start.weights is not None and start.optimizer is None:
        engine.reset_optimizer()  # masters are copies of the weights


def _files(start: Start, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor]) -> list[tuple[Path, Mapping[str, TileTensor], bool]]:
    """Files to load: path, tensors they fill, and whether element types must be equal."""
    if start.resumed is not None:
        return [(start.resumed.path / MODEL, model, True), (start.resumed.path / OPTIMIZER, optimizer, True)]
    files: list[tuple[Path, Mapping[str, TileTensor], bool]] = []
    if start.weights is not None and start.frozen_base is None:
        files.append((start.weights, model, False))
    if start.optimizer is not None:
        files.append((start.optimizer, optimizer, False))
    return files


def model_to_start_from(run: RunConfig, runtime: TaskRuntime) -> LanguageModel | None:
    """The model whose weights are in files, each tile to be read when it is first used; None where a new model begins with none."""
    start = run.start
    if start.frozen_base is not None:
        return _beside(start.frozen_base, run.model, runtime)
    if start.directory is None:
        return None
    model = build_model(run.model, runtime, fill=False)
    directory, tensors = ModelDirectory.open(start.directory, run.model.config), model.tensors()
    directory.attach(tensors)
    model.fill(directory.new({name: tensor.shape for name, tensor in tensors.items()}), run.model.seed)
    return model


def load_model(checkpoint: Checkpoint, spec: ModelSpec, runtime: TaskRuntime, *, read: bool = True) -> LanguageModel:
    """The model of a checkpoint as it was saved, adapters and what they stand beside included: what scores text.

    Args:
        spec: of its run, but for the element type.
        read: False leaves the checkpoint's own weights unread.

    Raises:
        DataError: the checkpoint is broken, or the weights that its adapters stand beside are not there or are others.
        UsageError: `spec` asks for a finer element type than that in which adapters met the weights beside them.
    """
    frozen_base, stored = frozen_base_of(checkpoint), from_dict(checkpoint.state["settings"], str(checkpoint.path / STATE))
    trained, asked = DTYPES[dtype_of(stored.model.dtype)], DTYPES[spec.dtype]
    if frozen_base is not None and asked.itemsize > trained.itemsize:
        raise UsageError(
            f"{checkpoint.path} holds adapters for weights in {trained.name}, and in {asked.name} those weights are others; "
            f"drop --dtype, or use a whole model: nntask export {shlex.quote(str(checkpoint.path))} DIR --merge"
        )
    if frozen_base is None:
        checkpoint.check_size()
        model = build_model(spec, runtime, fill=False)
    else:
        model = _beside(frozen_base, spec, runtime)
    if read:
        checkpoint.load(model.trained_tensors(), exact=False)  # a text may be scored in another type than it was trained in
    return model


def _beside(frozen_base: FrozenBase, spec: ModelSpec, runtime: TaskRuntime) -> LanguageModel:
    """A model with adapters in their first state, beside the weights of `frozen_base`."""
    model = build_model(spec, runtime, fill=frozen_base.kind == "seed")
    model.fill(frozen_base.attach(model), spec.seed)
    return model
