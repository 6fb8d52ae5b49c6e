"""Choice of the next token from scores, and penalties for repetition.

Random numbers come from a counter: token number i of text number n draws the same uniform number for a seed, on any machine and next to any
other texts.

The rules of penalties and their order are those of transformers' `generate`: the repetition penalty of CTRL (Keskar et al. 2019, section 4.1), then
n-grams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import Diverged, UsageError
from ..io.finite import first_not_finite

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties for repeated tokens and runs of tokens of a text, including its prompt.

    Args:
        repetition: divisor of the positive scores, and factor of the negative scores, of tokens that the text contains; 1 for no penalty.
        no_repeat_ngram: length of the runs of tokens that may occur only once; 0 for no rule.

    Raises:
        UsageError: a value is out of range.
    """

    repetition: float = 1.0
    no_repeat_ngram: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.repetition < inf:
            raise UsageError(f"repetition must be above 0 and finite, got {self.repetition}", "1 is for no penalty")
        if self.no_repeat_ngram < 0:
            raise UsageError(f"no_repeat_ngram must be at least 0, got {self.no_repeat_ngram}", "the nearest legal value is 0")

    def apply(self, scores: Floats, text: Sequence[int]) -> Floats:
        """Return the scores (V,) of the next token of `text` with penalties.

        The result is the same array if no penalty is set, otherwise a new one of at least fp32.
        """
        if self.repetition == 1 and self.no_repeat_ngram == 0:
            return scores
        penalised = _widened(scores)
        known = np.unique(np.asarray(text, np.intp))
        known = known[known < len(penalised)]  # a prompt may contain ids that the model may not choose
        if self.repetition != 1:
            those = penalised[known]
            penalised[known] = np.where(those < 0, those * self.repetition, those / self.repetition)
        if self.no_repeat_ngram:
            penalised[_followers(text, self.no_repeat_ngram, len(penalised))] = -np.inf
        return penalised


NO_PENALTIES: Final = Penalties()


def _widened(scores: Floats) -> Floats:
    """Return a copy in at least fp32."""
    return scores.astype(np.promote_types(np.float32, scores.dtype) if scores.dtype.kind == "f" else np.float32)


def _followers(text: Sequence[int], size: int, limit: int) -> list[int]:
    """Return the ids below `limit` that would repeat a run of `size` tokens of the text."""
    begin = list(text[len(text) + 1 - size :]) if size > 1 else []
    runs = (list(text[start : start + size]) for start in range(len(text) + 1 - size))
    return [run[-1] for run in runs if run[:-1] == begin and run[-1] < limit]


@dataclass(frozen=True, slots=True)
class OutputPenalties:
    """Penalties of OpenAI's interface, subtracted from the scores of tokens of the output; the prompt does not count.

    Args:
        presence: penalty of a token that occurs in the output.
        frequency: penalty of a token for each time that it occurs in the output.
        bias: number added to the score of a token, by id.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def apply(self, scores: Floats, said: Sequence[int]) -> Floats:
        """Return the scores (V,) of the token after the output `said` with penalties, in a new array of at least fp32."""
        found = _widened(scores)
        known, counts = np.unique(np.asarray(said, np.intp), return_counts=True)
        found[known] -= self.presence + self.frequency * counts
        for token, number in self.bias.items():
            if token < len(found):
                found[token] += number
        return found


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


def choose(logits: Floats, how: Sampling, draw: float, text: Sequence[int] = (), penalties: Penalties = NO_PENALTIES) -> int:
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


def check_finite(logits: Floats) -> None:
    """Check that the scores of a model are finite.

    Raises:
        Diverged: one is not finite.
    """
    if (bad := first_not_finite(logits)) is not None:
        raise Diverged(
            f"the scores of the next token must be finite, and one is {bad}: weights are not finite, or too large for the element type",
            "use an earlier checkpoint, or --dtype fp32",
        )


def _drawn(logits: Floats, how: Sampling, draw: float) -> int:
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


def best_ids(scores: Floats, count: int) -> npt.NDArray[np.intp]:
    """Return the ids of the `count` best scores, ascending; 0 for all. Among equal scores, the lowest ids are taken."""
    if not 0 < count < len(scores):
        return np.arange(len(scores))
    least = np.partition(scores, -count)[-count]
    better, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([better, equal[: count - len(better)]]))
