"""Beam search: of all texts that continue a prompt the most probable, as far as N texts at a time can find it.

The search and its rules are those of transformers' `generate` (version 5) without sampling, in fp32, so that its texts are those of transformers.
A step scores what follows each of a prompt's N running texts, its beams. Of the candidates with the best sums of logarithms of probabilities, those
that end are kept as hypotheses, ranked by sum / length ** length_penalty, and the best N others run on. One beam may go on as several, and another
as none; so with each step the search says which beam's past every new beam has.

The search knows no model: it takes a function that scores rows of ids. Those ids are what a decoder has been given, a prompt or the token with which
a decoder begins, and lengths count from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .penalties import NO_PENALTIES, Penalties
from .sampling import best_ids, check_finite

Scores = npt.NDArray[np.floating[Any]]
Rows = npt.NDArray[np.int32]
EarlyStopping = Literal["false", "true", "never"]

STEEPEST: Final = 5
"""Largest length penalty: powers of lengths up to this one are numbers in fp32."""
_NEVER: Final = np.float32(-1e9)
"""The score of what must not be chosen; transformers' number, since sums with it are compared."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """How the most probable text is searched for.

    Args:
        num_beams: texts that run side by side for each prompt.
        length_penalty: hypotheses rank by sum / length ** length_penalty: above 0 longer texts gain, below 0 shorter ones.
        early_stopping: when a prompt's search ends, if not because no beam can go on: "true" as soon as there are `num_beams` hypotheses; "false"
            when the best beam would be no better than the worst of them if it ended now; "never" when it could not become better at any length.

    Raises:
        UsageError: a value is out of range.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise UsageError(f"num_beams must be at least 1, got {self.num_beams}; the nearest legal value is 1")
        if not -STEEPEST <= self.length_penalty <= STEEPEST:
            near = -STEEPEST if self.length_penalty < 0 else STEEPEST
            raise UsageError(f"length_penalty must be from -{STEEPEST} to {STEEPEST}, got {self.length_penalty}; the nearest legal value is {near}")
        if self.early_stopping not in ("false", "true", "never"):
            raise UsageError(f'early_stopping must be "false", "true" or "never", got {self.early_stopping!r}; choose one of them')


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that a search has found.

    Args:
        tokens: the new ones, without the token that ended it.
        score: sum of the logarithms of probabilities, penalties included, by the length to the power of the length penalty.
    """

    tokens: tuple[int, ...]
    score: float


def search(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    how: BeamSearch,
    scorer: Callable[[list[list[int]]], Callable[[Rows], Scores]],
    *,
    vocab_size: int | None = None,
    stop: Collection[int] = (),
    penalties: Penalties = NO_PENALTIES,
) -> list[list[Hypothesis]]:
    """Search for the best texts of several prompts side by side; none depends on the others.

    Args:
        prompts: B, ids that texts begin with, at least one each.
        limits: most new tokens of each text, at least 1; a token that ends a text counts.
        scorer: called once with the B*N rows of ids, `num_beams` neighbours a prompt. The search changes these lists. It gives a function
            rows (B*N,) -> (B*N, V), scores of what follows each row as it is when called; row i is row rows[i] of the call before and one token
            more. Rows stay with their prompt, and those of a prompt whose search has ended are where they were.
        vocab_size: ids that may come; the others have their share of probability.
        stop: tokens that end a text.

    Returns:
        For each prompt its hypotheses, at most `num_beams`, the best first; at least one.

    Raises:
        Diverged: scores are not finite.
    """
    texts = [list(prompt) for prompt in prompts for _ in range(how.num_beams)]
    beams = [_Beams(texts, number * how.num_beams, limit, how, stop) for number, limit in enumerate(limits)]
    scores = scorer(texts)
    rows = np.arange(len(texts), dtype=np.int32)
    while not all(each.is_done for each in beams):
        found = scores(rows)
        rows = np.arange(len(texts), dtype=np.int32)
        for each in beams:
            if not each.is_done:
                rows[each.rows] = each.step(found[each.rows], vocab_size, penalties)
    return [each.hypotheses() for each in beams]


class _Beams:
    """The beams of one prompt.

    Args:
        texts: of all rows; the beams' own are kept up.
        first: number of their first row.
        limit: most new tokens.
    """

    def __init__(self, texts: list[list[int]], first: int, limit: int, how: BeamSearch, stop: Collection[int]) -> None:
        self.rows = slice(first, first + how.num_beams)
        self.is_done = False
        self._texts, self._how, self._limit = texts, how, limit
        self._stop = np.array(sorted(set(stop)), np.intp)
        self._num_given, self._length = len(texts[first]), 0
        self._scores = np.full(how.num_beams, _NEVER)  # the beams are equal at first, and only one of them counts
        self._scores[0] = 0
        self._ended: list[tuple[np.float32, tuple[int, ...]]] = []

    def step(self, logits: Scores, vocab_size: int | None, penalties: Penalties) -> Rows:
        """Let every beam go on by a token, from scores (N, V) of what follows it; returns the rows (N,) that the new beams come from.

        Args:
            vocab_size: ids that may come, None for V.
        """
        first, num_beams, texts = self.rows.start, self._how.num_beams, self._texts[self.rows]
        logarithms = np.stack([_log_softmax(row, vocab_size, penalties, text) for row, text in zip(logits, texts, strict=True)])
        all_sums = (logarithms + self._scores[:, None]).reshape(-1)  # (N, V) + (N, 1) -> (N V,)
        chosen = best_ids(all_sums, max(2, 1 + len(self._stop)) * num_beams)
        chosen = chosen[np.argsort(-all_sums[chosen], kind="stable")]
        beam, token = np.divmod(chosen, logarithms.shape[1])
        sums = all_sums[chosen]
        self._length += 1
        ends = np.isin(token, self._stop) | (self._length >= self._limit)
        scores = sums[:num_beams] / self._power(self._length)
        for each in np.flatnonzero(ends[:num_beams] & (scores > _NEVER)):  # of the best N only
            self._ended.append((scores[each], (*texts[beam[each]], int(token[each]))))
        self._ended = sorted(self._ended, key=lambda ended: -ended[0])[:num_beams]
        running = np.where(ends, sums + _NEVER, sums)
        going = np.argsort(-running, kind="stable")[:num_beams]
        self._texts[self.rows] = [[*texts[beam[each]], int(token[each])] for each in going]
        self._scores = running[going]
        self.is_done = bool(ends.all()) or not self._can_improve()
        return np.asarray(first + beam[going], np.int32)

    def _can_improve(self) -> bool:
        """Whether a beam may still become a better hypothesis than the worst one."""
        if len(self._ended) < self._how.num_beams:
            return True
        if self._how.early_stopping == "true":
            return False
        far = self._how.early_stopping == "never" and self._how.length_penalty > 0
        best = self._scores[0] / self._power(self._limit if far else self._length)
        return bool(best > self._ended[-1][0])

    def _power(self, length: int) -> np.float32:
        return np.float32(length**self._how.length_penalty)

    def hypotheses(self) -> list[Hypothesis]:
        """What has ended, the best first; where penalties have forbidden every end, the best beam."""
        ended = self._ended or [(self._scores[0], tuple(self._texts[self.rows.start]))]
        return [Hypothesis(tuple(self._new(text)), float(score)) for score, text in ended]

    def _new(self, text: Sequence[int]) -> Sequence[int]:
        new = text[self._num_given :]
        return new[:-1] if new and new[-1] in self._stop else new


def _log_softmax(scores: Scores, limit: int | None, penalties: Penalties, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logarithms of the probabilities among all V of the first `limit` ids to follow a text, with penalties.

    Raises:
        Diverged: a score is not finite.
    """
    check_finite(scores)
    shifted = scores.astype(np.float32)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return np.asarray(penalties.apply(shifted[:limit], text), np.float32)
