"""Which token follows: a choice from scores.

Chance is a counter: token number i of text number n draws the same uniform number for a seed, on any machine and whatever else is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: scores are divided by it; 0 takes the best token always.
        top_k: only the k best tokens; 0 for all.
        top_p: only the best tokens that together have this probability; 1 for all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def draw(self, text: int, number: int) -> float:
        """The uniform number in [0, 1) that chooses token `number` of text `text`, both from 0."""
        return float(np.random.Generator(np.random.PCG64([self.seed, number, text])).random())


def choose(logits: npt.NDArray[np.floating[Any]], how: Sampling, draw: float) -> int:
    """The next token.

    Args:
        logits: (V,) scores.
        draw: uniform in [0, 1).
    """
    if how.temperature == 0:
        return int(np.argmax(logits))
    scores = np.asarray(logits, np.float64)
    order = _best_first(scores, how.top_k)
    weights = np.exp((scores[order] - scores[order[0]]) / how.temperature)
    mass = np.cumsum(weights / weights.sum())
    if how.top_p < 1:
        order = order[: int(np.searchsorted(mass, how.top_p)) + 1]
        mass = mass[: len(order)]
    where = int(np.searchsorted(mass, draw * mass[-1], side="right"))
    return int(order[min(where, len(order) - 1)])


def _best_first(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Ids of the `count` best scores (0: of all), the best first; of equal ones the lowest id."""
    if not 0 < count < len(scores):
        return np.argsort(-scores, kind="stable")
    candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]
