"""GGUF files that are split into parts, as llama-gguf-split writes them: NAME-00001-of-00003.gguf and its siblings in one directory.

The first part has the metadata and every part has tensors. Any part names the model. Parts that are missing, or that belong to another model, are
refused; nothing of a part is believed beyond what `nntask.io.gguf_file` checks.
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

_NAME: Final = re.compile(rf"(?P<stem>.*)-(?P<number>\d{{5}})-of-(?P<count>\d{{5}}){re.escape(SUFFIX)}")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class Parts:
    """The open parts of a model; one for a file that is not split.

    Args:
        path: the path that names the model.
        files: the parts in order.
        tensors: name -> (file of its part, entry).
    """

    path: Path
    files: tuple[GgufFile, ...]
    tensors: Mapping[str, tuple[OpenFile, GgufTensor]]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the first part."""
        return self.files[0].metadata


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts by the name of one of them, present or not; the path itself if its name is that of no part."""
    found = _NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [path]
    return [path.with_name(f"{found['stem']}-{number:05d}-of-{found['count']}{SUFFIX}") for number in range(1, int(found["count"]) + 1)]


def open_parts(path: Path) -> Parts:
    """Open the file at a path, and the other parts of its model.

    Raises:
        StorageError: a file is broken.
        DataError: a part is missing, or is not of this model.
    """
    named = GgufFile(path)
    count = named.metadata.get(_COUNT, 1)
    if count == 1:
        return Parts(path, (named,), {name: (named.file, each) for name, each in named.tensors.items()})
    paths = part_paths(path)
    if len(paths) != count:
        raise DataError(
            f"{_COUNT} in {path} is {str(count)[:60]}, and by its name there is {len(paths)}; name parts NAME-00001-of-00002{SUFFIX} and so on, "
            "or join them with llama-gguf-split --merge"
        )
    files, tensors = list[GgufFile](), dict[str, tuple[OpenFile, GgufTensor]]()
    for number, part in enumerate(paths):
        if not part.is_file():
            raise DataError(f"{path} is one of {count} parts of a model, and {part.name} is not beside it; copy the missing part")
        file = named if part == path else GgufFile(part)
        if (file.metadata.get(_NUMBER), file.metadata.get(_COUNT)) != (number, count):
            got = f"part {file.metadata.get(_NUMBER)} of {file.metadata.get(_COUNT)}"
            raise DataError(f"{part} is {got[:80]} by its metadata, and part {number} of {count} by its name, counted from 0; copy the parts again")
        if twice := tensors.keys() & file.tensors.keys():
            raise DataError(f"{min(twice)[:80]} is in {part} and in a part before it; copy the parts of one model")
        tensors |= {name: (file.file, each) for name, each in file.tensors.items()}
        files.append(file)
    expected = files[0].metadata.get(_TENSORS, len(tensors))
    if expected != len(tensors):
        raise DataError(f"{_TENSORS} in {paths[0]} is {str(expected)[:60]}, and all parts have {len(tensors)}; copy the parts of one model")
    return Parts(path, tuple(files), tensors)
