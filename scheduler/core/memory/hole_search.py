"""The search for holes in a node's memory: which replicas to drop so that extents of given sizes fit.

For each size in turn, `HoleSearch` takes the smallest hole in free memory, else the place of a replica of exactly that size, else the adjacent
replicas, with the free memory between them, that cost least together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

from ..records import HandleRecord, NodeId, Replica
from .memory_node import MemoryNode


class Holes(NamedTuple):
    """Extents that would fit once some replicas are dropped.

    Attributes:
        offsets: offset of each extent, in the order of the sizes.
        victims: replicas in their way.
    """

    offsets: list[int]
    victims: list[Replica]


class ExtentPlan(NamedTuple):
    """A plan for extents on one node.

    Attributes:
        handles: handles that get an extent each.
        holes: their extents, and replicas to drop for them; None if they fit free memory.
    """

    node: NodeId
    handles: Sequence[HandleRecord]
    holes: Holes | None


Span = tuple[float, int, Replica, int, int, bool]
"""(key, number, replica, start, end, whether it is dirty): a replica that may go, and its entry in the order of eviction."""

_AnySpan = Span | tuple[float, int, None, int, int, bool]
"""The same, or bytes that are free."""

_END: Final[_AnySpan] = (0.0, 0, None, -2, -2, False)


class HoleSearch:
    """Runs of bytes that are free, or would be without the replicas released so far. Nothing is taken or dropped.

    Args:
        node: node whose memory is searched.
    """

    def __init__(self, node: MemoryNode) -> None:
        self._node = node
        free = node.extents.all_free()
        self._runs = {offset: offset + size for offset, size in free}  # start -> end
        self._ends = {offset + size: offset for offset, size in free}  # end -> start
        self._released: dict[int, Replica] = {}  # by offset

    def still_free(self, sizes: Sequence[int], holes: Holes) -> bool:
        """Return whether the holes of an earlier search would still be there if their victims, which may have been dropped, were released."""
        starts = self._node.starts
        for victim in holes.victims:
            if starts.get(victim.offset) is victim:
                self._add(victim.offset, victim.offset + victim.handle.spec.size)
        extents = zip(holes.offsets, sizes, strict=True)
        return all(any(start <= offset and offset + size <= end for start, end in self._runs.items()) for offset, size in extents)

    def cheapest(
        self,
        sizes: Sequence[int],
        spans: Callable[[], list[Span]],
        cost_of: Callable[[Span], float],
        of_size: Callable[[int], Replica | None],
        *,
        adds_up: bool,
    ) -> Holes | None:
        """Return the cheapest holes for extents.

        Args:
            sizes: bytes of each extent.
            spans: function that returns the replicas that may go.
            cost_of: function that returns the cost of dropping one.
            of_size: function that returns a replica of exactly that size which should go first, or None.
            adds_up: whether costs add up; else a hole costs as much as the dearest of its replicas.

        Returns:
            None if no adjacent replicas make a hole for some size.
        """
        offsets: list[int] = []
        victims: dict[Replica, None] = {}
        candidates: list[Span] | None = None
        for size in sizes:
            start = self._smallest_run(size)
            if start is None:
                same = of_size(size)
                if same is not None and same.offset not in self._released:
                    chosen = [same]
                else:
                    candidates = spans() if candidates is None else candidates
                    chosen = self._cheapest_neighbours(size, candidates, cost_of, adds_up=adds_up)
                for replica in chosen:
                    self._released[replica.offset] = replica
                    start, _ = self._add(replica.offset, replica.offset + replica.handle.spec.size)
            if start is None:
                return None
            offsets.append(self._carve(start, size, victims))
        return Holes(offsets, list(victims))

    def _smallest_run(self, size: int) -> int | None:
        """Return the start of the smallest run of at least `size` bytes; None if there is none."""
        run = min(((end - start, start) for start, end in self._runs.items() if end - start >= size), default=None)
        return None if run is None else run[1]

    def _cheapest_neighbours(self, size: int, candidates: Sequence[Span], cost_of: Callable[[Span], float], *, adds_up: bool) -> list[Replica]:
        """Return the adjacent replicas that leave a hole of `size` bytes and cost least, those with larger keys first; empty without any."""
        spans: list[_AnySpan] = [(0.0, 0, None, start, end, False) for start, end in self._runs.items()]
        spans += [span for span in candidates if span[3] not in self._released] if self._released else candidates
        spans.sort(key=lambda span: span[3])
        cheapest: Sequence[_AnySpan] = ()
        least, first, position = inf, 0, -1
        for number, span in enumerate([*spans, _END]):
            if span[3] != position:  # what lies before it stays
                if number and position - spans[first][3] >= size:
                    cost, window = _cheapest_window(spans[first:number], size, cost_of, adds_up=adds_up)
                    if cost < least:
                        least, cheapest = cost, window
                first = number
            position = span[4]
        return [span[2] for span in sorted(cheapest, key=lambda span: span[:2], reverse=True) if span[2] is not None]

    def _add(self, start: int, end: int) -> tuple[int, int]:
        """Enter a run, merge it with its neighbours, and return the merged run."""
        before = self._ends.pop(start, None)
        if before is not None:
            start = before
        after = self._runs.pop(end, None)
        if after is not None:
            del self._ends[after]
            end = after
        self._runs[start] = end
        self._ends[end] = start
        return start, end

    def _carve(self, start: int, size: int, victims: dict[Replica, None]) -> int:
        """Take `size` bytes at that end of a run where the released replicas have fewer bytes; return their offset.

        Args:
            victims: receives the released replicas that the bytes overlap.
        """
        end = self._runs.pop(start)
        del self._ends[end]
        left = self._inside(start, start + size)
        right = left if end == start + size else self._inside(end - size, end)
        is_left = left is right or sum(replica.handle.spec.size for replica in left) <= sum(replica.handle.spec.size for replica in right)
        offset = start if is_left else end - size
        victims.update(dict.fromkeys(left if is_left else right))
        if is_left and end > start + size:
            self._add(start + size, end)
        elif not is_left and end - size > start:
            self._add(start, end - size)
        return offset

    def _inside(self, start: int, end: int) -> list[Replica]:
        """Return the released replicas that overlap [start, end)."""
        return [replica for offset, replica in self._released.items() if offset < end and offset + replica.handle.spec.size > start]


def _cheapest_window(spans: Sequence[_AnySpan], size: int, cost_of: Callable[[Span], float], *, adds_up: bool) -> tuple[float, Sequence[_AnySpan]]:
    """Return the least cost of adjacent spans with `size` bytes, found by sliding a window over them, and these spans."""
    costs = [0.0 if span[2] is None else cost_of(span) for span in spans]
    least, window, low, total = inf, (0, 0), 0, 0.0
    for high, span in enumerate(spans):
        end = span[4]
        total += costs[high]
        while end - spans[low][4] >= size:
            total -= costs[low]
            low += 1
        if end - spans[low][3] >= size:
            cost = total if adds_up else max(costs[low : high + 1])
            if cost < least:
                least, window = cost, (low, high + 1)
    return least, spans[slice(*window)]
