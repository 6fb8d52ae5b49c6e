"""A GGUF file as a model directory: its config, its weights with transformers' names and layouts, and its tokenizer's files.

Opening a file reads its header only, and the head and the embedding where they might be the same. The last file that was opened is remembered, as
several askers open it in turn.
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
from ..io.gguf_file import MAGIC, SUFFIX, GgufFile
from ..io.regular_file import open_regular
from ..io.strided_ranges import FileRange
from ..io.translated_files import read_all
from .architectures import ARCHITECTURES, EMBEDDING, HEAD, ROTARY_FACTORS
from .config_keys import config_from
from .tensor_ranges import Heads, LocatedTensor
from .vocabulary import files_from, ids_from

_GENERATION: Final = "generation_config.json"
_AT_ONCE: Final = 1 << 20
_SAMPLE: Final = 4096


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a GGUF file, whole or broken."""
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

    Args:
        path: the file.

    Attributes:
        values: the config, in transformers' JSON.
        tensors: transformers' name -> tensor.

    Raises:
        StorageError: the file is broken.
        DataError: it is of an architecture that is not known here, or its metadata lack something.
    """

    def __init__(self, path: Path) -> None:
        found = GgufFile(path)
        self.path = path
        if (count := found.metadata.get("split.count", 1)) != 1:
            raise DataError(f"{path} is one of {count} files of a model; join them with llama-gguf-split --merge, and give the whole")
        shapes = {name: entry.shape for name, entry in found.tensors.items()}
        ties = _repeats_embedding(found)
        factors = _factors(found)
        self.values = config_from(found.metadata, shapes, str(path), rotary_factors=factors, ties=ties)
        ids = ids_from(found.metadata, self.values["vocab_size"])
        self.values |= ids
        architecture, heads = ARCHITECTURES[found.metadata["general.architecture"]], Heads.of(self.values)
        self.tensors = {
            architecture.name_there(name): LocatedTensor(found.file, name, each.type, each.shape, each.offset, architecture, heads)
            for name, each in found.tensors.items()
            if name != ROTARY_FACTORS and not (ties and name == HEAD)
        }
        self._metadata, self._ids = found.metadata, ids

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Name -> content of files that a model directory has beside its weights: the tokenizer, and ids around texts."""
        longest = int(self.values.get("max_position_embeddings", self.values.get("n_positions")) or 0)
        return {**files_from(self._metadata, longest), _GENERATION: json.dumps(self._ids)}

    def stored_ranges(self) -> tuple[dict[str, FileRange], dict[str, BlockFormat]]:
        """transformers' name -> range of each tensor, and name -> format of the matrices that are quantised as products take them.

        The former are of values with transformers' layout, and of the latter of their blocks (out, bytes of a row).

        Raises:
            DataError: the type of a tensor is not read here.
        """
        formats = {name: each.format for name, each in self.tensors.items() if each.format is not None}
        return {name: each.blocks() if name in formats else each.values() for name, each in self.tensors.items()}, formats


def open_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Open a GGUF file.

    Raises:
        StorageError, DataError: as of `GgufModel`.
    """
    file = Path(path)
    try:
        found = file.stat()
    except OSError:
        return GgufModel(file)  # which says why
    return _opened(file, file.resolve(), found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=1)
def _opened(path: Path, *_: object) -> GgufModel:
    return GgufModel(path)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """A fingerprint of a GGUF file: its size, and the CRC-32 of its header and of the first, middle and last 4 KiB of every tensor.

    See `nntask.io.safetensors_file.fingerprint_of`, which is the same of another format.

    Raises:
        StorageError: the file is broken.
    """
    file = GgufFile(path)
    spans = [(first, min(_AT_ONCE, file.header_nbytes - first)) for first in range(0, file.header_nbytes, _AT_ONCE)]
    for each in file.tensors.values():
        size = min(_SAMPLE, each.nbytes)
        spans += [(each.offset + first, size) for first in (0, (each.nbytes - size) // 2, each.nbytes - size)]
    checksum, piece = 0, bytearray(_AT_ONCE)
    for offset, size in spans:
        view = memoryview(piece)[:size]
        read_all(file.file, view, offset)
        checksum = zlib.crc32(view, checksum)
    return f"{os.stat(path).st_size}-{checksum:08x}"


def _factors(file: GgufFile) -> np.ndarray[Any, Any] | None:
    """The values of ``rope_freqs.weight``; None where there is none."""
    entry = file.tensors.get(ROTARY_FACTORS)
    if entry is None or entry.type.name != "F32" or entry.nbytes > _AT_ONCE:
        return None
    values = np.empty(entry.nbytes // 4, np.float32)
    read_all(file.file, values.view(np.uint8).data, entry.offset)
    return values


def _repeats_embedding(file: GgufFile) -> bool:
    """Whether the head is there and has the bytes of the embedding, as older converters wrote it; both are read until they differ."""
    head, embedding = file.tensors.get(HEAD), file.tensors.get(EMBEDDING)
    if head is None or embedding is None or (head.type, head.shape) != (embedding.type, embedding.shape):
        return False
    ours, theirs = np.empty((2, _AT_ONCE), np.uint8)
    for first in range(0, head.nbytes, _AT_ONCE):
        count = min(_AT_ONCE, head.nbytes - first)
        read_all(file.file, ours[:count].data, head.offset + first)
        read_all(file.file, theirs[:count].data, embedding.offset + first)
        if not np.array_equal(ours[:count], theirs[:count]):
            return False
    return True
