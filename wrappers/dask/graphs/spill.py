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
from contextlib import suppress
from itertools import count
from queue import PriorityQueue
from typing import Any, Final

import cloudpickle
import numpy as np

from scheduler import TierFailed
from scheduler.drivers import THREADS
from scheduler.machine import PAGE, MemoryNode, rounded
from scheduler.storage import DiskTier, HostArena

from .blocks import MemoryBlock, MoveBlock
from .values import raw_bytes

Done = Callable[[MemoryBlock, BaseException | None, bool], None]

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


class SpillEngine:
    """The threads that move blocks between memory and the file; reads are served before writes, because tasks wait for all of them.

    Args:
        tier: the file.
        nbytes: capacity of the file in bytes.
        staging: bytes of the staging buffer of each thread.
        done: called after each copy with the block, the error (None if it has succeeded), and whether the block cannot be pickled and stays.
        fail: called with an error of the engine itself.
    """

    def __init__(self, tier: DiskTier, nbytes: int, staging: int, done: Done, fail: Callable[[BaseException], None]) -> None:
        self.tier = tier
        self.file = MemoryNode("file", nbytes, is_storage=True)
        self._done, self._fail = done, fail
        self._staging = staging
        self._extents = threading.Lock()
        self._numbers = count()
        self._moves: PriorityQueue[tuple[int, int, MoveBlock | None]] = PriorityQueue()
        self._threads = [threading.Thread(target=self._run, name=f"nntask dask disk {number}", daemon=True) for number in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def put(self, move: MoveBlock) -> None:
        """Request a copy."""
        self._moves.put((move.kind == "write", next(self._numbers), move))

    def close(self) -> None:
        """End the threads after their current copies, and close the file."""
        for _ in range(THREADS):
            self._moves.put((-1, next(self._numbers), None))
        for thread in self._threads:
            with suppress(RuntimeError):  # the calling thread itself
                thread.join()
        self.tier.close()

    def discard(self, block: MemoryBlock) -> None:
        """Free the extent of a block, which will not be read any more."""
        extent, block.extent = block.extent, None
        if extent is not None:
            self._free(extent)

    def _free(self, extent: FileExtent) -> None:
        size = rounded(extent.nbytes)
        with self._extents:
            self.file.give(extent.offset, size, "data")
        if extent.offset + size > self.file.budget:
            self.tier.discard(extent.offset, size)

    def _run(self) -> None:
        try:
            arena = HostArena(self._staging)
            while (move := self._moves.get()[-1]) is not None:
                self._done(move.block, *self._carry_out(move, arena))
                del move  # and so the block
        except BaseException as bug:  # every waiting thread must be woken
            self._fail(bug)

    def _carry_out(self, move: MoveBlock, arena: HostArena) -> tuple[TierFailed | None, bool]:
        """Copy a block; return the error, and whether the block stays because it cannot be pickled."""
        block = move.block
        try:
            if move.kind == "read":
                block.owner = self._read(block.extent, arena, is_array=block.is_array)
                return None, False
            self.discard(block)  # the extent of its previous contents
            pieces, sizes = _pieces_of(block)
            if pieces:
                block.extent = self._write_pieces(pieces, sizes, arena)
            return None, not pieces
        except (OSError, pickle.PickleError, MemoryError) as error:
            why = str(getattr(error, "strerror", None) or error)
            failure = TierFailed(f"{block.nbytes:,} B of results", str(self.tier.directory), why, reads=move.kind == "read")
            failure.__cause__ = error
            return failure, False

    def _write_pieces(self, pieces: list[memoryview], sizes: list[int] | None, arena: HostArena) -> FileExtent:
        nbytes = sum(piece.nbytes for piece in pieces)
        size = rounded(nbytes)
        with self._extents:
            offset = self.file.take(size, "data")
        if offset is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extent = FileExtent(offset, nbytes, sizes)
        try:
            self._stage_out(pieces, offset, arena)
        except BaseException:
            self._free(extent)
            raise
        return extent

    def _stage_out(self, pieces: Iterable[memoryview], offset: int, arena: HostArena) -> None:
        """Write bytes one after another through the staging buffer."""
        staging, filled = np.frombuffer(arena.memory, np.uint8), 0
        for piece in pieces:
            data, done = np.frombuffer(piece, np.uint8), 0
            while done < data.nbytes:
                length = min(data.nbytes - done, self._staging - filled)
                staging[filled : filled + length] = data[done : done + length]
                filled, done = filled + length, done + length
                if filled == self._staging:
                    self.tier.write(arena, 0, offset, filled)
                    offset, filled = offset + filled, 0
        if filled:
            self.tier.write(arena, 0, offset, rounded(filled))

    def _read(self, extent: FileExtent, arena: HostArena, *, is_array: bool) -> Any:
        data = np.empty(extent.nbytes, np.uint8)
        staging, done = np.frombuffer(arena.memory, np.uint8), 0
        while done < extent.nbytes:
            length = min(extent.nbytes - done, self._staging)
            self.tier.read(arena, 0, extent.offset + done, rounded(length))
            data[done : done + length] = staging[:length]
            done += length
        if is_array:
            return data
        assert extent.sizes is not None
        pieces, begin = [], 0
        for size in extent.sizes:
            pieces.append(data[begin : begin + size])
            begin += size
        return pickle.loads(pieces[0].data, buffers=pieces[1:])


def _pieces_of(block: MemoryBlock) -> tuple[list[memoryview], list[int] | None]:
    """Return the bytes of a block, and the sizes of the pieces unless it is an array; no pieces if it cannot be pickled."""
    if block.is_array:
        return [raw_bytes(block.owner).data], None
    try:
        head, buffers = _pickled(block.owner)
    except Exception:  # an error of the object's __reduce__, not of the disk
        return [], None
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    return pieces, [piece.nbytes for piece in pieces]


def _pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return an object's pickle and its out-of-band buffers; cloudpickle takes functions of the program."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers = []
        return cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
