"""Kinds of files that --init-from may name: a model directory or GGUF file, a run or checkpoint, or a file of weights with nntask's names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..checkpoints.store import MODEL, STATE, Checkpoint, find_checkpoint, step_directories
from ..errors import UsageError

_SAFETENSORS: Final = ".safetensors"
_CONFIG: Final = "config.json"


def brings_config(init_from: str) -> bool:
    """Return whether a value of --init-from names a model with its config; False for a file of weights, and for no value."""
    return bool(init_from) and not init_from.endswith(_SAFETENSORS)


def checkpoint_at(init_from: str) -> Checkpoint | None:
    """Return the checkpoint at a path, or the newest of the run there; None for other paths and for checkpoints that are model directories.

    Raises:
        DataError: the checkpoint is broken.
        UsageError: the checkpoint has adapters and not a whole model.
    """
    path = Path(init_from)
    if not brings_config(init_from) or not ((path / STATE).is_file() or step_directories(path)):
        return None
    checkpoint = find_checkpoint(path)
    if (checkpoint.path / _CONFIG).is_file():
        return None
    if checkpoint.state.get("base") is not None:
        raise UsageError(f"--init-from {path} has adapters and needs a whole model; write one with nntask export {path} DIR --merge")
    return checkpoint


def directory_or_file(init_from: str) -> Path:
    """Return the directory or file that holds the weights of a value of --init-from; for a run, that of its newest checkpoint."""
    path = Path(init_from)
    if (path / STATE).is_file() or not (steps := step_directories(path)):
        return path
    return steps[-1]


def weights_file(init_from: str) -> Path | None:
    """Return the file with nntask's names of tensors that a value of --init-from means; None for other kinds."""
    if init_from.endswith(_SAFETENSORS):
        return Path(init_from)
    checkpoint = checkpoint_at(init_from)
    return None if checkpoint is None else checkpoint.path / MODEL


def model_directory(init_from: str) -> Path | None:
    """Return the model directory or GGUF file that a value of --init-from means; None for other kinds."""
    return directory_or_file(init_from) if init_from and weights_file(init_from) is None else None
