"""Settings of the C library's allocator: return freed memory to the system if memory is short, and reuse it in a Dask worker.

Libraries allocate workspace outside of the budgets, in varying sizes and from several threads, so holes grow between allocations in use. Dask starts
workers with ``MALLOC_TRIM_THRESHOLD_=65536``, which also stops glibc from learning which sizes a process uses repeatedly: it maps each allocation of
128 KiB or more anew, page by page, and unmaps it when it is freed. Training frees such memory with every message and temporary, which cost a quarter
of its processor time here. `reuse_freed_memory` keeps freed memory in the process.

glibc has an arena for every few threads. It returns only memory at the end of an arena, and only above a threshold, so an allocation in use keeps all
memory below it. Code that has freed a lot therefore calls `give_back_freed`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_REUSED_NBYTES: Final = 32 << 20
"""Largest size that glibc would learn by itself on 64 bits (DEFAULT_MMAP_THRESHOLD_MAX in its malloc.c); it trims at twice this size."""


def reuse_freed_memory() -> bool:
    """Keep freed allocations of up to 32 MiB in this process from now on: all below an allocation in use, and 64 MiB at the end of each arena.

    Returns:
        False if the C library is not glibc, or the environment sets a threshold (MALLOC_MMAP_THRESHOLD_).
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _REUSED_NBYTES) and mallopt(_TRIM_THRESHOLD, 2 * _REUSED_NBYTES))


def give_back_freed() -> None:
    """Return freed memory of all arenas to the system, if the allocator can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
