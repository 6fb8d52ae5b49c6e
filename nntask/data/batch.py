"""Batches of training data: named arrays, and the cursor at which they begin.

The names depend on the training objective; `nntask.data.objectives` lists them. Letters: B sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

OF_BATCH: Final = frozenset({"factor"})
"""Names of arrays that describe the whole batch and have no row per sequence."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the data: the first `position` sequences of epoch `epoch` have been returned."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step.

    Args:
        arrays: name -> array; the first axis is B, except for the arrays in `OF_BATCH`.
        begin: cursor before this batch.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    begin: Cursor = Cursor()

    @classmethod
    def causal(cls, tokens: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], begin: Cursor = Cursor()) -> Self:
        """Return a batch for a model that predicts the next token.

        Args:
            tokens: (B, T) int32, token ids.
            targets: (B, T) int32, the tokens shifted by one; -1 at positions that the loss ignores.
            begin: cursor before this batch.
        """
        return cls({"tokens": tokens, "targets": targets}, begin)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(B, T) int32, token ids."""
        return self.arrays["tokens"]

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """(B, T) or (B, 1) int32, ids to predict; -1 at positions that the loss ignores."""
        return self.arrays["targets"]

    def __len__(self) -> int:
        """Number of sequences, B."""
        return len(self.targets)

    def rows(self, chosen: slice | npt.NDArray[np.int64]) -> Batch:
        """Return a batch of the chosen sequences; arrays that describe the whole batch are not changed."""
        return Batch({name: array if name in OF_BATCH else array[chosen] for name, array in self.arrays.items()}, self.begin)
