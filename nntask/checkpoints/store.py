"""Checkpoints: directories of safetensors files and a state.json, either complete or absent.

::

    RUN/checkpoints/step-000100/model.safetensors, optimizer.safetensors, state.json, tokenizer.json
    RUN/latest -> checkpoints/step-000100

Guarantee: whenever the process dies, the newest directory named step-* is complete and its values are finite. The files are written to a directory
with a temporary name and forced to disk; the directory is renamed to step-* last. Then the link `latest` moves, if the file system has links, and
old checkpoints are removed. No file is a pickle. state.json holds the checksums of every other file and of itself, and a file that has changed since
is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from tiles import TileTensor

from ..architecture.config_checks import check_num_weights
from ..architecture.family_config import ModelConfig
from ..data.tokenizer import Tokenizer
from ..errors import DataError, Diverged, NntaskError, StorageError, UsageError
from ..io.atomic_write import PREFIX, UNSUPPORTED, fsync, remove_stale, written_aside
from ..io.json_text import decoded
from ..io.regular_file import read_text
from ..io.safetensors_file import TensorFile, checksum_of, load_tensors, save_tensors
from ..io.sealed_json import sealed, unsealed
from ..models.registry import config_from_dict, untiled_type

MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
STATE: Final = "state.json"
CONFIG: Final = "config.json"
RUN_CONFIG: Final = "config.toml"
"""Name of the file in a run directory that holds all settings of the run."""
FORMAT: Final = 2
_UNSEALED: Final = 1
"""Older format, whose state.json has no checksums of itself and of small files; such checkpoints are still read."""
_STEP_NAME: Final = re.compile(r"step-(\d{6,})", re.ASCII)
AGAINST_DIVERGENCE: Final = "lower --lr, raise --warmup-steps or set --grad-clip 1; --check-finite names the first task that went wrong"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk: its directory and the content of its state.json."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of optimizer steps done when the checkpoint was saved."""
        return int(self.state["step"])

    @property
    def config(self) -> ModelConfig:
        """Configuration of the checkpoint's model.

        Raises:
            DataError: state.json describes no valid model, or one without tiles.
        """
        file = self.path / STATE
        if kind := untiled_type(self.state["model"]):
            raise DataError(
                f"{self.path} holds a {kind}, for which nntask has no tiles: nntask train and plan take it, and nothing else does",
                f"use transformers, which reads it as a model directory: from_pretrained({str(self.path)!r})",
            )
        try:
            return config_from_dict(self.state["model"], f"model in {file}")
        except UsageError as error:
            raise DataError(error.fact, f"{error.remedy}; or use another checkpoint" if error.remedy else "or use another checkpoint") from None

    def check_size(self) -> None:
        """Check that the configuration does not ask for far more weights than the file has, before anything of those sizes is allocated.

        Raises:
            DataError: it asks for far more, or the file of weights is missing or broken.
        """
        with TensorFile(self.path / MODEL) as file:
            held = sum(prod(each.shape) for each in file.entries.values())
        check_num_weights(self.config.num_parameters, held, self.path / STATE, f"{MODEL} holds", _instead_of(self.path))

    def load(self, model: Mapping[str, TileTensor], optimizer: Mapping[str, TileTensor] | None = None, *, exact: bool = True) -> None:
        """Fill tensors with the values of the checkpoint.

        Args:
            model: name -> tensor of the model.
            optimizer: name -> tensor of the optimizer's state; None leaves the optimizer's file unread.
            exact: whether the model's element types must equal those of the file.

        Raises:
            DataError: a tensor is missing or has another shape or element type, or a file has changed since it was written.
        """
        self.verify(MODEL)
        load_tensors(self.path / MODEL, model, exact=exact)
        if optimizer is not None:
            self.verify(OPTIMIZER)
            load_tensors(self.path / OPTIMIZER, optimizer)

    def verify(self, *names: str) -> None:
        """Verify the checksums of files, given by their names; a file without a checksum in state.json passes.

        Small files are verified by `find_checkpoint`.

        Raises:
            DataError: a file is missing, cannot be read, or has changed since it was written.
        """
        for name in names:
            if not os.path.isfile(self.path / name):  # False, too, for a name that no file system accepts
                raise DataError(f"{self.path} is not a whole checkpoint: it lacks {name}", _instead_of(self.path))
            written = self.state["checksums"].get(name)
            if written is not None and (actual := checksum_of(self.path / name)) != written:
                raise DataError(
                    f"{self.path / name} is corrupt: its checksum is {actual:08x} and was {written:08x} when it was written",
                    _instead_of(self.path),
                )


