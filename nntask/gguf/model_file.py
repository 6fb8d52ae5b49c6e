"""A GGUF file in the role of a model directory: its config, its weights with transformers' names and layouts, and its tokenizer's files.

Opening a file reads only its header, and the head and the embedding if they might be the same. The last opened file is cached, because several
callers open it in turn.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiles import BlockFormat

from ..errors import DataError
from ..io.gguf_file import MAGIC, SUFFIX
from ..io.regular_file import open_regular
from ..io.strided_ranges import FileRange, is_equal, read_all
from .architectures import ALL_FACTORS, ARCHITECTURES, EMBEDDING, HEAD
from .config_keys import config_from
from .metadata_keys import check_kind, unread_of_others
from .split_files import Shards, open_shards, shard_paths
from .tensor_ranges import Heads, LocatedTensor
from .text_ends import PREFIX, beyond_vocabulary, ids_from
from .vocabulary import TOKENIZER, WHOLE, UntranslatedError, files_from, wrong_merge

_GENERATION: Final = "generation_config.json"
_AT_ONCE: Final = 1 << 20
_SAMPLE: Final = 4096
_SHOWN: Final = 8
"""Largest number of names of keys in a sentence."""


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a GGUF file, whole or broken."""
    file = Path(path)
    if not file.is_file():
        return False
    if file.suffix == SUFFIX:
        return True
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class GgufModel:
    """An open GGUF file.

    Attributes:
        values: config in transformers' JSON.
        tensors: transformers' name -> tensor.
        unread: keys of the file that neither llama.cpp nor this reader knows.

    Raises:
        StorageError: the file is broken.
        DataError: the architecture is unknown, or the metadata are incomplete.
    """

    def __init__(self, path: Path) -> None:
        shards = open_shards(path)
        self.path = path
        shapes = {name: entry.shape for name, (_, entry) in shards.tensors.items()}
        ties = _repeats_embedding(shards)
        factors = {name: _factors(shards, name) for name in ALL_FACTORS if name in shards.tensors}
        check_kind(shards.metadata, str(path))
        self.values, unread = config_from(shards.metadata, shapes, str(path), rotary_factors=factors, ties=ties)
        self.unread = (*unread, *unread_of_others(shards.metadata, str(shards.metadata["general.architecture"])))
        ids = ids_from(shards.metadata, self.values["vocab_size"])
        self.values |= ids
        architecture, heads = ARCHITECTURES[shards.metadata["general.architecture"]], Heads.of(self.values)
        self.tensors: dict[str, LocatedTensor] = {}
        for name, (file, each) in shards.tensors.items():
            located = LocatedTensor(file, name, each.type, each.shape, each.offset, architecture, heads)
            if architecture.has_experts(name):
                held = {architecture.name_there(name, expert): located.expert(expert) for expert in range(each.shape[0])}
            else:
                held = {} if name in ALL_FACTORS or (ties and name == HEAD) else {architecture.name_there(name): located}
            for there in held.keys() & self.tensors.keys():
                raise DataError(f"{name} in {path} has the same weights as another tensor, {self.tensors[there].name}", "convert the model again")
            self.tensors |= held
        self._metadata, self._ids = shards.metadata, ids

    @property
    def notes(self) -> list[str]:
        """Sentences for the caller to print about keys that nothing reads, and about missing ids and rules."""
        listed = ", ".join(self.unread[:_SHOWN]) + (f" and {len(self.unread) - _SHOWN} more" if len(self.unread) > _SHOWN else "")
        found = [f"{self.path} has keys that neither nntask nor llama.cpp knows, and they are ignored: {listed}"] if self.unread else []
        if beyond := beyond_vocabulary(self._metadata, vocab_size := self.values["vocab_size"]):
            found.append(f"{self.path} has {' and '.join(beyond)}, and its ids end at {vocab_size - 1}: they are ignored")
        has_whole = TOKENIZER in self.files and self.files[TOKENIZER] == self._metadata.get(WHOLE)
        if self._metadata.get(f"{PREFIX}model") == "gpt2" and f"{PREFIX}pre" not in self._metadata and not has_whole:
            found.append(f"{self.path} has no {PREFIX}pre, so texts are cut by llama.cpp's default rule; a file that is converted anew is better")
        return found

    @property
    def files(self) -> Mapping[str, str]:
        """Name -> content of the other files of a model directory: the tokenizer, if it can be translated, and ids around texts."""
        return self._files[0]

    @property
    def untranslated(self) -> str:
        """Reason why the file's tokenizer is not among `files`, completing "its tokenizer ..."; "" if it is, or if there is none."""
        return self._files[1]

    def flaw(self) -> str:
        """Return why the tokenizers package refuses the file's tokenizer, completing "the tokenizer ..."; "" if that is not known."""
        return wrong_merge(self._metadata)

    @cached_property
    def _files(self) -> tuple[Mapping[str, str], str]:
        longest = int(self.values.get("max_position_embeddings", self.values.get("n_positions")) or 0)
        generation, reason = {_GENERATION: json.dumps(self._ids)}, ""
        try:
            return {**files_from(self._metadata, longest, self.values["vocab_size"]), **generation}, ""
        except UntranslatedError as error:
            reason = str(error)
        return generation, reason

    def stored_ranges(self) -> tuple[dict[str, FileRange], dict[str, BlockFormat]]:
        """Return transformers' name -> range of each tensor, and name -> format of the matrices that products read in blocks.

        Ranges of matrices with a format are those of their blocks (out, bytes of a row), others those of values in transformers' layout. Matrices of
        16-bit floats have a format too.

        Raises:
            DataError: a tensor has a type that is not read here.
        """
        formats = {name: each.format for name, each in self.tensors.items() if each.format is not None}
        return {name: each.blocks() if name in formats else each.values() for name, each in self.tensors.items()}, formats


