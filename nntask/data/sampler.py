"""The order of training sequences: a seeded permutation per epoch, and a cursor that names the exact position in it.

Sequence i of a stream of tokens is [iT, (i+1)T), and its targets are the same tokens shifted by one. An epoch visits every sequence at most once;
sequences that do not fill a last batch are left out of that epoch. The permutation is computed position by position, so its memory does not grow
with the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError, UsageError
from .token_file import TokenFile

_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the data: `position` sequences of epoch `epoch` have been returned."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step.

    Args:
        tokens: (B, T) int32, token ids.
        targets: (B, T) int32, the tokens shifted by one; -1 where the loss ignores the position.
        begin: the cursor before this batch.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    begin: Cursor = Cursor()


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
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BatchStream:
    """Endless batches of a token file; equal seeds and cursors give equal batches.

    Args:
        file: the tokens.
        length: T, tokens per sequence.
        batch: B, sequences per batch.
        seed: seed of the shuffling.
        cursor: position of the first batch; None for the beginning.
        select: use only the first `select` sequences; -1 for all.
        rows: indices of the sequences of each batch that are returned; None for all. The others are not read.

    Raises:
        DataError: the file holds fewer than `batch` sequences.
        UsageError: `select` leaves fewer than `batch` sequences.
    """

    def __init__(
        self,
        file: TokenFile,
        length: int,
        batch: int,
        *,
        seed: int,
        cursor: Cursor | None = None,
        select: int = -1,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.file, self.length, self.batch, self.seed = file, length, batch, seed
        self.rows = np.arange(batch) if rows is None else np.asarray(rows, np.int64)
        self.num_sequences = file.num_sequences(length)
        if select > 0:
            self.num_sequences = min(self.num_sequences, select)
        if self.num_sequences < batch:
            need = batch * length + 1
            if 0 < select < batch:
                raise UsageError(
                    f"--dataset-select {select} leaves fewer sequences than --batch {batch}; raise it to {batch} at least, or use --batch {select}"
                )
            raise DataError(
                f"{file.path} is too short: {file.num_tokens} tokens give {self.num_sequences} sequences of {length}, and --batch is {batch}; "
                f"use at least {need} tokens" + (f", or --batch {self.num_sequences}" if self.num_sequences else "")
            )
        self.cursor = cursor or Cursor()

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self.num_sequences // self.batch

    def next(self) -> Batch:
        """The next batch; the cursor advances by B sequences.

        Raises:
            DataError: the file cannot be read, or holds an id beyond the vocabulary.
        """
        epoch, position = self.cursor.epoch, self.cursor.position
        if position + self.batch > self.num_sequences:
            epoch, position = epoch + 1, 0
        order = permuted(position + self.rows, self.num_sequences, self.seed, epoch)
        rows = np.empty((len(order), self.length + 1), np.int32)  # (B, T + 1)
        for row, sequence in zip(rows, order, strict=True):
            row[:] = self.file.window(int(sequence) * self.length, self.length + 1)
        self.cursor = Cursor(epoch, position + self.batch)
        return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), Cursor(epoch, position))


def in_order(file: TokenFile, length: int, batch: int, num_batches: int) -> list[Batch]:
    """The first `num_batches` batches of a file without shuffling, for evaluation; fewer when the file is shorter.

    A last batch with too few sequences is padded with targets -1, which the loss ignores.

    Args:
        file: the tokens.
        length: T, tokens per sequence.
        batch: B, sequences per batch.
        num_batches: largest number of batches.
    """
    total = file.num_sequences(length)
    batches = []
    for first in range(0, min(total, num_batches * batch), batch):
        tokens = np.zeros((batch, length), np.int32)
        targets = np.full((batch, length), -1, np.int32)
        for row, sequence in enumerate(range(first, min(first + batch, total))):
            ids = file.window(sequence * length, length + 1)
            tokens[row], targets[row] = ids[:-1], ids[1:]
        batches.append(Batch(tokens, targets))
    return batches