def save_checkpoint(
    run: Path,
    state: Mapping[str, Any],
    model: Mapping[str, TileTensor],
    optimizer: Mapping[str, TileTensor],
    *,
    tokenizer: Tokenizer | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write the checkpoint of ``state["step"]`` and remove all but the newest `keep`; an existing checkpoint of this step is left alone.

    Args:
        run: the run directory.
        state: content of state.json without "format" and "checksums".
        model: name -> tensor of the model.
        optimizer: name -> tensor of the optimizer's state.
        tokenizer: tokenizer whose files are saved as well; None to save none.
        config: content of a config.json to save as well, for models whose tensors have the names of a module in transformers; None to save none.
        keep: number of checkpoints to keep.

    Returns:
        The directory of the checkpoint.

    Raises:
        StorageError: the disk is full or failed; earlier checkpoints are intact.
        Diverged: a value is not finite; earlier checkpoints are intact.
    """
    base = run / "checkpoints"
    final = base / f"step-{state['step']:06d}"
    if final.exists():
        _check_is_own(run, final, state["step"])
    else:
        try:
            remove_stale(base)  # left by killed saves of any step
            with written_aside(final) as new:
                new.mkdir()
                _write_files(new, state, {MODEL: model, OPTIMIZER: optimizer}, tokenizer, config)
        except Diverged as error:
            raise Diverged(f"after step {state['step']}, {error}, and nothing of it was saved", AGAINST_DIVERGENCE) from None
        except (OSError, StorageError, DataError) as error:  # DataError: a file just written cannot be read
            raise _cannot_save(run, state["step"], error) from error
    try:
        _point_latest(run, final)
        for old in step_directories(run)[:-keep]:
            if old != final:
                _remove(old)
    except OSError as error:
        raise _cannot_save(run, state["step"], error) from error
    return final


def _write_files(
    directory: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, TileTensor]],
    tokenizer: Tokenizer | None,
    config: Mapping[str, Any] | None,
) -> None:
    checksums = {name: save_tensors(directory / name, some, finite=True) for name, some in tensors.items()}
    if tokenizer is not None:
        tokenizer.save(directory)
    if config is not None:
        _write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    checksums |= {file.name: checksum_of(file) for file in sorted(directory.iterdir()) if file.is_file() and file.name not in checksums}
    _write_text(directory / STATE, sealed({"format": FORMAT, **state, "checksums": checksums}))


def step_directories(run: Path) -> list[Path]:
    """Return the checkpoint directories of a run, oldest first."""
    base = run / "checkpoints"
    found = [(int(match[1]), path) for path in base.iterdir() if (match := _STEP_NAME.fullmatch(path.name))] if base.is_dir() else []
    return [path for _, path in sorted(found)]


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint in a directory, or the newest checkpoint of a run directory.

    Raises:
        DataError: the directory holds no checkpoint or one of another run, or the checkpoint's state.json is broken.
    """
    directory = Path(path)
    if not (directory / STATE).is_file():
        steps = step_directories(directory)
        if not steps:
            clause, remedy = _why_none(directory)
            raise DataError(f"{directory} {clause}", remedy)
        if steps[-1].resolve().parent.parent != directory.resolve():
            raise DataError(f"{steps[-1]} must be a directory of the run {directory}, got a link to {steps[-1].resolve()}", "name the target")
        directory = steps[-1]
    checkpoint = Checkpoint(directory, _read_state(directory / STATE))
    name = _STEP_NAME.fullmatch(directory.resolve().name)
    if name is not None and int(name[1]) != checkpoint.step:
        raise DataError(f"{directory} holds the checkpoint of step {checkpoint.step}, not of the step in its name", "move it away, or rename it")
    checkpoint.verify(*(file for file in checkpoint.state["checksums"] if file not in (MODEL, OPTIMIZER)))
    return checkpoint


def _why_none(directory: Path) -> tuple[str, str]:
    """Return the reason why a directory holds no checkpoint, as the end of a clause, and the remedy."""
    if not directory.exists():
        return "does not exist", "give a run directory, or one of its checkpoints"
    if (directory / RUN_CONFIG).is_file():
        clause = "holds a run that saved no checkpoint, so there is nothing to go on from"
        return clause, "wait for one if it is training, or remove it and begin anew"
    return "holds no checkpoint", "give a run directory with checkpoints/step-*, or one of those"


def _read_state(file: Path) -> dict[str, Any]:
    """Return the checked content of a state.json, except the values under "settings", which `nntask.config.settings.from_dict` checks.

    Raises:
        DataError: the file cannot be read or has another format version, or a key is missing or of another type.
    """
    instead = _instead_of(file.parent)
    try:
        text = read_text(file)
        if not text:
            raise DataError(f"{file} is not the state of a checkpoint: it is empty", instead)
        state: Any = decoded(text)  # `decoded` also takes paths that are not UTF-8
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", instead) from None
    except ValueError as error:
        raise DataError(f"{file} is not the state of a checkpoint: it is not whole JSON, {error}", instead) from None
    if not isinstance(state, dict) or "format" not in state:
        raise DataError(f"{file} is not the state of a checkpoint: it must be a JSON object with a format", instead)
    if state["format"] == FORMAT:
        try:
            values = {"settings": {}, **unsealed(state)}
        except ValueError as error:
            raise DataError(f"{file} is corrupt: {error}", instead) from None
    elif state["format"] == _UNSEALED:
        values = {"settings": {}, "checksums": {}, **state}
    else:
        raise DataError(f"{file} has format {state['format']}, this version reads up to {FORMAT}", "use the nntask that wrote it")
    for key, rule, holds in _STATE_RULES:
        if key not in values:
            raise DataError(f"{file} is not the state of a checkpoint: it lacks {key}, {rule}", instead)
        if not holds(values[key]):
            raise DataError(f"{key} in {file} must be {rule}, got {json.dumps(values[key])[:80]}", instead)
    return values


def _instead_of(directory: Path) -> str:
    """Return the advice for errors about a broken checkpoint, which names the previous checkpoint of the run if there is one."""
    whole = directory.resolve()
    steps = step_directories(whole.parent.parent)
    older = steps[steps.index(whole) - 1 :][:1] if whole in steps[1:] else []
    advice = "copy it again, or move this checkpoint away and use an older one"
    return ", ".join([advice, *(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path) for path in older)])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


