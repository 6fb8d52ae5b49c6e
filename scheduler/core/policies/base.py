"""The interface of a scheduling policy."""

from __future__ import annotations

from typing import Protocol

from ..performance_model import Estimates
from ..records import Task, Worker


class Policy(Protocol):
    """Holds ready tasks and hands them out.

    Attributes:
        keeps_partitions: whether it queues a task nowhere but where the plan wants it (`Task.planned_node`).
    """

    keeps_partitions: bool

    def join(self, worker: Worker) -> None:
        """A worker joins; called once for each, before its first `pop`."""

    def push(self, task: Task, worker: Worker | None) -> None:
        """Take a task that became ready; `worker` is the one whose finished task made it so, if any."""

    def pop(self, worker: Worker) -> Task | None:
        """Give up the task `worker` should run next; None if there is none it can run, or none that it would end sooner than another worker."""

    def __len__(self) -> int:
        """Number of ready tasks held."""


class PolicyFactory(Protocol):
    """Makes a policy."""

    def __call__(self, estimates: Estimates = ...) -> Policy:
        """A policy without workers and tasks; without estimates every task takes a second and copies no time."""
