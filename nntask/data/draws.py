"""Counter-based random numbers for data: each depends only on seed, epoch, sequence, purpose and position.

The order of reading, the number of nodes and resuming do not change any number.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, the increment of splitmix64."""


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, epoch: int, sequence: int, purpose: int, count: int) -> npt.NDArray[np.float64]:
    """Return (count,) random numbers in [0, 1), one for each position of a sequence.

    Args:
        seed: seed of the run.
        epoch: epoch of the data; -1 for validation.
        sequence: number of the sequence.
        purpose: number of the decision that they are used for; different purposes have independent numbers.
        count: number of positions.
    """
    key = np.zeros(1, np.uint64)
    for word in (seed, epoch + 1, sequence, purpose):
        key = mixed(key + _STRIDE + np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    words = mixed(key + _STRIDE * np.arange(1, count + 1, dtype=np.uint64)) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53
