"""Candidates for eviction of one node: its unused replicas in the order in which they should go.

`Candidates` keeps two heaps: *clean* replicas, whose loss costs at most a reload, and *dirty* ones, which must be written back first. It asks
`hole_search` which of them to drop. Three rules change the order of the policy:

- A candidate of exactly the wanted size goes first, unless it is much dearer than the best: tiles have few sizes, and replacing like by like keeps
  memory whole.
- Tiny replicas go last. They were almost half of all copies of a GPT-2 step, each as slow as a tile's, and freed hardly any bytes.
- If prices add up and the hole costs more than an equal amount of the cheapest candidates, the cheapest neighbours are taken instead.

Entries of a heap go stale when a replica is used, moved or dropped. A stale entry is removed or renewed when it reaches the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from ..records import Replica
from . import coherence
from .eviction_policies import EvictionPolicy, is_foreseen
from .hole_search import Holes, HoleSearch
from .memory_node import MemoryNode

TINY: Final = 1 << 13
"""Budget of a node over the size of the largest replica that counts as tiny there."""

TINY_NBYTES: Final = 64 << 10
"""Largest size in bytes that counts as tiny on any node."""

TINY_SHARE: Final = 16
"""Budget of a node over the bytes of its tiny replicas, above which they no longer go last."""

TRIED: Final = 200
"""Largest number of candidates examined for a hole that no task waits for."""

Entry = tuple[float, int, Replica]
"""(-key, number of the entry, replica), ordered by key. The number breaks ties and identifies the entry."""

Heaps = tuple[list[Entry], list[Entry]]
"""Clean and dirty candidates."""

Drawn = list[tuple[list[Entry], Entry]]
"""Entries that a plan has taken out of their heaps, to be put back at its end."""


class Candidates:
    """Candidates for eviction of one node.

    Args:
        node: memory of the node.
        policy: order of eviction.

    Attributes:
        tiny: size in bytes of the largest replica that counts as tiny.
        tiny_nbytes: bytes of all tiny replicas on the node.
        keep_dirty: whether write-backs have become impossible, so that dirty replicas must stay.
    """

    def __init__(self, node: MemoryNode, policy: EvictionPolicy) -> None:
        self.node = node
        self.policy = policy
        self.tiny = min(TINY_NBYTES, node.budget // TINY)
        self.tiny_nbytes = 0
        self.keep_dirty = False
        self._heaps: Heaps = ([], [])
        self._tiny: Heaps = ([], [])
        self._by_size: dict[int, Heaps] = {}
        self._added: dict[Replica, None] = {}  # not in the heaps yet: most are used again before the next plan
        self._entries: dict[Replica, Entry] = {}  # the latest entry of each replica
        self._num_entries = 0
        self._checked: set[int] = set()  # numbers of entries found valid by the current plan; nothing changes while it is made

    def enter(self, replica: Replica) -> None:
        """Count a replica that was installed on the node; it is in use, hence not a candidate yet."""
        size = replica.handle.size
        if size <= self.tiny:
            self.tiny_nbytes += size

    def leave(self, replica: Replica) -> None:
        """Forget a replica that was dropped."""
        size = replica.handle.size
        if size <= self.tiny:
            self.tiny_nbytes -= size
        self._added.pop(replica, None)
        self._entries.pop(replica, None)

    def add(self, replica: Replica) -> None:
        """Make a replica a candidate: only copies use it."""
        self._added[replica] = None

    def _take_added(self) -> None:
        """Move replicas added since the last call to the heaps, if they are still unused."""
        self._checked.clear()
        for replica in self._added:
            if is_unused(replica):
                self._push(replica)
        self._added.clear()

    def _push(self, replica: Replica) -> None:
        """Push a candidate on its heaps, with its current key."""
        dirty = is_dirty(replica)
        self._num_entries += 1
        key = self.policy.key(replica)
        entry = self._entries[replica] = (-key, self._num_entries, replica)
        size = replica.handle.size
        if size <= self.tiny and self.tiny_nbytes * TINY_SHARE <= self.node.budget and is_foreseen(key):
            heaps: tuple[list[Entry], ...] = (self._tiny[dirty],)
        else:
            if size not in self._by_size:
                self._by_size[size] = ([], [])
            heaps = (self._heaps[dirty], self._by_size[size][dirty])
        for heap in heaps:
            heapq.heappush(heap, entry)
            if len(heap) > 4 * len(self.node.starts) + 64:
                heap[:] = [each for each in heap if self._entries.get(each[2]) is each]
                heapq.heapify(heap)

    def plan(self, sizes: Sequence[int]) -> Holes | None:
        """Return holes for extents of `sizes`; None if the candidates do not make enough room."""
        self._take_added()
        drawn: Drawn = []
        if self.node.is_counted:
            return self._plan_bytes(sizes, self._all(self._heaps, drawn), drawn)
        search = HoleSearch(self.node, self._may_go)
        holes = search.in_order(sizes, self._all(self._heaps, drawn), lambda size: self._same_size(size, drawn))
        self._put_back(drawn)
        if holes is None or not self.policy.adds_up:
            return holes
        cost = self._cost(holes.victims)
        if cost <= self.policy.tolerance * self._least_cost(holes.victims, drawn):
            return holes
        cheaper = HoleSearch(self.node, self._may_go).cheapest(sizes, self._cost_of)
        return holes if cheaper is None or cost <= self._cost(cheaper.victims) else cheaper

    def _plan_bytes(self, sizes: Sequence[int], candidates: Iterator[Replica], drawn: Drawn) -> Holes | None:
        """Return the first candidates with enough bytes together, for a node on which only bytes are counted."""
        excess = self.node.used + sum(sizes) - self.node.budget
        victims: dict[Replica, None] = {}
        while excess > 0 and (replica := next(candidates, None)) is not None:
            if replica not in victims:
                victims[replica] = None
                excess -= replica.handle.size
        self._put_back(drawn)
        holes = None if excess > 0 else HoleSearch(self.node, self._may_go).in_order(sizes, iter(()), lambda size: None)
        return None if holes is None else Holes(holes.offsets, list(victims))

    def _least_cost(self, victims: Sequence[Replica], drawn: Drawn) -> float:
        """Return the cost of the first candidates drawn, as many bytes of them as the victims have, wherever they lie."""
        cost, missing = 0.0, sum(replica.handle.size for replica in victims)
        for replica in dict.fromkeys(entry[2] for _, entry in drawn):  # one drawn for its size may have been drawn again
            if missing <= 0:
                break
            cost += self._cost_of(replica)
            missing -= replica.handle.size
        return cost

    def _cost(self, victims: Sequence[Replica]) -> float:
        return sum(map(self._cost_of, victims))

    def _cost_of(self, replica: Replica) -> float:
        """Return the size of a replica times its price when it was last added; infinity if it must stay."""
        entry = self._entries.get(replica)
        if entry is None or replica.pins != replica.outgoing or replica.is_backing:  # hot path: `is_unused`
            return inf
        is_needed = coherence.is_needed(replica)
        if is_needed and self.keep_dirty:
            return inf
        return replica.handle.size * self.policy.price(-entry[0], dirty=is_needed and not replica.outgoing)

    def plan_droppable(self, sizes: Sequence[int], later_than: float) -> Holes | None:
        """Return holes over replicas that can be dropped at once and whose next use has an `order` above `later_than`.

        Only the first `TRIED` candidates are examined.
        """
        self._take_added()
        drawn: Drawn = []
        candidates = self._clean(self._heaps[0], drawn, later_than)
        if self.node.is_counted:
            return self._plan_bytes(sizes, candidates, drawn)
        search = HoleSearch(self.node, lambda replica: self._is_droppable(replica, later_than))
        holes = search.in_order(sizes, candidates, lambda size: self._clean_of_size(size, drawn, later_than))
        self._put_back(drawn)
        return holes

    def _may_go(self, replica: Replica) -> bool:
        """Whether a replica may be dropped, after a write-back if it is dirty."""
        return is_unused(replica) and not (self.keep_dirty and coherence.is_needed(replica))

    def _is_droppable(self, replica: Replica, later_than: float) -> bool:
        """Whether a replica can be dropped at once, and is next used after `later_than`."""
        return self._may_go(replica) and not replica.pins and not coherence.is_needed(replica) and self.policy.key(replica) > later_than

    def clean_nbytes(self, enough: int) -> int:
        """Return the bytes of clean candidates, tiny ones excluded; counting stops at `enough`."""
        self._take_added()
        nbytes = 0
        for entry in self._heaps[0]:
            if nbytes >= enough:
                break
            replica = entry[2]
            if self._entries.get(replica) is entry and is_unused(replica):
                nbytes += replica.handle.size
        return nbytes

    def dirty(self, limit: int) -> list[Replica]:
        """Return the first `limit` dirty candidates whose write-back has not begun."""
        self._take_added()
        drawn: Drawn = []
        heap = self._heaps[1]
        while len(drawn) < limit and self._top(heap, 1) is not None:
            drawn.append((heap, heapq.heappop(heap)))
        self._put_back(drawn)
        return [entry[2] for _, entry in drawn]

    def _same_size(self, size: int, drawn: Drawn) -> Replica | None:
        """Draw the first candidate of exactly that size, unless its price exceeds the best by more than the policy's tolerance."""
        heaps = self._by_size.get(size)
        if heaps is None:
            return None
        (price, which), (least, _) = self._first(heaps), self._first(self._heaps)
        if price == inf or price > self.policy.tolerance * least:
            return None
        drawn.append((heaps[which], heapq.heappop(heaps[which])))
        return drawn[-1][1][2]

    def _clean_of_size(self, size: int, drawn: Drawn, later_than: float) -> Replica | None:
        """Draw the first clean candidate of exactly that size which is next used after `later_than`."""
        heaps = self._by_size.get(size)
        return None if heaps is None else next(self._clean(heaps[0], drawn, later_than), None)

    def _first(self, heaps: Heaps) -> tuple[float, int]:
        """Return the price of the first candidate, infinity if there is none, and the index of its heap.

        Looking at the clean heap may renew entries as dirty ones, so the dirty heap is examined before and after it.
        """
        for which in (0,) if self.keep_dirty else (1, 0, 1):
            self._top(heaps[which], which)
        prices = [
            self.policy.price(-heap[0][0], dirty=bool(which)) if heap and not (which and self.keep_dirty) else inf for which, heap in enumerate(heaps)
        ]
        return (prices[0], 0) if prices[0] <= prices[1] else (prices[1], 1)

    def _all(self, heaps: Heaps, drawn: Drawn) -> Iterator[Replica]:
        """Draw candidates in the order of eviction, tiny ones last."""
        for each in (heaps, self._tiny):
            while True:
                price, which = self._first(each)
                if price == inf:
                    break
                drawn.append((each[which], heapq.heappop(each[which])))
                yield drawn[-1][1][2]

    def _clean(self, heap: list[Entry], drawn: Drawn, later_than: float) -> Iterator[Replica]:
        """Draw at most `TRIED` candidates of a clean heap that are next used after `later_than`."""
        for _ in range(TRIED):
            replica = self._top(heap, 0)
            if replica is None or -heap[0][0] <= later_than:
                return
            drawn.append((heap, heapq.heappop(heap)))
            if not replica.pins:
                yield replica

    def _top(self, heap: list[Entry], dirty: int) -> Replica | None:
        """Return the first candidate of a heap; stale entries before it are removed or renewed."""
        while heap:
            entry = heap[0]
            key, number, replica = entry
            if number in self._checked:
                return replica
            if self._entries.get(replica) is not entry or not is_unused(replica):
                heapq.heappop(heap)
            elif is_dirty(replica) != dirty or -self.policy.key(replica) != key:
                heapq.heappop(heap)
                self._push(replica)
            else:
                self._checked.add(number)
                return replica
        return None

    @staticmethod
    def _put_back(drawn: Drawn) -> None:
        """Return drawn entries to their heaps."""
        for heap, entry in drawn:
            heapq.heappush(heap, entry)


def is_dirty(replica: Replica) -> bool:
    """Whether the replica must be written back before it is dropped, and no write-back has begun."""
    return not replica.outgoing and coherence.is_needed(replica)


def is_unused(replica: Replica) -> bool:
    """Whether only copies use the replica, and it is not a backing replica."""
    return replica.pins == replica.outgoing and not replica.is_backing
