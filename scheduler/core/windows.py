"""Which neighbours to evict so that an extent fits: the cheapest run of free and movable spans of a node's memory.

Pure geometry over [0, capacity) cut into spans; knows nothing of who decides what is movable or what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .records import Replica

FREE = -1.0
"""Rank of free memory."""


@dataclass(slots=True)
class Span:
    """A stretch of memory: free (no replica), or a replica that may or may not go.

    Attributes:
        rank: the lower, the sooner it goes.
    """

    offset: int
    size: int
    replica: Replica | None = None
    movable: bool = True
    rank: float = FREE

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.size


def best_window(spans: Sequence[Span], size: int) -> tuple[int, int] | None:
    """First and last position of the cheapest run of movable spans of at least `size` bytes; None if there is none.

    Cheapest: lowest highest rank, then fewest bytes lost. `spans` is sorted and without gaps.
    """
    best: tuple[float, int] | None = None
    where: tuple[int, int] | None = None
    for first, start in enumerate(spans):
        if not start.movable:
            continue
        highest, lost = FREE, 0
        for last in range(first, len(spans)):
            span = spans[last]
            if not span.movable:
                break
            highest = max(highest, span.rank)
            lost += span.size if span.replica is not None else 0
            if best is not None and (highest, lost) >= best:
                break
            if span.end - start.offset >= size:
                best, where = (highest, lost), (first, last)
                break
    return where
