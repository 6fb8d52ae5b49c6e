"""The interface of a scheduling policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..records import Task, Worker


class Policy(Protocol):
    """A container of ready tasks that hands them out to workers.

    Attributes:
        keeps_partitions: whether it queues a task only on the node that the plan chose (`Task.planned_node`).
    """

    keeps_partitions: bool

    def join(self, worker: Worker) -> None:
        """Add a worker; called once for each, before its first `pop`."""

    def push(self, task: Task, worker: Worker | None) -> None:
        """Take a task that became ready; `worker` ran its last predecessor, if any did."""

    def pop(self, worker: Worker) -> Task | None:
        """Remove and return the task that `worker` should run next; None if it can run none, or would end none sooner than another worker."""

    def __len__(self) -> int:
        """Number of ready tasks held."""


PolicyFactory = Callable[..., Policy]
"""A function or class that creates a policy without workers and tasks, given estimates; by default every task takes a second."""
