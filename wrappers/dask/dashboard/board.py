"""The state of the runs that report to a cluster's scheduler: the latest steps of the latest jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MOST_STEPS: Final = 1000
"""Most steps kept of each node, the latest ones."""
MOST_JOBS: Final = 8
"""Most jobs kept, the latest ones."""


@dataclass(slots=True)
class NodeState:
    """The state of one node of a job.

    Attributes:
        steps: latest steps as (step, loss, tokens per second), with None for a value that the node did not report.
        resident: latest bytes in use of each memory.
        budget: budget of each memory in bytes.
    """

    steps: deque[tuple[int, float | None, float | None]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    resident: dict[str, float] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)


class Board:
    """The state of the jobs of a scheduler.

    Attributes:
        jobs: job -> node -> state; the latest jobs last.
        version: number of records so far.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, NodeState]] = {}
        self.version = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Enter a record. If a node repeats steps, after a fault or a restart, its later steps are dropped."""
        nodes = self.jobs[record["job"]] = self.jobs.pop(record["job"], {})
        while len(self.jobs) > MOST_JOBS:
            del self.jobs[next(iter(self.jobs))]
        state = nodes.setdefault(record["node"], NodeState())
        while state.steps and state.steps[-1][0] >= record["step"]:
            state.steps.pop()
        state.steps.append((record["step"], record.get("loss"), record.get("tokens_per_second")))
        state.resident, state.budget = dict(record.get("resident_bytes", {})), dict(record.get("budget_bytes", {}))
        self.version += 1

    def nodes(self) -> Iterator[tuple[str, str, NodeState]]:
        """Yield (job, node, state) of every node of every job."""
        for job, nodes in self.jobs.items():
            for node, state in nodes.items():
                yield job, node, state
