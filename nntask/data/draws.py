"""Random numbers of data: each is a function of what it is for, so no order of reading, no node and no continuation changes one."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, the step of splitmix64."""


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, epoch: int, sequence: int, purpose: int, count: int) -> npt.NDArray[np.float64]:
    """(count,) numbers in [0, 1), of the positions of a sequence.

    Args:
        seed: of the run.
        epoch: of the data; -1 for validation.
        sequence: its number.
        purpose: what they decide; others are independent of them.
        count: positions.
    """
    key = np.zeros(1, np.uint64)
    for word in (seed, epoch + 1, sequence, purpose):
        key = mixed(key + _STRIDE + np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    words = mixed(key + _STRIDE * np.arange(1, count + 1, dtype=np.uint64)) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53
