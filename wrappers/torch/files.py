"""A session on disk: a directory with weights, optimizer state and counters, written completely or not at all. No file is a pickle.

::

    DIRECTORY/model.safetensors, optimizer.safetensors, session.json, config.json, generation_config.json

model.safetensors and the configs have transformers' formats; the configs exist if the module has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from nntask import DataError, StorageError, UsageError
from nntask.io import checksum_of, load_tensors, read_text, save_tensors, sealed, unsealed, written_aside
from tiles import TileTensor

MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
STATE: Final = "session.json"
_UNSEALED: Final = 1
"""Format of sessions whose session.json had no checksum of itself; such sessions can still be read."""
FORMAT: Final = 2
_FIRST: Final[Mapping[str, Any]] = {"kind of device": "cpu", "threads": 1, "compiled": False, "rows_of_tiles": {}}
"""Numerics of sessions that were saved without them."""
_ARGUMENTS: Final = {"kind of device": "ngpu", "rows_of_tiles": "largest_tile"}
"""Numerics that depend on an argument of another name."""


def save_session(
    directory: Path, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor], state: Mapping[str, Any], module: torch.nn.Module | None
) -> None:
    """Write a session to a new directory.

    Args:
        directory: path of the new directory, which must not exist.
        model: name -> tensor of the module.
        optimizer: name -> tensor of the optimizer's state.
        state: further content of session.json.
        module: module whose config is saved, if it has one; None for no config.

    Raises:
        UsageError: the directory exists.
        StorageError: the disk is full or failed.
        Diverged: a value is not finite.
    """
    if directory.exists():
        raise UsageError(f"{directory} exists, and a session is saved to a new directory; name another one, or remove it")
    with storage_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(directory) as new:
            write_session(new, model, optimizer, state, module)


def write_session(
    directory: Path, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor], state: Mapping[str, Any], module: torch.nn.Module | None
) -> None:
    """Write the files of a session to a directory, which may exist; the arguments and errors are those of `save_session`."""
    checksums = {MODEL: write_model(directory, model, module), OPTIMIZER: save_tensors(directory / OPTIMIZER, optimizer, finite=True)}
    with storage_errors(directory):
        (directory / STATE).write_text(sealed({"format": FORMAT, **state, "checksums": checksums}))


def write_model(directory: Path, model: Mapping[str, TileTensor], module: torch.nn.Module | None) -> int:
    """Write model.safetensors, and the configs of a module of transformers, to a directory, with the arguments and errors of `save_session`.

    Returns:
        Checksum of model.safetensors.
    """
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("config", "generation_config"):
            config = getattr(module, name, None)
            if config is not None and hasattr(config, "to_json_file"):
                if name == "config":
                    config.architectures = [type(module).__name__]
                config.to_json_file(directory / f"{name}.json")
    return save_tensors(directory / MODEL, model, metadata={"format": "pt"}, finite=True)


@contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """Turn failures of the disk into an error that names the remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot save to {directory}: {error.strerror or error}; make room or choose another place") from error


def load_session(
    directory: Path, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor], *, numerics: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill tensors from a directory.

    Args:
        numerics: settings that bits depend on, by name of the argument; they must equal those of the saved session.

    Returns:
        The content of session.json: "step", "lr" and the result of `SessionOptimizer.counters` among others.

    Raises:
        DataError: a file is missing or changed, has other tensors, or was saved with other numerics.
    """
    file = directory / STATE
    try:
        state: dict[str, Any] = json.loads(read_text(file))
        if state["format"] == FORMAT:
            state = unsealed(state)
        known = state["format"] in (_UNSEALED, FORMAT) and isinstance(state["step"], int) and isinstance(state["lr"], float)
        known = known and all(isinstance(group, dict) for group in state.get("groups", []))
        known = known and all(isinstance(count, int) for count in state.get("skipped", {}).values())
        state["numerics"] = {**_FIRST, **state.get("numerics", {})}
        checksums = {name: int(state["checksums"][name]) for name in (MODEL, OPTIMIZER)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{directory} holds no whole session ({type(error).__name__} in {STATE}); give a directory that save() wrote") from None
    if not known:
        raise DataError(f"{file} has format {state['format']}, this version reads up to {FORMAT}; use the nntask that wrote it")
    for name, value in numerics.items():
        if state["numerics"].get(name, value) != value:
            raise DataError(
                f"{name} must be what it was when {directory} was saved, {state['numerics'][name]}, got {value}: bits depend on it; "
                f"give the {_ARGUMENTS.get(name, name)} of then"
            )
    for name, expected in checksums.items():
        if checksum_of(directory / name) != expected:
            raise DataError(f"{directory / name} is corrupt: its checksum changed since it was written; use another one")
    load_tensors(directory / MODEL, model)
    load_tensors(directory / OPTIMIZER, optimizer)
    return state