def open_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Open a GGUF file.

    Raises:
        StorageError, DataError: `GgufModel` refuses the file.
    """
    file = Path(path)
    try:
        stats = [shard.stat() for shard in dict.fromkeys((file, *shard_paths(file)))]
    except OSError:
        return GgufModel(file)  # raises the error
    return _opened(file, file.resolve(), *((each.st_size, each.st_mtime_ns, each.st_ino) for each in stats))


def file_notes(path: str | os.PathLike[str]) -> list[str]:
    """Return sentences for the caller to print about a GGUF file; none for any other path.

    Raises:
        StorageError, DataError: `GgufModel` refuses the file.
    """
    return open_gguf(path).notes if is_gguf(path) else []


@lru_cache(maxsize=1)
def _opened(path: Path, *_: object) -> GgufModel:
    return GgufModel(path)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a fingerprint of a GGUF file or of all its shards: the size, and the CRC-32 of headers and of the first, middle and last 4 KiB of every
    tensor.

    `nntask.io.safetensors_file.fingerprint_of` is its equivalent for safetensors.

    Raises:
        StorageError: the file is broken.
    """
    shards = open_shards(Path(path))
    checksum, piece, total = 0, bytearray(_AT_ONCE), 0
    for file in shards.files:
        spans = [(first, min(_AT_ONCE, file.header_nbytes - first)) for first in range(0, file.header_nbytes, _AT_ONCE)]
        for each in file.tensors.values():
            size = min(_SAMPLE, each.nbytes)
            spans += [(each.offset + first, size) for first in (0, (each.nbytes - size) // 2, each.nbytes - size)]
        for offset, size in spans:
            view = memoryview(piece)[:size]
            read_all(file.file, view, offset)
            checksum = zlib.crc32(view, checksum)
        total += os.stat(file.path).st_size
    return f"{total}-{checksum:08x}"


def _factors(shards: Shards, name: str) -> np.ndarray[Any, Any]:
    """Return the values of a tensor of rotary factors; raise DataError unless they are few and fp32, in which llama.cpp computes."""
    file, entry = shards.tensors[name]
    if entry.type.name != "F32" or entry.nbytes > _AT_ONCE:
        raise DataError(f"{name} in {file.path} must be F32, at most 1 MiB, got {entry.type.name} of {entry.nbytes} bytes", "convert the model again")
    values = np.empty(entry.nbytes // 4, np.float32)
    read_all(file, values.view(np.uint8).data, entry.offset)
    return values


def _repeats_embedding(shards: Shards) -> bool:
    """Return whether the file has a head with the bytes of the embedding, as older converters wrote it; reads both until they differ."""
    if HEAD not in shards.tensors or EMBEDDING not in shards.tensors:
        return False
    (ours, head), (theirs, embedding) = shards.tensors[HEAD], shards.tensors[EMBEDDING]
    ranges = (FileRange(file, np.dtype(np.uint8), each.offset, (each.nbytes,), (1,)) for file, each in ((ours, head), (theirs, embedding)))
    return (head.type, head.shape) == (embedding.type, embedding.shape) and is_equal(*ranges)
