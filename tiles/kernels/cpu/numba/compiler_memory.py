"""Memory of the compiler that is given back when a loop has been compiled, or loaded: some 70 MB, a seventh of a process that runs a small model.

LLVM's code and constants are pages of a file: the system has them anyway, and maps them again when the next loop is compiled. Its heap is freed, but
the C library keeps what is free. Only Linux says which pages are those of the file alone; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

from llvmlite.binding import ffi
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock

_EVENT: Final = "numba:compiler_lock"
_FORGET: Final = 4
"""MADV_DONTNEED: a page of a file that no process has written is read from it again when it is wanted."""
_MAPPING: Final = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) r-[-x]p \S+ \S+ \S+ +(.+)")


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
    """Give back what is there. Returns bytes of LLVM's pages that have been let go."""
    library, total = ctypes.CDLL(None), 0
    for address, nbytes in _untouched(os.path.realpath(ffi.lib._name).encode()):
        if library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _FORGET) == 0:
            total += nbytes
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
    return total


def _untouched(path: bytes) -> Iterator[tuple[int, int]]:
    """Address and size of the mappings of a file that cannot be written and of which this process has no page of its own."""
    try:
        with open("/proc/self/smaps", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    found: tuple[int, int] | None = None
    for line in lines:
        if (begins := _MAPPING.fullmatch(line)) is not None:
            first, end = (int(begins[group], 16) for group in (1, 2))
            found = (first, end - first) if begins[3] == path else None
        elif line.startswith(b"Anonymous:"):
            if found is not None and line.split()[1] == b"0":
                yield found
            found = None
