"""What the training loop needs of a model on a runtime, and no more.

The loop, evaluation and sampling know this interface only; `recorded.RecordedEngine` is the one that trains on this machine, the nodes of a `Cluster`
train behind another one, and tests bring a small one of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tiles import TileTensor

from ..data.batch import Batch
from ..data.dataset import Dataset

if TYPE_CHECKING:
    from scheduler import Step

    from ..config.run_config import RunConfig


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
        """Sum of the losses of a batch's targets, those of -1 ignored; changes nothing."""


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


class Trained(Engine, Protocol):
    """An engine whose model a run loads, samples and sums up."""

    @property
    def num_trained(self) -> int:
        """Number of weights that are learnt."""

    def peak_flops(self) -> float:
        """Flop/s of matrix products on the workers or GPUs, measured once in a process: no step can beat it."""

    def reset_optimizer(self) -> None:
        """Begin anew with the weights as they are now."""

    def sample(self, dataset: Dataset, length: int, stopped: Callable[[], bool]) -> str:
        """The text that a run ends with.

        Args:
            length: tokens of a sequence.
            stopped: asked after each token.
        """


class StepEngine(Trained, Protocol):
    """An engine of this process, whose step can be looked at."""

    @property
    def step(self) -> Step:
        """The recorded optimizer step."""


class Counters(Protocol):
    """The part of a runtime that a run looks at."""

    @property
    def gpus(self) -> Sequence[Any]:
        """GPUs of this machine that compute."""

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """Counters so far."""

    def check_stop(self) -> None:
        """Raise what has stopped the run, if anything has."""

    def wait(self) -> None:
        """Wait until everything asked for is done."""


class NodesChanged(Exception):
    """A cluster lost nodes, or found more: the run goes on from its last checkpoint with those that there are. The message is for the user."""


class Cluster(Protocol):
    """Machines that train together."""

    def open(self, run: RunConfig, dataset: Dataset, say: Callable[[str], None]) -> AbstractContextManager[tuple[Counters, Trained]]:
        """Make the nodes ready for a run.

        Raises:
            ClusterError: there are too few, or they cannot be used.
            NntaskError: what a node found wrong.
        """

    def check_members(self) -> None:
        """A checkpoint has just been saved: a good moment to change which nodes take part.

        Raises:
            NodesChanged: there are more nodes now.
        """
