"""How long a task will take: a history of measured durations per (codelet, footprint, worker kind).

The first sample is dropped (cold caches, lazy set-up) and the estimate is the median of the latest ones, so one spike moves nothing. Knows
nothing of tasks in flight, memory or time itself: durations are arguments.
"""

from __future__ import annotations

from collections import deque
from typing import Final

KEPT: Final = 32
"""Samples remembered per key."""

Key = tuple[str, int, str]


class History:
    """Measured durations and their medians."""

    def __init__(self) -> None:
        self._samples: dict[Key, deque[float]] = {}
        self._warm: set[Key] = set()

    def add(self, key: Key, seconds: float) -> None:
        """Record a duration; the first of each key is dropped."""
        if key not in self._warm:
            self._warm.add(key)
            return
        self._samples.setdefault(key, deque(maxlen=KEPT)).append(seconds)

    def estimate(self, key: Key) -> float | None:
        """Median duration in seconds, or None without samples."""
        samples = self._samples.get(key)
        if not samples:
            return None
        ordered = sorted(samples)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
