"""What the training loop needs of a model on a runtime, and no more.

The loop, evaluation and sampling know this interface only; `recorded.RecordedEngine` is the one that trains, tests bring a small one of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tiles import TileTensor

from ..data import Batch


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished step tells: the mean loss per token, and the norm of the whole gradient before clipping."""

    loss: float
    grad_norm: float


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> Outcome:
        """Wait until the step is over.

        Raises:
            TaskError: a task of it failed.
        """


class Scorer(Protocol):
    """A model that scores batches."""

    def evaluate(self, batch: Batch) -> float:
        """Sum of the token losses of a batch, targets of -1 ignored; changes nothing."""


class Engine(Scorer, Protocol):
    """A model, its optimizer and their recorded step."""

    @property
    def num_tasks(self) -> int:
        """Tasks of one optimizer step."""

    def start(self, step: int, lr: float, batch: Batch) -> Pending:
        """Begin optimizer step `step` (from 1) on a whole batch; returns at once while fewer than two are in flight."""

    def model_tensors(self) -> Mapping[str, TileTensor]:
        """Parameters that are learnt, by name."""

    def optimizer_tensors(self) -> Mapping[str, TileTensor]:
        """State of the optimizer by name."""
