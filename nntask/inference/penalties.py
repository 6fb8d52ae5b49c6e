"""Scores of the next token changed by what a text says already: repeated tokens weaker, repeated runs of tokens forbidden.

They are those of transformers' `generate`, in its order: the repetition penalty of CTRL (Keskar et al. 2019, section 4.1), then n-grams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a text may not repeat, or less probably. The prompt is a piece of the text.

    Args:
        repetition: scores of tokens that the text has are divided by it where they are positive, and multiplied where negative; 1 for none.
        no_repeat_ngram: no run of so many tokens comes twice; 0 for any.

    Raises:
        UsageError: a value is out of range.
    """

    repetition: float = 1.0
    no_repeat_ngram: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.repetition < inf:
            raise UsageError(f"repetition must be above 0 and finite, got {self.repetition}; 1 is for no penalty")
        if self.no_repeat_ngram < 0:
            raise UsageError(f"no_repeat_ngram must be at least 0, got {self.no_repeat_ngram}; the nearest legal value is 0")

    def apply(self, scores: Floats, text: Sequence[int]) -> Floats:
        """Scores (V,) of what follows `text`, changed: the same array where nothing is asked for, otherwise another one, in fp32 at least."""
        if self.repetition == 1 and self.no_repeat_ngram == 0:
            return scores
        found = scores.astype(np.promote_types(np.float32, scores.dtype) if scores.dtype.kind == "f" else np.float32)
        known = np.unique(np.asarray(text, np.intp))
        known = known[known < len(found)]  # the last ids of a prompt may lie beyond those that may come
        if self.repetition != 1:
            those = found[known]
            found[known] = np.where(those < 0, those * self.repetition, those / self.repetition)
        if self.no_repeat_ngram:
            found[_followers(text, self.no_repeat_ngram, len(found))] = -np.inf
        return found


NO_PENALTIES: Final = Penalties()


def _followers(text: Sequence[int], size: int, limit: int) -> list[int]:
    """The ids below `limit` that would complete a run of `size` tokens that the text has already."""
    begin = list(text[len(text) + 1 - size :]) if size > 1 else []
    runs = (list(text[start : start + size]) for start in range(len(text) + 1 - size))
    return [run[-1] for run in runs if run[:-1] == begin and run[-1] < limit]


@dataclass(frozen=True, slots=True)
class OutputPenalties:
    """What OpenAI's interface asks for: numbers that are taken from scores of tokens for what a text has said, the prompt left out.

    Args:
        presence: of tokens that it has said.
        frequency: of tokens, for each time that it has said them.
        bias: number that is added to the score of a token, by id.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def apply(self, scores: Floats, said: Sequence[int]) -> Floats:
        """Scores (V,) of what follows `said`, changed, in another array of fp32 at least."""
        found = scores.astype(np.promote_types(np.float32, scores.dtype) if scores.dtype.kind == "f" else np.float32)
        known, counts = np.unique(np.asarray(said, np.intp), return_counts=True)
        found[known] -= self.presence + self.frequency * counts
        for token, number in self.bias.items():
            if token < len(found):
                found[token] += number
        return found
