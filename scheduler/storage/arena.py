"""Host memory as one anonymous mapping of a node's whole budget.

The kernel backs a page when it is first touched, and the page stays. So the memory in use is the high-water mark of the extents, not the budget, and
no page faults happen after the first training step. Huge pages are requested if the system has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Any


class HostArena:
    """A mapping of `nbytes` bytes of host memory.

    Attributes:
        memory: the mapping, over which views are created.
        address: start of the mapping, for copies.

    Raises:
        MemoryError: the system refuses to reserve `nbytes` bytes of address space.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        try:
            self.memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
        except (OSError, ValueError) as error:
            raise MemoryError(f"the system refused to reserve {nbytes:,} bytes of address space ({error}); lower the memory budget") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def copy_from(self, source: HostArena, source_offset: int, offset: int, nbytes: int) -> None:
        """Copy bytes between arenas, or within one even if the ranges overlap. The copy releases the GIL."""
        ctypes.memmove(self.address + offset, source.address + source_offset, nbytes)

    def look(self, view: Callable[[Any, int], Any], offset: int, nbytes: int) -> Any:
        """Return a read-only view of `nbytes` bytes at an offset, created by the handle's `view`."""
        return view(memoryview(self.memory).toreadonly(), offset)
