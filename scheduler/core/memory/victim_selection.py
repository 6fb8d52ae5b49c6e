"""Candidates for eviction of one node: its unused replicas in the order in which they should go.

`Candidates` keeps *clean* replicas, whose loss costs at most a reload, and *dirty* ones, which must be written back first, in sorted queues: all of
them, those of each size, and tiny ones. It asks `hole_search` which of them to drop. Three rules change the order of the policy:

- A candidate of exactly the wanted size goes first, unless it is much dearer than the best: tiles have few sizes, and replacing like by like keeps
  memory whole.
- Tiny replicas go last. They were almost half of all copies of a GPT-2 step, each as slow as a tile's, and freed hardly any bytes.
- If prices add up and the hole costs more than an equal amount of the cheapest candidates, the cheapest neighbours are taken instead.

A candidate has one entry. It is removed when the replica is dropped, and examined when it is the first of a queue: only then is the entry of a
replica that has come into use removed, and that of a replica whose next use or dirtiness has changed placed anew.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
"""(key, -number of the entry, replica), in ascending order, so that the last entry of a queue goes first. The number breaks ties."""

Queue = list[Entry]
"""Sorted entries."""

Queues = tuple[Queue, Queue]
"""Clean and dirty candidates."""

Drawn = list[tuple[Queue, Entry]]
"""Entries that a plan has taken out of their queues, to be put back at its end."""


_NO_ENTRY: Final[tuple[Entry | None, Sequence[Queue]]] = (None, ())


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
        self._queues: Queues = ([], [])  # without tiny ones
        self._tiny: Queues = ([], [])
        self._by_size: dict[int, Queues] = {}  # without tiny ones
        self._entries: dict[Replica, tuple[Entry, Sequence[Queue]]] = {}  # the entry of each replica, and the queues that hold it
        self._num_entries = 0
        self._added: dict[Replica, None] = {}  # without an entry yet: most are used again before the next plan
        self._prices: dict[int, float] = {}  # of entries found valid by the current plan, by number; nothing changes while it is made

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
        self._remove(replica)

    def add(self, replica: Replica) -> None:
        """Make a replica a candidate: only copies use it."""
        self._added[replica] = None

    def _take_added(self) -> None:
        """Place replicas added since the last call, if they are still unused."""
        self._prices.clear()
        for replica in self._added:
            if is_unused(replica):
                self._place(replica)
        self._added.clear()

    def _place(self, replica: Replica) -> None:
        """Enter a candidate with its current key, in place of its last entry."""
        self._remove(replica)
        dirty = is_dirty(replica)
        key = self.policy.key(replica)
        self._num_entries += 1
        entry = (key, -self._num_entries, replica)
        size = replica.handle.size
        queues: tuple[Queue, ...]
        if size <= self.tiny and self.tiny_nbytes * TINY_SHARE <= self.node.budget and is_foreseen(key):
            queues = (self._tiny[dirty],)
        else:
            of_size = self._by_size.get(size)
            if of_size is None:
                of_size = self._by_size[size] = ([], [])
            queues = (self._queues[dirty], of_size[dirty])
        for queue in queues:
            insort(queue, entry)
        self._entries[replica] = entry, queues

    def _remove(self, replica: Replica) -> None:
        """Remove the entry of a replica, if it has one."""
        entry, queues = self._entries.pop(replica, _NO_ENTRY)
        for queue in queues:
            del queue[bisect_left(queue, entry)]

    def plan(self, sizes: Sequence[int]) -> Holes | None:
        """Return holes for extents of `sizes`; None if the candidates do not make enough room."""
        self._take_added()
        drawn: Drawn = []
        if self.node.is_counted:
            return self._plan_bytes(sizes, self._all(drawn), drawn)
        search = HoleSearch(self.node, self._may_go)
        holes = search.in_order(sizes, self._all(drawn), lambda size: self._same_size(size, drawn))
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
        return replica.handle.size * self.policy.price(entry[0][0], dirty=is_needed and not replica.outgoing)

    def plan_droppable(self, sizes: Sequence[int], later_than: float) -> Holes | None:
        """Return holes over replicas that can be dropped at once and whose next use has an `order` above `later_than`.

        Only the first `TRIED` candidates are examined.
        """
        self._take_added()
        drawn: Drawn = []
        candidates = self._clean(self._queues[0], drawn, later_than)
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
        for _, _, replica in self._queues[0]:
            if nbytes >= enough:
                break
            if is_unused(replica):
                nbytes += replica.handle.size
        return nbytes

    def dirty(self, limit: int) -> list[Replica]:
        """Return the first `limit` dirty candidates whose write-back has not begun."""
        self._take_added()
        drawn: Drawn = []
        queue = self._queues[1]
        while len(drawn) < limit and self._first_of(queue, 1) < inf:
            drawn.append((queue, queue.pop()))
        self._put_back(drawn)
        return [entry[2] for _, entry in drawn]

    def _same_size(self, size: int, drawn: Drawn) -> Replica | None:
        """Draw the first candidate of exactly that size, unless its price exceeds the best by more than the policy's tolerance."""
        queues = self._by_size.get(size)
        if queues is None:
            return None
        (price, queue), (least, _) = self._first(queues), self._first(self._queues)
        if queue is None or price > self.policy.tolerance * least:
            return None
        drawn.append((queue, queue.pop()))
        return drawn[-1][1][2]

    def _clean_of_size(self, size: int, drawn: Drawn, later_than: float) -> Replica | None:
        """Draw the first clean candidate of exactly that size which is next used after `later_than`."""
        queues = self._by_size.get(size)
        return None if queues is None else next(self._clean(queues[0], drawn, later_than), None)

    def _first(self, queues: Queues) -> tuple[float, Queue | None]:
        """Return the price of the first candidate, and its queue; infinity and None if there is none.

        Looking at the clean queue may place entries among the dirty ones, so the dirty queue is examined before and after it.
        """
        clean, dirty = queues
        if self.keep_dirty:
            return self._first_of(clean, 0), clean if clean else None
        self._first_of(dirty, 1)
        price, dirty_price = self._first_of(clean, 0), self._first_of(dirty, 1)
        if dirty_price < price:
            return dirty_price, dirty
        return price, clean if clean else None

    def _all(self, drawn: Drawn) -> Iterator[Replica]:
        """Draw candidates in the order of eviction, tiny ones last."""
        for queues in (self._queues, self._tiny):
            while (queue := self._first(queues)[1]) is not None:
                entry = queue.pop()
                drawn.append((queue, entry))
                yield entry[2]

    def _clean(self, queue: Queue, drawn: Drawn, later_than: float) -> Iterator[Replica]:
        """Draw at most `TRIED` candidates of a clean queue that are next used after `later_than`."""
        for _ in range(TRIED):
            if self._first_of(queue, 0) == inf or queue[-1][0] <= later_than:
                return
            entry = queue.pop()
            drawn.append((queue, entry))
            if not entry[2].pins:
                yield entry[2]

    def _first_of(self, queue: Queue, dirty: int) -> float:
        """Return the price of the first candidate of a queue, after removing or replacing stale entries before it; infinity if there is none."""
        prices = self._prices
        while queue:
            key, number, replica = queue[-1]
            price = prices.get(number)
            if price is not None:
                return price
            if not is_unused(replica):
                self._remove(replica)
            elif is_dirty(replica) != dirty or self.policy.key(replica) != key:
                self._place(replica)
            else:
                price = prices[number] = self.policy.price(key, dirty=bool(dirty))
                return price
        return inf

    @staticmethod
    def _put_back(drawn: Drawn) -> None:
        """Return drawn entries to their queues."""
        for queue, entry in reversed(drawn):
            if not queue or queue[-1] < entry:  # hot path: all but those before which another one was placed meanwhile
                queue.append(entry)
            else:
                insort(queue, entry)


def is_dirty(replica: Replica) -> bool:
    """Whether the replica must be written back before it is dropped, and no write-back has begun."""
    return not replica.outgoing and coherence.is_needed(replica)


def is_unused(replica: Replica) -> bool:
    """Whether only copies use the replica, and it is not a backing replica."""
    return replica.pins == replica.outgoing and not replica.is_backing
