"""Scores of the next token changed by what a text says already: repeated tokens weaker, repeated runs of tokens forbidden.

They are those of transformers' `generate`, in its order: the repetition penalty of CTRL (Keskar et al. 2019, section 4.1), then n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
