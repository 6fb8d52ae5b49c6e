"""Checkpoints: a directory of safetensors and a state.json, complete or absent.

::

    RUN/checkpoints/step-000100/model.safetensors, optimizer.safetensors, state.json, tokenizer.json
    RUN/latest -> checkpoints/step-000100

Guarantee: whenever the process dies, the newest directory named step-* is whole, because it gets that name last: files are written under another
name in the same directory, forced to disk, and renamed. Then `latest` moves, then old checkpoints go. There is no pickle anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tiles import TileTensor

from .data import Tokenizer
from .errors import DataError, StorageError
from .tensorfile import load_tensors, save_tensors

MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
STATE: Final = "state.json"
FORMAT: Final = 1
_STEP_NAME: Final = re.compile(r"step-(\d{6,})")
_TEMPORARY: Final = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk: its directory and its state.json."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done when it was taken."""
        return int(self.state["step"])

    def load(self, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor] | None = None) -> None:
        """Fill the tensors of a model, and of its optimizer unless None.

        Raises:
            DataError: a tensor is missing or of another shape or type.
        """
        load_tensors(self.path / MODEL, model)
        if optimizer is not None:
            load_tensors(self.path / OPTIMIZER, optimizer)


def save_checkpoint(
    run: Path,
    state: Mapping[str, Any],
    model: Mapping[str, TileTensor],
    optimizer: Mapping[str, TileTensor],
    *,
    tokenizer: Tokenizer | None = None,
    keep: int = 3,
) -> Path:
    """Write the checkpoint of ``state["step"]`` and drop all but the newest `keep`; one that is there already is left alone.

    Raises:
        StorageError: the disk is full or failed; earlier checkpoints are untouched.
    """
    base = run / "checkpoints"
    final = base / f"step-{state['step']:06d}"
    if not final.exists():
        temporary = base / f"{_TEMPORARY}{final.name}-{os.getpid()}"
        try:
            base.mkdir(parents=True, exist_ok=True)
            _clear_temporaries(base)
            temporary.mkdir()
            save_tensors(temporary / MODEL, model)
            save_tensors(temporary / OPTIMIZER, optimizer)
            if tokenizer is not None:
                tokenizer.save(temporary)
            _write_text(temporary / STATE, json.dumps({"format": FORMAT, **state}, indent=1))
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
            os.rename(temporary, final)
            _sync(base)
        except (OSError, StorageError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _cannot_save(run, state["step"], error) from error
    try:
        _point_latest(run, final)
        for old in step_directories(run)[:-keep]:
            if old != final:
                _remove(old)
    except OSError as error:
        raise _cannot_save(run, state["step"], error) from error
    return final


def step_directories(run: Path) -> list[Path]:
    """The checkpoint directories of a run, oldest first."""
    base = run / "checkpoints"
    found = [(int(match[1]), path) for path in base.iterdir() if (match := _STEP_NAME.fullmatch(path.name))] if base.is_dir() else []
    return [path for _, path in sorted(found)]


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint that a directory is, or the newest one of the run that it is.

    Raises:
        DataError: there is none, or its state.json is broken.
    """
    directory = Path(path)
    if not (directory / STATE).is_file():
        steps = step_directories(directory)
        if not steps:
            raise DataError(f"{directory} holds no checkpoint; give a run directory with checkpoints/step-*, or one of those")
        directory = steps[-1]
    file = directory / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        version = state["format"]
        state["step"], state["cursor"], state["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not the state of a checkpoint: {error!r}; use another checkpoint") from None
    if version != FORMAT:
        raise DataError(f"{file} has format {version}, this version reads {FORMAT}; use the nntask that wrote it")
    return Checkpoint(directory, state)


def run_of(checkpoint: Checkpoint) -> Path:
    """The run directory that a checkpoint belongs to."""
    return checkpoint.path.resolve().parent.parent


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file: readers see the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _write_text(temporary, text)
    _sync(temporary)
    os.replace(temporary, path)


def _cannot_save(run: Path, step: int, error: Exception) -> StorageError:
    steps = step_directories(run)
    safe = (
        f"the checkpoint {steps[-1]} is safe; make room, then nntask train --resume {run}" if steps else "there is no earlier checkpoint; make room"
    )
    reason = error.strerror if isinstance(error, OSError) else str(error).partition(";")[0]
    return StorageError(f"could not save the checkpoint of step {step}: {reason}; {safe}")


def _point_latest(run: Path, final: Path) -> None:
    link = run / f".latest.{os.getpid()}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.relative_to(run), target_is_directory=True)
    os.replace(link, run / "latest")
    _sync(run)


def _clear_temporaries(base: Path) -> None:
    """Remove what a killed process left half written."""
    for path in base.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(directory: Path) -> None:
    """Take the name away first, so that a kill in between leaves no step-* directory with files missing."""
    doomed = directory.with_name(f"{_TEMPORARY}removed-{directory.name}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    """Force a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
