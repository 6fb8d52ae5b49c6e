"""Several texts in one sequence, which attention keeps apart: positions with equal numbers in `documents` see each other, others do not.

A stream is cut into sequences wherever they end. Rows are put behind each other in their order, as long as the next one fits as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .masking import MaskedWindows, Masking
from .objectives import IGNORED
from .sampler import Examples, too_few_tokens, windows_of
from .token_file import TokenFile


def documents_of(ids: npt.NDArray[np.int32], begin: int, end: int) -> npt.NDArray[np.int32]:
    """(n, T) number of the text of each token in its sequence, from 1.

    Args:
        ids: (n, T) tokens of a stream.
        begin: id before each text.
        end: id behind each text; where it is `begin`, one id between two texts belongs to the second, as its first token.
    """
    edges = np.zeros(ids.shape, np.int32)
    if begin == end:
        edges[:, 1:] = ids[:, 1:] == begin
    else:
        edges[:, 1:] = ids[:, :-1] == end
    return np.cumsum(edges, axis=1, dtype=np.int32) + 1


def positions_in(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """(n, T) position of each token in its text, from 0, of texts behind each other with these numbers (n, T)."""
    at = np.arange(documents.shape[1], dtype=np.int32)
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found: npt.NDArray[np.int32] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    return found


class PlacedTexts:
    """Examples with the positions of tokens in their texts, for models that have a table of positions.

    Args:
        examples: several texts in one sequence.
    """

    def __init__(self, examples: Examples) -> None:
        self._examples, self.name, self.length = examples, examples.name, examples.length
        self.names: Sequence[str] = (*(name for name in examples.names if name not in ("positions", "factor")), "positions", "factor")

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return self._examples.num_sequences

    def too_few(self, batch: int) -> str:
        """Says that there are fewer than `batch` of them, and what to do."""
        return self._examples.too_few(batch)

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the examples, and positions (n, T) int32."""
        found = self._examples.arrays(numbers, epoch)
        return {**found, "positions": positions_in(found["documents"])}


class SeparateWindows:
    """Sequences of a token file for a model that predicts the next token, with the texts in a sequence kept apart.

    What follows the end of a text is no target; where one id is between two texts, the first text is followed by it and the second begins with it.

    Args:
        file: the tokens.
        length: T, tokens of a sequence.
        begin: id before each text.
        end: id behind each text.
    """

    names: Sequence[str] = ("tokens", "targets", "documents", "factor")

    def __init__(self, file: TokenFile, length: int, begin: int, end: int) -> None:
        self.file, self.name, self.length, self._begin, self._end = file, file.name, length, begin, end

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return self.file.num_sequences(self.length)

    def too_few(self, batch: int) -> str:
        """Says that there are fewer than `batch` of them, and what to do."""
        return too_few_tokens(self.file, self.length, self.num_sequences, batch, batch * self.length + 1)

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Tokens, targets and documents, (n, T) int32 each."""
        rows = windows_of(self.file, numbers, self.length, self.length + 1)
        tokens, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        if self._begin != self._end:
            targets[tokens == self._end] = IGNORED
        return {"tokens": tokens, "targets": targets, "documents": documents_of(tokens, self._begin, self._end)}


class SeparateMaskedWindows(MaskedWindows):
    """Sequences of a token file in which tokens are hidden, with the texts in a sequence kept apart.

    Args:
        begin: id before each text.
        end: id behind each text.
    """

    names: Sequence[str] = ("tokens", "targets", "documents", "factor")

    def __init__(self, file: TokenFile, length: int, masking: Masking, begin: int, end: int) -> None:
        super().__init__(file, length, masking)
        self._begin, self._end = begin, end

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Tokens, targets and documents, (n, T) int32 each."""
        found = super().arrays(numbers, epoch)
        ids = np.where(found["targets"] == IGNORED, found["tokens"], found["targets"])  # before any was hidden
        return {**found, "documents": documents_of(ids, self._begin, self._end)}


def packed(lengths: Iterable[int], limit: int) -> Iterator[int]:
    """The numbers of the rows that begin a sequence, and at the end how many rows there are.

    Args:
        lengths: of the rows, each at most `limit`.
        limit: T, positions of a sequence.
    """
    used, number = limit, 0
    for length in lengths:
        if used + length > limit:
            yield number
            used = 0
        used += length
        number += 1
    yield number
