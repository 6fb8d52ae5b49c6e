"""The search for holes in a node's memory: which replicas to drop so that extents of given sizes fit.

Two searches over the same bookkeeping of free runs:

- `HoleSearch.in_order` releases candidates in the order of eviction and merges each with the free memory around it, until a hole is large enough.
  Only released replicas inside the hole become victims. A replica much smaller than the hole goes along if it separates two released ones.
- `HoleSearch.cheapest` slides a window over the node and takes the neighbours that cost least together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from ..records import Replica
from .extents import PAGE
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
        self._carved: dict[int, int] = {}  # extents found so far: start -> end
        self._going: dict[Replica, bool] = {}  # small replicas examined so far, and whether they may be dropped

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
        costs: dict[int, float] = {}
        offsets: list[int] = []
        victims: dict[Replica, None] = {}
        for size in sizes:
            start = self._smallest_run(size)
            if start is None:
                for replica in self._cheapest_neighbours(size, costs, cost_of):
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

    def _cheapest_neighbours(self, size: int, costs: dict[int, float], cost_of: Callable[[Replica], float]) -> list[Replica]:
        """Return the cheapest adjacent replicas that leave a hole of `size` bytes, found by sliding a window over the node; empty without any.

        Args:
            costs: costs by offset, to which those that are missing are added.
        """
        starts, runs, carved, capacity = self._node.starts, self._runs, self._carved, self._node.extents.capacity
        spans: list[tuple[int, int, float, Replica | None]] = []  # runs and replicas since the last replica that stays
        cheapest: list[tuple[int, int, float, Replica | None]] = []
        least, low, cost, start = inf, 0, 0.0, 0
        while start < capacity:
            replica, end, more = None, runs.get(start), 0.0
            if end is None:
                end, more = carved.get(start), inf
            if end is None:
                replica = starts[start]
                end = start + replica.handle.size
                known = costs.get(start)
                more = costs[start] = cost_of(replica) if known is None else known
            if more == inf:
                spans, low, cost = [], 0, 0.0
            else:
                spans.append((start, end, more, replica))
                cost += more
                while end - spans[low][1] >= size:
                    cost -= spans[low][2]
                    low += 1
                if cost < least and end - spans[low][0] >= size:
                    least, cheapest = cost, spans[low:]
            start = end
        return [replica for _, _, _, replica in cheapest if replica is not None]

    def _release(self, replica: Replica, size: int) -> int | None:
        """Release a candidate and its small neighbours; return the start of the run around it if that has `size` bytes now."""
        runs, ends, released = self._runs, self._ends, self._released
        released[replica.offset] = replica
        start, end = self._add(replica.offset, replica.offset + replica.handle.size)
        small = size // SMALL
        if end - start >= size or small < PAGE:  # no replica is smaller than a page
            return start if end - start >= size else None
        del runs[start], ends[end]
        starts_of, ends_of = self._node.starts, self._node.ends
        while end - start < size:
            neighbour = starts_of.get(end)
            if neighbour is None or neighbour.handle.size > small or not self._goes_along(neighbour):
                break
            released[end] = neighbour
            end += neighbour.handle.size
            if end in runs:
                end = runs.pop(end)
                del ends[end]
        while end - start < size:
            neighbour = ends_of.get(start)
            if neighbour is None or neighbour.handle.size > small or not self._goes_along(neighbour):
                break
            start = neighbour.offset
            released[start] = neighbour
            if start in ends:
                start = ends.pop(start)
                del runs[start]
        runs[start] = end
        ends[end] = start
        return start if end - start >= size else None

    def _goes_along(self, replica: Replica) -> bool:
        """Whether a small neighbour of a released replica may be dropped and has not been released."""
        goes = self._going.get(replica)
        if goes is None:
            goes = self._going[replica] = self._may_go(replica)
        return goes and replica.offset not in self._released  # else it is in an extent found before

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
        is_left = left is right or sum(replica.handle.size for replica in left) <= sum(replica.handle.size for replica in right)
        offset = start if is_left else end - size
        victims.update(dict.fromkeys(left if is_left else right))
        self._carved[offset] = offset + size
        if is_left and end > start + size:
            self._add(start + size, end)
        elif not is_left and end - size > start:
            self._add(start, end - size)
        return offset

    def _inside(self, start: int, end: int) -> list[Replica]:
        """Return the released replicas that overlap [start, end)."""
        return [replica for offset, replica in self._released.items() if offset < end and offset + replica.handle.size > start]
