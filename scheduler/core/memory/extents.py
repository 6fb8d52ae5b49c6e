"""The ledger of a node: which bytes are in use, by which replica and for which class of data, under a hard budget.

`MemoryNode` alone knows. Its books change together: extents in use and free ones, replicas by their first and last byte, sums by class; so nothing
else keeps a list of what lies where. A handle lists its own replicas, which says where its data is valid, not where bytes lie.

Allocation is best fit with coalescing; any free extent serves any size. On top lie bins of just-freed extents by exact size, because a training
step frees and takes the same sizes over and over: a bin hit costs a list pop. Bins are flushed (coalesced) before untouched memory is taken, so
they never cost memory. Knows neither tasks nor coherence nor why extents are taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from ..errors import InvalidEvent
from ..records import DATA_CLASSES, NEWEST, DataClass, Replica

PAGE: Final = 4096
"""Extents are multiples of this many bytes, so that disk I/O and big pages stay possible."""

LARGE: Final = 4096
"""An extent of at least this fraction of the capacity is large: in small memories tiles are, and vectors beside them are not."""

_SPREAD: Final = 2 * LARGE
"""A file's extents may lie in an address space so many times its budget: what fragmentation costs there is addresses, not bytes. So wide that none
of them is large: they all lie as near to the beginning as they can, because what lies beyond the budget is discarded with each of them."""

_ANYWHERE: Final = 1 << 60
"""Addresses of a node of which only bytes are counted: nothing lies there, so they never run out."""


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages; at least one."""
    return max(-(-nbytes // PAGE) * PAGE, PAGE)


UNTOUCHED: Final = 4
"""Where offsets are kept: one in so many bytes of the memory stays untouched as long as old extents do,"""
LITTLE: Final = 1024
"""unless an extent is so many times smaller than what is untouched."""


class ExtentAllocator:
    """Hands out extents of [0, capacity): small ones from the bottom up, large ones from the top down, so that neither cuts up the other side.

    Invariant: handed-out, binned and free extents partition [0, low) and [high, capacity); the gap [low, high) between them is free too.

    Args:
        capacity: bytes; rounded down to whole pages.
        keeps_offsets: whether untouched memory, while much of it is left, is preferred to extents that would have to be cut or merged: then what
            comes and goes in the same sizes finds its old offsets again. For memory that is taken whole from the start.

    Attributes:
        kernel_mark: that of the extent handed out last (`Replica.kernel_mark`), with which it was given back; `NEWEST` if it is not the same extent.
    """

    __slots__ = ("_bins", "_by_size", "_ends", "_starts", "binned", "capacity", "high", "keeps_offsets", "kernel_mark", "low", "used")

    def __init__(self, capacity: int, *, keeps_offsets: bool = False) -> None:
        self.capacity = capacity // PAGE * PAGE
        self.keeps_offsets = keeps_offsets
        self.low = 0
        self.high = self.capacity
        self.used = 0
        self.binned = 0
        self._bins: dict[int, dict[int, int]] = {}  # of each size the offsets, in the order in which they were given back, and their kernel marks
        self.kernel_mark = NEWEST
        self._starts: dict[int, int] = {}  # offset -> size of each free extent outside the gap
        self._ends: dict[int, int] = {}  # end -> offset of each of them
        self._by_size: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (size, offset) of those below and above the gap, sorted

    def allocate(self, size: int, wanted: int = -1) -> int | None:
        """Offset of a new extent of `size` bytes (a multiple of PAGE), or None when no hole is large enough.

        Args:
            wanted: the offset that it has if an extent of just that size is free there, or, where offsets are kept, any around it. Where these are
                kept and it is not free, the extent is none that somebody else may want again, as long as there is untouched memory.
        """
        bin_ = self._bins.get(size)
        is_untouched = self.keeps_offsets and self.high - self.low > min(max(size, self.capacity // UNTOUCHED), LITTLE * size)
        if bin_ and (wanted in bin_ or wanted < 0 or not is_untouched):
            self.binned -= size
            self.used += size
            if wanted in bin_:
                self.kernel_mark = bin_.pop(wanted)
                return wanted
            last, self.kernel_mark = bin_.popitem()
            return last
        self.kernel_mark = NEWEST
        if wanted >= 0 and self.keeps_offsets and self._cut_out(wanted, size):
            self.used += size
            return wanted
        above = size * LARGE >= self.capacity
        offset: int | None = None
        if is_untouched:
            offset = self._from_gap(size, above)
        if offset is None:
            offset = self._best_fit(size, above)
        if offset is None and self.binned:
            self._flush()
            offset = self._best_fit(size, above)
        if offset is None:
            offset = self._from_gap(size, above)
        if offset is None:
            offset = self._best_fit(size, not above)
        if offset is not None:
            self.used += size
        return offset

    def take_at(self, offset: int, size: int) -> None:
        """Take the extent [offset, offset + size), which must be free.

        Raises:
            InvalidEvent: some of it is not.
        """
        self._flush()
        self.kernel_mark = NEWEST
        if not self._cut_out(offset, size):
            raise InvalidEvent(f"the extent of {size} B at byte {offset} was claimed, but it is not free")
        self.used += size

    def _cut_out(self, offset: int, size: int) -> bool:
        """Take [offset, offset + size) out of the free extent or the gap around it, if there is one; what lies in bins is not looked at."""
        end = offset + size
        if offset >= self.low and end <= self.high:
            low, high = self.low, self.high
            if offset - low <= high - end:  # the smaller rest leaves the gap
                self.low = end
                if offset > low:
                    self._insert(low, offset - low)
            else:
                self.high = offset
                if high > end:
                    self._insert(end, high - end)
            return True
        start = max((start for start in self._starts if start <= offset), default=-1)
        if start < 0 or start + self._starts[start] < end:
            return False
        hole = self._remove(start)
        if offset > start:
            self._insert(start, offset - start)
        if start + hole > end:
            self._insert(end, start + hole - end)
        return True

    def free(self, offset: int, size: int, kernel_mark: int = NEWEST) -> None:
        """Give back an extent, with the size it was taken with, and what may be known of the last kernel that used it."""
        self.used -= size
        self.binned += size
        bin_ = self._bins.get(size)
        if bin_ is None:
            self._bins[size] = {offset: kernel_mark}
        else:
            bin_[offset] = kernel_mark

    def compact(self, nbytes: int) -> None:
        """The extents in use now fill [0, nbytes): everything above is the gap."""
        self.used = self.low = nbytes
        self.high = self.capacity
        self.binned = 0
        self._bins, self._starts, self._ends, self._by_size = {}, {}, {}, ([], [])

    def largest_hole(self) -> int:
        """Size of the largest extent that could be allocated now."""
        return max((size for _, size in self.all_free()), default=0)

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, size) of every free or binned extent and of the gap, sorted, as they are."""
        binned = [(offset, size) for size, offsets in self._bins.items() for offset in offsets]
        return sorted([*self._starts.items(), *binned, *self._gap()])

    def all_free(self) -> list[tuple[int, int]]:
        """(offset, size) of everything that is free, coalesced and sorted."""
        self._flush()
        return sorted([*self._starts.items(), *self._gap()])

    def _gap(self) -> list[tuple[int, int]]:
        return [(self.low, self.high - self.low)] if self.high > self.low else []

    def _best_fit(self, size: int, above: bool) -> int | None:
        """Take from the smallest hole that is large enough on one side of the gap: its bottom below, its top above."""
        by_size = self._by_size[above]
        at = bisect_left(by_size, (size, -1))
        if at == len(by_size):
            return None
        hole, offset = by_size.pop(at)
        del self._starts[offset], self._ends[offset + hole]
        rest = hole - size
        if not rest:
            return offset
        if above:
            self._insert(offset, rest)
            return offset + rest
        self._insert(offset + size, rest)
        return offset

    def _from_gap(self, size: int, above: bool) -> int | None:
        if self.high - self.low < size:
            return None
        if above:
            self.high -= size
            return self.high
        self.low += size
        return self.low - size

    def _flush(self) -> None:
        bins, self._bins, self.binned = self._bins, {}, 0
        for size, offsets in bins.items():
            for offset in offsets:
                self._coalesce(offset, size)

    def _coalesce(self, offset: int, size: int) -> None:
        """Enter a free extent, merged with its neighbours; what touches the gap becomes part of it."""
        before = self._ends.get(offset)
        if before is not None:
            size += offset - before
            self._remove(before)
            offset = before
        if offset + size in self._starts:
            size += self._remove(offset + size)
        if offset + size == self.low:
            self.low = offset
        elif offset == self.high:
            self.high = offset + size
        else:
            self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        self._starts[offset] = size
        self._ends[offset + size] = offset
        insort(self._by_size[offset >= self.high], (size, offset))

    def _remove(self, offset: int) -> int:
        size = self._starts.pop(offset)
        del self._ends[offset + size]
        by_size = self._by_size[offset >= self.high]
        del by_size[bisect_left(by_size, (size, offset))]
        return size


class MemoryNode:
    """A memory node: its budget, and the replicas that occupy it.

    An extent is taken first, then occupied by a replica, and given back when that replica vacates it. A file of objects that are no
    replicas uses `take` and `give` alone.

    Args:
        name: "ram", "sim:0", ... as users see it.
        budget: hard limit in bytes on everything allocated here.
        is_storage: whether it is a file: no worker computes there, extents need not lie within the first `budget` bytes, and what is given
            back beyond them is to be discarded.
        keeps_offsets: see `ExtentAllocator`.
        is_counted: whether what is here has buffers of its own: bytes count and addresses mean nothing, so memory is never in pieces. Data may
            arrive unasked (`HandleAdopted`), and then even above the budget; nothing is admitted before it is met again.

    Attributes:
        starts, ends: replicas by their first byte, and by the first byte after them.
        taken: bytes handed out so far.
        peak: most bytes in use at any `mark`; `recent_peak` since `forget_recent_peak`.
    """

    __slots__ = (
        "budget",
        "by_class",
        "ends",
        "extents",
        "is_counted",
        "is_storage",
        "name",
        "peak",
        "peak_by_class",
        "recent_peak",
        "starts",
        "taken",
    )

    def __init__(self, name: str, budget: int, *, is_storage: bool = False, is_counted: bool = False, keeps_offsets: bool = False) -> None:
        self.name = name
        self.budget = budget
        self.is_storage = is_storage
        self.is_counted = is_counted
        extent = _ANYWHERE if is_counted else budget * _SPREAD if is_storage else budget
        self.extents = ExtentAllocator(extent, keeps_offsets=keeps_offsets)
        self.starts: dict[int, Replica] = {}
        self.ends: dict[int, Replica] = {}
        self.by_class: dict[DataClass, int] = dict.fromkeys(DATA_CLASSES, 0)
        self.taken = 0
        self.peak = 0
        self.recent_peak = 0
        self.peak_by_class: dict[DataClass, int] = dict(self.by_class)

    @property
    def used(self) -> int:
        """Bytes handed out now."""
        return self.extents.used

    def forget_recent_peak(self) -> None:
        """Begin a new period of `recent_peak`."""
        self.recent_peak = self.extents.used

    def take(self, size: int, data_class: DataClass, wanted: int = -1) -> int | None:
        """Offset of a new extent, entered in the ledger; None when no hole is large enough. `wanted`: see `ExtentAllocator.allocate`."""
        if (self.is_storage or self.is_counted) and self.extents.used + size > self.budget:
            return None
        offset = self.extents.allocate(size, wanted)
        if offset is not None:
            self._enter(size, data_class)
        return offset

    def adopt(self, size: int, data_class: DataClass) -> int:
        """Offset of a new extent of a counted node, for bytes that are there already: above the budget if need be."""
        offset = self.extents.allocate(size)
        assert offset is not None  # addresses of a counted node do not run out
        self._enter(size, data_class)
        return offset

    def largest_hole(self) -> int:
        """Bytes of the largest extent that could be taken now."""
        return max(self.budget - self.used, 0) if self.is_counted else self.extents.largest_hole()

    def take_at(self, offset: int, size: int, data_class: DataClass) -> None:
        """Take a free extent of one's choice, entered in the ledger."""
        self.extents.take_at(offset, size)
        self._enter(size, data_class)

    def occupy(self, replica: Replica) -> None:
        """The replica lies from now on in the extent at its offset, which was just taken for it."""
        self.starts[replica.offset] = replica
        self.ends[replica.offset + replica.handle.size] = replica

    def vacate(self, replica: Replica) -> None:
        """The replica gives its extent back."""
        offset, handle = replica.offset, replica.handle
        size = handle.size
        del self.starts[offset]
        del self.ends[offset + size]
        self.extents.free(offset, size, replica.kernel_mark)
        self.by_class[handle.data_class] -= size

    def pack(self) -> list[tuple[Replica, int]]:
        """Let all replicas lie side by side from the beginning on; those that lie elsewhere now, in order, with their former offsets."""
        moved: list[tuple[Replica, int]] = []
        kept = [replica for _, replica in sorted(self.starts.items())]
        self.starts.clear()
        self.ends.clear()
        end = 0
        for replica in kept:
            if replica.offset != end:
                moved.append((replica, replica.offset))
                replica.offset = end
            self.occupy(replica)
            end += replica.handle.size
        self.extents.compact(end)
        return moved

    def _enter(self, size: int, data_class: DataClass) -> None:
        self.by_class[data_class] += size
        self.taken += size

    def mark(self) -> None:
        """Take note of the bytes in use now: what was reserved is there to stay."""
        used = self.extents.used
        if used > self.recent_peak:
            self.recent_peak = used
            if used > self.peak:
                self.peak = used
                self.peak_by_class.update(self.by_class)

    def give(self, offset: int, size: int, data_class: DataClass) -> None:
        """Give an extent back that no replica occupies."""
        self.extents.free(offset, size)
        self.by_class[data_class] -= size

    def validate(self) -> None:
        """Check that replicas and free extents partition the memory and agree with the sums.

        Raises:
            InvalidEvent: they do not.
        """
        taken = [(replica.offset, replica.handle.size) for replica in self.starts.values()]
        if list(self.starts) != [offset for offset, _ in taken] or sorted(self.ends) != sorted(offset + size for offset, size in taken):
            raise InvalidEvent(f"node {self.name} lost track of where its replicas begin and end")
        position = 0
        for offset, size in sorted([*taken, *self.extents.free_extents()]):
            if offset != position:
                fault = "overlap" if offset < position else "leave a gap"
                raise InvalidEvent(f"extents of node {self.name} {fault} at byte {offset} (expected {position})")
            position = offset + size
        total = sum(size for _, size in taken)
        if position != self.extents.capacity or total != self.used or total != sum(self.by_class.values()):
            raise InvalidEvent(f"ledger of node {self.name}: replicas hold {total} B, extents {self.used} B, classes {sum(self.by_class.values())} B")
        if self.used > self.budget and not self.is_counted:
            raise InvalidEvent(f"node {self.name} uses {self.used} B of a budget of {self.budget} B")
