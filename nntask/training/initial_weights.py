"""Weights that a run starts from, and the weights of checkpoints. Both are checked against the model before any computation.

Weights of a model directory, and frozen weights of a model with adapters, are read tile by tile at their first use; others before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scheduler import TaskRuntime
from tiles import TileTensor

from ..adapters.lora import is_factor
from ..checkpoints.store import MODEL, OPTIMIZER
from ..config.run_config import RunConfig, Start
from ..engine.interface import Trained
from ..engine.models import build_model, model_beside
from ..hf.model_directory import ModelDirectory
from ..io.safetensors_file import TensorFile, load_tensors
from ..models.language import LanguageModel
from ..planning.memory_fit import CapturedStep


def check_weights(run: RunConfig, captured: CapturedStep) -> None:
    """Check every file of weights that will be read against the model and its checksum, before anything is computed or written.

    Raises:
        DataError: a file is missing or broken, or holds weights of another model.
    """
    start = run.start
    check_files(start, captured)
    if start.frozen_base is not None:
        start.frozen_base.weights({name: (tensor.shape, tensor.dtype) for name, tensor in _base(captured).items()}, run.model.config)
    elif start.directory is not None:
        ModelDirectory.open(start.directory, run.model.config).check({name: tensor.shape for name, tensor in captured.trained.items()})


def new_weights(run: RunConfig, captured: CapturedStep) -> list[str]:
    """Return the names in files of the weights that the directory of a new run lacks, those of a new head; the seed initialises them."""
    start, base = run.start, run.start.frozen_base
    directory = Path(base.path) if base is not None and base.kind in ("directory", "gguf") else start.directory
    if directory is None or start.is_continued or start.resumed is not None:
        return []
    return list(ModelDirectory.open(directory, run.model.config).new({name: tensor.shape for name, tensor in _base(captured).items()}).values())


def _base(captured: CapturedStep) -> dict[str, TileTensor]:
    """Return the tensors of a model without its adapters."""
    return {name: tensor for name, tensor in {**captured.frozen, **captured.trained}.items() if not is_factor(name)}


def check_files(start: Start, captured: CapturedStep) -> None:
    """Check the weights of a checkpoint and of single files. Those of a model directory, and frozen weights, are checked when they are attached."""
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
        engine.reset_optimizer()  # its master copies must follow the weights


def _files(start: Start, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor]) -> list[tuple[Path, Mapping[str, TileTensor], bool]]:
    """Return the files to load: path, tensors to fill, and whether element types must be equal."""
    if start.resumed is not None:
        return [(start.resumed.path / MODEL, model, True), (start.resumed.path / OPTIMIZER, optimizer, True)]
    files: list[tuple[Path, Mapping[str, TileTensor], bool]] = []
    if start.weights is not None and start.frozen_base is None:
        files.append((start.weights, model, False))
    if start.optimizer is not None:
        files.append((start.optimizer, optimizer, False))
    return files


def model_to_start_from(run: RunConfig, runtime: TaskRuntime) -> LanguageModel | None:
    """Return the model of a run that starts from files, with each tile read at its first use; None if a new run starts from no files."""
    start = run.start
    if start.frozen_base is not None:
        return model_beside(start.frozen_base, run.model, runtime)
    if start.directory is None:
        return None
    model = build_model(run.model, runtime, fill=False)
    directory, tensors = ModelDirectory.open(start.directory, run.model.config), model.tensors()
    directory.attach(tensors)
    model.fill(directory.new({name: tensor.shape for name, tensor in tensors.items()}), run.model.seed)
    return model
