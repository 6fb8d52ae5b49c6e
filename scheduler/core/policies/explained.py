"""A policy that is watched: what chosen tasks would have cost on each worker when they became ready, and which worker took them.

Wraps another policy and changes none of its decisions. Policies that weigh costs (dm, dmda, dmdas, reuse) are asked themselves, queues included;
for those that do not (eager, prio, lws) the candidates are what `costs.explain` makes of the same estimates. A task whose node is planned
(`Task.planned_node`) goes there, whatever the candidates cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ..performance_model import Estimates
from ..records import NodeId, Task, Worker, WorkerId
from .base import Policy
from .costs import Candidate, explain
from .expected import ExpectedEnd

NOT_CHOSEN: Final = WorkerId(-2)
"""Who has taken a task that is still queued."""


@dataclass(slots=True)
class Placement:
    """One task, the workers it could have gone to, and the one that took it.

    Attributes:
        order: the task's number, in planned order.
        candidates: estimates at the moment it became ready, cheapest first.
        weighs_costs: whether the policy goes by them.
        planned_node: the node where the plan wants the task, if the policy keeps to that: then the candidates did not decide.
        chosen: the worker that took it; where costs are weighed an idle worker may, if it expects to end the task before the cheapest one would.
    """

    name: str
    order: int
    candidates: list[Candidate]
    weighs_costs: bool
    planned_node: NodeId | None = None
    chosen: WorkerId = NOT_CHOSEN


class Explained:
    """A policy with its first placements of some recorded tasks written down.

    Args:
        policy: whose decisions these are.
        estimates: what it goes by, or would.
        workers: the workers.
        names: of the tasks.
        count: placements wanted.

    Attributes:
        placements: those whose worker is known, in the order they were taken.
    """

    def __init__(self, policy: Policy, estimates: Estimates, workers: Sequence[Worker], names: Collection[str], count: int) -> None:
        self.policy = policy
        self.keeps_partitions = policy.keeps_partitions
        self.placements: list[Placement] = []
        self._estimates = estimates
        self._workers = workers
        self._names = frozenset(names)
        self._num_wanted = count
        self._open: dict[Task, Placement] = {}
        self._known: set[int] = set()  # orders of the tasks written down: a worker may give one back, which comes again

    def join(self, worker: Worker) -> None:
        """The worker joins the policy."""
        self.policy.join(worker)

    def push(self, task: Task, worker: Worker | None) -> None:
        """Write down what the policy sees if the task is wanted, then hand it on."""
        if self._num_wanted and task.step is not None and task.name in self._names and task.order not in self._known:
            self._num_wanted -= 1
            self._known.add(task.order)
            if isinstance(self.policy, ExpectedEnd):
                placement = Placement(task.name, task.order, self.policy.explain(task), weighs_costs=True, planned_node=task.planned_node)
            else:
                placement = Placement(task.name, task.order, explain(task, self._workers, self._estimates), weighs_costs=False)
            self._open[task] = placement
        self.policy.push(task, worker)

    def pop(self, worker: Worker) -> Task | None:
        """What the policy gives the worker."""
        task = self.policy.pop(worker)
        if self._open and task in self._open:
            placement = self._open.pop(task)
            placement.chosen = worker.id
            self.placements.append(placement)
        return task

    def __len__(self) -> int:
        return len(self.policy)
