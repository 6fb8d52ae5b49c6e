"""Memory of a session outside its budget, and its release.

A budget counts every tensor. It does not count Python objects of the recorded steps, code of libraries, and the working memory of kernels. This
module releases unused memory after imports and captures. Importing it loads all code that a session uses, including 40 MB of Numba, so that imports
take their memory before a session fills its budget.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Final

import psutil
import torch

from nntask.hardware import give_back_freed
from scheduler.storage import release_file_pages
from tiles.kernels import load_update_loops

_KEPT_FILE_NBYTES: Final = 64 << 20
"""Bytes of resident file pages below which they are not released; training reads about 40 MB of them."""
_STATUS: Final = Path("/proc/self/status")
BESIDE_NBYTES: Final = 64 << 20
"""Bytes above imports and budget that ``benchmarks/torch_memory.py`` allows for recorded steps and working memory of kernels."""


def outside_budget() -> dict[str, int]:
    """Return resident memory that `ram` does not count, in bytes.

    Returns:
        Two entries: resident memory of this process, which has imported all code of a session and holds no weights ("imports"), and the allowance
        `BESIDE_NBYTES`.
    """
    return {"imports": psutil.Process().memory_info().rss, "beside": BESIDE_NBYTES}


def release_unused() -> None:
    """Release memory that is unused after a capture: free objects of Python, freed memory of the C library, and pages of libraries.

    The process must not compute meanwhile, because running code would be mapped page by page afterwards.
    """
    _clear_free_lists()
    give_back_freed()
    if _resident_file_nbytes() > _KEPT_FILE_NBYTES:
        release_file_pages()


def _clear_free_lists() -> None:
    """Clear Python's lists of free objects, each of which keeps a page, by a full collection over no objects."""
    if gc.get_freeze_count():  # the program has frozen objects, and unfreeze() would undo that
        gc.collect()
        return
    gc.freeze()
    try:
        gc.collect()
    finally:
        gc.unfreeze()


def _resident_file_nbytes() -> int:
    """Return the bytes of resident pages of mapped files; 0 if the system does not report them."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:")), 0)


def _load_code() -> None:
    """Import the modules that PyTorch's optimizers and Numba import at their first use, by using them on one element.

    Loading a compiled loop briefly needs 50 MB for the compiler's code, which would exceed a full budget in the first step.
    """
    load_update_loops()
    torch.optim.AdamW([torch.zeros(1)])


_load_code()
