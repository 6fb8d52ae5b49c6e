"""Which neighbours to evict so that an extent fits: the cheapest run of free and movable spans of a node's memory.

Pure geometry over [0, capacity) cut into spans; knows nothing of who decides what is movable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .records import Replica


@dataclass(slots=True)
class Span:
    """A stretch of memory: free (no replica), or a replica that may or may not go.

    Attributes:
        dirty_bytes: bytes to write back before it can go.
        last_use: when it was used last; 0 for free memory.
    """

    offset: int
    size: int
    replica: Replica | None = None
    movable: bool = True
    dirty_bytes: int = 0
    last_use: int = 0

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.size


def best_window(spans: Sequence[Span], size: int) -> tuple[int, int] | None:
    """First and last position of the cheapest run of movable spans of at least `size` bytes; None if there is none.

    Cheapest: fewest dirty bytes, then least recently used, then fewest bytes lost. `spans` is sorted and without gaps.
    """
    best: tuple[int, int, int] | None = None
    where: tuple[int, int] | None = None
    for first, start in enumerate(spans):
        if not start.movable:
            continue
        dirty = latest = lost = 0
        for last in range(first, len(spans)):
            span = spans[last]
            if not span.movable:
                break
            dirty += span.dirty_bytes
            latest = max(latest, span.last_use)
            lost += span.size if span.replica is not None else 0
            if best is not None and (dirty, latest, lost) >= best:
                break
            if span.end - start.offset >= size:
                best, where = (dirty, latest, lost), (first, last)
                break
    return where
