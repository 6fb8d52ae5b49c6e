"""The C library's allocator: what is freed goes back to the system where memory is short, and is reused in a Dask worker.

Kernels of libraries allocate what they pack their operands into, beside the budgets, in sizes that vary, from several threads: holes grow between
the pieces in use. And Dask starts workers with ``MALLOC_TRIM_THRESHOLD_=65536``, by which glibc also stops to learn how large the pieces are that a
process uses again and again: each of 128 KiB or more is mapped anew, page by page, and unmapped when it is freed. A training does that with every
message and temporary, which cost a quarter of its processor time here.

What is freed then stays with the process. glibc has an arena for every few threads, and gives back only what is free at an arena's end, where that is
more than a threshold: a piece in use keeps everything below it. So code that has freed much says so: `give_back_freed`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_REUSED_NBYTES: Final = 32 << 20
"""The most that glibc would learn by itself on 64 bits (DEFAULT_MMAP_THRESHOLD_MAX in its malloc.c); it trims at twice as much."""


def reuse_freed_memory() -> bool:
    """Let this process keep freed pieces of up to 32 MiB for what it needs next, for good: at the end of each arena 64 MiB, below pieces in use all.

    Returns:
        False where the C library is not glibc, or the environment has chosen a threshold (MALLOC_MMAP_THRESHOLD_).
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _REUSED_NBYTES) and mallopt(_TRIM_THRESHOLD, 2 * _REUSED_NBYTES))


def give_back_freed() -> None:
    """Have the allocator give freed memory of all arenas back to the system, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
