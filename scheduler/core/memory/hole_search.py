"""The search for holes in a node's memory: which replicas to drop so that extents of given sizes fit.

Two searches over the same bookkeeping of free runs:

- `HoleSearch.in_order` releases candidates in the order of eviction and merges each with the free memory around it, until a hole is large enough.
  Only released replicas inside the hole become victims. A replica much smaller than the hole goes along if it separates two released ones.
- `HoleSearch.cheapest` slides a window over the node and takes the neighbours that cost least together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from ..records import Replica
from .memory_node import MemoryNode

SMALL: Final = 64
"""Size of a hole over the size of the largest replica that counts as small."""


class Holes(NamedTuple):
    """Extents that would fit once some replicas are dropped.

    Attributes:
        offsets: offset of each extent, in the order of the sizes.
        victims: replicas in their way.
    """

    offsets: list[int]
    victims: list[Replica]


class HoleSearch:
    """Runs of bytes that are free, or would be without the replicas released so far. Nothing is taken or dropped.

    Args:
        node: node whose memory is searched.
        may_go: function that returns whether a small replica may be dropped along with its neighbours.
    """

    def __init__(self, node: MemoryNode, may_go: Callable[[Replica], bool]) -> None:
        self._node = node
        self._may_go = may_go
        free = node.extents.all_free()
        self._runs = {offset: offset + size for offset, size in free}  # start -> end
        self._ends = {offset + size: offset for offset, size in free}  # end -> start
        self._released: dict[int, Replica] = {}  # by offset

    def in_order(self, sizes: Sequence[int], candidates: Iterator[Replica], of_size: Callable[[int], Replica | None]) -> Holes | None:
        """Release candidates one by one until there is a hole for every size.

        Args:
            sizes: bytes of each extent.
            candidates: replicas in the order of eviction.
            of_size: function that returns a candidate of exactly that size which should go first, or None.

        Returns:
            None if the candidates do not suffice.
        """
        offsets: list[int] = []
        victims: dict[Replica, None] = {}
        for size in sizes:
            start = self._smallest_run(size)
            first = of_size(size) if start is None else None
            while start is None:
                replica, first = (next(candidates, None) if first is None else first), None
                if replica is None:
                    return None
                if replica.offset in self._released:
                    continue
                start = self._release(replica, size)
            offsets.append(self._carve(start, size, victims))
        return Holes(offsets, list(victims))

    def cheapest(self, sizes: Sequence[int], cost_of: Callable[[Replica], float]) -> Holes | None:
        """Return holes made by dropping, for each size in turn, the adjacent replicas that together cost least.

        Args:
            sizes: bytes of each extent.
            cost_of: cost of dropping a replica; infinite if it must stay.

        Returns:
            None if no adjacent replicas make a hole for some size.
        """
        costs = {replica.offset: cost_of(replica) for replica in self._node.starts.values()}
        offsets: list[int] = []
        victims: dict[Replica, None] = {}
        for size in sizes:
            start = self._smallest_run(size)
            if start is None:
                for replica in self._cheapest_neighbours(size, costs):
                    self._released[replica.offset] = replica
                    start, _ = self._add(replica.offset, replica.offset + replica.handle.size)
            if start is None:
                return None
            offsets.append(self._carve(start, size, victims))
        return Holes(offsets, list(victims))

    def _smallest_run(self, size: int) -> int | None:
        """Return the start of the smallest run of at least `size` bytes; None if there is none."""
        run = min(((end - start, start) for start, end in self._runs.items() if end - start >= size), default=None)
        return None if run is None else run[1]

    def _cheapest_neighbours(self, size: int, costs: Mapping[int, float]) -> list[Replica]:
        """Return the cheapest adjacent replicas that leave a hole of `size` bytes, found by sliding a window over the node; empty without any."""
        spans: list[tuple[int, int, float, Replica | None]] = [(start, end, 0.0, None) for start, end in self._runs.items()]
        spans += [
            (offset, offset + replica.handle.size, costs[offset], replica)
            for offset, replica in self._node.starts.items()
            if offset not in self._released and costs[offset] < inf
        ]
        spans.sort(key=lambda span: span[0])
        least, window, low, cost = inf, (0, 0), 0, 0.0
        for high, (start, end, more, _) in enumerate(spans):
            if high and spans[high - 1][1] != start:  # a replica between them stays
                low, cost = high, 0.0
            cost += more
            while end - spans[low][1] >= size:
                cost -= spans[low][2]
                low += 1
            if end - spans[low][0] >= size and cost < least:
                least, window = cost, (low, high + 1)
        return [replica for _, _, _, replica in spans[slice(*window)] if replica is not None]

    def _release(self, replica: Replica, size: int) -> int | None:
        """Release a candidate and its small neighbours; return the start of the run around it if that has `size` bytes now."""
        self._released[replica.offset] = replica
        start, end = self._add(replica.offset, replica.offset + replica.handle.size)
        small = size // SMALL
        while end - start < size:
            beside = (self._node.starts.get(end), self._node.ends.get(start))
            neighbour = next((each for each in beside if each is not None and self._goes_along(each, small)), None)
            if neighbour is None:
                return None
            self._released[neighbour.offset] = neighbour
            start, end = self._add(neighbour.offset, neighbour.offset + neighbour.handle.size)
        return start

    def _goes_along(self, replica: Replica, small: int) -> bool:
        """Whether a neighbour of a released replica is small, not released yet, and may be dropped."""
        return replica.handle.size <= small and replica.offset not in self._released and self._may_go(replica)

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
        left, right = self._inside(start, start + size), self._inside(end - size, end)
        is_left = sum(replica.handle.size for replica in left) <= sum(replica.handle.size for replica in right)
        offset = start if is_left else end - size
        victims.update(dict.fromkeys(left if is_left else right))
        if is_left and end > start + size:
            self._add(start + size, end)
        elif not is_left and end - size > start:
            self._add(start, end - size)
        return offset

    def _inside(self, start: int, end: int) -> list[Replica]:
        """Return the released replicas that overlap [start, end)."""
        return [replica for offset, replica in self._released.items() if offset < end and offset + replica.handle.size > start]
