"""Release of the compiler's memory after a loop has been compiled or loaded: some 70 MB, a seventh of a process that runs a small model.

LLVM's code and constants are pages of a file: the system has them anyway, and maps them when the next loop is compiled. LLVM frees its heap, but
the C library keeps the freed memory. Only Linux reports which pages belong to the file alone; on other systems nothing is released.
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
    """Listener for the release of Numba's compiler lock."""

    def on_start(self, event: Any) -> None:
        """Ignore requests for the lock."""

    def on_end(self, event: Any) -> None:
        """Release memory when the outermost holder has released the lock."""
        if not global_compiler_lock.is_locked():  # type: ignore[no-untyped-call]
            give_back()


def begin() -> None:
    """Release memory after every compilation or loading of a loop from now on."""
    if sys.platform == "linux":
        event.register(_EVENT, _Listener())  # type: ignore[no-untyped-call]


def give_back() -> int:
    """Release LLVM's pages and freed memory; return the number of bytes of LLVM's mappings that were released."""
    released = release_file_pages(os.path.realpath(ffi.lib._name).encode())
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
    return released
