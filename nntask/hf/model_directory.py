"""Model directories of transformers: the config, the safetensors files, and the weights as sources of our tiles. A GGUF file is read the same way.

Opening a directory reads headers only, and compares their sizes with the config's before memory is taken for these. A tile is read from its byte
range in the file at its first use, and again at its next use after an eviction; no tensor is whole in memory. A value that is not finite raises an
error at that read, with the names of the tensor and the file. Matrices may be quantised (`io.block_ranges`); a model with blocks takes them as they
are, and other models as floats.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiles import BlockFormat, TileTensor

from ..architecture.config_checks import check_num_weights, config_values
from ..architecture.family_config import ModelConfig
from ..architecture.names import is_of_head
from ..errors import DataError
from ..gguf.model_file import is_gguf, open_gguf
from ..io.block_ranges import BlockRange, formats_in, turned
from ..io.regular_file import read_text
from ..io.safetensors_file import STORAGE, TensorFile
from ..io.strided_ranges import FileRange, is_equal
from ..io.terminal_text import python_command, python_text
from ..io.tile_sources import Stored, TileSource
from ..models.registry import config_from_dict
from ..nn.module import Blocks
from .layout import FileLayout, blanks, names_of, shapes_of, split_experts, ties_of
from .shard_index import INDEX, indexed_files

CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
_ADVICE: Final = "give a directory as transformers' save_pretrained writes it"
SINGLE: Final = "model.safetensors"
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin", "model.pt", "pytorch_model.pt")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS: Final = (np.dtype(np.float64), *STORAGE.values())


def read_config(directory: Path) -> Any:
    """Return the config of a model directory, an instance of its family's class.

    Raises:
        DataError: the directory does not exist, has no config.json, or its config.json is not JSON.
        UsageError: the model family is unknown, or the config breaks a rule.
    """
    return config_from_dict(*read_values(directory))


def read_values(directory: Path) -> tuple[Any, str]:
    """Return the decoded config.json of a model directory or the config of a GGUF file, of any family, and the file's name for error messages.

    Raises:
        DataError: the path does not exist, has no config.json, or its config.json is not JSON.
    """
    if is_gguf(directory):
        return open_gguf(directory).values, str(directory)
    _check_directory(directory)
    return config_values(directory, _ADVICE)


def _check_directory(directory: Path) -> None:
    if directory.is_file():
        what = "a torch pickle, which is never loaded here" if directory.suffix in _SUFFIXES else "a file"
        how = _conversion(directory.parent, directory.suffix)
        raise DataError(f"{directory} is {what}", f"give a directory with {CONFIG} and safetensors, or a GGUF file{how}")
    if not directory.is_dir():
        raise DataError(f"{directory} does not exist", f"give a directory with {CONFIG} and {SINGLE}, as transformers' save_pretrained writes it")
    if (directory / ADAPTER_CONFIG).is_file() and (directory / CONFIG).exists():
        raise DataError(
            f"{directory} has both a model and adapters of PEFT, which transformers would apply",
            f"merge them into the model, or move {ADAPTER_CONFIG} to a directory of its own to use the model without them",
        )
    if (directory / ADAPTER_CONFIG).is_file():
        raise DataError(f"{directory} has adapters of PEFT and no model", "give a model with them merged, as nntask export RUN DIR --merge writes it")


def _conversion(directory: Path, suffix: str = ".bin") -> str:
    """Return the end of an error message about pickles: the command that converts them to safetensors; "" for other suffixes."""
    if suffix not in _SUFFIXES:
        return ""
    target = f"{directory if directory.name else 'model'}-safetensors"
    classes = {"M": _class_in(directory)}
    if any((directory / name).exists() for name in _TOKENIZERS):  # without one, transformers would write an empty tokenizer
        classes["T"] = "AutoTokenizer"
    imports = ", ".join(f"{name} as {short}" for short, name in classes.items())
    calls = "; ".join(f"{short}.from_pretrained({python_text(directory)}).save_pretrained({python_text(target)})" for short in classes)
    return f"; convert it: {python_command(f'from transformers import {imports}; {calls}')}, then give {shlex.quote(target)}"


def _class_in(directory: Path) -> str:
    """Return transformers' class that the config of a directory names, if it has a head; the class of causal language models otherwise."""
    try:
        named = json.loads(read_text(directory / CONFIG))["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        named = None
    return named if isinstance(named, str) and named.isidentifier() and ("For" in named or "LM" in named) else "AutoModelForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """An open model directory; methods take the shapes, or the tensors, of all weights of the model by our names.

    Args:
        path: path of the directory.
        config: config of the model that takes the weights, an instance of the family's class.
        ranges: name in the files -> byte range of the tensor; for a quantised matrix, of its blocks (features out, bytes of a row).
        stored: config of the directory itself; it differs from `config` if the model has other dropout or another head.
        formats: name in the files -> format of each quantised matrix.
    """

    path: Path
    config: Any
    ranges: Mapping[str, FileRange]
    stored: Any
    formats: Mapping[str, BlockFormat] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, config: ModelConfig | None = None) -> ModelDirectory:
        """Open a directory, and read its config and the headers of its files.

        Args:
            config: config of the model that takes the weights; None for the directory's own. If it has another objective, the files may lack weights
                of its head, which `new` returns.

        Raises:
            DataError: a file is missing, broken or a pickle; index and files disagree; or the config needs far more weights than the files have.
            UsageError: the model family is unknown, or the config breaks a rule.
        """
        stored = read_config(path)
        ranges, formats = stored_ranges(path)
        held = sum(formats[name].columns(prod(each.shape)) if name in formats else prod(each.shape) for name, each in ranges.items())
        check_num_weights(stored.num_parameters, held, f"the config of {path}", "its files hold", "copy both from one model")
        return cls(path, stored if config is None else config, split_experts(ranges, stored.names), stored, formats)

    @property
    def has_head(self) -> bool:
        """Whether the directory's model has the head of the model that takes the weights."""
        return bool(self.config.objective == self.stored.objective)

    def new(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Return our name -> name in files, for the weights of a head that the files lack because their model has another one."""
        if self.has_head:
            return {}
        present = {self.config.names.today(name) for name in self.ranges}
        return {ours: name for ours, name in names_of(self.config, shapes).items() if is_of_head(ours) and name not in present}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the files hold exactly the weights of a model, except those that are `new`, and that a stored head equals the embedding if the
        config ties them. Spare names may have any values.

        Raises:
            DataError: a tensor is missing, present under two names, unknown to the model, or has a wrong shape or an integer type; or a tied head
                differs from the embedding.
        """
        placeholders = self.config.names.to_hf(blanks(shapes), self.config)
        expected, ties = shapes_of(placeholders), ties_of(placeholders)
        theirs: dict[str, str] = {}
        for name in self.ranges:
            known = self.config.names.today(name)
            if known not in placeholders:
                continue
            if known in theirs:
                raise DataError(f"{self.path} has both {theirs[known]} and {name}, which are the same weight", "remove the one that is wrong")
            theirs[known] = name
            shape = expected[ties.get(known, known)]
            if self._shape(name) != shape:
                raise DataError(f"{name} in {self._where(name)} has shape {self._shape(name)}, {CONFIG} makes it {shape}", "copy both from one model")
        for tied, name in ties.items():
            if tied in theirs and name not in theirs:
                theirs[name] = theirs.pop(tied)
        new = self.new(shapes).values()
        if missing := [name for name in expected if name not in theirs and name not in new]:
            raise DataError(self._lacking(missing, expected, shapes))
        self._check_elements(shapes)
        for tied, name in ties.items():
            if tied in theirs and tied not in self.config.names.spare and not is_equal(self.ranges[theirs[tied]], self.ranges[theirs[name]]):
                raise DataError(
                    f"{theirs[tied]} in {self._where(theirs[tied])} is not {theirs[name]}, and {CONFIG} says that it is",
                    f'write "tie_word_embeddings": false in {self.path / CONFIG} to use both, or remove the first',
                )

    def _lacking(self, missing: Sequence[str], expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return the message for files that lack the tensors `missing`: the whole head of a model that was saved without one, or others."""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if set(missing) != {name for ours, name in names_of(self.config, shapes).items() if is_of_head(ours) and name in expected}:
            return (
                f"{self.path} has no tensor {missing[0]} of shape {expected[missing[0]]}{more}, which its {CONFIG} asks for; copy it again as a whole"
            )
        kind = self.config.to_dict()["architectures"][0]
        other = ", or train a classifier of it with --objective classify" if self.config.objective == "masked" else ""
        return f"{self.path} has no head: it ends where a {kind} would have {missing[0]}{more}; use the directory of a {kind}{other}"

    def _check_elements(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise DataError if a tensor does not belong to the model, is empty, or has a type that is not floating-point."""
        if empty := [name for name, each in self.ranges.items() if 0 in each.shape]:
            shape = self.ranges[empty[0]].shape
            raise DataError(f"{empty[0]} in {self._where(empty[0])} has shape {shape} and no elements", "remove it, or copy the file again")
        for ours, (name, _) in self.weights().items():
            if ours not in shapes:
                raise DataError(
                    f"{self._where(name)} has a tensor {name} of shape {self.ranges[name].shape} that a {self.config.to_dict()['model_type']} "
                    "of this config lacks",
                    "remove it, or copy both from one model",
                )
            if self.ranges[name].dtype not in _FLOATS and name not in self.formats:
                kind = self.ranges[name].dtype.name
                raise DataError(
                    f"{name} in {self._where(name)} holds {kind}, and weights must be F32, F16 or BF16", "convert it, or copy the right one"
                )

    def weights(self) -> dict[str, tuple[str, Stored]]:
        """Return our name of each weight in the files -> (name of the tensor that contains it, its byte range). Call `check` first."""
        layout, stored = FileLayout(self.ranges), dict[str, tuple[str, Stored]]()
        placeholders = {name: array.T if self._is_turned(name) else array for name, array in layout.arrays().items()}
        for ours, array in self.config.names.from_hf(placeholders, self.config, has_head=self.has_head).items():
            name, where = layout.name_of(array), layout.range_of(array)
            if name in self.formats:
                is_turned = self._is_turned(name)
                stored[ours] = name, BlockRange.of(turned(where) if is_turned else where, self.formats[name], is_turned=is_turned)
            else:
                stored[ours] = name, where
        return stored

    def _is_turned(self, name: str) -> bool:
        """Return whether a tensor is quantised as the transpose of the family's (in, out) matrix."""
        if name not in self.formats or not self.config.description.has_rows_in:
            return False
        return self.config.names.today(name) not in (self.config.names.embedding, self.config.names.head)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the family's files."""
        shape, kind = self.ranges[name].shape, self.formats.get(name)
        if kind is None:
            return shape
        rows, columns = shape[0], kind.columns(shape[1])
        return (columns, rows) if self._is_turned(name) else (rows, columns)

    def blocks(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Blocks]:
        """Return our name of each matrix that is quantised in the files -> its storage, for `LanguageModel.hold_blocks`.

        Raises:
            DataError: the files do not hold the weights of this model.
        """
        if not self.formats:
            return {}
        self.check(shapes)
        return {ours: Blocks(each.block_format, each.is_turned) for ours, (_, each) in self.weights().items() if isinstance(each, BlockRange)}

    def attach(self, tensors: Mapping[str, TileTensor]) -> None:
        """Attach the tensors of a model to their byte ranges in the files; no value is read now, except to compare a stored tied head.

        Raises:
            DataError: the files do not hold the weights of this model.
        """
        self.check({name: tensor.shape for name, tensor in tensors.items()})
        attach_weights(tensors, self.weights())

    def _where(self, name: str) -> Path:
        return self.ranges[name].file.path


def weight_ranges(path: Path) -> dict[str, FileRange]:
    """Return name -> byte range of the numbers of each tensor of a model directory or a GGUF file; only headers are read.

    Raises:
        DataError: the directory has no safetensors files, one of them is broken, or index and files disagree; or a tensor is quantised in our layout.
    """
    if is_gguf(path):
        return {name: each.values() for name, each in open_gguf(path).tensors.items()}
    ranges, formats = stored_ranges(path)
    if formats:
        name, kind = next(iter(formats.items()))
        raise DataError(f"{name} in {path} is quantised as {kind.name}, which only nntask's own models support", "use the original weights")
    return ranges


def stored_ranges(path: Path) -> tuple[dict[str, FileRange], dict[str, BlockFormat]]:
    """Return name -> byte range of each tensor of a model directory, and name -> format of the quantised ones; only headers are read.

    Raises:
        DataError: the directory has no safetensors files, one of them is broken, or index and files disagree.
    """
    if is_gguf(path):
        return open_gguf(path).stored_ranges()
    _check_directory(path)
    ranges: dict[str, FileRange] = {}
    formats: dict[str, BlockFormat] = {}
    for name, tensors in _files(path).items():
        with TensorFile(path / name) as file:
            in_file = file.ranges()
            formats.update(formats_in(file.metadata, in_file, file.path))
        if tensors is not None and (wrong := sorted(tensors ^ set(in_file))):
            where = "has a tensor" if wrong[0] in in_file else "lacks the tensor"
            raise DataError(f"{path / name} {where} {wrong[0]}, and {INDEX} says otherwise", "copy the directory again")
        ranges.update(in_file)
    return ranges, formats


def block_sizes(path: Path) -> tuple[int, ...]:
    """Return the block sizes, in weights, of a model directory or a GGUF file, without duplicates; only headers are read.

    Raises:
        DataError: the files are missing, broken, or disagree with their index.
    """
    return tuple(sorted({each.block_values for each in stored_ranges(path)[1].values()}))


def attach_weights(tensors: Mapping[str, TileTensor], weights: Mapping[str, tuple[str, Stored]]) -> None:
    """Attach tensors to byte ranges of files; no value is read now.

    Args:
        tensors: our name -> tensor.
        weights: our name -> (name in the files for error messages, byte range of the tensor's shape).
    """
    for ours, (name, where) in weights.items():
        tensor = tensors[ours]
        for index, handle in zip(tensor.tiling.indices(), tensor.handles, strict=True):
            tensor.runtime.attach(handle, TileSource.of(where, tensor, index, name))


def _files(path: Path) -> dict[str, set[str] | None]:
    """Return file name -> names of its tensors in the index, None without one; raise DataError if files are missing or disagree with it."""
    if not (path / INDEX).exists():
        if (path / SINGLE).exists():
            return {SINGLE: None}
        shards = sorted(path.glob("model-*-of-*.safetensors"))
        if shards:
            raise DataError(f"{path} has {shards[0].name} and no {INDEX}", "copy the directory again as a whole")
        if pickles := [name for name in _PICKLES if (path / name).exists()] or sorted(each.name for each in path.glob("pytorch_model-*-of-*.bin")):
            raise DataError(f"{path} has its weights in {pickles[0]}, a torch pickle, which is never loaded here{_conversion(path)}")
        if metas := sorted(path.glob("consolidated*.pth")):
            target = shlex.quote(f"{path}-safetensors")
            raise DataError(
                f"{path} has its weights in {metas[0].name}, a torch pickle as Meta writes them, which is never loaded here",
                f"convert it with a "
                "transformers below 5: python -m transformers.models.llama.convert_llama_weights_to_hf "
                f"--input_dir {shlex.quote(str(path))} --model_size SIZE --output_dir {target}, SIZE for example 8B, then give {target}",
            )
        raise DataError(f"{path} has no weights", f"it needs {SINGLE}, or shards and {INDEX}")
    return indexed_files(path)
