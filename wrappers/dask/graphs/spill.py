"""Blocks in the tier file (arrays as bytes, other objects pickled with protocol 5 and out-of-band buffers), and the threads that move them.

The file is that of the disk tier (`scheduler.storage.DiskTier`): private, unlinked as soon as it is open, direct I/O where the file system has it. It
is the only place where objects are pickled. Direct I/O needs page-aligned addresses, which buffers of arrays do not have, so the bytes pass through a
small aligned staging buffer per thread, which the budget counts.
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

from scheduler import TierFailed
from scheduler.drivers import THREADS, DiskEngine, Marks
from scheduler.machine import PAGE, CopyTile, MemoryNode, NodeId, rounded
from scheduler.storage import DiskTier, HostArena

from .values import MemoryBlock, raw_bytes

STAGING: Final = 256 << 10
"""Largest staging buffer of a thread; bytes."""


def staging_bytes(ram: int) -> int:
    """Return the bytes of each thread's staging buffer within a budget of `ram` bytes: a small fraction of it."""
    return max(PAGE, min(STAGING, ram // 64 // THREADS // PAGE * PAGE))


class FileExtent:
    """An extent of the tier file that holds a block.

    Attributes:
        offset: offset in the file; bytes.
        nbytes: exact number of bytes.
        sizes: bytes of the pickle and of each of its buffers; None for the bytes of an array.
    """

    __slots__ = ("nbytes", "offset", "sizes")

    def __init__(self, offset: int, nbytes: int, sizes: list[int] | None) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.sizes = sizes


class Unpicklable:
    """An object that cannot be pickled, and so stays in memory in place of an extent."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.owner = owner


class SpillEngine(DiskEngine):
    """The threads that copy blocks between host memory and the file.

    Args:
        tier: the file.
        nbytes: capacity of the file in bytes.
        node: memory node of the file.
        staging: bytes of the staging buffer of each thread.
        done, lost, fail: as in `DiskEngine`.
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
        keep: Callable[[MemoryBlock], None],
    ) -> None:
        super().__init__((), tier, node, done, lost, fail)
        self.file = MemoryNode("file", nbytes, is_storage=True)
        self._keep = keep
        self._staging = staging
        self._local = threading.local()
        self._extents = threading.Lock()

    def discard(self, extent: Any) -> None:
        """Free an extent, which will not be read any more."""
        if isinstance(extent, FileExtent):
            size = rounded(extent.nbytes)
            with self._extents:
                self.file.give(extent.offset, size, "data")
            if extent.offset + size > self.file.budget and self.tier is not None:
                self.tier.discard(extent.offset, size)

    def _marks(self, node: NodeId) -> Marks:
        return ()

    def _carry_out(self, action: CopyTile, marks: Marks, buffers: Any) -> TierFailed | None:
        block: MemoryBlock = action.source.handle.view  # type: ignore[assignment]  # opaque to the core
        leaves = action.target.node == self.node
        try:
            if leaves:
                self.discard(block.extent)  # the extent of the block's previous contents
                block.extent = None
                block.extent = self._write(block)
            else:
                block.owner = self._read(block.extent, is_array=block.is_array)
        except (OSError, pickle.PickleError, MemoryError) as error:
            assert self.tier is not None
            why = str(getattr(error, "strerror", None) or error)
            failure = TierFailed(f"{block.nbytes:,} B of results", str(self.tier.directory), why, reads=not leaves)
            failure.__cause__ = error
            return failure
        return None

    def _write(self, block: MemoryBlock) -> FileExtent | Unpicklable:
        if block.is_array:
            return self._write_pieces([raw_bytes(block.owner).data], None)
        try:
            head, buffers = _pickled(block.owner)
        except Exception:  # an error of the object's __reduce__, not of the disk
            self._keep(block)
            return Unpicklable(block.owner)
        pieces = [memoryview(head), *(each.raw() for each in buffers)]
        return self._write_pieces(pieces, [piece.nbytes for piece in pieces])

    def _write_pieces(self, pieces: list[memoryview], sizes: list[int] | None) -> FileExtent:
        nbytes = sum(piece.nbytes for piece in pieces)
        size = rounded(nbytes)
        with self._extents:
            offset = self.file.take(size, "data")
        if offset is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extent = FileExtent(offset, nbytes, sizes)
        try:
            self._stage_out(pieces, offset)
        except BaseException:
            self.discard(extent)
            raise
        return extent

    def _stage_out(self, pieces: Iterable[memoryview], offset: int) -> None:
        """Write bytes one after another through the staging buffer."""
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

    def _read(self, extent: FileExtent | Unpicklable, *, is_array: bool) -> Any:
        if isinstance(extent, Unpicklable):
            return extent.owner
        data = np.empty(extent.nbytes, np.uint8)
        arena, done = self._arena(), 0
        staging = np.frombuffer(arena.memory, np.uint8)
        assert self.tier is not None
        while done < extent.nbytes:
            count = min(extent.nbytes - done, self._staging)
            self.tier.read(arena, 0, extent.offset + done, rounded(count))
            data[done : done + count] = staging[:count]
            done += count
        if is_array:
            return data
        assert extent.sizes is not None
        pieces, begin = [], 0
        for size in extent.sizes:
            pieces.append(data[begin : begin + size])
            begin += size
        return pickle.loads(pieces[0].data, buffers=pieces[1:])

    def _arena(self) -> HostArena:
        arena: HostArena | None = getattr(self._local, "arena", None)
        if arena is None:
            arena = self._local.arena = HostArena(self._staging)
        return arena


def _pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return an object's pickle and its out-of-band buffers; cloudpickle takes functions of the program."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers = []
        return cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
