"""Memory of a GPU: one reservation of a node's whole budget, and copies from, to and within it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .arena import HostArena

if TYPE_CHECKING:
    from ..drivers.cuda import Gpu


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Where a node's memory begins on its GPU; a handle's view is made over it."""

    address: int


class DeviceArena:
    """Memory of `nbytes` bytes on a GPU.

    Attributes:
        memory: as views are made over it.
        address: where it begins.

    Raises:
        MemoryError: the GPU has less.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.gpu = gpu
        self.address = gpu.reserve(nbytes)
        self.memory = DeviceMemory(self.address)

    def copy_from(self, source: Arena, source_offset: int, offset: int, nbytes: int) -> None:
        """Copy bytes from an arena into this one, or within it even where they overlap, and wait until they are there."""
        gpu, target, origin = self.gpu, self.address + offset, source.address + source_offset
        if isinstance(source, HostArena):
            gpu.upload(target, origin, nbytes)
        elif source is self:
            self._move(target, origin, nbytes)
        else:
            self._copy_over(source, origin, target, nbytes)
        gpu.wait()

    def copy_to(self, target: HostArena, target_offset: int, offset: int, nbytes: int) -> None:
        """Copy bytes into host memory, and wait until they are there."""
        self.gpu.download(target.address + target_offset, self.address + offset, nbytes)
        self.gpu.wait()

    def close(self) -> None:
        """Give the memory back."""
        self.gpu.release(self.address)

    def _move(self, target: int, origin: int, nbytes: int) -> None:
        """Within the arena: in pieces that do not overlap their sources, in the order in which none is overwritten before it is read."""
        step = min(nbytes, abs(target - origin)) or nbytes
        pieces = range(0, nbytes, step)
        for start in pieces if target <= origin else reversed(pieces):
            self.gpu.copy(target + start, origin + start, min(step, nbytes - start))

    def _copy_over(self, source: DeviceArena, origin: int, target: int, nbytes: int) -> None:
        """From another GPU, through host memory."""
        stage = HostArena(nbytes)
        source.gpu.download(stage.address, origin, nbytes)
        source.gpu.wait()
        self.gpu.upload(target, stage.address, nbytes)
        self.gpu.wait()


Arena = HostArena | DeviceArena


def transfer(source: Arena, source_offset: int, target: Arena, offset: int, nbytes: int) -> None:
    """Copy bytes between the memories of two nodes, and wait until they are there."""
    if isinstance(target, DeviceArena):
        target.copy_from(source, source_offset, offset, nbytes)
    elif isinstance(source, DeviceArena):
        source.copy_to(target, offset, source_offset, nbytes)
    else:
        target.copy_from(source, source_offset, offset, nbytes)


@contextmanager
def in_host_memory(arena: Arena, offset: int, nbytes: int, *, writes: bool) -> Iterator[tuple[HostArena, int]]:
    """Bytes of a node's memory where files are read and written: themselves, or of a GPU a copy, (arena, offset); `writes` back what is put there."""
    if isinstance(arena, HostArena):
        yield arena, offset
        return
    stage = HostArena(nbytes)
    if not writes:
        transfer(arena, offset, stage, 0, nbytes)
    yield stage, 0
    if writes:
        transfer(stage, 0, arena, offset, nbytes)
