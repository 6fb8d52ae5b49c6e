"""Blocks in the tier file: arrays as their bytes, other objects pickled (protocol 5, buffers beside), and the threads that move them.

The file is the disk tier's (`scheduler.storage.DiskTier`): private, unlinked as soon as it is open, direct I/O where the file system has it. It is
the only place where anything is pickled. Direct I/O wants pages at page addresses, which buffers of arrays do not begin at, so bytes pass through a
small aligned piece of memory per thread, which is counted in the budget.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import cloudpickle
import numpy as np

from scheduler.core.errors import TierFailed
from scheduler.core.events import CopyTile
from scheduler.core.memory import PAGE, MemoryNode, rounded
from scheduler.core.records import NodeId
from scheduler.drivers.disk import THREADS, DiskEngine, Marks
from scheduler.storage import DiskTier, HostArena

from .values import Block, raw_bytes

STAGING: Final = 256 << 10
"""Bytes of aligned memory per thread, at most."""


def staging_bytes(ram: int) -> int:
    """Aligned memory per thread within a budget of so many bytes: a small share of it."""
    return max(PAGE, min(STAGING, ram // 64 // THREADS // PAGE * PAGE))


class Place:
    """An extent of the file.

    Attributes:
        sizes: of the pickle and of each of its buffers; None for the bytes of an array.
    """

    __slots__ = ("nbytes", "offset", "sizes")

    def __init__(self, offset: int, nbytes: int, sizes: list[int] | None) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.sizes = sizes


class Kept:
    """What could not be pickled stays in memory."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.owner = owner


class SpillEngine(DiskEngine):
    """Carries out the copies of blocks between host memory and the file.

    Args:
        tier: the file.
        nbytes: how many it may hold.
        staging: bytes of aligned memory per thread.
        done, lost, fail: as of `DiskEngine`.
        keep: called with a block that cannot be pickled.
    """

    def __init__(
        self,
        tier: DiskTier,
        nbytes: int,
        node: NodeId,
        staging: int,
        done: Callable[[CopyTile, int, int], None],
        lost: Callable[[CopyTile, BaseException], None],
        fail: Callable[[BaseException], None],
        keep: Callable[[Block], None],
    ) -> None:
        super().__init__((), tier, node, done, lost, fail)
        self.file = MemoryNode("file", nbytes, is_storage=True)
        self._keep = keep
        self._staging = staging
        self._local = threading.local()
        self._extents = threading.Lock()

    def discard(self, place: Any) -> None:
        """Nothing will read a place any more."""
        if isinstance(place, Place):
            size = rounded(place.nbytes)
            with self._extents:
                self.file.give(place.offset, size, "data")
            if place.offset + size > self.file.budget and self.tier is not None:
                self.tier.discard(place.offset, size)

    def _marks(self, node: NodeId) -> Marks:
        return ()

    def _carry_out(self, action: CopyTile, marks: Marks, room: Any) -> TierFailed | None:
        block: Block = action.source.handle.view  # type: ignore[assignment]  # opaque to the core
        leaves = action.target.node == self.node
        try:
            if leaves:
                self.discard(block.place)  # of what it was before a task changed it
                block.place = None
                block.place = self._write(block)
            else:
                block.owner = self._read(block.place, is_array=block.is_array)
        except (OSError, pickle.PickleError, MemoryError) as error:
            assert self.tier is not None
            what = "written to" if leaves else "read back from"
            failure = TierFailed(
                f"{block.nbytes:,} B of results could not be {what} the disk tier in {self.tier.directory}: "
                f"{getattr(error, 'strerror', None) or error}; free space there, name another directory with disk, or raise ram"
            )
            failure.__cause__ = error
            return failure
        return None

    def _write(self, block: Block) -> Place | Kept:
        if block.is_array:
            return self._write_pieces([raw_bytes(block.owner).data], None)
        try:
            head, buffers = _pickled(block.owner)
        except Exception:  # of somebody's __reduce__: nothing is wrong with the disk
            self._keep(block)
            return Kept(block.owner)
        pieces = [memoryview(head), *(each.raw() for each in buffers)]
        return self._write_pieces(pieces, [piece.nbytes for piece in pieces])

    def _write_pieces(self, pieces: list[memoryview], sizes: list[int] | None) -> Place:
        nbytes = sum(piece.nbytes for piece in pieces)
        size = rounded(nbytes)
        with self._extents:
            offset = self.file.take(size, "data")
        if offset is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place = Place(offset, nbytes, sizes)
        try:
            self._pour(pieces, offset)
        except BaseException:
            self.discard(place)
            raise
        return place

    def _pour(self, pieces: Iterable[memoryview], offset: int) -> None:
        """Write bytes one after another, by way of the aligned memory."""
        arena, filled = self._arena(), 0
        staging = np.frombuffer(arena.memory, np.uint8)
        assert self.tier is not None
        for piece in pieces:
            data, done = np.frombuffer(piece, np.uint8), 0
            while done < data.nbytes:
                count = min(data.nbytes - done, self._staging - filled)
                staging[filled : filled + count] = data[done : done + count]
                filled, done = filled + count, done + count
                if filled == self._staging:
                    self.tier.write(arena, 0, offset, filled)
                    offset, filled = offset + filled, 0
        if filled:
            self.tier.write(arena, 0, offset, rounded(filled))

    def _read(self, place: Place | Kept, *, is_array: bool) -> Any:
        if isinstance(place, Kept):
            return place.owner
        data = np.empty(place.nbytes, np.uint8)
        arena, done = self._arena(), 0
        staging = np.frombuffer(arena.memory, np.uint8)
        assert self.tier is not None
        while done < place.nbytes:
            count = min(place.nbytes - done, self._staging)
            self.tier.read(arena, 0, place.offset + done, rounded(count))
            data[done : done + count] = staging[:count]
            done += count
        if is_array:
            return data
        assert place.sizes is not None
        pieces, begin = [], 0
        for size in place.sizes:
            pieces.append(data[begin : begin + size])
            begin += size
        return pickle.loads(pieces[0].data, buffers=pieces[1:])

    def _arena(self) -> HostArena:
        arena: HostArena | None = getattr(self._local, "arena", None)
        if arena is None:
            arena = self._local.arena = HostArena(self._staging)
        return arena


def _pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """An object's pickle and the buffers that are not in it; functions of the program's too."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers = []
        return cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
