"""A session on disk: a directory with weights, optimizer state and counters, written completely or not at all. No file is a pickle.

::

    DIRECTORY/model.safetensors, optimizer.safetensors, session.json, config.json, generation_config.json

model.safetensors and the configs have transformers' formats; the configs exist if the module has them.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from nntask import DataError, StorageError, UsageError
from nntask.io import checksum_of, load_tensors, read_text, save_tensors, sealed, unsealed, written_aside

from ..steps.optimizers import SessionOptimizer
from .session_values import SessionValues
from .started import StartedStep

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


class SessionFiles(ABC):
    """The part of a session that saves and loads; `Session` describes the attributes."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    num_steps: int
    _half_done: str
    _is_closed: bool
    _started: deque[StartedStep]
    _optimizer: SessionOptimizer
    _module_values: SessionValues

    @property
    @abstractmethod
    def _numerics(self) -> dict[str, Any]:
        """Settings that the bits depend on, besides module, optimizer and batches."""

    def _wait_for_started(self) -> None:
        """Wait until all steps are over; a failed one is not counted, and its `result` raises the error."""
        while self._started:
            self._started.popleft().wait()

    def _check_open(self) -> None:
        """Raise an error if the session is closed."""
        if self._is_closed:
            raise UsageError(
                "the session is closed, and its weights are gone unless they were saved or taken out before",
                "make the module anew, or a session with weights=DIR of a saved session",
            )

    def _check_whole(self) -> None:
        """Raise an error if the session is closed, or a step has updated only some parameters."""
        self._check_open()
        if self._half_done:
            raise UsageError(self._half_done)

    def save(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Save everything to a new directory, completely or not at all; `resume` continues from it with the same bits.

        model.safetensors has the weights under the module's names, together with the config.json of a module of transformers, so that
        ``from_pretrained`` can read the directory.

        Args:
            directory: path of the new directory, which must not exist.
            frozen: whether to save frozen parameters; if not, there is no config.json, and the session that resumes must have their values.

        Raises:
            UsageError: the directory exists already, or a step was half done.
            StorageError: the disk is full or failed.
            Diverged: a weight is not finite.
        """
        path = Path(directory)
        self._wait_for_started()
        self._check_whole()
        if path.exists():
            raise UsageError(f"{path} exists, and a session is saved to a new directory", "name another one, or remove it")
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as new:
                self.save_into(new, frozen=frozen)

    def save_into(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Save everything to a directory that may exist, and that is incomplete if this fails; otherwise like `save`."""
        path, optimizer = Path(directory), self._optimizer.updates.tensors()
        checksums = {MODEL: self.save_weights(path, frozen=frozen), OPTIMIZER: save_tensors(path / OPTIMIZER, optimizer, finite=True)}
        state = {"step": self.num_steps, "lr": float(self.optimizer.param_groups[0]["lr"]), **self._optimizer.counters(), "numerics": self._numerics}
        with storage_errors(path):
            (path / STATE).write_text(sealed({"format": FORMAT, **state, "checksums": checksums}))

    def save_weights(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> int:
        """Save weights and buffers to a directory, which may exist, tile by tile, without the optimizer's state; otherwise like `save`.

        Returns:
            Checksum of model.safetensors.
        """
        self._wait_for_started()
        self._check_whole()
        path, tensors = Path(directory), self._module_values.saved(frozen=frozen)
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            for name in ("config", "generation_config") if frozen else ():
                config = getattr(self.module, name, None)
                if config is not None and hasattr(config, "to_json_file"):
                    if name == "config":
                        config.architectures = [type(self.module).__name__]
                    config.to_json_file(path / f"{name}.json")
        return save_tensors(path / MODEL, tensors, metadata={"format": "pt"}, finite=True)

    def resume(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Continue from a directory written by `save`, for the same module and optimizer.

        Args:
            directory: directory that was passed to `save`.
            frozen: value that was passed to `save`.

        Raises:
            DataError: the directory is incomplete, or belongs to another module or optimizer. The session's state is then undefined.
        """
        self._check_open()
        self._wait_for_started()
        path, tensors = Path(directory), self._module_values.saved(frozen=frozen)
        state = _read_state(path, self._numerics)
        load_tensors(path / MODEL, tensors)
        load_tensors(path / OPTIMIZER, self._optimizer.updates.tensors())
        self.num_steps, self._half_done = state["step"], ""
        self._optimizer.restore(state, path)

    def load_weights(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Load weights and buffers from the model.safetensors of a directory, and reset the optimizer.

        Args:
            directory: directory that was passed to `save` or `save_weights`.
            frozen: value that was passed there.

        Raises:
            DataError: the file is missing or corrupt, or belongs to another module.
        """
        self._check_open()
        load_tensors(Path(directory) / MODEL, self._module_values.saved(frozen=frozen))
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Reset optimizer and step number, keeping the current weights."""
        self._check_open()
        self._wait_for_started()
        self._optimizer.reset()
        self.num_steps, self._half_done = 0, ""


@contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """Turn failures of the disk into an error that names the remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot save to {directory}: {error.strerror or error}", "make room or choose another place") from error


def _read_state(directory: Path, numerics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a directory's session.json: "step", "lr" and the result of `SessionOptimizer.counters` among others.

    Args:
        numerics: settings that bits depend on, by name of the argument; they must equal those of the saved session.

    Raises:
        DataError: a file is missing or changed, or was saved with other numerics.
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
        raise DataError(f"{directory} holds no whole session ({type(error).__name__} in {STATE})", "give a directory that save() wrote") from None
    if not known:
        raise DataError(f"{file} has format {state['format']}, this version reads up to {FORMAT}", "use the nntask that wrote it")
    for name, value in numerics.items():
        if state["numerics"].get(name, value) != value:
            raise DataError(
                f"{name} must be what it was when {directory} was saved, {state['numerics'][name]}, got {value}: bits depend on it",
                f"give the {_ARGUMENTS.get(name, name)} of then",
            )
    for name, expected in checksums.items():
        if checksum_of(directory / name) != expected:
            raise DataError(f"{directory / name} is corrupt: its checksum changed since it was written", "use another one")
    return state
