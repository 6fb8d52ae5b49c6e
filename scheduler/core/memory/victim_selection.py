"""Candidates for eviction of one node: its unused replicas, and the choice of those that make room for extents.

`Candidates` keeps *clean* replicas, whose loss costs at most a reload, and *dirty* ones, which must be written back first, in sorted queues: all of
them, those of each size, and tiny ones. `hole_search` chooses holes for which the dropped replicas cost least, by two rules:

- A candidate of exactly the wanted size goes first, unless it is much dearer than the best: tiles have few sizes, and replacing like by like keeps
  memory whole.
- A tiny replica counts like one of `TINY_COST` times that size. Tiny ones were almost half of all copies of a GPT-2 step, each as slow as a tile's.

A queue is sorted by the policy's key; between queues, prices are compared, and between holes the costs, prices times bytes (`Candidates._cost`).
A candidate has one entry. It leaves the queues when the replica is dropped. Entries of replicas in use are skipped; those whose next use or dirtiness
has changed are entered anew when they are chosen.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Final

from ..records import Replica
from . import coherence
from .eviction_policies import EvictionPolicy, is_foreseen
from .hole_search import Holes, HoleSearch, Span
from .memory_node import MemoryNode

TINY: Final = 1 << 13
"""Budget of a node over the size of the largest replica that counts as tiny there."""

TINY_NBYTES: Final = 64 << 10
"""Largest size in bytes that counts as tiny on any node."""

TINY_SHARE: Final = 16
"""Budget of a node over the bytes of its tiny replicas, above which they are sorted among the others."""

FEW: Final = 256
"""Number of candidates of each queue among which holes are sought first."""

MORE: Final = 8
"""Factor by which that number grows if they do not suffice."""

TINY_COST: Final = 4
"""Bytes for which any smaller replica counts when costs are compared, over the size of the largest tiny one: a copy takes time to start."""

Entry = Span
"""(key, -number, replica, start, end, whether it is dirty), in ascending order: the last entry of a queue goes first. Numbers break ties."""

Queue = list[Entry]
"""Sorted entries."""

Queues = tuple[Queue, Queue]
"""Clean and dirty candidates."""


class Candidates:
    """Candidates for eviction of one node.

    Args:
        node: memory of the node.
        policy: order of eviction.

    Attributes:
        tiny: size in bytes of the largest replica that counts as tiny.
        tiny_nbytes: bytes of all tiny replicas on the node.
        keep_dirty: whether write-backs have become impossible, so that dirty replicas must stay.
        num_changes: number of replicas that were added or dropped so far. Until it changes, a plan that has
            failed is not tried again.
    """

    def __init__(self, node: MemoryNode, policy: EvictionPolicy) -> None:
        self.node = node
        self.policy = policy
        self.tiny = min(TINY_NBYTES, node.budget // TINY)
        self.tiny_nbytes = 0
        self.keep_dirty = False
        self.num_changes = 0
        self._queues: Queues = ([], [])  # without tiny ones
        self._tiny: Queues = ([], [])
        self._by_size: dict[int, Queues] = {}  # without tiny ones
        self._entries: dict[Replica, tuple[Entry, Sequence[Queue]]] = {}  # the entry of each replica, and the queues that hold it
        self._num_entries = 0
        self._added: dict[Replica, None] = {}  # without an entry yet: most are used again before the next plan
        self._prices: dict[int, float] = {}  # of entries found valid by the current plan, by number; nothing changes while it is made

    def enter(self, replica: Replica) -> None:
        """Count a replica that was installed on the node; it is in use, hence not a candidate yet."""
        size = replica.handle.spec.size
        if size <= self.tiny:
            self.tiny_nbytes += size

    def leave(self, replica: Replica) -> None:
        """Forget a replica that was dropped."""
        size = replica.handle.spec.size
        if size <= self.tiny:
            self.tiny_nbytes -= size
        self.num_changes += 1
        if replica in self._added:
            del self._added[replica]
        if replica in self._entries:
            self._remove(replica)

    def add(self, replica: Replica) -> None:
        """Make a replica a candidate: only copies use it."""
        self.num_changes += 1
        self._added[replica] = None

    def _take_added(self) -> None:
        """Enter replicas added since the last call, if they are still unused."""
        self._prices.clear()
        for replica in self._added:
            if is_unused(replica):
                self._push(replica)
        self._added.clear()

    def _push(self, replica: Replica) -> None:
        """Enter a candidate with its current key, in place of its last entry."""
        self._remove(replica)
        dirty = is_dirty(replica)
        key = self.policy.key(replica)
        self._num_entries += 1
        size = replica.handle.spec.size
        entry = (key, -self._num_entries, replica, replica.offset, replica.offset + size, dirty)
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
        held = self._entries.pop(replica, None)
        if held is not None:
            entry, queues = held
            for queue in queues:
                del queue[bisect_left(queue, entry)]

    def plan(self, sizes: Sequence[int], kept: Collection[Replica] = ()) -> Holes | None:
        """Return holes for extents of `sizes`; None if the candidates do not make enough room.

        Args:
            kept: replicas that must stay.
        """
        self._begin(kept)
        holes = self._current_holes(sizes, self._same_size)
        self._end(kept)
        return holes

    def plan_droppable(self, sizes: Sequence[int], later_than: float, kept: Collection[Replica] = ()) -> Holes | None:
        """Return holes over replicas that can be dropped at once and whose next use has an `order` above `later_than`.

        Args:
            kept: replicas that must stay.
        """
        self._begin(kept)
        holes = self._current_holes(sizes, lambda size: self._clean_of_size(size, later_than), later_than)
        self._end(kept)
        return holes

    def _current_holes(self, sizes: Sequence[int], of_size: Callable[[int], Replica | None], clean_later_than: float | None = None) -> Holes | None:
        """Return the holes of `_cheapest` once all of their victims have current entries."""
        outdated: Iterable[Replica] = ()
        while True:
            was_outdated = bool(outdated)
            holes = self._cheapest(sizes, of_size, clean_later_than)
            outdated = [] if holes is None else [victim for victim in holes.victims if self._is_outdated(victim)]
            if not outdated:
                return holes
            for replica in list(self._entries) if was_outdated else outdated:  # a second time: others will be, too
                self._push(replica)

    def _is_outdated(self, replica: Replica) -> bool:
        """Whether the next use or the dirtiness of a candidate has changed since it was entered."""
        (key, *_, dirty), _ = self._entries[replica]
        return dirty != is_dirty(replica) or self.policy.key(replica) != key

    def _cheapest(
        self, sizes: Sequence[int], of_size: Callable[[int], Replica | None], clean_later_than: float | None = None, number: int = FEW
    ) -> Holes | None:
        """Return the cheapest holes over the first `number` candidates of each queue; more are examined if they do not suffice.

        Args:
            of_size: argument of `HoleSearch.cheapest`.
            clean_later_than: next use after which clean candidates may go; None if all may, and dirty ones, too.
        """
        search = HoleSearch(self.node)
        holes = search.cheapest(sizes, lambda: self._spans(number, clean_later_than), self._cost, of_size, adds_up=self.policy.adds_up)
        if holes is not None or number >= len(self._entries):
            return holes
        return self._cheapest(sizes, of_size, clean_later_than, MORE * number)

    def _spans(self, number: int, clean_later_than: float | None) -> list[Span]:
        """Return the entries of the first `number` candidates of each queue that may go."""
        if clean_later_than is not None:
            least = (clean_later_than, 1)  # above all entries of this key
            late = [queue[max(bisect_left(queue, least), len(queue) - number) :] for queue in (self._queues[0], self._tiny[0])]
            return [entry for queue in late for entry in queue if not entry[2].pins and not entry[2].is_backing]
        queues = (self._queues[0], self._tiny[0]) if self.keep_dirty else (*self._queues, *self._tiny)
        return [entry for queue in queues for entry in queue[-number:] if is_unused(entry[2])]

    def _cost(self, span: Span) -> float:
        """Return the price of a candidate; of all its bytes, if prices add up."""
        key, _, _, start, end, dirty = span
        price = self.policy.price(key, dirty=dirty)
        return price * max(end - start, self.tiny * TINY_COST) if self.policy.adds_up else price

    def _begin(self, kept: Collection[Replica]) -> None:
        """Begin a plan in which the replicas `kept` are no candidates."""
        for replica in kept:
            self._added.pop(replica, None)
            self._remove(replica)
        self._take_added()

    def _end(self, kept: Collection[Replica]) -> None:
        """End a plan: make candidates of the kept replicas again."""
        self._added.update(dict.fromkeys(filter(is_unused, kept)))

    def plan_free(self, sizes: Sequence[int]) -> Holes | None:
        """Return holes in free memory for extents of `sizes`, which were refused in another order; None if there are too few."""
        return HoleSearch(self.node).cheapest(sizes, list, self._cost, lambda size: None, adds_up=True)

    def still_fits(self, sizes: Sequence[int], holes: Holes) -> bool:
        """Return whether the holes of an earlier plan can be had now by dropping those of their victims that are left."""
        starts = self.node.starts
        left = [victim for victim in holes.victims if starts.get(victim.offset) is victim]
        return all(is_droppable(victim) and not victim.is_backing for victim in left) and HoleSearch(self.node).still_free(sizes, holes)

    def clean_nbytes(self, enough: int) -> int:
        """Return the bytes of clean candidates, tiny ones excluded; counting stops at `enough`."""
        self._take_added()
        nbytes = 0
        for _, _, replica, *_ in self._queues[0]:
            if nbytes >= enough:
                break
            if is_unused(replica):
                nbytes += replica.handle.spec.size
        return nbytes

    def dirty(self, limit: int) -> list[Replica]:
        """Return the first `limit` dirty candidates whose write-back has not begun."""
        self._take_added()
        drawn: Queue = []
        queue = self._queues[1]
        while len(drawn) < limit and self._first_of(queue, 1) < inf:
            drawn.append(queue.pop())
        for entry in drawn:
            insort(queue, entry)
        return [entry[2] for entry in drawn]

    def _same_size(self, size: int) -> Replica | None:
        """Return the first candidate of exactly that size, unless its price exceeds the best by more than the policy's tolerance."""
        queues = self._by_size.get(size)
        if queues is None:
            return None
        price, queue = self._first(queues)
        if queue is None or price > self.policy.tolerance * self._first(self._queues)[0]:
            return None
        return queue[-1][2]

    def _clean_of_size(self, size: int, later_than: float) -> Replica | None:
        """Return the first clean candidate of exactly that size, if it is next used after `later_than`."""
        queue = self._by_size.get(size, ((), ()))[0]
        if not queue or self._first_of(queue, 0) == inf or queue[-1][0] <= later_than or queue[-1][2].pins:
            return None
        return queue[-1][2]

    def _first(self, queues: Queues) -> tuple[float, Queue | None]:
        """Return the price of the first candidate, and its queue; infinity and None if there is none.

        Looking at the clean queue may move entries to the dirty ones, so the dirty queue is examined before and after it.
        """
        clean, dirty = queues
        if self.keep_dirty:
            return self._first_of(clean, 0), clean if clean else None
        self._first_of(dirty, 1)
        price, dirty_price = self._first_of(clean, 0), self._first_of(dirty, 1)
        if dirty_price < price:
            return dirty_price, dirty
        return price, clean if clean else None

    def _first_of(self, queue: Queue, dirty: int) -> float:
        """Return the price of the first candidate of a queue, after removing or replacing stale entries before it; infinity if there is none."""
        prices = self._prices
        while queue:
            key, number, replica, *_ = queue[-1]
            price = prices.get(number)
            if price is not None:
                return price
            if not is_unused(replica):
                self._remove(replica)
            elif is_dirty(replica) != dirty or self.policy.key(replica) != key:
                self._push(replica)
            else:
                price = prices[number] = self.policy.price(key, dirty=bool(dirty))
                return price
        return inf


def is_dirty(replica: Replica) -> bool:
    """Whether the replica must be written back before it is dropped, and no write-back has begun."""
    return not replica.outgoing and coherence.is_needed(replica)


def is_unused(replica: Replica) -> bool:
    """Whether only copies use the replica, and it is not a backing replica."""
    return replica.pins == replica.outgoing and not replica.is_backing


def is_droppable(replica: Replica) -> bool:
    """Whether a candidate can be dropped at once: nothing uses it, and its data is elsewhere, too, or not needed."""
    return not replica.pins and not coherence.is_needed(replica)
