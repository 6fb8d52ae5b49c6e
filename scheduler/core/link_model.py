"""Time of copies over a link: latency + bytes / bandwidth, fitted to measured copies.

The fit uses medians (Theil and Sen), so that a few slow copies do not change it. Times of small copies vary most, so the bandwidth is fitted to large
ones if several are known. Durations are arguments: this module knows neither clocks nor files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

KEPT_COPIES: Final = 16
"""Number of large copies remembered per link, and of small ones."""

LARGE: Final = 1 << 16
"""Smallest copy, in bytes, that is used for the bandwidth. The time of a smaller copy is mostly the cost of starting it."""

MOST_LATENCY: Final = 0.75
"""Largest fraction of a large copy's time that latency explains; bandwidth is at most 1 / (1 - MOST_LATENCY) times the best measured rate."""

FEW_PAIRS: Final = 8
"""Number of pairs of large copies below which their median is unreliable."""

REFIT: Final = 8
"""Number of new copies after which a link is fitted again; a link with few copies is fitted sooner."""

MEMORY_LINK: Final = (2e-5, 5e9)
"""Latency in seconds and bandwidth in bytes per second of a copy between memories, until copies have been measured."""

DISK_LINK: Final = (1e-4, 4e8)
"""Latency in seconds and bandwidth in bytes per second of one of the concurrent requests of a disk, until copies have been measured."""


class LinkModel:
    """Latency + bytes / bandwidth of one link.

    Args:
        latency: seconds, used until copies have been measured.
        bandwidth: bytes per second, used until copies of at least `LARGE` bytes have been measured.
        is_given: whether the two values are exact, so that measured copies are ignored: for simulated links and imaginary machines.
    """

    def __init__(self, latency: float = MEMORY_LINK[0], bandwidth: float = MEMORY_LINK[1], *, is_given: bool = False) -> None:
        self.latency = latency
        self.bandwidth = bandwidth
        self.is_given = is_given
        self._small: deque[tuple[int, float]] = deque(maxlen=KEPT_COPIES)
        self._large: deque[tuple[int, float]] = deque(maxlen=KEPT_COPIES)
        self._num_new = 0

    @property
    def samples(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of the latest copies, small ones first."""
        return [*self._small, *self._large]

    def add(self, nbytes: int, seconds: float) -> None:
        """Record the duration of a copy, without the time it waited for the link."""
        if nbytes <= 0 or seconds <= 0.0 or self.is_given:
            return
        self.remember([(nbytes, seconds)])
        self._num_new += 1
        if self._num_new >= min(REFIT, (len(self._small) + len(self._large) + 1) // 2):
            self.fit()

    def remember(self, samples: Iterable[tuple[int, float]]) -> None:
        """Add (bytes, seconds) of copies without a new fit."""
        for nbytes, seconds in samples:
            (self._small if nbytes < LARGE else self._large).append((nbytes, seconds))

    def fit(self) -> None:
        """Fit latency and bandwidth to the samples."""
        self._num_new = 0
        slope = self._seconds_per_byte() if self._large else 1.0 / self.bandwidth
        if samples := self.samples:
            self.latency = max(0.0, median([seconds - nbytes * slope for nbytes, seconds in samples]))
        self.bandwidth = 1.0 / slope

    def _seconds_per_byte(self) -> float:
        """Return 1 / bandwidth, given at least one large copy.

        It is a median over pairs of copies, of which one is at least twice as large as the other: pairs of large copies if there are several, else
        pairs of a large copy and any other. The result is at least the smallest seconds per byte of a large copy after its latency, which is
        at most the time of a fast small copy.
        """
        slopes = _slopes(self._large, self._large)
        if len(slopes) < FEW_PAIRS:  # one slow copy may spoil all of them
            slopes += _slopes(self._large, self._small)
        slope = median(slopes) if slopes else 0.0
        if slope <= 0.0:  # the sizes are too similar to separate latency from bandwidth
            return median([seconds / nbytes for nbytes, seconds in self._large])
        latency = max(0.0, median([seconds - nbytes * slope for nbytes, seconds in self._large]))
        if self._small:
            latency = min(latency, sorted(seconds for _, seconds in self._small)[(len(self._small) - 1) // 4])  # slow ones are noise
        return max(slope, min((seconds - min(latency, MOST_LATENCY * seconds)) / nbytes for nbytes, seconds in self._large))

    def seconds(self, nbytes: int) -> float:
        """Return the seconds to move `nbytes` while nothing else uses the link."""
        return self.latency + nbytes / self.bandwidth


def _slopes(larger: Iterable[tuple[int, float]], others: Iterable[tuple[int, float]]) -> list[float]:
    """Return seconds per byte, of the difference between each larger copy and each other copy of at most half its size."""
    return [(t - s) / (b - a) for b, t in larger for a, s in others if b >= 2 * a]


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle values; `values` may not be empty."""
    ordered = sorted(values)
    middle = len(ordered) >> 1
    return ordered[middle] if len(ordered) & 1 else (ordered[middle - 1] + ordered[middle]) / 2
