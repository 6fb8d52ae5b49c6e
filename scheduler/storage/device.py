"""Memory of a GPU: one reservation of a node's whole budget, copies from, to and within it, and page-locked host memory for these copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..core.records import NEWEST, Replica
from ..drivers.gpu import Flow, Gpu, Stream, device_failed
from .arena import HostArena

STAGE_NBYTES: Final = 4 << 20
"""Size of the staging buffer of each thread that reads and writes files for a GPU, counted in the budget of host memory; bytes."""

PIN_NBYTES: Final = 64 << 20
"""Size of the pieces in which host memory is page-locked, each when a copy first touches it; bytes. Locking backs the pages, so it would take seconds
for a whole budget."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The start address of a node's memory on its GPU, over which views of handles are created."""

    address: int


class PinnedRange:
    """Host memory for a GPU's copies: page-locked if the system allows it, else copied at the speed of pageable memory.

    Args:
        gpu: any of the GPUs that copy.
        arena: memory to lock.
        nbytes: bytes from the start of the arena that may be locked.

    Attributes:
        is_refused: whether the system has refused to lock a piece; no further piece is locked then.
    """

    def __init__(self, gpu: Gpu, arena: HostArena, nbytes: int) -> None:
        self.is_refused = False
        self._gpu = gpu
        self._begin, self._end = arena.address, arena.address + nbytes
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    def pieces(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut a range into pieces, each in one locked region or in none, because a copy may not span two; yield (address, bytes)."""
        end = address + nbytes
        while address < end:
            number = (address - self._begin) // PIN_NBYTES
            stop = min(end, self._begin + (number + 1) * PIN_NBYTES)
            if number not in self._pinned and not self.is_refused:
                self._pin(number)
            yield address, stop - address
            address = stop

    def close(self) -> None:
        """Unlock all pieces."""
        for number in self._pinned:
            self._gpu.unpin(self._begin + number * PIN_NBYTES)
        self._pinned.clear()

    @property
    def nbytes(self) -> int:
        """Number of locked bytes, all within the arena."""
        return sum(min(PIN_NBYTES, self._end - self._begin - number * PIN_NBYTES) for number in tuple(self._pinned))

    def _pin(self, number: int) -> None:
        with self._lock:
            if number not in self._pinned and not self.is_refused:
                begin = self._begin + number * PIN_NBYTES
                if self._gpu.pin(begin, min(PIN_NBYTES, self._end - begin)):
                    self._pinned.add(number)
                else:
                    self.is_refused = True


class DeviceArena:
    """A reservation of `nbytes` bytes on a GPU.

    Attributes:
        memory: memory over which views are created.
        address: start of the memory.
        flow: the GPU's stream of kernels.
        host: host memory that is copied from and to this memory.

    Raises:
        MemoryError: the GPU has fewer free bytes.
    """

    def __init__(self, gpu: Gpu, nbytes: int, host: PinnedRange | None = None) -> None:
        self.gpu = gpu
        self.address = gpu.reserve(nbytes)
        self.memory = DeviceMemory(self.address)
        self.flow = Flow(gpu)
        self.host = host
        self._local = threading.local()

    def put(self, stream: Stream, address: int, offset: int, nbytes: int) -> None:
        """Put a copy from host memory on a stream."""
        for begin, count in self._pieces(address, nbytes):
            stream.copy(self.address + offset + begin - address, begin, count)

    def take(self, stream: Stream, address: int, offset: int, nbytes: int) -> None:
        """Put a copy to host memory on a stream."""
        for begin, count in self._pieces(address, nbytes):
            stream.copy(begin, self.address + offset + begin - address, count)

    def exchange(self, address: int, offset: int, nbytes: int, after: int, *, writes: bool) -> None:
        """Copy to host memory, or with `writes` from it, once the flow has passed the mark `after`; return when the copy has ended.

        Raises:
            DeviceFailed: the GPU stopped working.
        """
        try:
            stream, event = self._own()
            self.flow.hold(stream, after)
            (self.put if writes else self.take)(stream, address, offset, nbytes)
            stream.record(event)
            event.wait()
        except RuntimeError as error:
            raise device_failed(self.gpu, error) from error

    def look(self, view: Callable[[Any, int], Any], offset: int, nbytes: int) -> Any:
        """Return a read-only view of a host copy of `nbytes` bytes at an offset, taken after all kernels submitted so far have ended."""
        copy = HostArena(nbytes)
        self.exchange(copy.address, offset, nbytes, self.flow.number, writes=False)
        return copy.look(view, 0, nbytes)

    def close(self) -> None:
        """Return the memory to the GPU."""
        self.flow.close()
        self.gpu.release(self.address)

    def _pieces(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        host = self.host
        if host is not None and host._begin <= address < host._end:
            return host.pieces(address, nbytes)
        return iter(((address, nbytes),))

    def _own(self) -> Any:
        """Return the stream and the event of the calling thread."""
        if not hasattr(self._local, "pair"):
            self._local.pair = self.gpu.stream(), self.gpu.event()
        return self._local.pair


Arena = HostArena | DeviceArena


def mark_of(replica: Replica, arena: DeviceArena) -> tuple[Flow, int]:
    """Return the flow of a GPU, and the mark that it must have passed before another stream may use a replica's extent.

    The mark follows the last kernel that may have used the extent. The machine has already decided on the next use, so no further kernel uses the
    extent before it.
    """
    return arena.flow, arena.flow.number if replica.kernel_mark == NEWEST else replica.kernel_mark