_STATE_RULES: Final[tuple[tuple[str, str, Callable[[Any], bool]], ...]] = (
    ("step", "a whole number", _is_count),
    ("cursor", "two whole numbers", lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))),
    ("model", "an object", lambda value: isinstance(value, dict)),
    ("settings", "an object of objects", lambda value: isinstance(value, dict) and all(isinstance(group, dict) for group in value.values())),
    (
        "checksums",
        "an object of whole numbers by names of files",
        lambda value: isinstance(value, dict) and all(map(_is_count, value.values())) and all(Path(name).name == name for name in value),
    ),
)
"""Required keys of state.json: (key, rule in words, test of the value)."""


def run_of(checkpoint: Checkpoint) -> Path:
    """Return the run directory that a checkpoint belongs to."""
    return checkpoint.path.resolve().parent.parent


def how_to_go_on(run: Path) -> str:
    """Return the advice for errors about a failed disk: the checkpoint that is safe, and the command that resumes from it."""
    steps = step_directories(run)
    if steps:
        return f"the checkpoint {steps[-1]} is safe; make room, then nntask train --resume {shlex.quote(str(run))}"
    return "there is no earlier checkpoint; make room"


def _cannot_save(run: Path, step: int, error: Exception) -> StorageError:
    reason = error.fact if isinstance(error, NntaskError) else getattr(error, "strerror", None) or error
    return StorageError(f"could not save the checkpoint of step {step}: {reason}", how_to_go_on(run))


def _point_latest(run: Path, final: Path) -> None:
    link = run / ".latest.tmp"  # a fixed name, so that the next save removes the link of a killed save
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(final.relative_to(run), target_is_directory=True)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return
    os.replace(link, run / "latest")
    fsync(run)


def _check_is_own(run: Path, final: Path, step: int) -> None:
    """Raise StorageError unless an existing directory of a step to save holds the checkpoint of that step."""
    try:
        find_checkpoint(final)
    except DataError as error:
        raise _cannot_save(run, step, StorageError(f"{final} is there and is not it ({error.fact})")) from error


def _remove(directory: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in between leaves no incomplete directory named step-*."""
    aside = directory.with_name(f"{PREFIX}removed-{directory.name}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
