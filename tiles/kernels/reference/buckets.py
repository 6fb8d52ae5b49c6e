"""Buckets of distances for relative position biases (Raffel et al., T5, 2020): one distance each for near keys, ranges of distances for far ones.

A distance is the position of the key minus that of the query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class BucketRun(NamedTuple):
    """Distances [first, end) of one bucket; the outer ends lie far beyond the length of any text."""

    first: int
    end: int
    bucket: int


_FAR = 1 << 30


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rule that assigns distances to buckets.

    Args:
        count: number of buckets, at least 2, and even if `bidirectional`.
        bidirectional: whether later keys have half of the buckets; otherwise they all share the first one.
        max_distance: distance from which on all keys share the last bucket.
    """

    count: int
    bidirectional: bool
    max_distance: int

    def __post_init__(self) -> None:
        exact = (self.count // 2 if self.bidirectional else self.count) // 2
        if exact < 1 or (self.bidirectional and self.count % 2) or self.max_distance <= exact:
            raise ValueError(
                f"half of the buckets are for one distance each, and max_distance must exceed these distances; got {self.count} buckets, "
                f"bidirectional {self.bidirectional}, max_distance {self.max_distance}; use more buckets or a larger max_distance"
            )

    def of(self, distances: Array) -> Array:
        """Return the bucket of each distance, of equal shape, rounded in fp32 as transformers' T5Attention._relative_position_bucket does."""
        half = self.count // 2 if self.bidirectional else self.count
        offset = np.where(distances > 0, half, 0) if self.bidirectional else 0
        far = np.abs(distances) if self.bidirectional else np.maximum(-distances, 0)
        exact = half // 2
        ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(log(self.max_distance / exact))
        steps = (ratio * np.float32(half - exact)).astype(np.int64)
        buckets: Array = offset + np.where(far < exact, far, np.minimum(exact + steps, half - 1))
        return buckets

    def runs(self) -> tuple[BucketRun, ...]:
        """Return the buckets of all distances, in order of distance."""
        return _runs(self)


@lru_cache
def _runs(buckets: Buckets) -> tuple[BucketRun, ...]:
    end = buckets.max_distance + 1
    distances = np.arange(-end, end + 1)
    numbers = buckets.of(distances)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    firsts = [-_FAR, *(int(distance) for distance in distances[starts[1:]])]
    return tuple(BucketRun(first, last, int(numbers[start])) for first, last, start in zip(firsts, [*firsts[1:], _FAR], starts, strict=True))
