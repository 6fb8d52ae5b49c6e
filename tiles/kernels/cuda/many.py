"""Several tiles in one launch: a table of tiles is one of the launch's arguments (`source/many.cuh`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar

import numpy as np

from .array import DeviceArray

Task = tuple[Sequence[DeviceArray], Mapping[str, Any]]
"""The tiles and the constants of a task."""

Row = Sequence[DeviceArray | None]
"""The tiles of a table's row; the size of the first one is the number of elements."""

MOST_TILES: Final = 64
"""Largest number of tiles in a launch: a table with six numbers of 8 bytes and one of 4 for each stays below the limit of 4 KiB for arguments."""

_T = TypeVar("_T")

LANES: Final = 8
"""Number of rows of a piece that are summed side by side (`source/columns.cuh`)."""
_ENOUGH_BLOCKS: Final = 792
"""Number of blocks with which sums of columns keep all multiprocessors of a large GPU busy."""
_LEAST_ROWS: Final = 64
"""Smallest number of rows of a piece, so that partial sums are few compared with the array."""
SUMS_NBYTES: Final = 4 * (_ENOUGH_BLOCKS + 1) * 128
"""Upper bound of the bytes of partial sums of one array's columns: `pieces_of` pieces of `width` floats, if there are several pieces."""


def table(*names: str, numbers: Sequence[str] = ()) -> np.dtype[Any]:
    """Return the type of a table: addresses by name, counts of elements, number of tiles, first block of each tile and the end, and `numbers`."""
    addresses = [(name, np.uint64, MOST_TILES) for name in names]
    blocks = [("num_tiles", np.int32), ("begins", np.int32, MOST_TILES + 1)]
    return np.dtype([*addresses, ("counts", np.int64, MOST_TILES), *blocks, *((name, np.int32, MOST_TILES) for name in numbers)])


def filled(kind: np.dtype[Any], rows: Sequence[Row], blocks: Sequence[int], **numbers: Sequence[int]) -> Any:
    """Return a table of the tiles in `rows`, where tile i is computed by blocks[i] blocks."""
    result, names = np.zeros((), kind), kind.names
    assert names is not None
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        result[name][: len(rows)] = [0 if tile is None else tile.address for tile in column]
    result["counts"][: len(rows)] = [row[0].size for row in rows if row[0] is not None]
    result["num_tiles"] = len(rows)
    result["begins"][: len(rows) + 1] = [0, *accumulate(blocks)]
    for name, own in numbers.items():
        result[name][: len(rows)] = own
    return result[()]


def pieces_of(num_rows: int, width: int) -> int:
    """Return the number of pieces into which sums of columns divide the rows of an array; it depends on nothing else, and so do the sums' bits."""
    return max(1, min(_ENOUGH_BLOCKS // -(-width // 128), num_rows // _LEAST_ROWS))


def groups_of(width: int, *arrays: DeviceArray) -> tuple[int, bool]:
    """Return the number of blocks for the columns of arrays, and whether a thread reads four columns at once, where all rows allow that."""
    is_wide = width % 4 == 0 and all(array.address % 16 == 0 for array in arrays)
    return -(-width // (128 if is_wide else 32)), is_wide


def in_starts(rows: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the rows in groups that fit one launch."""
    for first in range(0, len(rows), MOST_TILES):
        yield rows[first : first + MOST_TILES]


def by_type(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """Yield the tasks whose first tiles have the same type, in groups that fit one launch."""
    alike: dict[np.dtype[Any], list[Task]] = {}
    for task in tasks:
        alike.setdefault(task[0][0].dtype, []).append(task)
    for some in alike.values():
        yield from in_starts(some)
