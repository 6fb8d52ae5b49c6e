"""Memory of the compiler that is given back when a loop has been compiled, or loaded: some 70 MB, a seventh of a process that runs a small model.

LLVM's code and constants are pages of a file: the system has them anyway, and maps them again when the next loop is compiled. Its heap is freed, but
the C library keeps what is free. Only Linux says which pages are those of the file alone; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Final

from llvmlite.binding import ffi
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock

from scheduler.storage import release_file_pages

_EVENT: Final = "numba:compiler_lock"


class _Listener(event.Listener):
    """Hears when Numba's lock is free again."""

    def on_start(self, event: Any) -> None:
        """Someone asks for the lock."""

    def on_end(self, event: Any) -> None:
        """Someone has let it go, perhaps inside another holder."""
        if not global_compiler_lock.is_locked():  # type: ignore[no-untyped-call]
            give_back()


def begin() -> None:
    """Give memory back whenever a loop has been compiled or loaded from now on."""
    if sys.platform == "linux":
        event.register(_EVENT, _Listener())  # type: ignore[no-untyped-call]


def give_back() -> int:
    """Release LLVM's pages and freed memory. Returns bytes of LLVM's mappings that were released."""
    released = release_file_pages(os.path.realpath(ffi.lib._name).encode())
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
    return released
