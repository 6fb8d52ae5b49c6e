"""The frozen weights that adapters stand beside: where a run has them from, and whether they are still the same.

Checkpoints of a run with adapters hold the adapters alone; state.json says where the other weights came from: a model directory, a file of weights,
or the seed, from which they are made again. Of each file it has a fingerprint (`tensorfile.fingerprint_of`), which is compared before anything is
computed with them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tiles import TileTensor

from ..checkpoints import STATE, Checkpoint
from ..errors import DataError
from ..fileranges import FileRange
from ..hf.directory import ModelDirectory, attach_weights
from ..tensorfile import TensorFile, fingerprint_of
from .rules import rank_of
from .settings import TrainSettings, from_dict

Kind = Literal["directory", "file", "seed"]
_KINDS: Final = ("directory", "file", "seed")


@dataclass(frozen=True, slots=True)
class Base:
    """Where frozen weights come from.

    Args:
        kind: a model directory, a file of weights under our names, or nothing but the seed.
        path: of the directory or the file, absolute; "" for the seed.
        files: name -> fingerprint, of each file with weights.
    """

    kind: Kind
    path: str = ""
    files: Mapping[str, str] | None = None

    @classmethod
    def of_directory(cls, path: str | os.PathLike[str]) -> Base:
        """The base in a model directory as it is now.

        Raises:
            DataError: it is none, or broken; see `ModelDirectory.open`.
        """
        place = Path(path).resolve()
        names = {each.file.path for each in ModelDirectory.open(place).ranges.values()}
        return cls("directory", str(place), {file.name: fingerprint_of(file) for file in sorted(names)})

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> Base:
        """The base in a file of weights as it is now.

        Raises:
            DataError: it is no safetensors file.
        """
        place = Path(path).resolve()
        return cls("file", str(place), {place.name: fingerprint_of(place)})

    @classmethod
    def of_state(cls, state: Mapping[str, Any], source: str) -> Base | None:
        """The base that a state.json names; None if its run has no adapters.

        Args:
            source: the file, for messages.

        Raises:
            DataError: what it says is no base.
        """
        values = state.get("base")
        if values is None:
            return None
        files = values.get("files") if isinstance(values, dict) else None
        if not isinstance(values, dict) or values.get("kind") not in _KINDS or not isinstance(values.get("path"), str):
            raise DataError(
                f"base in {source} must say a kind, one of {', '.join(_KINDS)}, and a path, got {str(values)[:80]}; use another checkpoint"
            )
        if values["kind"] != "seed" and not (isinstance(files, dict) and all(isinstance(each, str) for each in files.values())):
            raise DataError(f"base.files in {source} must have the fingerprint of each file, got {str(files)[:80]}; use another checkpoint")
        return cls(values["kind"], values["path"], files)

    def to_dict(self) -> dict[str, Any]:
        """As state.json keeps it."""
        return asdict(self)

    def check(self, owner: Path) -> None:
        """Check that the files are there and are those that the adapters were trained beside.

        Args:
            owner: the checkpoint, for messages.

        Raises:
            DataError: one is not.
        """
        folder = Path(self.path) if self.kind == "directory" else Path(self.path).parent
        for name, written in (self.files or {}).items():
            file = folder / name
            if not file.is_file():
                raise DataError(
                    f"{owner} holds adapters for the weights in {file}, which is not there; move them back, or make a link to where they are now: "
                    f"ln -s NEW {shlex.quote(self.path)}"
                )
            if (found := fingerprint_of(file)) != written:
                raise DataError(
                    f"{owner} holds adapters for {file} as it was, with fingerprint {written}, and it is {found} now; "
                    "adapters mean nothing beside other weights, so put the old file back"
                )

    def weights(self, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, tuple[str, FileRange]] | None:
        """Our name of each weight -> its name in the files, and where it lies; None for weights that are made from the seed.

        Args:
            shapes: name -> (shape, element type) of the model's weights, which must be those of the files; types may differ.

        Raises:
            DataError: a file is missing or broken, or holds the weights of another model.
        """
        if self.kind == "seed":
            return None
        if self.kind == "file":
            with TensorFile(self.path) as file:
                file.check(shapes, exact=False)
                return {name: (name, where) for name, where in file.ranges().items()}
        directory = ModelDirectory.open(Path(self.path))
        directory.check({name: shape for name, (shape, _) in shapes.items()})
        return directory.weights()

    def attach(self, tensors: Mapping[str, TileTensor]) -> None:
        """Make the files the sources of a model's frozen tensors; reads nothing.

        Raises:
            DataError: see `weights`.
        """
        found = self.weights({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        if found is not None:
            attach_weights(tensors, found)


def base_of(checkpoint: Checkpoint) -> Base | None:
    """The frozen weights that a checkpoint's adapters stand beside, checked; None if it holds a whole model.

    Raises:
        DataError: they are not there, or not those that the adapters were trained beside.
    """
    file = checkpoint.path / STATE
    if rank_of(from_dict(checkpoint.state["settings"], str(file))) is None:
        return None
    base = Base.of_state(checkpoint.state, str(file))
    if base is None:
        raise DataError(f"{file} does not say where the weights are that its adapters stand beside; use another checkpoint")
    base.check(checkpoint.path)
    return base


def base_to_start_from(settings: TrainSettings, resumed: Checkpoint | None) -> Base | None:
    """The frozen weights of a run with adapters; None where all weights are trained.

    Raises:
        DataError: they are not there, or not those that the run began with.
    """
    if rank_of(settings) is None:
        return None
    if resumed is not None:
        return base_of(resumed)
    files = settings.checkpoints
    if files.init_from:
        return Base.of_directory(files.init_from)
    return Base.of_file(files.load_checkpoint) if files.load_checkpoint else Base("seed")
