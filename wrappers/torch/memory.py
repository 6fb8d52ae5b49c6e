"""Memory of a session outside its budget, and how it is kept small.

A budget counts every tensor. Outside it lie Python objects of the recorded steps, code of libraries, and the working memory of kernels. This module
releases what importing and capturing leave behind, and loads compiled loops while the budget is empty. It imports Numba (30 MB), so that importing a
session takes all the memory of imports.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Final

import numpy as np
import torch

from nntask.hardware import give_back_freed
from scheduler.storage import release_file_pages
from tiles.kernels import kernel
from tiles.kernels.cpu.numba import loops as _  # noqa: F401

_KEPT_FILE_NBYTES: Final = 64 << 20
"""Resident file pages below this size are not released: a training reads about 40 MB of them. Bytes."""
_STATUS: Final = Path("/proc/self/status")


def load_loops(optimizer: torch.optim.Optimizer) -> None:
    """Load the compiled loops of the update by running each on one element.

    Loading needs 50 MB of the compiler's code for a moment. Before the first values arrive, the session's memory is empty.

    Args:
        optimizer: optimizer of the session.
    """
    value, total = np.zeros(1, np.float32), np.zeros(1, np.float64)
    kernel("sum_squares", "cpu")(value, total)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True, "max_norm": 0.0, "clip": False, "master": False}
        param, grad, first, second = (np.zeros(1, np.float32) for _ in range(4))
        kernel("adam", "cpu")(param, grad, first, second, np.ones(3, np.float32), **options)


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
