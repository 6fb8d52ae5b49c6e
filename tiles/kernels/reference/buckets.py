"""Buckets of distances, to each of which attention may add a number of its own (Raffel et al., T5, 2020): near ones alone, far ones together.

A distance is the position of the key less that of the query.
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
    """Distances [first, end) of one bucket; the outer ends are far beyond any text."""

    first: int
    end: int
    bucket: int


_FAR = 1 << 30


@dataclass(frozen=True, slots=True)
class Buckets:
    """How distances are put into buckets.

    Args:
        count: buckets, two at least, and an even number of them where `bidirectional`.
        bidirectional: later keys have half of the buckets; otherwise all of them have the first one.
        max_distance: from here on all distances have the last bucket.
    """

    count: int
    bidirectional: bool
    max_distance: int

    def __post_init__(self) -> None:
        exact = (self.count // 2 if self.bidirectional else self.count) // 2
        if exact < 1 or (self.bidirectional and self.count % 2) or self.max_distance <= exact:
            raise ValueError(
                f"half of the buckets are for single distances and max_distance lies beyond these, got {self.count} buckets, "
                f"bidirectional {self.bidirectional}, max_distance {self.max_distance}; take more buckets or a larger max_distance"
            )

    def of(self, distances: Array) -> Array:
        """The bucket of each distance, of equal shape; rounded as transformers' T5Attention._relative_position_bucket rounds, in fp32."""
        half = self.count // 2 if self.bidirectional else self.count
        offset = np.where(distances > 0, half, 0) if self.bidirectional else 0
        far = np.abs(distances) if self.bidirectional else np.maximum(-distances, 0)
        exact = half // 2
        ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(log(self.max_distance / exact))
        steps = (ratio * np.float32(half - exact)).astype(np.int64)
        found: Array = offset + np.where(far < exact, far, np.minimum(exact + steps, half - 1))
        return found

    def runs(self) -> tuple[BucketRun, ...]:
        """All distances in order."""
        return _runs(self)


@lru_cache
def _runs(buckets: Buckets) -> tuple[BucketRun, ...]:
    end = buckets.max_distance + 1
    distances = np.arange(-end, end + 1)
    found = buckets.of(distances)
    starts = np.flatnonzero(np.diff(found, prepend=-1))
    firsts = [-_FAR, *(int(distance) for distance in distances[starts[1:]])]
    return tuple(BucketRun(first, last, int(found[at])) for first, last, at in zip(firsts, [*firsts[1:], _FAR], starts, strict=True))
