"""Order of training sequences: a seeded permutation per epoch, and a cursor that records the exact position in it.

An epoch visits every sequence at most once; sequences that do not fill a last batch are left out of that epoch. The permutation is computed position
by position, so its memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DataError, UsageError
from .batch import Batch, Cursor
from .draws import mixed
from .objectives import IGNORED, factor_of
from .token_file import TokenFile

VALIDATION: Final = -1
"""Epoch number of validation data, whose random choices never change."""
_ROUNDS: Final = 6


class Examples(Protocol):
    """Interface of training data as sequences that are read by number.

    Attributes:
        name: name of the data in messages.
        names: names of the arrays of a batch.
        length: number of tokens in a sequence, or of patches in an image.
    """

    name: str
    names: Sequence[str]
    length: int

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""

    def too_few(self, batch: int) -> str:
        """Return the error message for fewer sequences than `batch`."""

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of some sequences, except `factor`, which needs the whole batch.

        A sequence depends only on its number, the epoch and the seed.

        Args:
            numbers: (n,) int64, numbers of the sequences.
            epoch: epoch that determines the random choices; `VALIDATION` for choices that never change.

        Raises:
            DataError: the data cannot be read, or are broken.
        """


class Windows:
    """Sequences of a token file for a model that predicts the next token; sequence i is tokens [iT, (i+1)T), and its targets start one token later.

    Args:
        file: file of the tokens.
        length: number of tokens in a sequence, T.
    """

    names: Sequence[str] = ("tokens", "targets")
    _num_ahead: int = 1
    """Number of tokens after a sequence that its targets need."""

    def __init__(self, file: TokenFile, length: int) -> None:
        self.file, self.name, self.length, self._stride = file, file.name, length, length

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return max(self.file.num_tokens - self._num_ahead, 0) // self._stride

    def too_few(self, batch: int) -> str:
        """Return the error message for fewer sequences than `batch`."""
        found = self.num_sequences
        return (
            f"{self.name} is too short: {self.file.num_tokens} tokens give {found} sequences of {self._stride}, and --batch is {batch}; "
            f"use at least {batch * self._stride + self._num_ahead} tokens" + (f", or --batch {found}" if found else "")
        )

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return tokens and targets, (n, T) int32 each."""
        rows = self._windows(numbers)  # (n, T + 1)
        return {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}  # copies: a single row is contiguous, and targets may be changed

    def _windows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return (n, T) int32, the tokens of sequences, each with the tokens after it that its targets need."""
        rows = np.empty((len(numbers), self._stride + self._num_ahead), np.int32)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = self.file.window(int(number) * self._stride, rows.shape[1])
        return rows


def permuted(positions: npt.NDArray[np.int64], count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the images of `positions` under the permutation of range(count) that is determined by (seed, epoch).

    The permutation is a Feistel network over the next even power of two, applied repeatedly until its value is below `count` (cycle walking; Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002), which is a bijection for any round function.

    Args:
        positions: (n,) int64, each in [0, count).
        count: number of sequences.
        seed: seed of the shuffling.
        epoch: number of the epoch.

    Returns:
        (n,) int64.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(half), mask, keys)
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: np.uint64, mask: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mixed(right + key) & mask)
    return (left << half) | right


class Derived:
    """Base of examples that are derived from others, sequence by sequence."""

    def __init__(self, examples: Examples) -> None:
        self._examples, self.name, self.names, self.length = examples, examples.name, examples.names, examples.length

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self._examples.num_sequences

    def too_few(self, batch: int) -> str:
        """Return the error message for fewer sequences than `batch`."""
        return self._examples.too_few(batch)


class Shuffled(Derived):
    """Examples in a fixed shuffled order. Files are often sorted by label, so their first rows would all have the same label."""

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of sequences; `numbers` are positions in the shuffled order."""
        return self._examples.arrays(permuted(numbers, self.num_sequences, 0, 0), epoch)


class BatchStream:
    """Endless batches of training data; equal seeds and cursors give equal batches.

    Args:
        examples: training data.
        batch: number of sequences per batch, B.
        seed: seed of the shuffling.
        cursor: position of the first batch; None for the beginning.
        select: number of sequences to use, from the first; -1 for all.
        rows: indices of the sequences of each batch to return; None for all. The others are read only if a batch has the array `factor`
            (1 / number of targets), which depends on the whole batch. If `rows` is empty, nothing is read.

    Raises:
        DataError: there are fewer than `batch` sequences.
        UsageError: `select` leaves fewer than `batch` sequences.
    """

    def __init__(
        self,
        examples: Examples,
        batch: int,
        *,
        seed: int,
        cursor: Cursor | None = None,
        select: int = -1,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.examples, self.batch, self.seed, self.length = examples, batch, seed, examples.length
        self.rows = np.arange(batch) if rows is None else np.asarray(rows, np.int64)
        self.num_sequences = examples.num_sequences
        if select > 0:
            self.num_sequences = min(self.num_sequences, select)
        if self.num_sequences < batch:
            if 0 < select < batch:
                raise UsageError(
                    f"leaves fewer sequences than --batch {batch}",
                    f"raise it to {batch} at least, or use --batch {select}",
                    flag="--dataset-select",
                    value=select,
                )
            raise DataError(examples.too_few(batch))
        self.cursor = cursor or Cursor()

    @property
    def batches_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self.num_sequences // self.batch

    def next(self) -> Batch:
        """Return the next batch, and advance the cursor by B sequences.

        Raises:
            DataError: the data cannot be read, or contain an id outside the vocabulary.
        """
        epoch, position = self.cursor.epoch, self.cursor.position
        if position + self.batch > self.num_sequences:
            epoch, position = epoch + 1, 0
        self.cursor, begin = Cursor(epoch, position + self.batch), Cursor(epoch, position)
        is_whole = "factor" in self.examples.names and len(self.rows) > 0
        numbers = permuted(position + (np.arange(self.batch) if is_whole else self.rows), self.num_sequences, self.seed, epoch)
        batch = Batch(self.examples.arrays(numbers, epoch), begin)
        return with_factor(batch).rows(self.rows) if is_whole else batch


def with_factor(batch: Batch) -> Batch:
    """Return the batch with the array `factor`, 1 / (number of targets that are not ignored)."""
    return Batch({**batch.arrays, "factor": factor_of(batch.targets)}, batch.begin)


def in_order(examples: Examples, batch: int, num_batches: int) -> list[Batch]:
    """Return the first `num_batches` batches of B sequences of validation data, fewer if the data are short.

    A last batch with too few sequences is padded with zeros, and with targets of -1, which the loss ignores. The batches lack the array `factor`,
    because validation sums losses and divides the total.
    """
    total = examples.num_sequences
    batches = []
    for first in range(0, min(total, num_batches * batch), batch):
        rows_by_name = examples.arrays(np.arange(first, min(first + batch, total)), VALIDATION)
        arrays = {}
        for name, rows in rows_by_name.items():
            arrays[name] = np.full((batch, *rows.shape[1:]), IGNORED if name == "targets" else 0, rows.dtype)
            arrays[name][: len(rows)] = rows
        batches.append(Batch(arrays))
    return batches
