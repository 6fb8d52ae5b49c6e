"""Memory of a GPU: one reservation of a node's whole budget, and copies from, to and within it; host memory that such copies find locked in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..drivers.gpu import Flow, Gpu, Stream, device_failed
from .arena import HostArena

STAGE_NBYTES: Final = 4 << 20
"""Host memory of each thread that reads and writes files for a GPU, counted in the budget of host memory."""

PIN_NBYTES: Final = 64 << 20
"""Host memory is locked in pieces of so much, when a copy first touches them: locking takes pages, and all of a budget at once would take seconds."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Where a node's memory begins on its GPU; a handle's view is made over it."""

    address: int


class PinnedRange:
    """Host memory as copies of a GPU use it: locked in place where the system allows it, else copied at the speed of ordinary memory.

    Args:
        gpu: any of those that copy.
        arena: the memory.

    Attributes:
        is_refused: whether the system has refused to lock some of it; nothing more is locked then.
    """

    def __init__(self, gpu: Gpu, arena: HostArena, nbytes: int) -> None:
        self.is_refused = False
        self._gpu = gpu
        self._begin, self._end = arena.address, arena.address + nbytes
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    def pieces(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut a range so that each piece lies in one locked region, or in none: (address, bytes); one copy may not span two."""
        end = address + nbytes
        while address < end:
            number = (address - self._begin) // PIN_NBYTES
            stop = min(end, self._begin + (number + 1) * PIN_NBYTES)
            if number not in self._pinned and not self.is_refused:
                self._pin(number)
            yield address, stop - address
            address = stop

    def close(self) -> None:
        """Unlock everything."""
        for number in self._pinned:
            self._gpu.unpin(self._begin + number * PIN_NBYTES)
        self._pinned.clear()

    @property
    def nbytes(self) -> int:
        """Locked bytes, all of them within the arena."""
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
    """Memory of `nbytes` bytes on a GPU.

    Attributes:
        memory: as views are made over it.
        address: where it begins.
        flow: the kernels that use it.
        host: host memory that is copied from and to it.

    Raises:
        MemoryError: the GPU has less.
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
        """Copy to host memory, or with `writes` from it, once the flow is past the mark `after`, and wait until that is done.

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
        """A read-only view of a copy of what lies there, once everything that was asked of the device has ended."""
        copy = HostArena(nbytes)
        self.exchange(copy.address, offset, nbytes, self.flow.number, writes=False)
        return copy.look(view, 0, nbytes)

    def close(self) -> None:
        """Give the memory back."""
        self.flow.close()
        self.gpu.release(self.address)

    def _pieces(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        host = self.host
        if host is not None and host._begin <= address < host._end:
            return host.pieces(address, nbytes)
        return iter(((address, nbytes),))

    def _own(self) -> Any:
        """Stream and event of the calling thread."""
        if not hasattr(self._local, "pair"):
            self.gpu.adopt()
            self._local.pair = self.gpu.stream(), self.gpu.event()
        return self._local.pair


Arena = HostArena | DeviceArena


def marks_of(*arenas: Arena) -> Sequence[tuple[Flow, int]]:
    """How far the kernels of each GPU among them must be before anything else may use what they have used so far."""
    return [(arena.flow, arena.flow.number) for arena in arenas if isinstance(arena, DeviceArena)]
