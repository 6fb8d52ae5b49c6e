"""Memory of a session outside its budget, and how it is kept small.

A budget counts every tensor. Outside it lie Python objects of the recorded steps, code of libraries, and the working memory of kernels. This module
releases what importing and capturing leave behind. Importing it loads all code that a session uses, 40 MB of Numba among it, so that imports take
their memory before a session fills its budget.
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
"""Resident file pages below this size are not released: a training reads about 40 MB of them. Bytes."""
_STATUS: Final = Path("/proc/self/status")
BESIDE_NBYTES: Final = 64 << 20
"""Resident memory above imports and budget that ``benchmarks/torch_memory.py`` allows: recorded steps, and working memory of kernels. Bytes."""


def outside_budget() -> dict[str, int]:
    """Return resident memory that `ram` does not count, bytes.

    Returns:
        "imports": resident memory of this process, which has imported all code of a session and holds no weights. "beside": allowance for recorded
        steps and working memory of kernels.
    """
    return {"imports": psutil.Process().memory_info().rss, "beside": BESIDE_NBYTES}


def release_unused() -> None:
    """Release memory that a capture has left behind: free objects of Python, freed pieces of the C library, and pages of libraries.

    The process must not compute meanwhile, because code that runs would be mapped again page by page.
    """
    _clear_free_lists()
    give_back_freed()
    if _resident_file_nbytes() > _KEPT_FILE_NBYTES:
        release_file_pages()


def _clear_free_lists() -> None:
    """Clear Python's lists of free objects, each of which keeps a page; a full collection does that, over no objects here."""
    if gc.get_freeze_count():  # the program's choice, which unfreeze() would undo
        gc.collect()
        return
    gc.freeze()
    try:
        gc.collect()
    finally:
        gc.unfreeze()


def _resident_file_nbytes() -> int:
    """Resident pages of mapped files, bytes; 0 where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:")), 0)


def _load_code() -> None:
    """Import what PyTorch's optimizers and Numba import at their first use, by using them on one element.

    Loading a compiled loop needs 50 MB of the compiler's code for a moment, which would come on top of a full budget in the first step.
    """
    load_update_loops()
    torch.optim.AdamW([torch.zeros(1)])


_load_code()
