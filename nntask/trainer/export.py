"""Checkpoints as model directories that transformers loads, written without torch or transformers.

Every element goes from its place in the checkpoint straight to its place in the new files, a few MiB at a time; where it belongs is what `from_hf`
says about the files to be (`shadow`). The directory appears whole or not at all (`nntask.writing`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..checkpoints import STATE, Checkpoint
from ..data import Tokenizer
from ..data.special import Special
from ..errors import DataError, Diverged, StorageError, UsageError
from ..fileranges import FileRange, OpenFile, strides_of, windows
from ..finite import first_not_finite
from ..hf.directory import CONFIG, INDEX, SINGLE
from ..hf.shadow import Shadow, blanks, shapes_of
from ..hf.tokenizers import as_text, tokenizer_files
from ..jsonfile import read_object
from ..lora import wide
from ..models.registry import FAMILIES, family_of
from ..tensorfile import STORAGE, header_of
from ..writing import written_aside
from .base import Base
from .merge import Weight, weights_of

ADAPTER_CONFIG: Final = "adapter_config.json"
_OURS: Final = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(adapter_|generation_|tokenizer_)?config\.json|"
    r"(tokenizer|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|tokenizer\.model|chat_template\.jinja"
)
"""Names of files that save_pretrained or we write."""
_KIND_NAMES: Final = {STORAGE["fp32"]: "float32", STORAGE["fp16"]: "float16", STORAGE["bf16"]: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: files of weights, bytes of weights and number of weights."""

    files: tuple[str, ...]
    nbytes: int
    num_weights: int


def check_target(path: Path, source: Checkpoint, *, force: bool) -> None:
    """Check that a model directory may be written to `path`; creates nothing.

    Raises:
        UsageError: something is there, and `force` is off, or it holds anything but the files of a model that save_pretrained or we write; or
            it would touch the checkpoint, or the weights that its adapters stand beside.
    """
    ours, target = source.path.resolve(), path.resolve()
    if target == ours or target in ours.parents or ours in target.parents:
        raise UsageError(f"{path} holds the checkpoint that is exported, or lies in it; name another directory")
    base = Base.of_state(source.state, str(source.path / STATE))  # its files need not be there
    if base is not None and base.path:
        needed = Path(base.path).resolve()
        if target == needed or target in needed.parents or needed in target.parents:
            raise UsageError(f"{path} holds, or lies in, the weights {base.path} that the adapters stand beside; name another directory")
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if path.is_symlink() or not there.is_dir():
        raise UsageError(f"{there} is not a directory; name another one")
    if there != path:
        return
    if not force:
        raise UsageError(f"{path} exists; name another directory, or replace it with --force")
    if surplus := sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name) or entry.is_symlink() or not entry.is_file()):
        raise UsageError(
            f"{path} has {surplus[0]}, and --force replaces directories that hold a model and nothing else; name another directory, or move it away"
        )
    if (path / CONFIG).exists():
        kind = read_object(path / CONFIG, "the config").get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise UsageError(f"{path} holds a model of type {kind!r}, and --force replaces those of {', '.join(FAMILIES)}; name another directory")
    elif any(path.iterdir()) and not (path / ADAPTER_CONFIG).exists():
        raise UsageError(f"{path} has no {CONFIG}, and --force replaces model directories only; name another directory, or remove this one")


def export(source: Checkpoint, path: Path, *, dtype: str, shard_nbytes: int, tokenizer: Tokenizer | None, force: bool = False) -> Exported:
    """Write a checkpoint as a model directory.

    Args:
        dtype: fp32, fp16, bf16, or auto for the one it is stored in (fp32 for fp64).
        shard_nbytes: most bytes of weights in a file; a tensor that is larger gets a file of its own.
        tokenizer: written too, unless None.

    Raises:
        UsageError: see `check_target`, or a weight is too large for `dtype`.
        DataError: the checkpoint is broken.
        StorageError: the disk is full or failed; nothing was replaced.
    """
    check_target(path, source, force=force)
    weights = weights_of(source)

    def write(directory: Path) -> Exported:
        done = _write_weights(source.config, weights, directory, dtype, shard_nbytes)
        ids = (Special() if tokenizer is None else tokenizer.special).to_dict()
        kind = _KIND_NAMES[kind_of({each.dtype for each in weights.values()}, dtype)]
        # transformers 5 says dtype where 4 said torch_dtype
        write_json(directory / CONFIG, {**source.config.to_dict(), **ids, "dtype": kind, "torch_dtype": kind})
        write_tokenizer(directory, tokenizer, source.config.n_positions)
        return done

    return write_directory(path, write)


