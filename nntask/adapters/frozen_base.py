"""Frozen base weights of a run with adapters: the record of their source, and the check that the source is unchanged.

A checkpoint of such a run holds the adapters alone. Its state.json names the source of the frozen weights: a model directory, a file of weights, or
the seed from which they are drawn again. It also keeps a fingerprint of each file (`safetensors_file.fingerprint_of`), which is compared before the
weights are used. A fingerprint is computed from samples: it detects training or replacement of the weights, but may miss a single value edited by
hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from ..architecture.family_config import ModelConfig
from ..errors import DataError
from ..gguf.model_file import fingerprint
from ..hf.model_directory import ModelDirectory, attach_weights
from ..io.safetensors_file import TensorFile, fingerprint_of
from ..io.tile_sources import Stored
from ..models.language import LanguageModel
from .lora import base_tensors

Kind = Literal["directory", "gguf", "file", "seed"]
_KINDS: Final = ("directory", "gguf", "file", "seed")


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The source of a model's frozen base weights.

    Args:
        kind: "directory" for a Hugging Face model directory, "gguf" for a GGUF file, "file" for a safetensors file with our names, "seed" for drawn
            weights.
        path: absolute path of the directory or the file; "" for the seed.
        files: file name -> fingerprint, for each file with weights; None for the seed, and before the files of a new run are read.
    """

    kind: Kind
    path: str = ""
    files: Mapping[str, str] | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any], source: str) -> FrozenBase | None:
        """Return the frozen base weights that a state.json names; None if its run has no adapters.

        Args:
            state: content of the state.json.
            source: path of the state.json, for error messages.

        Raises:
            DataError: the entry "base" is malformed.
        """
        values = state.get("base")
        if values is None:
            return None
        files = values.get("files") if isinstance(values, dict) else None
        if not isinstance(values, dict) or values.get("kind") not in _KINDS or not isinstance(values.get("path"), str):
            raise DataError(
                f"base in {source} must say a kind, one of {', '.join(_KINDS)}, and a path, got {str(values)[:80]}", "use another checkpoint"
            )
        if values["kind"] != "seed" and not (isinstance(files, dict) and all(isinstance(each, str) for each in files.values())):
            raise DataError(f"base.files in {source} must have the fingerprint of each file, got {str(files)[:80]}", "use another checkpoint")
        return cls(values["kind"], values["path"], files)

    def with_fingerprints(self) -> FrozenBase:
        """Return the record with the present state of the files.

        Raises:
            DataError: the directory is not a model directory, or a file is not a safetensors file.
        """
        path = Path(self.path)
        if self.kind == "seed":
            return self
        names = {path} if self.kind in ("file", "gguf") else {each.file.path for each in ModelDirectory.open(path).ranges.values()}
        return replace(self, files={file.name: self._fingerprint(file) for file in sorted(names)})

    def _fingerprint(self, file: Path) -> str:
        return fingerprint(file) if self.kind == "gguf" else fingerprint_of(file)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object under "base" in state.json."""
        return asdict(self)

    def check(self, owner: Path) -> None:
        """Check that every file exists and has the fingerprint that it had when the adapters were trained.

        Args:
            owner: directory of the checkpoint with the adapters, for error messages.

        Raises:
            DataError: a file is missing or has another fingerprint.
        """
        folder = Path(self.path) if self.kind == "directory" else Path(self.path).parent
        for name, written in (self.files or {}).items():
            file = folder / name
            if not file.is_file():
                link = file if folder.exists() else folder  # ln -s onto a directory that exists would put the link inside it
                raise DataError(
                    f"{owner} holds adapters for the weights in {file}, which is not there",
                    f"move them back, or make a link to where "
                    f"{'that file' if link == file else 'that directory'} is now: ln -s NEW {shlex.quote(str(link))}",
                )
            if (present := self._fingerprint(file)) != written:
                raise DataError(
                    f"{owner} holds adapters for {file} as it was, with fingerprint {written}, and it is {present} now",
                    "adapters only fit the weights that they were trained with, so restore the old file",
                )

    def weights(self, shapes: Mapping[str, tuple[tuple[int, ...], Any]], config: ModelConfig) -> dict[str, tuple[str, Stored]] | None:
        """Return (name in the files, byte range) by our name of each weight; None for weights that are drawn from the seed.

        Args:
            shapes: name -> (shape, element type) of the model's weights without its adapters. Names and shapes must be those of the files, which may
                lack those of a new head; element types may differ.
            config: config of the model.

        Raises:
            DataError: a file is missing or broken, or holds the weights of another model.
        """
        if self.kind == "seed":
            return None
        if self.kind == "file":
            with TensorFile(self.path) as file:
                file.check(shapes, exact=False)
                return {name: (name, where) for name, where in file.ranges().items()}
        directory = ModelDirectory.open(Path(self.path), config)
        directory.check({name: shape for name, (shape, _) in shapes.items()})
        return directory.weights()

    def attach(self, model: LanguageModel) -> list[str]:
        """Attach a model's weights, except its adapters, to their byte ranges in the files; no value is read yet.

        Weights that are quantised in the files stay quantised in the model.

        Returns:
            Our names of the weights of a new head, which the files lack.

        Raises:
            DataError: a file is missing or broken, or holds the weights of another model.
        """
        if self.kind in ("directory", "gguf"):
            directory = ModelDirectory.open(Path(self.path), model.config)
            blocks = directory.blocks({name: tensor.shape for name, tensor in base_tensors(model).items()})
            # products of many tokens with 16-bit blocks are slower than with floats, so training takes floats
            model.hold_blocks({name: how for name, how in blocks.items() if how.block_format.is_quantised})
        tensors = base_tensors(model)
        weights = self.weights({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, model.config)
        if weights is None:
            return []
        attach_weights(tensors, weights)
        return [name for name in tensors if name not in weights]
