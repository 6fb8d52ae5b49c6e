"""Who runs what, and when there is memory for it: from ready tasks to running ones.

A worker with a free slot draws a task from the policy; the task is admitted to the worker's node if everything it misses there can be reserved in one
step (`memory/admission`), else it is blocked: it joins the node's line, holds nothing and occupies no worker. Behind the oldest of a line only tasks
that need no new memory are admitted. Knows workers, policy and admission; does not know dependencies, failures or replays.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Final, Literal

from .errors import InvalidEvent, TaskError
from .events import Action, RunTask
from .memory.admission import Admission, NothingToRead
from .memory.compaction import Compaction
from .memory.replicas import Replicas
from .performance_model import Estimates
from .policies import Explained, Pinned, Placement, Policy
from .records import ANY, HOST, RAM, RW, NodeId, R, Task, TaskId, TaskState, Worker, WorkerId

TaskEvent = Literal[
    "submitted", "freed", "drawn, fits", "drawn, inputs missing", "drawn, no free bytes", "inputs arrived", "worker free", "finished",
    "raised", "reads lost data", "never fits",
]  # fmt: skip

TASK_TRANSITIONS: Final[dict[tuple[TaskState, TaskEvent], TaskState]] = {
    ("waiting", "freed"): "ready",
    ("waiting", "reads lost data"): "cancelled",
    ("ready", "drawn, no free bytes"): "blocked",
    ("ready", "drawn, inputs missing"): "fetching",
    ("ready", "drawn, fits"): "staged",
    ("ready", "reads lost data"): "cancelled",
    ("blocked", "drawn, inputs missing"): "fetching",
    ("blocked", "drawn, fits"): "staged",
    ("blocked", "never fits"): "cancelled",
    ("blocked", "reads lost data"): "cancelled",
    ("fetching", "inputs arrived"): "staged",
    ("fetching", "reads lost data"): "cancelled",
    ("staged", "worker free"): "running",
    ("running", "finished"): "done",
    ("running", "raised"): "failed",
}
"""(state, event) -> next state of a task. A recorded task starts over as waiting. "ready" and "staged" may be passed within one event."""


class Dispatch:
    """Workers, ready tasks and blocked tasks.

    Attributes:
        to_cancel: tasks found to have nothing to read, and why; the owner of the dispatch cancels them.
        blocked: per node, tasks waiting for memory, oldest first.
        throttled: recorded tasks too far ahead of the planned order, a heap.
        num_active: tasks running, the program's included.
        num_ready: tasks the policy holds.
    """

    def __init__(self, replicas: Replicas, admission: Admission, policy: Policy) -> None:
        self._replicas = replicas
        self._admission = admission
        self._compaction = Compaction(replicas)
        self._foresight = replicas.foresight
        self._copies = replicas.copies
        self.policy = policy
        self.host = Worker(HOST, "host", RAM, depth=1 << 60)
        self.workers: dict[WorkerId, Worker] = {HOST: self.host}
        self.joined: list[Worker] = []
        self.blocked: list[list[Task]] = [[] for _ in replicas.nodes]
        self.to_cancel: list[tuple[Task, BaseException]] = []
        self.num_active = 0
        self.num_blocked = 0
        self.num_ready = 0
        self.throttled: list[tuple[int, TaskId, Task, Worker | None]] = []
        self._num_slots: list[int] = [0 for _ in replicas.nodes]  # tasks the workers of each node can hold together

    def join(self, worker: Worker, actions: list[Action]) -> None:
        """A worker joins."""
        self.workers[worker.id] = worker
        self.joined.append(worker)
        self.policy.join(worker)
        self._num_slots[worker.node] += worker.depth
        if self.num_ready:
            self._fill(worker, actions)

    def keep_pins(self) -> None:
        """Tasks that only one worker may run are about to come: let a policy that knows of them stand in front of the one that does not."""
        if not isinstance(self.policy, Pinned):
            self.policy = Pinned(self.policy)

    def explain(self, estimates: Estimates, names: Collection[str], count: int) -> Sequence[Placement]:
        """Write down the next placements of recorded tasks of these names; the list grows as they happen."""
        holder = self.policy if isinstance(self.policy, Pinned) else self
        policy = holder.policy.policy if isinstance(holder.policy, Explained) else holder.policy
        watched = holder.policy = Explained(policy, estimates, self.joined, names, count)
        return watched.placements

    def push(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """Take a task that waits for no other; `worker` ran the last one it waited for."""
        task.state = "ready"
        step = task.step
        if step is not None:
            order = task.order = step.first_order + task.position
            if step.window != ANY and order > self._foresight.order + step.window:
                heapq.heappush(self.throttled, (order, task.id, task, worker))
                return
        self._hand_over(task, worker, actions)

    def _hand_over(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """Give a ready task to the policy; what needs no worker is admitted at once."""
        if task.kinds[0] == "host":
            self._assign(task, self.host, actions)
        else:
            self.num_ready += 1
            self.policy.push(task, worker)

    def release_throttled(self, actions: list[Action]) -> None:
        """The planned order has advanced: hand the next throttled tasks to the policy."""
        throttled, order = self.throttled, self._foresight.order
        while throttled:
            task, worker = throttled[0][2:]
            if task.step is not None and task.order > order + task.step.window:
                return
            heapq.heappop(throttled)
            self._hand_over(task, worker, actions)

    def feed(self, actions: list[Action]) -> None:
        """Give ready tasks to workers with free slots."""
        for worker in self.joined:
            if not self.num_ready:
                return
            if len(worker.assigned) < worker.depth:
                self._fill(worker, actions)

    def _fill(self, worker: Worker, actions: list[Action]) -> None:
        """Draw ready tasks for a worker while it has free slots; not many more while its memory is short.

        Where all tasks that it has wait for copies, its last slot is for one that need not: else it would idle behind a slow link. Not so of workers
        that stand aside: all that they run waits for what devices send.
        """
        assigned, depth = worker.assigned, worker.depth
        line, limit = self.blocked[worker.node], self._num_slots[worker.node]
        while len(assigned) < depth and len(line) < limit:
            task = self.policy.pop(worker)
            if task is None:
                return
            if len(assigned) == depth - 1 and not worker.aside and _only_wait(assigned) and _misses_input(task, worker.node):
                self.policy.push(task, worker)
                return
            self.num_ready -= 1
            self._assign(task, worker, actions)

    def _assign(self, task: Task, worker: Worker, actions: list[Action]) -> None:
        """Admit the task for the worker, or let it wait for memory."""
        line = self.blocked[worker.node]
        is_behind = line and line[0].order < task.order and not self._admission.needs_no_bytes(task, worker.node)
        if is_behind or not self._admit(task, worker, actions):
            task.state = "blocked"
            task.worker = worker.id
            task.node = worker.node
            line.append(task)
            line.sort(key=_order)
            self.num_blocked += 1

    def _admit(self, task: Task, worker: Worker, actions: list[Action]) -> bool:
        """Admit the task to the worker's node if it fits; a task found to have nothing to read counts as dealt with."""
        task.worker = worker.id
        task.node = worker.node
        try:
            if not self._admission.admit(task, actions):
                return False
        except NothingToRead as unwritten:
            lost = unwritten.handle.lost
            why = "nothing has written; write it first" if lost is None else f"is lost because {lost}"
            reason = f"{task!r} reads {unwritten.handle!r}, which {why}"
            self.to_cancel.append((task, TaskError(reason)))
            return True
        worker.assigned.append(task)
        if task.num_arriving:
            task.state = "fetching"
        elif worker.running is None:  # hot path: `stage`
            self._run(task, worker, actions)
        else:
            task.state = "staged"
        return True

    def stage(self, task: Task, worker: Worker, actions: list[Action]) -> None:
        """The task's data is in place: run it, or let it wait for its worker."""
        if worker.running is None:
            self._run(task, worker, actions)
        else:
            task.state = "staged"

    def _run(self, task: Task, worker: Worker, actions: list[Action]) -> None:
        if self._replicas.has_several:
            self._replicas.invalidate_others(task, actions)
        task.state = "running"
        if worker is not self.host:
            worker.running = task
        self.num_active += 1
        actions.append(RunTask(worker.id, task))

    def withdraw(self, task: Task) -> None:
        """A task that was admitted will never run: its data could not be fetched."""
        self.workers[task.worker].assigned.remove(task)

    def retire(self, task: Task, actions: list[Action]) -> Worker:
        """A task that ran has ended: free its worker for the next one that is staged. Returns the worker."""
        worker = self.workers[task.worker]
        self.num_active -= 1
        worker.assigned.remove(task)
        if worker.running is task:
            worker.running = None
            for waiting in worker.assigned:
                if waiting.state == "staged":
                    self._run(waiting, worker, actions)
                    break
        return worker

    def refill(self, worker: Worker, actions: list[Action]) -> None:
        """Give ready tasks out, to `worker` first."""
        if worker is not self.host:
            if worker.running is None:
                self._fill(worker, actions)
            if len(self.joined) == 1:
                return
        self.feed(actions)

    def retry(self, actions: list[Action]) -> None:
        """Admit blocked tasks from the oldest on; behind one that does not fit, only those that need no new memory."""
        for line in sorted(filter(None, self.blocked), key=lambda line: line[0].order):
            is_head = True
            for task in list(line):
                worker = self._find_worker(task)
                if worker is None or not (is_head or self._admission.needs_no_bytes(task, task.node)):
                    is_head = False
                    continue
                if not self._admit_blocked(task, worker, actions):
                    is_head = False

    def oldest_blocked(self) -> Task | None:
        """The oldest task that waits for memory."""
        return min(chain.from_iterable(self.blocked), key=_order, default=None)

    def force_admit(self, actions: list[Action]) -> bool:
        """When nothing runs or moves: let through any task that fits anywhere, oldest first, then any the policy holds.

        Returns:
            Whether something is under way now.
        """
        for task in sorted(chain.from_iterable(self.blocked), key=_order):
            if self._admit_anywhere(task, actions):
                return True
        for worker in self.joined:
            while self.num_ready and (drawn := self.policy.pop(worker)) is not None:
                self.num_ready -= 1
                self._assign(drawn, worker, actions)
                if drawn.state != "blocked" or self._admit_anywhere(drawn, actions):
                    return True
        return False

    def _admit_anywhere(self, task: Task, actions: list[Action]) -> bool:
        """Admit a blocked task on whatever node it fits; True if that, or a write-back towards it, is under way.

        When only fragmentation is in the way, the node is compacted first.
        """
        tried: set[NodeId] = set()
        for worker in (self.host, *self.joined):
            if worker.kind in task.kinds and worker.node not in tried and (task.pin is None or task.pin == worker.id):
                tried.add(worker.node)
                if self._admit_blocked(task, worker, actions) or self._copies:
                    return True
                if self._compaction.compact(task, worker.node, actions):
                    return self._admit_blocked(task, worker, actions)
                if self._copies:
                    return True
        return False

    def _find_worker(self, task: Task) -> Worker | None:
        """A worker with a free slot on the node the blocked task waits for, preferably the one that drew it."""
        drawer = self.workers[task.worker]
        if len(drawer.assigned) < drawer.depth:
            return drawer
        if task.pin is not None:
            return None
        for worker in self.joined:
            if worker.node == task.node and worker.kind in task.kinds and len(worker.assigned) < worker.depth:
                return worker
        return None

    def _admit_blocked(self, task: Task, worker: Worker, actions: list[Action]) -> bool:
        assigned = task.worker, task.node
        dealt_with = self._admit(task, worker, actions)
        if task.state == "blocked":
            task.worker, task.node = assigned
        else:
            self.unblock(task, assigned[1])
        return dealt_with

    def unblock(self, task: Task, node_id: NodeId | None = None) -> None:
        """Take a task out of its line, or of another node's."""
        self.blocked[task.node if node_id is None else node_id].remove(task)
        self.num_blocked -= 1

    def admitted(self) -> Iterator[Task]:
        """Tasks that hold memory now."""
        for worker in self.workers.values():
            yield from worker.assigned

    def validate(self) -> None:
        """Check the books at rest between two events.

        Raises:
            InvalidEvent: something does not add up.
        """
        if self.num_ready != len(self.policy):
            raise InvalidEvent(f"{self.num_ready} tasks were given to the policy, which holds {len(self.policy)}")
        if self.num_blocked != sum(map(len, self.blocked)):
            raise InvalidEvent(f"{self.num_blocked} tasks were blocked, the lines hold {sum(map(len, self.blocked))}")
        for worker in self.joined:
            if worker.running is not None and (worker.running.state != "running" or worker.running not in worker.assigned):
                raise InvalidEvent(f"worker {worker.id} runs {worker.running!r}, which is {worker.running.state}")
            if worker.running is None and any(task.state == "staged" for task in worker.assigned):
                raise InvalidEvent(f"worker {worker.id} idles although a task is staged")
            if len(worker.assigned) > worker.depth:
                raise InvalidEvent(f"worker {worker.id} holds {len(worker.assigned)} tasks, more than {worker.depth}")
        num_active = sum(task.state == "running" for task in self.admitted())
        if num_active != self.num_active:
            raise InvalidEvent(f"{num_active} tasks run, {self.num_active} were counted")


def _only_wait(tasks: Sequence[Task]) -> bool:
    """Whether there are tasks, and all of them wait for copies."""
    return bool(tasks) and all(task.state == "fetching" for task in tasks)


def _misses_input(task: Task, node: NodeId) -> bool:
    """Whether data that a task reads has yet to arrive on a node."""
    for handle, mode in task.accesses:
        if mode == R or mode == RW:
            replica = handle.replicas.get(node)
            if replica is None or replica.arriving or replica.state == "reserved":
                return True
    return False


def _order(task: Task) -> int:
    return task.order
