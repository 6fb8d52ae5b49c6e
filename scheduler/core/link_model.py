"""Time of copies over a link: latency + bytes / bandwidth, fitted to measured copies by medians (Theil and Sen), so that a few slow copies change
nothing. Small copies, whose times vary most, say nothing of the bandwidth while several large ones are known. Durations come in as arguments; nothing
here knows time or files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

KEPT_COPIES: Final = 16
"""Copies remembered per link, and as many small ones."""

LARGE: Final = 1 << 16
"""Copies of fewer bytes take what it costs to start them: they say nothing of a link's bandwidth."""

MOST_LATENCY: Final = 0.75
"""Largest share of a large copy's time that latency explains; bandwidth is at most 1 / (1 - MOST_LATENCY) times the best measured rate."""

FEW_PAIRS: Final = 8
"""Pairs of large copies that are too few for a median."""

REFIT: Final = 8
"""A link is fitted anew after so many copies, sooner while it has few."""

MEMORY_LINK: Final = (2e-5, 5e9)
"""Seconds and bytes per second of a copy between memories, until one has been measured."""

DISK_LINK: Final = (1e-4, 4e8)
"""The same of one of the requests in flight of a disk."""


class LinkModel:
    """Latency + bytes / bandwidth of one link.

    Args:
        latency: seconds, until copies have been measured.
        bandwidth: bytes per second, until copies of at least `LARGE` bytes have been measured.
        is_given: whether that is how the link is, whatever copies take: of simulated links and imaginary machines.
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
        """Record the time a copy took, waiting for the link not included."""
        if nbytes <= 0 or seconds <= 0.0 or self.is_given:
            return
        self.remember([(nbytes, seconds)])
        self._num_new += 1
        if self._num_new >= min(REFIT, (len(self._small) + len(self._large) + 1) // 2):
            self.fit()

    def remember(self, samples: Iterable[tuple[int, float]]) -> None:
        """Take note of (bytes, seconds) of copies, without a fit."""
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
        """1 / bandwidth, from at least one large copy.

        It is a median over pairs of copies one of which is at least twice the other: of large ones if there are several such pairs, else of a large
        one and any other. It is at least what the best large copy leaves after the latency, which no small copy exceeds.
        """
        slopes = _slopes(self._large, self._large)
        if len(slopes) < FEW_PAIRS:  # one slow copy may spoil all of them
            slopes += _slopes(self._large, self._small)
        slope = median(slopes) if slopes else 0.0
        if slope <= 0.0:  # sizes too much alike to tell latency from bandwidth
            return median([seconds / nbytes for nbytes, seconds in self._large])
        latency = max(0.0, median([seconds - nbytes * slope for nbytes, seconds in self._large]))
        if self._small:
            latency = min(latency, sorted(seconds for _, seconds in self._small)[(len(self._small) - 1) // 4])  # slow ones are noise
        return max(slope, min((seconds - min(latency, MOST_LATENCY * seconds)) / nbytes for nbytes, seconds in self._large))

    def seconds(self, nbytes: int) -> float:
        """Seconds to move so many bytes while nothing else uses the link."""
        return self.latency + nbytes / self.bandwidth


def _slopes(larger: Iterable[tuple[int, float]], others: Iterable[tuple[int, float]]) -> list[float]:
    """Seconds per byte of the differences between copies and those of at most half their size."""
    return [(t - s) / (b - a) for b, t in larger for a, s in others if b >= 2 * a]


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two in the middle; there must be one."""
    ordered = sorted(values)
    middle = len(ordered) >> 1
    return ordered[middle] if len(ordered) & 1 else (ordered[middle - 1] + ordered[middle]) / 2
