"""Policies of minimum expected completion time: dm, dmda and dmdas, after StarPU's policies of these names (Augonnet et al. 2011).

A task that becomes ready joins the queue where its expected end is earliest (`costs`). Workers of one kind on one node are interchangeable, so they
form a *group* with one queue. An estimate per group costs as little with 64 workers as with one, and no queues inside a group need balancing. dmda
and dmdas queue a task with a planned node (`Task.planned_node`) there, whatever it costs.

Decisions stay late. A worker whose group has no task for it takes one from the far end of another group's queue, if it expects to end the task no
later than that group. A task of a mixed step may end later, too, if the rest of the step takes longer than the task and its path, and its group
keeps as many tasks as its workers hold. So a slow worker helps in the middle of a step, and delays nothing at its end. Tasks that no group can
run yet wait for a worker that can.

If workers of several kinds may run a task and its duration on one of them is unknown, its first `TRIALS` runs there are trials, as in StarPU.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..performance_model import CALIBRATED, NO_ESTIMATES, Estimates, Key, key_of
from ..records import HandleRecord, NodeId, Task, Worker, WorkerId, WorkerKind
from .costs import Candidate, Move, WorkerGroup, WorkLeft, assigned_seconds, find_move

STEAL: Final = 8
"""Number of tasks at the far end of a queue that a worker of another group considers."""

TRIALS: Final = CALIBRATED + 1
"""Number of trials of a task on a kind of worker; the first duration that a process measures does not count."""

NOTHING: Final = Move(0, 0.0, 0.0, 0.0, [])


def sum_up(weights: tuple[float, float, Move]) -> float:
    """Return the seconds until the task has ended, given (queueing, execution, move)."""
    queueing, seconds, move = weights
    return queueing + seconds + move.transfer_seconds + move.eviction_seconds


class Entry(NamedTuple):
    """A queued task. Entries sort ascending, so the next task to run is the last one.

    Attributes:
        urgency, rank, number: priority; negative order, among equal priorities; negative count of pushes.
        seconds: expected duration of the task.
        transfer_seconds: expected duration of its copies.
        brings: handles that it will bring to the node.
        stays: whether no other group may take it: the plan chose the node, or the run is a trial.
    """

    urgency: int
    rank: int
    number: int
    task: Task
    seconds: float
    transfer_seconds: float
    brings: list[HandleRecord]
    stays: bool


class Queues(WorkerGroup):
    """A group and its queues: one for each set of kinds that can run a task.

    Attributes:
        seconds, transfer_seconds: sums over all queued tasks.
        promised: handles that queued tasks will bring to the node, with the number of these tasks.
    """

    def __init__(self, kind: WorkerKind, node: NodeId) -> None:
        super().__init__(kind, node)
        self.queues: dict[tuple[WorkerKind, ...], list[Entry]] = {}
        self.seconds = 0.0
        self.transfer_seconds = 0.0
        self.promised: dict[HandleRecord, int] = {}
        self._num = 0

    def put(self, entry: Entry) -> None:
        """Queue a task."""
        queue = self.queues.get(entry.task.spec.kinds)
        if queue is None:
            queue = self.queues[entry.task.spec.kinds] = []
        insort(queue, entry)
        self._num += 1
        self.seconds += entry.seconds
        self.transfer_seconds += entry.transfer_seconds
        for handle in entry.brings:
            self.promised[handle] = self.promised.get(handle, 0) + 1

    def take(self, queue: list[Entry], at: int) -> Task:
        """Remove and return a queued task."""
        entry = queue.pop(at)
        self._num -= 1
        if self._num:
            self.seconds -= entry.seconds
            self.transfer_seconds -= entry.transfer_seconds
        else:
            self.seconds = self.transfer_seconds = 0.0
        for handle in entry.brings:
            count = self.promised[handle] - 1
            if count:
                self.promised[handle] = count
            else:
                del self.promised[handle]
        return entry.task

    def __len__(self) -> int:
        return self._num

    def head(self) -> list[Entry] | None:
        """Return the queue whose last entry is the next to run."""
        best: list[Entry] | None = None
        for queue in self.queues.values():
            if queue and (best is None or queue[-1] > best[-1]):
                best = queue
        return best

    def first(self) -> Task | None:
        """Remove and return the next task."""
        queue = self.head()
        return None if queue is None else self.take(queue, -1)

    def backlog(self, estimates: Estimates) -> float:
        """Return the seconds of work per worker, both queued and held by the workers."""
        return self.seconds / len(self.workers) + self.assigned_seconds(estimates)


class ExpectedEnd:
    """The policy dm: queued seconds + execution; the location of data does not matter. Queues are first in, first out.

    Args:
        estimates: estimates of durations, links and memory.
    """

    weighs_data = False
    keeps_partitions = False
    is_sorted = False
    queues: type[Queues] = Queues

    def __init__(self, estimates: Estimates = NO_ESTIMATES) -> None:
        self.estimates = estimates
        self._groups: dict[tuple[WorkerKind, NodeId], Queues] = {}
        self._group_of: dict[WorkerId, Queues] = {}
        self._strays: list[Task] = []
        self._trials: dict[Key, int] = {}
        self._left = WorkLeft()
        self._num = 0
        self._num_pushed = 0

    def join(self, worker: Worker) -> None:
        """Add the worker to its group, and queue the tasks that no earlier worker could run."""
        if worker.id in self._group_of:
            return
        group = self._groups.setdefault((worker.kind, worker.node), self.queues(worker.kind, worker.node))
        group.workers.append(worker)
        self._group_of[worker.id] = group
        strays, self._strays = self._strays, []
        self._num -= len(strays)
        for task in strays:
            self.push(task, None)

    def push(self, task: Task, worker: Worker | None) -> None:
        """Queue the task with the group that is expected to end it soonest; ties go to the group that joined first."""
        self._num += 1
        self._num_pushed += 1
        node = task.planned_node
        groups = [group for group in self._groups.values() if group.kind in task.spec.kinds and (node is None or group.node == node)]
        if not groups:
            self._strays.append(task)
            return
        trial = self._find_trial(task, groups)
        if trial is not None:
            groups = [trial]
        best, best_total, best_move, best_seconds = groups[0], float("inf"), NOTHING, 0.0
        if len(self._groups) > 1:
            for group in groups:  # a single planned group is weighed too, because the entry needs its seconds and promises
                weights = self._weigh(task, group, group.backlog(self.estimates))
                total = sum_up(weights)
                if total < best_total:
                    best, best_total, (_, best_seconds, best_move) = group, total, weights
        urgency, rank = (task.spec.priority, -task.order) if self.is_sorted else (0, 0)
        stays = node is not None or trial is not None
        best.put(Entry(urgency, rank, -self._num_pushed, task, best_seconds, best_move.transfer_seconds, best_move.brings, stays))

    def _find_trial(self, task: Task, groups: Sequence[Queues]) -> Queues | None:
        """Return the group that should measure the task, and count the trial; None if all durations are known or on trial, or there is no choice."""
        if len(groups) < 2 or len({group.kind for group in groups}) < 2:
            return None
        for group in groups:
            if not self.estimates.is_known(task, group.kind):
                key = (*key_of(task.spec), group.kind)
                number = self._trials.get(key, 0)
                if number < TRIALS:
                    self._trials[key] = number + 1
                    return group
        return None

    def pop(self, worker: Worker) -> Task | None:
        """Return the next task of the worker's group, else one of another group that the worker can end no later."""
        group = self._group_of.get(worker.id)
        if group is None:  # the worker asks before it has joined
            self.join(worker)
            group = self._group_of[worker.id]
        task = group.first()
        if task is None and self._num and len(self._groups) > 1:
            task = self._steal(worker, group)
        if task is not None:
            self._num -= 1
            if task.spec.shared_seconds:
                self._left.begin(task)
        return task

    def __len__(self) -> int:
        return self._num

    def explain(self, task: Task) -> list[Candidate]:
        """Return the present cost of the task on each worker that can run it, including the queues; cheapest first, ties by worker."""
        candidates = []
        for group in self._groups.values():
            if group.kind in task.spec.kinds:
                queueing, seconds, move = self._weigh(task, group, group.backlog(self.estimates))
                candidates += [
                    Candidate(each.id, each.kind, each.node, seconds, move.transfer_seconds, queueing, move.eviction_seconds, move.nbytes)
                    for each in group.workers
                ]
        return sorted(candidates, key=lambda candidate: (candidate.total, candidate.worker))

    def _weigh(self, task: Task, group: Queues, backlog: float) -> tuple[float, float, Move]:
        """Return the seconds of queueing and of execution, and the copies that the group needs, if its workers are busy for `backlog` seconds."""
        estimates = self.estimates
        move = find_move(task, group.node, estimates, group.promised) if self.weighs_data else NOTHING
        queueing = max(backlog, move.wait_seconds + group.transfer_seconds)
        return queueing, estimates.task_seconds(task, group.kind), move

    def _steal(self, worker: Worker, own: Queues) -> Task | None:
        """Return a task of another group that the worker ends no later than that group, else one that may end later; None without one."""
        estimates = self.estimates
        backlog = assigned_seconds(worker, estimates)  # the group has no task for the worker, so its queue is empty
        may_end_later: tuple[Queues, list[Entry], int] | None = None
        for group in sorted(self._groups.values(), key=lambda group: -group.seconds):
            if group is own or not len(group):
                continue
            held, has_spare = group.assigned_seconds(estimates), len(group) > sum(member.depth for member in group.workers)
            for kinds, queue in group.queues.items():
                if worker.kind not in kinds:
                    continue
                before = group.seconds  # sum over the tasks up to the present one
                for index in range(min(STEAL, len(queue))):
                    entry = queue[index]
                    before -= entry.seconds
                    if entry.stays:
                        continue
                    seconds = sum_up(self._weigh(entry.task, own, backlog))
                    if seconds <= held + before / len(group.workers) + entry.seconds + entry.transfer_seconds:
                        return group.take(queue, index)
                    if has_spare and may_end_later is None and self._left.has_slack(entry.task, seconds):
                        may_end_later = group, queue, index
        if may_end_later is None:
            return None
        group, queue, index = may_end_later
        return group.take(queue, index)


class DataAware(ExpectedEnd):
    """The policy dmda: dm + transfers + evictions."""

    weighs_data = True
    keeps_partitions = True


class DataAwareSorted(DataAware):
    """The policy dmdas: dmda with queues by priority, then submission order."""

    is_sorted = True
