"""Interface between the training loop and a model on a runtime.

The loop, evaluation and sampling use only this interface. `recorded.RecordedEngine` implements it for training on this machine, the nodes of a
`Cluster` implement it for several machines, and tests have a small implementation of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler import Step
from tiles import TileTensor

from ..config.run_config import RunConfig
from ..data.batch import Batch
from ..data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a finished step: the mean loss per token, and the norm of the whole gradient before clipping."""

    loss: float
    grad_norm: float


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> Outcome:
        """Wait until the step is over.

        Raises:
            TaskError: a task of the step failed.
        """


class Scorer(Protocol):
    """A model that scores batches."""

    def evaluate(self, batch: Batch) -> float:
        """Return the sum of the losses of a batch's targets, except those of -1; changes nothing."""


class Engine(Scorer, Protocol):
    """A model, its optimizer and their recorded step."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks of one optimizer step."""

    def start(self, step: int, lr: float, batch: Batch) -> Pending:
        """Begin optimizer step `step` (from 1) on a whole batch; returns at once while fewer than two are in flight."""

    def model_tensors(self) -> Mapping[str, TileTensor]:
        """Return the parameters that are learnt, by name."""

    def optimizer_tensors(self) -> Mapping[str, TileTensor]:
        """Return the state of the optimizer by name."""


class Trained(Engine, Protocol):
    """An engine with a model that a run can load, sample and summarise."""

    @property
    def num_trained(self) -> int:
        """Number of weights that are learnt."""

    def peak_flops(self) -> float:
        """Return the flop/s of matrix products on the workers or GPUs, measured once in a process: an upper bound of any step."""

    def reset_optimizer(self) -> None:
        """Reset the optimizer to the present weights."""

    def sample(self, dataset: Dataset, length: int, stopped: Callable[[], bool]) -> str:
        """Return the text that a run prints at its end.

        Args:
            length: number of tokens of a sequence.
            stopped: function that is called after each token; True ends the text.
        """


class StepEngine(Trained, Protocol):
    """An engine of this process, with access to its step."""

    @property
    def step(self) -> Step:
        """The recorded optimizer step."""


class Counters(Protocol):
    """The part of a runtime that a run reads."""

    @property
    def gpus(self) -> Sequence[Any]:
        """GPUs of this machine that compute."""

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """Return the counters so far."""

    def check_stop(self) -> None:
        """Raise the error that has stopped the run, if any."""

    def wait(self) -> None:
        """Wait until all submitted work is done."""


class NodesChanged(Exception):
    """A cluster lost or gained nodes: the run continues from its last checkpoint with the present nodes. The message is for the user."""


class ModelShapes(Protocol):
    """Tensors of a model and of its optimizer, without data."""

    @property
    def trained(self) -> Mapping[str, TileTensor]:
        """Parameters that are learnt, by name."""

    @property
    def optimizer(self) -> Mapping[str, TileTensor]:
        """State of the optimizer, by name."""

    @property
    def whole(self) -> Mapping[str, str]:
        """Parameters that one node updates as a whole, each with the name of its matrix."""


class Cluster(Protocol):
    """Machines that train together."""

    def open(
        self, run: RunConfig, shapes: ModelShapes, dataset: Dataset, say: Callable[[str], None]
    ) -> AbstractContextManager[tuple[Counters, Trained]]:
        """Prepare the nodes for a run.

        Args:
            shapes: tensors of the run's model.
            say: function that prints a line.

        Raises:
            ClusterError: there are too few nodes, or they cannot be used.
            NntaskError: a node reported an error.
        """

    def check_members(self) -> None:
        """Check for new nodes. The loop calls it after saving a checkpoint, when nodes may join.

        Raises:
            NodesChanged: the cluster has more nodes now.
        """
