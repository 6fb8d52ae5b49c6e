"""Span corruption of T5 (Raffel et al., 2020, section 3.1.4): spans of a text are replaced by sentinels, and the output is the hidden spans.

A sequence is divided into spans that alternately stay and are hidden, beginning with one that stays. The input has the spans that stay, each followed
by a sentinel. The output has each sentinel, followed by the span that it hides. Both end with the end-of-text id. The first sentinel has the largest
id, and each next one the id below. The lengths of input and output depend only on the length of the text, so they are equal for all sequences.
Letters: L tokens of text, S of the input, T of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .draws import uniforms
from .known_ids import check_known
from .objectives import IGNORED, Objective
from .sampler import Windows
from .token_file import TokenFile
from .tokenizer import BpeTokenizer, Tokenizer

MEAN_SPAN: Final = 3.0
NUM_SENTINELS: Final = 100
"""Number of ids that a tokenizer trained for span corruption reserves for sentinels, as in T5."""
_HIDDEN, _SHOWN = 3, 4
_FIRST: Final = "<extra_id_0>"
_SECOND: Final = "<extra_id_1>"


@dataclass(frozen=True, slots=True)
class SpanSizes:
    """Sizes of a corrupted sequence.

    Args:
        text: number of tokens of the text, L.
        hidden: number of these tokens that are hidden.
        spans: number of hidden spans.
    """

    text: int
    hidden: int
    spans: int

    @property
    def input(self) -> int:
        """Number of tokens of the input, S, with the end-of-text id."""
        return self.text - self.hidden + self.spans + 1

    @property
    def output(self) -> int:
        """Number of tokens of the output, T, with the end-of-text id."""
        return self.hidden + self.spans + 1


def sizes_of(text: int, probability: float) -> SpanSizes:
    """Return the sizes for a text of L tokens, a share `probability` of which is hidden in spans of `MEAN_SPAN` tokens on average."""
    hidden = min(max(round(text * probability), 1), text - 1)
    return SpanSizes(text, hidden, min(max(round(hidden / MEAN_SPAN), 1), text - hidden))


def longest(length: int, target_length: int | None, probability: float) -> SpanSizes | None:
    """Return the sizes of the longest text that fits into S and T; None if a text of two tokens does not fit.

    Args:
        length: largest number of tokens of the input, S.
        target_length: largest number of tokens of the output, T; None for no limit.
        probability: share of the text's tokens that are hidden.
    """
    best, low, high = None, 2, 2 * length + 2 * int(length / (1 - probability))
    while low <= high:
        middle = (low + high) // 2
        sizes = sizes_of(middle, probability)
        if sizes.input <= length and (target_length is None or sizes.output <= target_length):
            best, low = sizes, middle + 1
        else:
            high = middle - 1
    return best


def first_sentinel(tokenizer: Tokenizer | None, vocab_size: int, count: int) -> int:
    """Return the id of the first of `count` sentinels: the tokenizer's own, or else the last id of the model's vocabulary.

    Raises:
        DataError: the tokenizer has too few sentinels, or uses the last ids of the vocabulary for other tokens.
    """
    inner = tokenizer.inner if isinstance(tokenizer, BpeTokenizer) else None
    own = None if inner is None else inner.token_to_id(_FIRST)
    if tokenizer is not None and inner is not None and own is not None:
        check_known(np.array([own]), tokenizer, vocab_size, "every corrupted text")
        is_down = count == 1 or inner.token_to_id(_SECOND) == own - 1
        if is_down and inner.token_to_id(f"<extra_id_{count - 1}>") is not None:
            return int(own)
        raise DataError(
            f"the tokenizer must have sentinels {_FIRST} to <extra_id_{count - 1}>, each with an id one below that of the sentinel before",
            "lower --seq-len",
        )
    taken = 0 if tokenizer is None else tokenizer.vocab_size
    if taken + count > vocab_size:
        raise DataError(
            f"corrupted spans take {count} sentinels, the last ids of the model's vocabulary of {vocab_size}, of which the tokenizer uses {taken}",
            "raise vocab_size in the config, or lower --seq-len",
        )
    return vocab_size - 1


class CorruptedSpans(Windows):
    """Sequences of a token file with hidden spans; sequence i is tokens [iL, (i+1)L).

    Args:
        file: file of the tokens.
        objective: training objective, with S and T.
        tokenizer: tokenizer with the sentinels and the end-of-text id; None if it is unknown, which leaves out the end-of-text id.
        vocab_size: number of ids in the model's vocabulary.
        seed: seed of the run.

    Raises:
        DataError: the tokenizer leaves no ids for sentinels.
    """

    names: Sequence[str] = ("tokens", "documents", "decoder_tokens", "targets", "factor")
    _num_ahead = 0

    def __init__(self, file: TokenFile, objective: Objective, tokenizer: Tokenizer | None, vocab_size: int, seed: int) -> None:
        sizes = longest(objective.length, objective.target_length, objective.mask_probability)
        assert sizes is not None  # `config.objective` has checked it
        assert objective.target_length is not None  # `config.objective` has set it
        super().__init__(file, sizes.text)
        self.length = objective.length
        self._sizes, self._objective, self._seed = sizes, objective, seed
        self._first = first_sentinel(tokenizer, vocab_size, sizes.spans)
        self._end = [] if tokenizer is None else [tokenizer.end_of_text]

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return tokens and documents (n, S), decoder_tokens and targets (n, T), int32 each."""
        rows = zip(self._windows(numbers), numbers, strict=True)
        return rows_of_pairs([self.corrupted(ids, epoch, int(number)) for ids, number in rows], self._objective)

    def corrupted(self, ids: npt.NDArray[np.int32], epoch: int, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the input (S,) and the output (T,) for a text of L tokens."""
        sizes = self._sizes
        hidden = lengths_of(sizes.hidden, uniforms(self._seed, epoch, sequence, _HIDDEN, max(sizes.hidden - 1, 0)), sizes.spans)
        stay = sizes.text - sizes.hidden
        shown = lengths_of(stay, uniforms(self._seed, epoch, sequence, _SHOWN, max(stay - 1, 0)), sizes.spans)
        source: list[npt.NDArray[np.int32]] = []
        target: list[npt.NDArray[np.int32]] = []
        position = 0
        for number, (num_shown, gone) in enumerate(zip(shown, hidden, strict=True)):
            sentinel = np.array([self._first - number], np.int32)
            source += [ids[position : position + num_shown], sentinel]
            target += [sentinel, ids[position + num_shown : position + num_shown + gone]]
            position += int(num_shown + gone)
        end = np.array(self._end, np.int32)
        return np.concatenate([*source, end]), np.concatenate([*target, end])


def lengths_of(total: int, drawn: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Return (count,) lengths of at least 1 that add up to `total`; all such divisions are equally probable.

    Args:
        total: sum of the lengths.
        drawn: (total - 1,) random numbers; the positions of the smallest ones are the boundaries between lengths.
        count: number of lengths.
    """
    cuts = np.sort(np.argsort(drawn, kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


def rows_of_pairs(pairs: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]], objective: Objective) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of pairs of input and output, cut or padded to S and T. The decoder reads the start id, then the output."""
    assert objective.target_length is not None  # `config.objective` has set it
    shape, target_shape = (len(pairs), objective.length), (len(pairs), objective.target_length)
    tokens, documents = np.full(shape, objective.pad, np.int32), np.zeros(shape, np.int32)
    decoder_tokens, targets = np.full(target_shape, objective.pad, np.int32), np.full(target_shape, IGNORED, np.int32)
    decoder_tokens[:, :1] = objective.start
    for row, (source, target) in enumerate(pairs):
        source, target = source[: shape[1]], target[: target_shape[1]]
        tokens[row, : len(source)], documents[row, : len(source)] = source, 1
        targets[row, : len(target)] = target
        decoder_tokens[row, 1 : len(target)] = target[: len(target) - 1]
    return {"tokens": tokens, "documents": documents, "decoder_tokens": decoder_tokens, "targets": targets}
