"""Allocation of extents in an address range.

Allocation is best fit with coalescing; any free extent serves any size. On top lie bins of freed extents by exact size, because a training step frees
and takes the same sizes again and again: a hit costs one list operation. Bins are coalesced before untouched memory is taken, so they never cost
memory. Knows nothing of replicas, tasks or budgets (`memory_node`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

from ..errors import InvalidEvent
from ..records import NEWEST

PAGE: Final = 4096
"""Extents are multiples of this many bytes, so that disk I/O and big pages stay possible."""

LARGE: Final = 4096
"""Capacity over the size from which an extent counts as large. In a small memory, tiles are large and vectors are not."""


def rounded(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages, at least one."""
    return max(-(-nbytes // PAGE) * PAGE, PAGE)


UNTOUCHED: Final = 4
"""If offsets are kept, 1/UNTOUCHED of the memory stays untouched while freed extents suffice."""
LITTLE: Final = 1024
"""Untouched bytes over the size of an extent above which the extent takes untouched bytes nevertheless."""


class ExtentAllocator:
    """Allocator of extents in [0, capacity). Small extents grow from the bottom, large ones from the top, so that neither fragments the other.

    Invariant: allocated, binned and free extents partition [0, low) and [high, capacity). The gap [low, high) is free as well.

    Args:
        capacity: bytes; rounded down to whole pages.
        keeps_offsets: whether an allocation prefers untouched memory to cutting or merging freed extents, so that data which comes and goes in the
            same sizes finds its old offsets. Meant for memory that is reserved whole from the start.

    Attributes:
        low, high: bounds of the gap.
        used: bytes allocated.
        binned: bytes in bins.
        kernel_mark: mark with which the extent allocated last was freed (`Replica.kernel_mark`); `NEWEST` if it is not exactly that extent.
    """

    __slots__ = ("_bins", "_by_size", "_ends", "_starts", "binned", "capacity", "high", "keeps_offsets", "kernel_mark", "low", "used")

    def __init__(self, capacity: int, *, keeps_offsets: bool = False) -> None:
        self.capacity = capacity // PAGE * PAGE
        self.keeps_offsets = keeps_offsets
        self.low = 0
        self.high = self.capacity
        self.used = 0
        self.binned = 0
        self._bins: dict[int, dict[int, int]] = {}  # size -> {offset: kernel mark}, in the order in which they were freed
        self.kernel_mark = NEWEST
        self._starts: dict[int, int] = {}  # offset -> size of the free extents outside the gap
        self._ends: dict[int, int] = {}  # end -> offset of the same extents
        self._by_size: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # sorted (size, offset), below and above the gap

    def allocate(self, size: int, wanted: int = -1) -> int | None:
        """Return the offset of a new extent, or None if no hole is large enough.

        Args:
            size: bytes, a multiple of PAGE.
            wanted: preferred offset, -1 for none. It is used if an extent of exactly that size is free there, or, if offsets are kept, any free
                extent around it. If offsets are kept and `wanted` is taken, untouched memory is preferred to freed extents, which others may want.
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

    def fits(self, requests: Sequence[tuple[int, int]]) -> bool:
        """Return whether `allocate` would find extents for these pairs (size, wanted offset), one after the other. Nothing is allocated."""
        if len(requests) == 1:
            ((size, _),) = requests
            if self._bins.get(size) or self._has_hole(size):
                return True
            self._flush()
            return self._has_hole(size)
        sizes = [size for size, _ in requests]
        if all(sizes.count(size) <= len(self._bins.get(size, ())) for size in sizes):  # hot path: each takes an extent of exactly its size
            return True
        trial = self._copied()
        return all(trial.allocate(size, wanted) is not None for size, wanted in requests)

    def _has_hole(self, size: int) -> bool:
        """Return whether the gap or a free extent outside of bins has `size` bytes."""
        return self.high - self.low >= size or any(holes and holes[-1][0] >= size for holes in self._by_size)

    def _copied(self) -> ExtentAllocator:
        """Return an allocator in the same state."""
        twin = ExtentAllocator(self.capacity, keeps_offsets=self.keeps_offsets)
        twin.low, twin.high, twin.used, twin.binned = self.low, self.high, self.used, self.binned
        twin._bins = {size: bin_.copy() for size, bin_ in self._bins.items()}
        twin._starts, twin._ends = self._starts.copy(), self._ends.copy()
        twin._by_size = self._by_size[0].copy(), self._by_size[1].copy()
        return twin

    def take_at(self, offset: int, size: int) -> None:
        """Allocate [offset, offset + size), which must be free.

        Raises:
            InvalidEvent: part of it is in use.
        """
        self._flush()
        self.kernel_mark = NEWEST
        if not self._cut_out(offset, size):
            raise InvalidEvent(f"the extent of {size} B at byte {offset} was claimed, but it is not free")
        self.used += size

    def _cut_out(self, offset: int, size: int) -> bool:
        """Take [offset, offset + size) out of the free extent or gap around it; return whether there is one. Bins are not searched."""
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
        """Free an extent, given its allocated size and the mark of the last kernel that used it, if known."""
        self.used -= size
        self.binned += size
        bin_ = self._bins.get(size)
        if bin_ is None:
            self._bins[size] = {offset: kernel_mark}
        else:
            bin_[offset] = kernel_mark

    def compact(self, nbytes: int) -> None:
        """Declare that the extents in use fill [0, nbytes) and that everything above is the gap."""
        self.used = self.low = nbytes
        self.high = self.capacity
        self.binned = 0
        self._bins, self._starts, self._ends, self._by_size = {}, {}, {}, ([], [])

    def largest_hole(self) -> int:
        """Return the size of the largest extent that could be allocated now."""
        return max((size for _, size in self.all_free()), default=0)

    def free_extents(self) -> list[tuple[int, int]]:
        """Return (offset, size) of every free or binned extent and of the gap, sorted, without coalescing them."""
        binned = [(offset, size) for size, offsets in self._bins.items() for offset in offsets]
        return sorted([*self._starts.items(), *binned, *self._gap()])

    def all_free(self) -> list[tuple[int, int]]:
        """Return (offset, size) of all free memory, coalesced and sorted."""
        self._flush()
        return sorted([*self._starts.items(), *self._gap()])

    def _gap(self) -> list[tuple[int, int]]:
        return [(self.low, self.high - self.low)] if self.high > self.low else []

    def _best_fit(self, size: int, above: bool) -> int | None:
        """Allocate in the smallest sufficient hole on one side of the gap: at its bottom below the gap, at its top above."""
        by_size = self._by_size[above]
        index = bisect_left(by_size, (size, -1))
        if index == len(by_size):
            return None
        hole, offset = by_size.pop(index)
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
        """Enter a free extent, merged with free neighbours; an extent that touches the gap becomes part of it."""
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
