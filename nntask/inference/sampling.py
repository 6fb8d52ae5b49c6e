"""Choice of the next token from scores.

Random numbers come from a counter: token number i of text number n draws the same uniform number for a seed, on any machine and next to any
other texts.
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
    """Rule by which the next token is chosen.

    Args:
        temperature: divisor of the scores; 0 always takes the best token.
        top_k: number of best tokens to choose from; 0 for all.
        top_p: total probability of the best tokens to choose from; 1 for all.
        seed: seed of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def draw(self, text: int, number: int) -> float:
        """Return the uniform number in [0, 1) that chooses token `number` of text `text`, both counted from 0."""
        return float(np.random.Generator(np.random.PCG64([self.seed, number, text])).random())


def choose(logits: npt.NDArray[np.floating[Any]], how: Sampling, draw: float, text: Sequence[int] = (), penalties: Penalties = NO_PENALTIES) -> int:
    """Choose the next token.

    Args:
        logits: (V,) scores.
        how: rule of the choice.
        draw: uniform number in [0, 1).
        text: ids of the text so far, on which `penalties` depend.
        penalties: penalties for repetition.

    Raises:
        Diverged: a score is not finite.
    """
    check_finite(logits)
    return _drawn(penalties.apply(logits, text), how, draw)


def check_finite(logits: npt.NDArray[np.floating[Any]]) -> None:
    """Check that the scores of a model are finite.

    Raises:
        Diverged: one is not finite.
    """
    if (bad := first_not_finite(logits)) is not None:
        raise Diverged(
            f"the scores of the next token must be finite, and one is {bad}: weights are not finite, or too large for the element type; "
            "use an earlier checkpoint, or --dtype fp32"
        )


def _drawn(logits: npt.NDArray[np.floating[Any]], how: Sampling, draw: float) -> int:
    """Choose the next token. Tokens with a score of minus infinity are forbidden; if all are forbidden, the first one is chosen."""
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
    """Return the ids of the `count` best scores, ascending; 0 for all. Among equal scores, the lowest ids are taken."""
    if not 0 < count < len(scores):
        return np.arange(len(scores))
    least = np.partition(scores, -count)[-count]
    better, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([better, equal[: count - len(better)]]))
