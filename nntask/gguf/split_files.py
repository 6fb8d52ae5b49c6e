"""GGUF files in several shards, as llama-gguf-split writes them: NAME-00001-of-00003.gguf and so on in one directory.

The first shard has the metadata, and every shard has tensors. The path of any shard names the model. Missing shards, and shards of another model, are
refused. Shards are untrusted beyond the checks of `nntask.io.gguf_file`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..io.gguf_file import SUFFIX, GgufFile, GgufTensor
from ..io.strided_ranges import OpenFile

_NAME: Final = re.compile(rf"(?P<stem>.*)-(?P<number>\d{{5}})-of-(?P<count>\d{{5}}){re.escape(SUFFIX)}", re.ASCII)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class Shards:
    """The open shards of a model; one for a file that is not split.

    Args:
        files: shards in order.
        tensors: name -> (file of its shard, entry).
    """

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, tuple[OpenFile, GgufTensor]]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the first shard."""
        return self.files[0].metadata


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of all shards by the name of one of them, present or not; the path itself if its name is not that of a shard."""
    found = _NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [path]
    return [path.with_name(f"{found['stem']}-{number:05d}-of-{found['count']}{SUFFIX}") for number in range(1, int(found["count"]) + 1)]


def open_shards(path: Path) -> Shards:
    """Open the file at a path, and the other shards of its model.

    Raises:
        StorageError: a file is broken.
        DataError: a shard is missing, or belongs to another model.
    """
    named = GgufFile(path)
    count = named.metadata.get(_COUNT, 1)
    if count == 1 or (count == 0 and shard_paths(path) == [path]):  # 0 in a file joined from shards
        return Shards((named,), {name: (named.file, each) for name, each in named.tensors.items()})
    paths = shard_paths(path)
    if len(paths) != count:
        raise DataError(
            f"{_COUNT} in {path} is {str(count)[:60]}, and by its name there is {len(paths)}",
            f"name shards NAME-00001-of-00002{SUFFIX} and so on, or join them with llama-gguf-split --merge",
        )
    files, tensors = list[GgufFile](), dict[str, tuple[OpenFile, GgufTensor]]()
    for number, shard in enumerate(paths):
        if not shard.is_file():
            raise DataError(f"{path} is one of {count} shards of a model, and {shard.name} is not in its directory", "copy the missing shard")
        file = named if shard == path else GgufFile(shard)
        if (file.metadata.get(_NUMBER), file.metadata.get(_COUNT)) != (number, count):
            got = f"shard {file.metadata.get(_NUMBER)} of {file.metadata.get(_COUNT)}"
            raise DataError(
                f"{shard} is {got[:80]} by its metadata, and shard {number} of {count} by its name, counted from 0", "copy the shards again"
            )
        if twice := tensors.keys() & file.tensors.keys():
            raise DataError(f"{min(twice)[:80]} is in {shard} and in a shard before it", "copy the shards of one model")
        tensors |= {name: (file.file, each) for name, each in file.tensors.items()}
        files.append(file)
    expected = files[0].metadata.get(_TENSORS, len(tensors))
    if expected != len(tensors):
        raise DataError(f"{_TENSORS} in {paths[0]} is {str(expected)[:60]}, and all shards have {len(tensors)}", "copy the shards of one model")
    return Shards(tuple(files), tensors)
