"""Where arrays under our names lie in files under Hugging Face's names, found by asking `from_hf` about arrays that are never read.

The stand-ins are views of reserved address space without memory, one address for each byte of the files. `from_hf` splits and transposes views of
them; the address and the strides of what comes out say where in the files it came from. So names and layouts are written down once, in the
family's module, and reading needs no second description of them.
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

from ..fileranges import FileRange, OpenFile, strides_of
from ..models.registry import Arrays, Family


class Shadow:
    """Stand-ins for ranges of files, and the way back.

    Args:
        ranges: name -> range, each with an offset in its file and C-ordered.
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
        self._base = _address(np.frombuffer(self._space, np.uint8))

    def arrays(self) -> Arrays:
        """A stand-in for each range: its shape, and as many bytes an element."""
        return {
            name: np.ndarray(each.shape, f"V{each.dtype.itemsize}", buffer=self._space, offset=start)
            for start, (name, each) in zip(self._starts, self.ranges.items(), strict=True)
        }

    def name_of(self, array: npt.NDArray[Any]) -> str:
        """The range that a view of a stand-in came from."""
        return self._names[bisect_right(self._starts, _address(array) - self._base) - 1]

    def range_of(self, array: npt.NDArray[Any]) -> FileRange:
        """Where a view of a stand-in lies."""
        place = _address(array) - self._base
        assert 0 <= place < len(self._space), "from_hf made a copy of a weight; it must return views"
        number = bisect_right(self._starts, place) - 1
        whole = self.ranges[self._names[number]]
        return FileRange(whole.file, whole.dtype, whole.offset + place - self._starts[number], array.shape, array.strides)


def shapes_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name; of names that stand for the same array, only the first."""
    seen: set[int] = set()
    found = {}
    for name, array in arrays.items():
        if id(array) not in seen:
            seen.add(id(array))
            found[name] = array.shape
    return found


def ties_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, str]:
    """Names that stand for an array with an earlier name -> that name."""
    first: dict[int, str] = {}
    return {name: first[id(array)] for name, array in arrays.items() if first.setdefault(id(array), name) != name}


def names_of(family: Family, config: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Our names of a model's weights -> the names of the tensors that hold them in the family's files.

    Args:
        shapes: of all weights of a model, by our names.
    """
    nowhere, bytewise = OpenFile(Path(os.devnull)), np.dtype(np.uint8)
    theirs = shapes_of(family.to_hf(blanks(shapes), config))
    shadow = Shadow({name: FileRange(nowhere, bytewise, 0, shape, strides_of(shape, bytewise)) for name, shape in theirs.items()})
    return {ours: shadow.name_of(array) for ours, array in family.from_hf(shadow.arrays(), config).items()}


class _Blank:
    """A shape that NumPy joins like an array. (Joining arrays whose elements have no bytes takes no memory either, but 0.36 s for 4 GB.)"""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    @property
    def T(self) -> _Blank:
        return _Blank(self.shape[::-1])

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.concatenate:
            return NotImplemented
        parts, axis = args[0], kwargs.get("axis", 0)
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return _Blank(shape)


def blanks(shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """Stand-ins for `to_hf`, which may rename, join and transpose them."""
    found: dict[str, Any] = {name: _Blank(shape) for name, shape in shapes.items()}
    return found


def _nbytes(each: FileRange) -> int:
    return int(np.prod(each.shape, dtype=np.int64)) * each.dtype.itemsize


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