def write_directory(path: Path, write: Callable[[Path], Exported]) -> Exported:
    """Let `write` fill a new directory, which gets the name `path` when it is whole (`nntask.writing`).

    Raises:
        StorageError: the disk is full or failed; what was there is there still, or the message says where it lies.
    """
    try:
        with written_aside(path) as new:
            new.mkdir()
            return write(new)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; make room or name another directory") from error


def kind_of(kinds: set[np.dtype[Any]], dtype: str) -> np.dtype[Any]:
    """The element type to store.

    Args:
        kinds: of what there is.
        dtype: as of `export`.
    """
    if dtype != "auto":
        return STORAGE[dtype]
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_KIND_NAMES) else STORAGE["fp32"]


def _write_weights(config: Any, weights: Mapping[str, Weight], directory: Path, dtype: str, shard_nbytes: int) -> Exported:
    family, kind = family_of(config), kind_of({each.dtype for each in weights.values()}, dtype)
    try:
        shapes = shapes_of(family.to_hf(blanks({name: each.shape for name, each in weights.items()}), config))
    except KeyError as error:
        raise DataError(f"the checkpoint lacks {error}, which its config asks for; use another checkpoint") from None
    places: dict[str, FileRange] = {}
    shards = _shards(shapes, kind, shard_nbytes)
    for name, members in shards.items():
        places.update(new_file(directory / name, members, kind))
    if len(shards) > 1:
        write_json(directory / INDEX, _index(shards, shapes, kind))
    shadow = Shadow(places)
    for name, array in family.from_hf(shadow.arrays(), config).items():
        place = shadow.range_of(array)
        for window, piece in _pieces(weights[name], kind):
            place[window].write(as_stored(name, piece, kind))
    num_weights = sum(prod(shape) for shape in shapes.values())
    return Exported(tuple(shards), num_weights * kind.itemsize, num_weights)


def _shards(shapes: Mapping[str, tuple[int, ...]], kind: np.dtype[Any], limit: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """File names and the tensors in each, in order; files are filled one after another."""
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


def new_file(path: Path, shapes: Mapping[str, tuple[int, ...]], kind: np.dtype[Any]) -> dict[str, FileRange]:
    """Make a file with a header and room for tensors; returns where they belong."""
    header, places = header_of({name: (shape, kind) for name, shape in shapes.items()}, {"format": "pt"})
    file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.pwrite(file.fd, header, 0)
    found = {}
    for name, shape in shapes.items():
        first, last = places[name]
        found[name] = FileRange(file, kind, len(header) + first, shape, strides_of(shape, kind))
        os.ftruncate(file.fd, len(header) + last)
    return found


def _pieces(source: Weight, kind: np.dtype[Any]) -> Iterator[tuple[tuple[slice, ...], npt.NDArray[Any]]]:
    """Rows of a tensor, and where they lie in it; wide where they are stored in another type than `kind`, so that they are rounded once."""
    held = kind if source.dtype == kind else wide(source.dtype)
    for window in windows(source.shape, held.itemsize):
        part = source[window]
        piece = np.empty(part.shape, held)
        part.read(piece)
        yield window, piece


def as_stored(name: str, piece: npt.NDArray[Any], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values in their new element type.

    Raises:
        Diverged: a weight is not finite.
        UsageError: a weight is too large for the new type.
    """
    with np.errstate(over="ignore"):
        values: npt.NDArray[Any] = piece.astype(kind)
    if first_not_finite(values) is not None:
        if first_not_finite(piece) is None:
            raise UsageError(f"{name} holds values too large for {kind.name}; use --dtype bf16 or fp32")
        raise Diverged(f"{name} holds values that are not finite; use an earlier checkpoint")
    return values


def write_tokenizer(directory: Path, tokenizer: Tokenizer | None, n_positions: int) -> None:
    """The files of a tokenizer, if there is one."""
    if tokenizer is not None:
        for name, text in tokenizer_files(tokenizer, n_positions).items():
            (directory / name).write_text(text, encoding="utf-8")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A file of readable JSON."""
    path.write_text(as_text(values), encoding="utf-8")
