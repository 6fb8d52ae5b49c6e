"""A wrapper that records the placements of a policy: the cost of chosen tasks on each worker when they became ready, and the worker that took them.

It changes no decision. Policies that weigh costs (dm, dmda, dmdas, reuse) compute the candidates themselves, including their queues. For the others
(eager, prio, lws), `costs.explain` computes them from the same estimates. A task with a planned node (`Task.planned_node`) goes there, whatever the
candidates cost.
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
"""Value of `Placement.chosen` while the task is still queued."""


@dataclass(slots=True)
class Placement:
    """One task, the candidate workers, and the worker that took it.

    Attributes:
        name: name of the codelet.
        order: number of the task in planned order.
        candidates: estimates at the moment when it became ready, cheapest first.
        weighs_costs: whether the policy decides by these estimates.
        planned_node: the node that the plan chose for the task, if the policy respects it; the candidates did not decide then.
        chosen: the worker that took it. Under a policy that weighs costs this may be an idle worker that expects to end the task before the cheapest
            one would.
    """

    name: str
    order: int
    candidates: list[Candidate]
    weighs_costs: bool
    planned_node: NodeId | None = None
    chosen: WorkerId = NOT_CHOSEN


class Explained:
    """A policy that records its first placements of some recorded tasks.

    Args:
        policy: policy that decides.
        estimates: estimates for the candidates, if the policy does not weigh costs itself.
        workers: all workers.
        names: names of the codelets to record.
        count: number of placements to record.

    Attributes:
        placements: placements with a known worker, in the order in which the tasks were taken.
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
        self._known: set[int] = set()  # orders of the recorded tasks: a worker may return a task, which is then pushed once more

    def join(self, worker: Worker) -> None:
        """Add a worker to the policy."""
        self.policy.join(worker)

    def push(self, task: Task, worker: Worker | None) -> None:
        """Record the candidates if the task is wanted, then pass it to the policy."""
        if self._num_wanted and task.step is not None and task.spec.name in self._names and task.order not in self._known:
            self._num_wanted -= 1
            self._known.add(task.order)
            if isinstance(self.policy, ExpectedEnd):
                placement = Placement(task.spec.name, task.order, self.policy.explain(task), weighs_costs=True, planned_node=task.planned_node)
            else:
                placement = Placement(task.spec.name, task.order, explain(task, self._workers, self._estimates), weighs_costs=False)
            self._open[task] = placement
        self.policy.push(task, worker)

    def pop(self, worker: Worker) -> Task | None:
        """Return the policy's task for the worker."""
        task = self.policy.pop(worker)
        if self._open and task in self._open:
            placement = self._open.pop(task)
            placement.chosen = worker.id
            self.placements.append(placement)
        return task

    def __len__(self) -> int:
        return len(self.policy)
