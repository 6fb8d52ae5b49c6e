"""Export of checkpoints as model directories that transformers loads, written without torch or transformers.

The files are created with their final sizes first. `from_hf` of the model's family, applied to a `FileLayout` of these files, maps each of our
weights to its byte range in them, and every weight is copied there a few MiB at a time. The directory appears complete or not at all
(`nntask.io.atomic_write`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import merge_dtype
from ..checkpoints.store import STATE, Checkpoint
from ..data.special_tokens import Special
from ..data.tokenizer import Tokenizer
from ..errors import DataError, Diverged, StorageError, UsageError
from ..hf.layout import FileLayout, blanks, shapes_of
from ..hf.model_directory import ADAPTER_CONFIG, CONFIG, SINGLE
from ..hf.shard_index import INDEX
from ..hf.tokenizer_files import as_text, tokenizer_files
from ..inference.samples import begins_after_end
from ..io.atomic_write import written_aside
from ..io.finite import first_not_finite
from ..io.json_file import read_object
from ..io.safetensors_file import STORAGE, header_of
from ..io.strided_ranges import FileRange, OpenFile, strides_of, windows
from ..io.writable import check_writable
from ..models.registry import FAMILIES
from .merged_weights import Weight, weights_of

_OURS: Final = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(adapter_|generation_|tokenizer_)?config\.json|"
    r"(tokenizer|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|tokenizer\.model|chat_template\.jinja"
)
"""Names of the files that save_pretrained of transformers or this module writes."""
_KIND_NAMES: Final = {STORAGE["fp32"]: "float32", STORAGE["fp16"]: "float16", STORAGE["bf16"]: "bfloat16"}


METADATA: Final = {"format": "pt"}
"""Metadata of a file that transformers loads."""
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Exported:
    """Summary of an export.

    Args:
        files: names of the files with weights.
        nbytes: bytes of all weights.
        num_weights: number of elements of all weights.
    """

    files: tuple[str, ...]
    nbytes: int
    num_weights: int


def check_target(path: Path, source: Checkpoint, *, force: bool) -> None:
    """Check that a checkpoint may be exported to a new model directory, with `force` to an existing one, without creating it.

    Raises:
        UsageError: `path` exists and `force` is false, it holds files that are not of an exported model, it overlaps the checkpoint or the frozen
            base weights of its adapters, or it cannot be written.
    """
    check_apart_from(path, source)
    check_replaceable(path, force=force)


def check_apart_from(path: Path, source: Checkpoint) -> None:
    """Check that a target neither overlaps a checkpoint nor the frozen base weights of its adapters.

    Raises:
        UsageError: it overlaps one of them.
    """
    check_apart(path, source.path, "the checkpoint that is exported")
    base = FrozenBase.of_state(source.state, str(source.path / STATE))  # not checked: a path that does not exist is protected as well
    if base is not None and base.path:
        check_apart(path, Path(base.path), "the frozen weights of the adapters")


def check_apart(path: Path, source: Path, what: str = "the source") -> None:
    """Check that a target is not a file or directory that is read, nor in it or around it.

    Args:
        path: target.
        source: file or directory that is read.
        what: noun phrase for `source` in the error message.

    Raises:
        UsageError: the target is one of these.
    """
    ours, theirs = path.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise UsageError(f"{path} must not be, contain or lie in {source}, which is {what}", "name another place")


def check_new_file(path: Path, kind: str, is_kind: Callable[[Path], bool], *, force: bool, instead: str = "replace it with --force") -> None:
    """Check that a file is new, or with `force` one of its kind, and that it can be written.

    Args:
        path: file to write.
        kind: name of the kind in error messages, such as "a GGUF file".
        is_kind: function that returns whether an existing file is of the kind.
        force: whether to replace an existing file.
        instead: alternative to naming another file, for the error message if the file exists.

    Raises:
        UsageError: the file exists and is a link, of another kind, or not to be replaced; or it cannot be written.
    """
    if os.path.lexists(path):
        if not force:
            raise UsageError(f"{path} exists", f"name another file, or {instead}")
        if path.is_symlink() or not is_kind(path):
            raise UsageError(f"{path} exists and is not {kind}, the only kind overwritten", "name another file, or remove it")
    check_writable(path, "")


def check_replaceable(path: Path, *, force: bool) -> None:
    """Check that a directory is new, or with `force` a model directory, and that it can be written.

    Raises:
        UsageError: the directory is neither, or cannot be written.
    """
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if path.is_symlink() or not there.is_dir():
        raise UsageError(f"{there} is not a directory", "name another one")
    check_writable(path, "")
    if there != path:
        return
    if not force:
        raise UsageError(f"{path} exists", "name another directory, or replace it with --force")
    if surplus := sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name) or entry.is_symlink() or not entry.is_file()):
        raise UsageError(
            f"{path} has {surplus[0]}, and --force replaces directories that hold a model and nothing else", "name another directory, or move it away"
        )
    if (path / CONFIG).exists():
        kind = read_object(path / CONFIG, "the config").get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise UsageError(f"{path} holds a model of type {kind!r}, and --force replaces those of {', '.join(FAMILIES)}", "name another directory")
    elif any(path.iterdir()) and not (path / ADAPTER_CONFIG).exists():
        raise UsageError(f"{path} has no {CONFIG}, and --force replaces model directories only", "name another directory, or remove this one")


def export(source: Checkpoint, path: Path, *, dtype: str, shard_nbytes: int, tokenizer: Tokenizer | None, force: bool = False) -> Exported:
    """Write a checkpoint as a model directory.

    Args:
        source: checkpoint to export.
        path: directory to write.
        dtype: "fp32", "fp16", "bf16", or "auto" for the element type of the checkpoint (fp32 for fp64).
        shard_nbytes: largest number of bytes of weights in a file; a larger tensor gets a file of its own.
        tokenizer: tokenizer whose files are written too; None for none.
        force: whether to replace an existing model directory.

    Raises:
        UsageError: `check_target` refuses `path`, or a weight is too large for `dtype`.
        DataError: the checkpoint is broken.
        StorageError: the disk is full or failed; no file was replaced.
    """
    check_target(path, source, force=force)
    weights = weights_of(source)

    def write(directory: Path) -> Exported:
        done = _write_weights(source.config, weights, directory, dtype, shard_nbytes)
        ids = (Special() if tokenizer is None else tokenizer.special).to_dict()
        kind = _KIND_NAMES[kind_of({each.dtype for each in weights.values()}, dtype)]
        # transformers 5 reads dtype, transformers 4 reads torch_dtype
        write_json(directory / CONFIG, {**source.config.to_dict(), **ids, "dtype": kind, "torch_dtype": kind})
        write_tokenizer(directory, tokenizer, source.config.n_positions, begins_after_end=begins_after_end(source))
        return done

    return write_directory(path, write)


def write_directory(path: Path, write: Callable[[Path], Done]) -> Done:
    """Let `write` fill a new directory, which gets the name `path` when it is complete (`nntask.io.atomic_write`).

    Raises:
        StorageError: the disk is full or failed; an existing directory at `path` is kept, or the message names the path to which it was moved.
    """
    try:
        with written_aside(path) as new:
            new.mkdir()
            return write(new)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", "make room or name another directory") from error


def kind_of(kinds: set[np.dtype[Any]], dtype: str) -> np.dtype[Any]:
    """Return the element type of the exported weights.

    Args:
        kinds: element types of the checkpoint's weights.
        dtype: "fp32", "fp16", "bf16", or "auto" for the one element type in `kinds` (fp32 for fp64 and for several types).
    """
    if dtype != "auto":
        return STORAGE[dtype]
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_KIND_NAMES) else STORAGE["fp32"]


def _write_weights(config: Any, weights: Mapping[str, Weight], directory: Path, dtype: str, shard_nbytes: int) -> Exported:
    kind = kind_of({each.dtype for each in weights.values()}, dtype)
    try:
        shapes = shapes_of(config.names.to_hf(blanks({name: each.shape for name, each in weights.items()}), config))
    except KeyError as error:
        raise DataError(f"the checkpoint lacks {error}, which its config asks for", "use another checkpoint") from None
    ranges: dict[str, FileRange] = {}
    shards = _shards(shapes, kind, shard_nbytes)
    for name, members in shards.items():
        ranges.update(new_file(directory / name, {name: (shape, kind) for name, shape in members.items()}))
    if len(shards) > 1:
        write_json(directory / INDEX, _index(shards, shapes, kind))
    layout = FileLayout(ranges)
    for name, array in config.names.from_hf(layout.arrays(), config).items():
        target = layout.range_of(array)
        for window, piece in pieces(weights[name], kind):
            target[window].write(as_stored(name, piece, kind))
    num_weights = sum(prod(shape) for shape in shapes.values())
    return Exported(tuple(shards), num_weights * kind.itemsize, num_weights)


def _shards(shapes: Mapping[str, tuple[int, ...]], kind: np.dtype[Any], limit: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return file name -> {tensor name: shape}, in order; a tensor goes into the current file unless the file would exceed `limit` bytes."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    taken = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * kind.itemsize
        if groups[-1] and taken + nbytes > limit:
            groups.append({})
            taken = 0
        groups[-1][name] = shape
        taken += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _index(shards: Mapping[str, Mapping[str, tuple[int, ...]]], shapes: Mapping[str, tuple[int, ...]], kind: np.dtype[Any]) -> dict[str, Any]:
    total = sum(prod(shape) for shape in shapes.values()) * kind.itemsize
    return {"metadata": {"total_size": total}, "weight_map": {name: file for file, members in shards.items() for name in members}}


def new_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], metadata: Mapping[str, str] = METADATA
) -> dict[str, FileRange]:
    """Create a safetensors file with its header and its final size, and return the byte range of each tensor, to be written by the caller.

    Args:
        path: the file.
        tensors: name -> (shape, element type).
        metadata: metadata of the header.

    Raises:
        OSError: the file exists, or the disk is full or failed.
    """
    header, spans = header_of(tensors, metadata)
    file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.pwrite(file.fd, header, 0)
    os.ftruncate(file.fd, len(header) + max((last for _, last in spans.values()), default=0))
    begins = {name: len(header) + first for name, (first, _) in spans.items()}
    return {name: FileRange(file, kind, begins[name], shape, strides_of(shape, kind)) for name, (shape, kind) in tensors.items()}


def pieces(source: Weight, kind: np.dtype[Any]) -> Iterator[tuple[tuple[slice, ...], npt.NDArray[Any]]]:
    """Yield (window, values) for windows that cover a weight; values of another type than `kind` come in the merge type, to be rounded only once."""
    held = kind if source.dtype == kind else merge_dtype(source.dtype)
    for window in windows(source.shape, held.itemsize):
        values = source[window]
        piece = np.empty(values.shape, held)
        values.read(piece)
        yield window, piece


def as_stored(
    name: str, piece: npt.NDArray[Any], kind: np.dtype[Any], *, shown: str = "", advice: str = "use --dtype bf16 or fp32"
) -> npt.NDArray[Any]:
    """Return values of the weight `name`, converted to the element type `kind`.

    Args:
        name: name of the weight.
        piece: values.
        kind: element type.
        shown: name of the type in error messages; "" for that of `kind`.
        advice: remedy for values that are too large.

    Raises:
        Diverged: a value is not finite.
        UsageError: a weight is too large for the new type.
    """
    with np.errstate(over="ignore"):
        values: npt.NDArray[Any] = piece.astype(kind, copy=False)
    if first_not_finite(values) is not None:
        if first_not_finite(piece) is None:
            raise UsageError(f"{name} holds values too large for {shown or kind.name}", advice)
        raise Diverged(f"{name} holds values that are not finite", "use an earlier checkpoint, or another model")
    return values


def write_tokenizer(directory: Path, tokenizer: Tokenizer | None, n_positions: int, *, begins_after_end: bool) -> None:
    """Write the files of a tokenizer, unless it is None, into a model's directory; the other arguments are those of `tokenizer_files`."""
    if tokenizer is not None:
        for name, text in tokenizer_files(tokenizer, n_positions, begins_after_end=begins_after_end).items():
            (directory / name).write_text(text, encoding="utf-8")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(as_text(values), encoding="utf-8")
