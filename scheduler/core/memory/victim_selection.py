"""Which replicas of a node to drop so that extents fit: candidates kept sorted, and the hole that letting them go would make.

`Candidates` keeps the replicas of one node that nothing but copies uses, in two heaps: clean (dropping them loses nothing) and dirty (they must be
written back first). A plan lets candidates go in the order of the eviction policy, on paper, and merges them with the free memory around them until a
hole is large enough; only those inside the hole are victims. Candidates enter the heaps when these are next asked: until then, most of them are used
again, dropped, or added once more. Entries of the heaps go stale when a replica is used, moved or dropped; a stale entry is thrown away, or entered
anew, when it comes up.

A candidate of just the size that is looked for goes first, if the policy finds it hardly dearer than the best: tiles have few sizes, and a memory in
which they replace their like does not break into pieces. Candidates much smaller than the hole do not decide where it lies: where one stands between
two that go, it goes with them. And what is tiny beside the node goes when nothing larger can: parameters of norms and means of rows were almost half
of all copies of a GPT-2 step, each as slow as a tile's, and freed hardly any bytes. So it is as long as what is tiny takes a small share of the node,
and only where it will be used.

In that order a large tile that is needed soon can be the first hole, because no neighbours among the cheap small ones make one. So where prices add
up and the hole costs more than as many bytes of the cheapest candidates would, a window is slid over the node to find the neighbours that cost
least together.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Final

from ..records import Replica
from . import coherence
from .eviction_policies import EvictionPolicy, is_foreseen
from .extents import MemoryNode

SMALL: Final = 64
"""A replica this many times smaller than the hole is small."""

TINY: Final = 1 << 13
TINY_NBYTES: Final = 64 << 10
"""A replica of at most this fraction of the node's budget, and at most so many bytes, goes when nothing larger can: its bytes are worth less than the
copies that it costs."""

TINY_SHARE: Final = 16
"""Unless all of them together have more than this fraction of the budget."""

TRIED: Final = 200
"""Candidates looked at, at most, for a hole that no task waits for."""

Entry = tuple[float, int, Replica]
"""(-key, number of the entry, replica): sorts like the key; the number breaks ties, and says whether the entry still holds."""

Heaps = tuple[list[Entry], list[Entry]]
"""Clean and dirty candidates."""

Drawn = list[tuple[list[Entry], Entry]]
"""Entries taken out of heaps for a while."""


class Candidates:
    """The replicas of one node, as candidates for eviction.

    Args:
        node: its extents.
        policy: in which order they go.

    Attributes:
        tiny: bytes of the largest replica that is tiny beside the node, and `tiny_nbytes` of all such replicas there.
        keep_dirty: whether nothing can be written back any more.
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
        self._added: dict[Replica, None] = {}  # since the heaps were last asked for anything
        self._entries: dict[Replica, Entry] = {}  # the entries that hold
        self._num_entries = 0
        self._checked: set[int] = set()  # numbers of entries that hold, found since a plan was begun: nothing changes while it is made

    def enter(self, replica: Replica) -> None:
        """A replica was installed on the node; it is no candidate yet."""
        size = replica.handle.size
        if size <= self.tiny:
            self.tiny_nbytes += size

    def leave(self, replica: Replica) -> None:
        """A replica was dropped."""
        size = replica.handle.size
        if size <= self.tiny:
            self.tiny_nbytes -= size
        self._added.pop(replica, None)
        self._entries.pop(replica, None)

    def add(self, replica: Replica) -> None:
        """Nothing but copies uses the replica any more: it is a candidate."""
        self._added[replica] = None

    def _take_added(self) -> None:
        """What was added since this was called last enters the heaps, as far as it is still unused."""
        self._checked.clear()
        for replica in self._added:
            if is_unused(replica):
                self._push(replica)
        self._added.clear()

    def _push(self, replica: Replica) -> None:
        """Push a candidate on its heaps, as it is now."""
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

    def plan(self, sizes: Sequence[int]) -> tuple[list[int], list[Replica]] | None:
        """Where extents of `sizes` would go, and the replicas in their way; None if they do not all fit."""
        self._take_added()
        drawn: Drawn = []
        if self.node.is_counted:
            return self._plan_bytes(sizes, self._all(self._heaps, drawn), drawn)
        found = _Paper(self).allocate(sizes, self._all(self._heaps, drawn), lambda size: self._twin(size, drawn))
        self._put_back(drawn)
        if found is None or not self.policy.adds_up or self._cost(found[1]) <= self.policy.tolerance * self._least_cost(found[1], drawn):
            return found
        other = _Paper(self).allocate_cheaply(sizes, self._cost_of)
        return found if other is None or self._cost(found[1]) <= self._cost(other[1]) else other

    def _plan_bytes(self, sizes: Sequence[int], candidates: Iterator[Replica], drawn: Drawn) -> tuple[list[int], list[Replica]] | None:
        """`plan` where only bytes are counted: the first candidates that have enough of them together."""
        excess = self.node.used + sum(sizes) - self.node.budget
        victims: dict[Replica, None] = {}
        while excess > 0 and (replica := next(candidates, None)) is not None:
            if replica not in victims:
                victims[replica] = None
                excess -= replica.handle.size
        self._put_back(drawn)
        found = None if excess > 0 else _Paper(self).allocate(sizes, iter(()), lambda size: None)
        return None if found is None else (found[0], list(victims))

    def _least_cost(self, victims: Sequence[Replica], drawn: Drawn) -> float:
        """What as many bytes as the victims have would cost if they need not lie side by side: of those drawn, the first ones."""
        cost, missing = 0.0, sum(replica.handle.size for replica in victims)
        for replica in dict.fromkeys(entry[2] for _, entry in drawn):  # one that went as a twin may have come up again
            if missing <= 0:
                break
            cost += self._cost_of(replica)
            missing -= replica.handle.size
        return cost

    def _cost(self, victims: Sequence[Replica]) -> float:
        return sum(map(self._cost_of, victims))

    def _cost_of(self, replica: Replica) -> float:
        """Bytes of a replica times its price, as of when it was last added; infinite if it may not go."""
        entry = self._entries.get(replica)
        if entry is None or replica.pins != replica.outgoing or replica.is_backing:  # hot path: `is_unused`
            return inf
        is_needed = coherence.is_needed(replica)
        if is_needed and self.keep_dirty:
            return inf
        return replica.handle.size * self.policy.price(-entry[0], dirty=is_needed and not replica.outgoing)

    def plan_droppable(self, sizes: Sequence[int], later_than: float) -> tuple[list[int], list[Replica]] | None:
        """`plan` over replicas that can be dropped at once and are used later than `order` `later_than`; tries a few only."""
        self._take_added()
        drawn: Drawn = []
        candidates = self._clean(self._heaps[0], drawn, later_than)
        if self.node.is_counted:
            return self._plan_bytes(sizes, candidates, drawn)
        found = _Paper(self, later_than).allocate(sizes, candidates, lambda size: self._clean_twin(size, drawn, later_than))
        self._put_back(drawn)
        return found

    def clean_nbytes(self, enough: int) -> int:
        """Bytes of candidates that can be dropped at once, as of when they were last added and but for tiny ones; stops counting at `enough`."""
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
        """The first dirty candidates, at most `limit`, that no copy uses yet."""
        self._take_added()
        drawn: Drawn = []
        heap = self._heaps[1]
        while len(drawn) < limit and self._top(heap, 1) is not None:
            drawn.append((heap, heapq.heappop(heap)))
        self._put_back(drawn)
        return [entry[2] for _, entry in drawn]

    def _twin(self, size: int, drawn: Drawn) -> Replica | None:
        """The first candidate of exactly that size, if it costs hardly more than the first of all; its entry is taken out of its heap."""
        heaps = self._by_size.get(size)
        if heaps is None:
            return None
        (price, which), (least, _) = self._first(heaps), self._first(self._heaps)
        if price == inf or price > self.policy.tolerance * least:
            return None
        drawn.append((heaps[which], heapq.heappop(heaps[which])))
        return drawn[-1][1][2]

    def _clean_twin(self, size: int, drawn: Drawn, later_than: float) -> Replica | None:
        """The same of those that `plan_droppable` may take."""
        heaps = self._by_size.get(size)
        return None if heaps is None else next(self._clean(heaps[0], drawn, later_than), None)

    def _first(self, heaps: Heaps) -> tuple[float, int]:
        """Price of the first candidate, infinite if there is none, and which heap it is in.

        Asked anew for every draw: looking at a heap may correct entries, which then come up in the other one, so the dirty heap is looked at twice.
        """
        for which in (0,) if self.keep_dirty else (1, 0, 1):
            self._top(heaps[which], which)
        prices = [
            self.policy.price(-heap[0][0], dirty=bool(which)) if heap and not (which and self.keep_dirty) else inf for which, heap in enumerate(heaps)
        ]
        return (prices[0], 0) if prices[0] <= prices[1] else (prices[1], 1)

    def _all(self, heaps: Heaps, drawn: Drawn) -> Iterator[Replica]:
        """Candidates in the order in which they should go, the tiny ones last; their entries are taken out of the heaps and noted in `drawn`."""
        for each in (heaps, self._tiny):
            while True:
                price, which = self._first(each)
                if price == inf:
                    break
                drawn.append((each[which], heapq.heappop(each[which])))
                yield drawn[-1][1][2]

    def _clean(self, heap: list[Entry], drawn: Drawn, later_than: float) -> Iterator[Replica]:
        for _ in range(TRIED):
            replica = self._top(heap, 0)
            if replica is None or -heap[0][0] <= later_than:
                return
            drawn.append((heap, heapq.heappop(heap)))
            if not replica.pins:
                yield replica

    def _top(self, heap: list[Entry], dirty: int) -> Replica | None:
        """The first candidate of a heap whose entry holds; stale ones before it are thrown away or corrected."""
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
        for heap, entry in drawn:
            heapq.heappush(heap, entry)


