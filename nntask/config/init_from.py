"""Kinds of files that --init-from may name: a model directory or GGUF file, a run or checkpoint, or a file of weights with nntask's names."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..checkpoints.store import MODEL, STATE, Checkpoint, find_checkpoint, step_directories
from ..errors import UsageError

_SAFETENSORS: Final = ".safetensors"
_CONFIG: Final = "config.json"


class InitialModel(NamedTuple):
    """Files that a value of --init-from names.

    Attributes:
        directory: model directory or GGUF file; None for other kinds.
        weights: file with nntask's names of tensors; None for other kinds.
        checkpoint: checkpoint to which `weights` belongs; None for a file alone.
    """

    directory: Path | None = None
    weights: Path | None = None
    checkpoint: Checkpoint | None = None


def brings_config(init_from: str) -> bool:
    """Return whether a value of --init-from names a model with its config; False for a file of weights, and for no value."""
    return bool(init_from) and not _is_safetensors(init_from)


def initial_model(init_from: str) -> InitialModel:
    """Return the files that a value of --init-from names.

    Raises:
        DataError: it is a checkpoint, and broken.
        UsageError: it is a checkpoint of adapters and not of a whole model.
    """
    path = Path(init_from)
    if not brings_config(init_from):
        return InitialModel(weights=path) if init_from else InitialModel()
    path = model_path(init_from)
    if not (path / STATE).is_file() or (path / _CONFIG).is_file():
        return InitialModel(directory=path)
    checkpoint = find_checkpoint(init_from)
    if checkpoint.state.get("base") is not None:
        raise UsageError(
            "has adapters and needs a whole model", f"write one with nntask export {init_from} DIR --merge", flag="--init-from", value=init_from
        )
    return InitialModel(weights=checkpoint.path / MODEL, checkpoint=checkpoint)


def model_path(init_from: str) -> Path:
    """Return the directory or file that holds the weights of a value of --init-from; for a run, the directory of its newest checkpoint."""
    path = Path(init_from)
    if (path / STATE).is_file() or not (steps := step_directories(path)):
        return path
    return steps[-1]


def _is_safetensors(path: str) -> bool:
    """Whether a path has the suffix of a safetensors file, or is a file with such a header, which NNTile's users may have named model.pt."""
    if path.endswith(_SAFETENSORS):
        return True
    with suppress(OSError, ValueError), open(path, "rb") as file:  # ValueError: a name that no file can have
        head = file.read(10)
        return head[8:] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32
    return False
