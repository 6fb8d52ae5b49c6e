"""Pages of mapped files, mostly code of libraries, that this process has read and need not keep resident.

A page of a read-only file mapping that no process has written is the system's copy of the file. Unmapping it costs a minor page fault if it is read
again, and lowers the resident memory of the process until then. Importing PyTorch alone leaves about 100 MB of such pages, of which a training reads
a third again. Only Linux lists these mappings; on other systems nothing is released.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from typing import Final

_DONTNEED: Final = 4
"""MADV_DONTNEED: an unchanged page of a private file mapping is dropped, and read from the file at its next use."""
_HEADER: Final = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ \S+ *(.*)")


def release_file_pages(path: bytes | None = None) -> int:
    """Unmap the pages of files that this process has mapped and not changed.

    Args:
        path: the only file whose pages are released; None for all files.

    Returns:
        Bytes of the mappings that were released, resident or not.
    """
    if sys.platform != "linux":
        return 0
    madvise, total = ctypes.CDLL(None).madvise, 0
    for address, nbytes in _unchanged_mappings(path):
        if madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _DONTNEED) == 0:
            total += nbytes
    return total


def _unchanged_mappings(path: bytes | None) -> Iterator[tuple[int, int]]:
    """Return address and size of the private read-only file mappings in which this process has changed no page."""
    try:
        with open("/proc/self/smaps", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    mapping: tuple[int, int] | None = None
    for line in lines:
        if line.startswith(b"Anonymous:"):
            if mapping is not None and line.split()[1] == b"0":
                yield mapping
            mapping = None
        elif (header := _HEADER.fullmatch(line)) is not None:
            start, end, access, name = int(header[1], 16), int(header[2], 16), header[3], header[4]
            is_candidate = access in (b"r--p", b"r-xp") and name.startswith(b"/") and path in (None, name)
            mapping = (start, end - start) if is_candidate else None
