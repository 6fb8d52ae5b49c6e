"""The index of a model directory whose weights are in several safetensors files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..errors import DataError
from ..io.json_file import read_object

_LONGEST_NAME: Final = 255
INDEX: Final = "model.safetensors.index.json"


def indexed_files(path: Path) -> dict[str, set[str] | None]:
    """Return the files that the index of a directory names, each with the names of its tensors.

    Raises:
        DataError: the index is broken, or names other files than the directory has.
    """
    index = path / INDEX
    file_names = read_object(index, "the index").get("weight_map")
    if not isinstance(file_names, dict):
        raise DataError(f"{index} is not an index of safetensors files: it has no weight_map", "copy it again")
    tensors_of: dict[str, set[str] | None] = {}
    for tensor, name in file_names.items():
        if not isinstance(name, str) or Path(name).name != name or len(name) > _LONGEST_NAME:
            raise DataError(
                f"{index} is not an index of safetensors files: {tensor} is in {str(name)[:80]!r}, which is no file name", "copy it again"
            )
        tensors = tensors_of.setdefault(name, set())
        assert tensors is not None  # every value is a set here
        tensors.add(tensor)
    for name in tensors_of:
        if not os.path.exists(path / name):  # also for names that no file system accepts
            raise DataError(f"{path} has no {name}, which {INDEX} names", "copy the missing file")
    shards = {each.name for each in path.glob("model-*-of-*.safetensors")}
    if surplus := sorted(shards - set(tensors_of)):
        raise DataError(f"{index} does not name {surplus[0]}, which is in the same directory", "copy the directory again as a whole")
    return tensors_of
