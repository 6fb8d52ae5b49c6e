"""Byte ranges of our weights in files with Hugging Face's names and layouts, derived from the `from_hf` of `names.Names`.

`from_hf` is applied to placeholder arrays: views of reserved address space without memory, one address for each byte of the files. It renames, splits
and transposes them. The address and strides of each view that it returns are the offset and strides of our weight in the files. So names and layouts
are written once, in the family's table.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..architecture.family_config import ModelConfig
from ..architecture.names import Arrays, Names
from ..io.strided_ranges import FileRange, OpenFile, RowGroups, Rows, strides_of


class FileLayout:
    """Placeholder arrays for byte ranges of files, and the map from their views back to byte ranges.

    Args:
        ranges: name -> range of a file, without gaps, its axes in any order.
    """

    def __init__(self, ranges: Mapping[str, FileRange]) -> None:
        self.ranges = ranges
        self._names: list[str] = list(ranges)
        self._starts: list[int] = []
        end = 0
        for each in ranges.values():
            self._starts.append(end)
            end += _nbytes(each)
        self._space = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self._origin = _address(np.frombuffer(self._space, np.uint8))

    def arrays(self) -> Arrays:
        """Return name -> placeholder with the shape and the element size of its range; its values must not be read."""
        return {
            name: np.ndarray(each.shape, f"V{each.dtype.itemsize}", buffer=self._space, offset=start, strides=each.strides)
            for start, (name, each) in zip(self._starts, self.ranges.items(), strict=True)
        }

    def name_of(self, array: npt.NDArray[Any]) -> str:
        """Return the name of the range that a view of a placeholder belongs to."""
        return self._names[bisect_right(self._starts, _address(array) - self._origin) - 1]

    def range_of(self, array: npt.NDArray[Any]) -> Rows:
        """Return the byte range of a view of a placeholder, with the view's shape and strides; rows by head (H, D, ..) become rows (H*D, ..)."""
        offset = _address(array) - self._origin
        assert 0 <= offset < len(self._space), "from_hf made a copy of a weight; it must return views"
        number = bisect_right(self._starts, offset) - 1
        whole = self.ranges[self._names[number]]
        found = FileRange(whole.file, whole.dtype, whole.offset + offset - self._starts[number], array.shape, array.strides)
        return RowGroups.of(found) if array.ndim > len(whole.shape) else found


def split_experts(ranges: Mapping[str, FileRange], names: Names) -> Mapping[str, FileRange]:
    """Return the byte ranges of files with those of arrays of all experts replaced by one for each matrix, under today's names.

    Raises:
        DataError: such an array has the wrong number of axes or rows, or a matrix of it is there twice.
    """
    if not any(name.endswith(tuple(f".{each.whole}" for each in names.stacked)) for name in ranges):
        return ranges
    layout = FileLayout(ranges)
    apart = names.apart({names.today(name): array for name, array in layout.arrays().items()})
    of_names = ((name, layout.range_of(array)) for name, array in apart.items())
    return {name: each for name, each in of_names if isinstance(each, FileRange)}


def shapes_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape; of several names of one array, only the first is present."""
    seen: set[int] = set()
    found = {}
    for name, array in arrays.items():
        if id(array) not in seen:
            seen.add(id(array))
            found[name] = array.shape
    return found


def ties_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, str]:
    """Return name -> earlier name of the same array, for every name that is not the first of its array."""
    first: dict[int, str] = {}
    return {name: first[id(array)] for name, array in arrays.items() if first.setdefault(id(array), name) != name}


def names_of(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return our name of each weight of a model, given with its shape -> name of the tensor in the family's files that contains it."""
    nowhere, bytewise = OpenFile(Path(os.devnull), fd=os.open(os.devnull, os.O_RDONLY)), np.dtype(np.uint8)
    theirs = shapes_of(config.names.to_hf(blanks(shapes), config))
    layout = FileLayout({name: FileRange(nowhere, bytewise, 0, shape, strides_of(shape, bytewise)) for name, shape in theirs.items()})
    return {ours: layout.name_of(array) for ours, array in config.names.from_hf(layout.arrays(), config).items()}


class _Blank:
    """A shape that `np.concatenate`, `.T` and `.reshape` accept like an array, in time that does not grow with the shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    @property
    def T(self) -> _Blank:
        return _Blank(self.shape[::-1])

    def reshape(self, shape: Sequence[int]) -> _Blank:
        return _Blank(shape)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.concatenate:
            return NotImplemented
        arrays, axis = args[0], kwargs.get("axis", 0)
        shape = list(arrays[0].shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        return _Blank(shape)


def blanks(shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """Return name -> shape without elements, as arguments of `to_hf`, which may rename, join and transpose them."""
    found: dict[str, Any] = {name: _Blank(shape) for name, shape in shapes.items()}
    return found


def _nbytes(each: FileRange) -> int:
    return int(np.prod(each.shape, dtype=np.int64)) * each.dtype.itemsize


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
