"""Which token follows: a choice from scores.

Chance is a counter: token number i of text number n draws the same uniform number for a seed, on any machine and whatever else is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Diverged
from ..io.finite import first_not_finite
from .penalties import NO_PENALTIES, Penalties


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


def choose(logits: npt.NDArray[np.floating[Any]], how: Sampling, draw: float, text: Sequence[int] = (), penalties: Penalties = NO_PENALTIES) -> int:
    """The next token.

    Args:
        logits: (V,) scores.
        draw: uniform in [0, 1).
        text: that it continues, which `penalties` look at.

    Raises:
        Diverged: a score is not finite.
    """
    check_finite(logits)
    return _drawn(penalties.apply(logits, text), how, draw)


def check_finite(logits: npt.NDArray[np.floating[Any]]) -> None:
    """Check scores as a model gives them.

    Raises:
        Diverged: one is not finite.
    """
    if (bad := first_not_finite(logits)) is not None:
        raise Diverged(
            f"the scores of the next token must be finite, and one is {bad}: weights are not finite, or too large for the element type; "
            "use an earlier checkpoint, or --dtype fp32"
        )


def _drawn(logits: npt.NDArray[np.floating[Any]], how: Sampling, draw: float) -> int:
    """The next token, where scores of minus infinity are of tokens that must not come; of none but those, the first."""
    if how.temperature == 0:
        return int(np.argmax(logits))
    scores = np.asarray(logits, np.float64)
    if np.isneginf(scores.max()):
        return 0
    ids = best_ids(scores, how.top_k)
    if how.top_p < 1:
        ids = ids[np.argsort(-scores[ids], kind="stable")]
    with np.errstate(over="ignore"):  # at a temperature near 0 all but the best are at minus infinity
        weights = np.exp((scores[ids] - scores[ids].max()) / how.temperature)
    mass = np.cumsum(weights / weights.sum())
    if how.top_p < 1:
        mass = mass[: int(np.searchsorted(mass, how.top_p)) + 1]
    where = int(np.searchsorted(mass, draw * mass[-1], side="right"))
    return int(ids[min(where, len(mass) - 1)])


def best_ids(scores: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.intp]:
    """Ids of the `count` best scores (0: of all), ascending; of equal ones the lowest ids."""
    if not 0 < count < len(scores):
        return np.arange(len(scores))
    least = np.partition(scores, -count)[-count]
    better, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([better, equal[: count - len(better)]]))
