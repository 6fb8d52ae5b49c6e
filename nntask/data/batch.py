"""What a training step learns from: named arrays, and the place in the data where they begin.

Which names there are depends on what is learnt; `nntask.data.objectives` lists them. Letters: B sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

OF_BATCH: Final = frozenset({"factor"})
"""Names of arrays that have no rows: they say something of the whole batch."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the data: `position` sequences of epoch `epoch` have been returned."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step.

    Args:
        arrays: by name; the first axis is B, except of those in `OF_BATCH`.
        begin: the cursor before this batch.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    begin: Cursor = Cursor()

    @classmethod
    def causal(cls, tokens: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], begin: Cursor = Cursor()) -> Self:
        """The batch of a model that predicts the next token.

        Args:
            tokens: (B, T) int32, token ids.
            targets: (B, T) int32, the tokens shifted by one; -1 where the loss ignores the position.
            begin: the cursor before this batch.
        """
        return cls({"tokens": tokens, "targets": targets}, begin)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(B, T) int32, token ids."""
        return self.arrays["tokens"]

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """(B, T) or (B, 1) int32, what is to be predicted; -1 where the loss ignores the position."""
        return self.arrays["targets"]

    def __len__(self) -> int:
        """B, sequences."""
        return len(self.targets)

    def rows(self, chosen: slice | npt.NDArray[np.int64]) -> Batch:
        """Some sequences of the batch; what is said of the whole batch stays as it is."""
        return Batch({name: array if name in OF_BATCH else array[chosen] for name, array in self.arrays.items()}, self.begin)
