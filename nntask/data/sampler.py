"""The order of training sequences: a seeded permutation per epoch, and a cursor that names the exact position in it.

An epoch visits every sequence at most once;
sequences that do not fill a last batch are left out of that epoch. The permutation is computed position by position, so its memory does not grow
with the stream.
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
"""The epoch of data that are only scored."""
_ROUNDS: Final = 6


class Examples(Protocol):
    """Training data as sequences that are read by number.

    Attributes:
        name: what messages call them.
        names: names of the arrays of a batch of them.
        length: tokens of a sequence, or patches of an image.
    """

    name: str
    names: Sequence[str]
    length: int

    @property
    def num_sequences(self) -> int:
        """How many there are."""

    def too_few(self, batch: int) -> str:
        """Says that there are fewer than `batch` of them, and what to do."""

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Arrays of sequences, those of a batch but for `factor`; each is a function of the number, the epoch and the seed alone.

        Args:
            numbers: (n,) of the sequences.
            epoch: whose random choices are made; `VALIDATION` for those that never change.

        Raises:
            DataError: the data cannot be read, or are broken.
        """


class Windows:
    """Sequences of a token file for a model that predicts the next token; sequence i is tokens [iT, (i+1)T), its targets are one further.

    Args:
        file: the tokens.
        length: T, tokens of a sequence.
    """

    names: Sequence[str] = ("tokens", "targets")

    def __init__(self, file: TokenFile, length: int) -> None:
        self.file, self.name, self.length = file, file.name, length

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return self.file.num_sequences(self.length)

    def too_few(self, batch: int) -> str:
        """Says that there are fewer than `batch` of them, and what to do."""
        return too_few_tokens(self.file, self.length, self.num_sequences, batch, batch * self.length + 1)

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Tokens and targets, (n, T) int32 each."""
        rows = windows_of(self.file, numbers, self.length, self.length + 1)  # (n, T + 1)
        return {"tokens": np.ascontiguousarray(rows[:, :-1]), "targets": np.ascontiguousarray(rows[:, 1:])}


def windows_of(file: TokenFile, numbers: npt.NDArray[np.int64], stride: int, count: int) -> npt.NDArray[np.int32]:
    """(n, count) the tokens from number x stride on, for each number."""
    rows = np.empty((len(numbers), count), np.int32)
    for row, number in zip(rows, numbers, strict=True):
        row[:] = file.window(int(number) * stride, count)
    return rows


def too_few_tokens(file: TokenFile, length: int, found: int, batch: int, need: int) -> str:
    """Says that a file has `found` sequences of `length` tokens, and would have to have `need` tokens for a batch."""
    return (
        f"{file.name} is too short: {file.num_tokens} tokens give {found} sequences of {length}, and --batch is {batch}; "
        f"use at least {need} tokens" + (f", or --batch {found}" if found else "")
    )


def permuted(positions: npt.NDArray[np.int64], count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Images of `positions` under the permutation of range(count) that belongs to (seed, epoch).

    The permutation is a Feistel network over the next even power of two, applied again until its value is below `count` (cycle walking; Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002), which is a bijection for any round function.

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


class Shuffled:
    """Examples in another order, always the same: files are often sorted by label, and their first ones would all have the same.

    Args:
        examples: the examples.
    """

    def __init__(self, examples: Examples) -> None:
        self._examples, self.name, self.names, self.length = examples, examples.name, examples.names, examples.length

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return self._examples.num_sequences

    def too_few(self, batch: int) -> str:
        """Says that there are fewer than `batch` of them, and what to do."""
        return self._examples.too_few(batch)

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of sequences by their numbers in the new order."""
        return self._examples.arrays(permuted(numbers, self.num_sequences, 0, 0), epoch)


class BatchStream:
    """Endless batches of training data; equal seeds and cursors give equal batches.

    Args:
        examples: the data.
        batch: B, sequences per batch.
        seed: seed of the shuffling.
        cursor: position of the first batch; None for the beginning.
        select: use only the first `select` sequences; -1 for all.
        rows: indices of the sequences of each batch that are returned; None for all. The others are not read, unless something is said of the whole
            batch (`factor`); where there are no rows at all, nothing is read.

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
                    f"--dataset-select {select} leaves fewer sequences than --batch {batch}; raise it to {batch} at least, or use --batch {select}"
                )
            raise DataError(examples.too_few(batch))
        self.cursor = cursor or Cursor()

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self.num_sequences // self.batch

    def next(self) -> Batch:
        """The next batch; the cursor advances by B sequences.

        Raises:
            DataError: the data cannot be read, or hold an id beyond the vocabulary.
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
    """The batch with what is said of all of it."""
    return Batch({**batch.arrays, "factor": factor_of(batch.targets)}, batch.begin)


def in_order(examples: Examples, batch: int, num_batches: int) -> list[Batch]:
    """The first `num_batches` batches without shuffling, for evaluation; fewer when there is less. They have no `factor`.

    A last batch with too few sequences is padded with zeros and targets -1, which the loss ignores.

    Args:
        examples: the data.
        batch: B, sequences per batch.
        num_batches: largest number of batches.
    """
    total = examples.num_sequences
    batches = []
    for first in range(0, min(total, num_batches * batch), batch):
        found = examples.arrays(np.arange(first, min(first + batch, total)), VALIDATION)
        arrays = {}
        for name, rows in found.items():
            arrays[name] = np.full((batch, *rows.shape[1:]), IGNORED if name == "targets" else 0, rows.dtype)
            arrays[name][: len(rows)] = rows
        batches.append(Batch(arrays))
    return batches
