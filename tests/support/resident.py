"""Resident memory of this process, as tests of leaks compare it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import psutil


def least_growth(work: Callable[[], object], rounds: int = 3) -> int:
    """Bytes by which resident memory grew in the round of `work` in which it grew least: a leak grows in each, what is pending at once varies."""
    process = psutil.Process()
    growths = []
    for _ in range(rounds):
        gc.collect()
        before = process.memory_info().rss
        work()
        gc.collect()
        growths.append(process.memory_info().rss - before)
    return min(growths)
