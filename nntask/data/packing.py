"""Several texts in one sequence, kept apart by attention: positions attend to each other only if their numbers in `documents` are equal.

A stream is cut into sequences of equal length, even within a text. Rows fill a sequence in order, as long as the next row fits as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .masking import MaskedWindows, Masking
from .objectives import IGNORED
from .sampler import Derived, Examples, Windows
from .token_file import TokenFile


def documents_of(ids: npt.NDArray[np.int32], begin: int, end: int) -> npt.NDArray[np.int32]:
    """Return (n, T) int32, the number of each token's text within its sequence, from 1.

    Args:
        ids: (n, T) tokens of a stream.
        begin: id before each text.
        end: id after each text; if it equals `begin`, the one id between two texts is the first token of the second.
    """
    edges = np.zeros(ids.shape, np.int32)
    if begin == end:
        edges[:, 1:] = ids[:, 1:] == begin
    else:
        edges[:, 1:] = ids[:, :-1] == end
    return np.cumsum(edges, axis=1, dtype=np.int32) + 1


def positions_in(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return (n, T) int32, the position of each token in its text, from 0; `documents` (n, T) has the number of each token's text."""
    at = np.arange(documents.shape[1], dtype=np.int32)
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found: npt.NDArray[np.int32] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    return found


class PlacedTexts(Derived):
    """Examples with several texts in a sequence, and the position of each token in its text, for models that have a table of positions."""

    def __init__(self, examples: Examples) -> None:
        super().__init__(examples)
        self.names = (*(name for name in examples.names if name not in ("positions", "factor")), "positions", "factor")

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the examples, and positions (n, T) int32."""
        found = self._examples.arrays(numbers, epoch)
        return {**found, "positions": positions_in(found["documents"])}


class SeparateWindows(Windows):
    """Sequences of a token file for a model that predicts the next token, with the texts in a sequence kept apart.

    The token after the end of a text is not a target. If `begin` equals `end`, the one id between two texts is both the last target of the first text
    and the first token of the second.

    Args:
        file: file of the tokens.
        length: number of tokens in a sequence, T.
        begin: id before each text.
        end: id after each text.
    """

    names: Sequence[str] = ("tokens", "targets", "documents", "factor")

    def __init__(self, file: TokenFile, length: int, begin: int, end: int) -> None:
        super().__init__(file, length)
        self._begin, self._end = begin, end

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return tokens, targets and documents, (n, T) int32 each."""
        found = super().arrays(numbers, epoch)
        if self._begin != self._end:
            found["targets"][found["tokens"] == self._end] = IGNORED
        return {**found, "documents": documents_of(found["tokens"], self._begin, self._end)}


class SeparateMaskedWindows(MaskedWindows):
    """Sequences of a token file with masked tokens, with the texts in a sequence kept apart.

    Args:
        file: file of the tokens.
        length: number of tokens in a sequence, T.
        masking: masking to apply.
        begin: id before each text.
        end: id after each text.
    """

    names: Sequence[str] = ("tokens", "targets", "documents", "factor")

    def __init__(self, file: TokenFile, length: int, masking: Masking, begin: int, end: int) -> None:
        super().__init__(file, length, masking)
        self._begin, self._end = begin, end

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return tokens, targets and documents, (n, T) int32 each."""
        found = super().arrays(numbers, epoch)
        ids = np.where(found["targets"] == IGNORED, found["tokens"], found["targets"])  # the ids before masking
        return {**found, "documents": documents_of(ids, self._begin, self._end)}


def packed(lengths: Iterable[int], limit: int) -> Iterator[int]:
    """Yield the numbers of the rows, by their lengths, that begin a sequence of at most `limit` positions, and finally the number of rows."""
    used, number = limit, 0
    for length in lengths:
        if used + length > limit:
            yield number
            used = 0
        used += length
        number += 1
    yield number
