"""The ledger of a node: the bytes in use, the replicas that occupy them, and their sums by class of data, under a hard budget.

Its books change together, so no other module keeps a list of extents. A handle lists its own replicas, which says on which nodes its data is
valid, not at which addresses. Knows neither tasks nor coherence, nor why extents are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..errors import InvalidEvent
from ..records import DATA_CLASSES, DataClass, HandleRecord, Replica
from .extents import LARGE, ExtentAllocator

_SPREAD: Final = 2 * LARGE
"""Address space of a storage node over its budget: fragmentation of a file costs addresses, not bytes. It is so wide that no extent counts as large,
so all of them lie near the beginning; bytes beyond the budget are discarded when they are freed."""

Extent = tuple[int, int]
"""Bytes taken on a node: the first byte, and the mark after the last kernel that used them (`Replica.kernel_mark`)."""


class MemoryNode:
    """Memory of one node: its budget, and the replicas that occupy it.

    An extent is taken, then occupied by a replica, and freed when the replica vacates it. Files of objects other than replicas use `take` and `give`
    only.

    Args:
        name: name for users, such as "ram" or "sim:0".
        budget: hard limit in bytes on everything allocated here.
        is_storage: whether the node is a file: no worker computes there, and extents may lie beyond the first `budget` bytes.
        keeps_offsets: option of `ExtentAllocator`.

    Attributes:
        extents: allocator of the address range.
        starts, ends: replicas by their first byte, and by the first byte after them.
        by_class: bytes in use by class of data; `peak_by_class` at the time of `peak`.
        taken: bytes allocated so far, in total.
        peak: largest number of bytes in use at any `mark`; `recent_peak` since the last `forget_recent_peak`.
    """

    __slots__ = (
        "budget",
        "by_class",
        "ends",
        "extents",
        "is_storage",
        "name",
        "peak",
        "peak_by_class",
        "recent_peak",
        "starts",
        "taken",
    )

    def __init__(self, name: str, budget: int, *, is_storage: bool = False, keeps_offsets: bool = False) -> None:
        self.name = name
        self.budget = budget
        self.is_storage = is_storage
        self.extents = ExtentAllocator(budget * _SPREAD if is_storage else budget, keeps_offsets=keeps_offsets)
        self.starts: dict[int, Replica] = {}
        self.ends: dict[int, Replica] = {}
        self.by_class: dict[DataClass, int] = dict.fromkeys(DATA_CLASSES, 0)
        self.taken = 0
        self.peak = 0
        self.recent_peak = 0
        self.peak_by_class: dict[DataClass, int] = dict(self.by_class)

    @property
    def used(self) -> int:
        """Bytes in use now."""
        return self.extents.used

    def forget_recent_peak(self) -> None:
        """Start a new period of `recent_peak`."""
        self.recent_peak = self.extents.used

    def take(self, size: int, data_class: DataClass, wanted: int = -1) -> int | None:
        """Return the offset of a new extent; None if no hole is large enough. `wanted` is the preferred offset (`ExtentAllocator.allocate`)."""
        if self.is_storage and self.extents.used + size > self.budget:
            return None
        offset = self.extents.allocate(size, wanted)
        if offset is not None:
            self._enter(size, data_class)
        return offset

    def fits(self, handles: Sequence[HandleRecord], *, preferred: bool = False) -> bool:
        """Return whether free memory has extents for the handles.

        Args:
            preferred: whether they are to be taken by `take_all`, at the preferred offsets of the handles if these are free.
        """
        total, extents = 0, self.extents
        for handle in handles:
            total += handle.spec.size
        if self.is_storage:
            return extents.used + total <= self.budget
        if extents.high - extents.low >= total << len(handles):  # hot path: a preferred extent leaves half of the rest of the gap, or more
            return True
        if extents.used + total > extents.capacity:
            return False
        return extents.fits([(handle.spec.size, handle.preferred_offset if preferred else -1) for handle in handles])

    def take_all(self, handles: Sequence[HandleRecord], *, preferred: bool) -> list[Extent]:
        """Take an extent for every handle; they must fit.

        Args:
            preferred: whether each is taken at the handle's preferred offset if that is free, and its offset is preferred from then on.
        """
        taken: list[Extent] = []
        extents = self.extents
        for handle in handles:
            size, data_class = handle.spec.size, handle.spec.data_class
            offset = extents.allocate(size, handle.preferred_offset if preferred else -1)
            assert offset is not None
            self.by_class[data_class] += size
            self.taken += size
            if preferred:
                handle.preferred_offset = offset
            taken.append((offset, extents.kernel_mark))
        return taken

    def largest_hole(self) -> int:
        """Return the bytes of the largest extent that could be taken now."""
        return self.extents.largest_hole()

    def take_at(self, offset: int, size: int, data_class: DataClass) -> None:
        """Take the free extent at `offset`."""
        self.extents.take_at(offset, size)
        self._enter(size, data_class)

    def occupy(self, replica: Replica) -> None:
        """Enter a replica in the extent at its offset, which was taken for it."""
        self.starts[replica.offset] = replica
        self.ends[replica.offset + replica.handle.spec.size] = replica

    def vacate(self, replica: Replica) -> None:
        """Free the extent of a replica."""
        offset, handle = replica.offset, replica.handle
        size = handle.spec.size
        del self.starts[offset]
        del self.ends[offset + size]
        self.extents.free(offset, size, replica.kernel_mark)
        self.by_class[handle.spec.data_class] -= size

    def pack(self) -> list[tuple[Replica, int]]:
        """Place all replicas side by side from the start of the memory; return those that moved, in order, with their former offsets."""
        moved: list[tuple[Replica, int]] = []
        replicas = [replica for _, replica in sorted(self.starts.items())]
        self.starts.clear()
        self.ends.clear()
        end = 0
        for replica in replicas:
            if replica.offset != end:
                moved.append((replica, replica.offset))
                replica.offset = end
            self.occupy(replica)
            end += replica.handle.spec.size
        self.extents.compact(end)
        return moved

    def _enter(self, size: int, data_class: DataClass) -> None:
        self.by_class[data_class] += size
        self.taken += size

    def mark(self) -> None:
        """Update the peaks, now that reserved bytes are final."""
        used = self.extents.used
        if used > self.recent_peak:
            self.recent_peak = used
            if used > self.peak:
                self.peak = used
                self.peak_by_class.update(self.by_class)

    def give(self, offset: int, size: int, data_class: DataClass) -> None:
        """Free an extent that no replica occupies."""
        self.extents.free(offset, size)
        self.by_class[data_class] -= size

    def validate(self) -> None:
        """Check that replicas and free extents partition the memory and agree with the sums.

        Raises:
            InvalidEvent: they disagree.
        """
        taken = [(replica.offset, replica.handle.spec.size) for replica in self.starts.values()]
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
        if self.used > self.budget:
            raise InvalidEvent(f"node {self.name} uses {self.used} B of a budget of {self.budget} B")
