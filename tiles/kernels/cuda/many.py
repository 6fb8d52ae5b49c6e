"""Several tiles in one start: a launch takes a table of tiles among its arguments (`source/many.cuh`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar

import numpy as np

from .array import DeviceArray
from .launch import MOST_BLOCKS, THREADS

Task = tuple[Sequence[DeviceArray], Mapping[str, Any]]
"""The tiles and the constants of a task."""

Row = Sequence[DeviceArray | None]
"""The tiles of a table's row; the first one says how many elements there are."""

MOST_TILES: Final = 64
"""Tiles of one start: a table of six numbers of 8 bytes and one of 4 for each stays below the 4 KiB of a kernel's arguments on every card."""

_T = TypeVar("_T")


def table(*names: str, numbers: Sequence[str] = ()) -> np.dtype[Any]:
    """A table of tiles: addresses by name, counts of elements, how many tiles there are, the first block of each and of one more, and `numbers`."""
    addresses = [(name, np.uint64, MOST_TILES) for name in names]
    blocks = [("num_tiles", np.int32), ("begins", np.int32, MOST_TILES + 1)]
    return np.dtype([*addresses, ("counts", np.int64, MOST_TILES), *blocks, *((name, np.int32, MOST_TILES) for name in numbers)])


def filled(kind: np.dtype[Any], rows: Sequence[Row], blocks: Sequence[int], **numbers: Sequence[int]) -> Any:
    """A table of the tiles of these rows, with so many blocks each."""
    found, names = np.zeros((), kind), kind.names
    assert names is not None
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        found[name][: len(rows)] = [0 if tile is None else tile.address for tile in column]
    found["counts"][: len(rows)] = [row[0].size for row in rows if row[0] is not None]
    found["num_tiles"] = len(rows)
    found["begins"][: len(rows) + 1] = [0, *accumulate(blocks)]
    for name, own in numbers.items():
        found[name][: len(rows)] = own
    return found[()]


def blocks_for(count: int) -> int:
    """Blocks of a kernel that goes over so many numbers, one a thread."""
    return min(MOST_BLOCKS, -(-count // THREADS))


def in_starts(rows: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """As many at a time as one start takes."""
    for first in range(0, len(rows), MOST_TILES):
        yield rows[first : first + MOST_TILES]


def by_type(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """The tasks whose first tiles are of one type, as many at a time as one start takes."""
    alike: dict[np.dtype[Any], list[Task]] = {}
    for task in tasks:
        alike.setdefault(task[0][0].dtype, []).append(task)
    for some in alike.values():
        yield from in_starts(some)