class _Paper:
    """Free memory on paper: runs of free extents and of candidates that were let go."""

    def __init__(self, candidates: Candidates, later_than: float | None = None) -> None:
        self.candidates = candidates
        self.later_than = later_than
        free = candidates.node.extents.all_free()
        self.runs = {offset: offset + size for offset, size in free}  # start -> end
        self.ends = {offset + size: offset for offset, size in free}  # end -> start
        self.gone: dict[int, Replica] = {}  # let go, by offset

    def allocate(
        self, sizes: Sequence[int], candidates: Iterator[Replica], twin: Callable[[int], Replica | None]
    ) -> tuple[list[int], list[Replica]] | None:
        """Let candidates go until every size has an offset.

        Args:
            candidates: in the order in which they should go.
            twin: one of a size that should go before them, if any.
        """
        offsets: list[int] = []
        victims: dict[Replica, None] = {}
        for size in sizes:
            start = self._smallest_run(size)
            like = twin(size) if start is None else None
            while start is None:
                replica, like = (next(candidates, None) if like is None else like), None
                if replica is None:
                    return None
                if replica.offset in self.gone:
                    continue
                start = self._let_go(replica, size)
            offsets.append(self._carve(start, size, victims))
        return offsets, list(victims)

    def allocate_cheaply(self, sizes: Sequence[int], cost_of: Callable[[Replica], float]) -> tuple[list[int], list[Replica]] | None:
        """For every size in turn, let those neighbours go that cost least together.

        Args:
            cost_of: a replica; infinite if it may not go.
        """
        costs = {replica.offset: cost_of(replica) for replica in self.candidates.node.starts.values()}
        offsets: list[int] = []
        victims: dict[Replica, None] = {}
        for size in sizes:
            start = self._smallest_run(size)
            if start is None:
                for replica in self._cheapest(size, costs):
                    self.gone[replica.offset] = replica
                    start, _ = self._add(replica.offset, replica.offset + replica.handle.size)
            if start is None:
                return None
            offsets.append(self._carve(start, size, victims))
        return offsets, list(victims)

    def _smallest_run(self, size: int) -> int | None:
        """Where the smallest run of at least `size` bytes begins."""
        run = min(((end - start, start) for start, end in self.runs.items() if end - start >= size), default=None)
        return None if run is None else run[1]

    def _cheapest(self, size: int, costs: Mapping[int, float]) -> list[Replica]:
        """The neighbours that leave a hole of `size` bytes and cost least, by a window that slides over the node; empty if there are none."""
        spans: list[tuple[int, int, float, Replica | None]] = [(start, end, 0.0, None) for start, end in self.runs.items()]
        spans += [
            (offset, offset + replica.handle.size, costs[offset], replica)
            for offset, replica in self.candidates.node.starts.items()
            if offset not in self.gone and costs[offset] < inf
        ]
        spans.sort(key=lambda span: span[0])
        best, found, low, cost = inf, (0, 0), 0, 0.0
        for high, (start, end, more, _) in enumerate(spans):
            if high and spans[high - 1][1] != start:  # what lies between stays
                low, cost = high, 0.0
            cost += more
            while end - spans[low][1] >= size:
                cost -= spans[low][2]
                low += 1
            if end - spans[low][0] >= size and cost < best:
                best, found = cost, (low, high + 1)
        return [replica for _, _, _, replica in spans[slice(*found)] if replica is not None]

    def _let_go(self, replica: Replica, size: int) -> int | None:
        """Add a candidate; the start of the run around it, if that is large enough now."""
        self.gone[replica.offset] = replica
        start, end = self._add(replica.offset, replica.offset + replica.handle.size)
        small = size // SMALL
        node = self.candidates.node
        while end - start < size:
            after, before = node.starts.get(end), node.ends.get(start)
            if after is not None and after.handle.size <= small and self._may_go(after):
                neighbour = after
            elif before is not None and before.handle.size <= small and self._may_go(before):
                neighbour = before
            else:
                return None
            self.gone[neighbour.offset] = neighbour
            start, end = self._add(neighbour.offset, neighbour.offset + neighbour.handle.size)
        return start

    def _may_go(self, replica: Replica) -> bool:
        if replica.offset in self.gone:  # its bytes are taken
            return False
        if not is_unused(replica) or (self.candidates.keep_dirty and coherence.is_needed(replica)):
            return False
        if self.later_than is None:
            return True
        return not replica.pins and not coherence.is_needed(replica) and self.candidates.policy.key(replica) > self.later_than

    def _add(self, start: int, end: int) -> tuple[int, int]:
        """Enter a run and merge it with its neighbours; returns the whole."""
        before = self.ends.pop(start, None)
        if before is not None:
            start = before
        after = self.runs.pop(end, None)
        if after is not None:
            del self.ends[after]
            end = after
        self.runs[start] = end
        self.ends[end] = start
        return start, end

    def _carve(self, start: int, size: int, victims: dict[Replica, None]) -> int:
        """Take `size` bytes of a run, from the end of it that loses fewer bytes; returns their offset."""
        end = self.runs.pop(start)
        del self.ends[end]
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
        """Candidates let go that overlap [start, end)."""
        return [replica for offset, replica in self.gone.items() if offset < end and offset + replica.handle.size > start]


def is_dirty(replica: Replica) -> bool:
    """Whether the replica must be written back before it is dropped, and that has not begun."""
    return not replica.outgoing and coherence.is_needed(replica)


def is_unused(replica: Replica) -> bool:
    """Whether nothing but copies uses the replica, and it is no backing replica."""
    return replica.pins == replica.outgoing and not replica.is_backing
