"""Beam search: the most probable continuation of a prompt that a search with N texts at a time can find.

The rules are those of transformers' `generate` (version 5) without sampling, in fp32, so the texts are equal to those of transformers.

A step scores the next token of each of a prompt's N running texts, its beams. Candidates are ranked by the sum of the logarithms of their
probabilities. Of the best candidates, those that end become hypotheses, ranked by sum / length ** length_penalty; the best N others run on. A beam
may continue as several beams or as none, so each step returns the row whose past every new beam continues.

The search knows no model: it takes a function that scores rows of ids. The ids are the decoder's input: a prompt, or the token with which a decoder
begins. Lengths count from the end of that input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .sampling import NO_PENALTIES, Penalties, best_ids, check_finite

Scores = npt.NDArray[np.floating[Any]]
Rows = npt.NDArray[np.int32]
EarlyStopping = Literal["false", "true", "never"]

STEEPEST: Final = 5
"""Largest length penalty: powers of lengths up to this one are numbers in fp32."""
_NEVER: Final = np.float32(-1e9)
"""Score of a forbidden candidate. The number is transformers', since sums with it are compared."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Settings of a beam search.

    Args:
        num_beams: number of texts that run side by side for each prompt.
        length_penalty: exponent of the length in sum / length ** length_penalty: above 0 longer texts gain, below 0 shorter ones.
        early_stopping: rule that ends a prompt's search, unless no beam can go on: "true" as soon as there are `num_beams` hypotheses; "false"
            if the best beam, ended now, would be no better than the worst hypothesis; "never" if no length could make it better.

    Raises:
        UsageError: a value is out of range.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise UsageError(f"num_beams must be at least 1, got {self.num_beams}", "the nearest legal value is 1")
        if not -STEEPEST <= self.length_penalty <= STEEPEST:
            near = -STEEPEST if self.length_penalty < 0 else STEEPEST
            raise UsageError(
                f"length_penalty must be from -{STEEPEST} to {STEEPEST}, got {self.length_penalty}", f"the nearest legal value is {near}"
            )
        if self.early_stopping not in ("false", "true", "never"):
            raise UsageError(f'early_stopping must be "false", "true" or "never", got {self.early_stopping!r}', "choose one of them")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Text found by a search.

    Args:
        tokens: new tokens, without the token that ended the text.
        score: sum of the logarithms of the probabilities, with penalties, divided by length ** length_penalty.
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
    """Search for the best texts of several prompts side by side; the prompts are independent of each other.

    Args:
        prompts: B lists of ids, at least one id each.
        limits: maximum number of new tokens of each text, at least 1; a token that ends a text counts.
        scorer: function called once with the B*N rows of ids, N = `num_beams` neighbours a prompt; the search changes these lists. It returns a
            function rows (B*N,) -> (B*N, V) of scores of the next token of each row at the time of the call. Row i continues row rows[i] of the
            call before by one token. Rows stay with their prompt; the rows of a prompt whose search has ended do not move.
        vocab_size: number of ids that may be chosen; ids beyond it keep their share of the probability.
        stop: tokens that end a text.

    Returns:
        Hypotheses of each prompt, best first, at least one and at most `num_beams`.

    Raises:
        Diverged: scores are not finite.
    """
    texts = [list(prompt) for prompt in prompts for _ in range(how.num_beams)]
    beams = [_Beams(texts, number * how.num_beams, limit, how, stop) for number, limit in enumerate(limits)]
    scores = scorer(texts)
    rows = np.arange(len(texts), dtype=np.int32)
    while not all(each.is_done for each in beams):
        step_scores = scores(rows)
        rows = np.arange(len(texts), dtype=np.int32)
        for each in beams:
            if not each.is_done:
                rows[each.rows] = each.step(step_scores[each.rows], vocab_size, penalties)
    return [each.hypotheses() for each in beams]


class _Beams:
    """Beams of one prompt.

    Args:
        texts: ids of all rows; the search updates those of its own rows.
        first: index of the prompt's first row.
        limit: maximum number of new tokens.
    """

    def __init__(self, texts: list[list[int]], first: int, limit: int, how: BeamSearch, stop: Collection[int]) -> None:
        self.rows = slice(first, first + how.num_beams)
        self.is_done = False
        self._texts, self._how, self._limit = texts, how, limit
        self._stop = np.array(sorted(set(stop)), np.intp)
        self._num_given, self._length = len(texts[first]), 0
        self._scores = np.full(how.num_beams, _NEVER)  # all beams are equal at first, so only one of them counts
        self._scores[0] = 0
        self._ended: list[tuple[np.float32, tuple[int, ...]]] = []

    def step(self, logits: Scores, vocab_size: int | None, penalties: Penalties) -> Rows:
        """Extend every beam by a token and return the rows (N,) that the new beams continue.

        Args:
            logits: scores (N, V) of the next token of each beam.
            vocab_size: number of ids that may be chosen, None for V.
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
        """Return whether a beam may still become a better hypothesis than the worst one."""
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
        """Return the ended texts, best first. If penalties forbade every end, return the best beam."""
        ended = self._ended or [(self._scores[0], tuple(self._texts[self.rows.start]))]
        return [Hypothesis(tuple(self._new(text)), float(score)) for score, text in ended]

    def _new(self, text: Sequence[int]) -> Sequence[int]:
        new = text[self._num_given :]
        return new[:-1] if new and new[-1] in self._stop else new


def _log_softmax(scores: Scores, limit: int | None, penalties: Penalties, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the log-probabilities of the first `limit` ids among all V as the next token of a text, with penalties.

    Raises:
        Diverged: a score is not finite.
    """
    check_finite(scores)
    shifted = scores.astype(np.float32)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return np.asarray(penalties.apply(shifted[:limit], text), np.float32)
