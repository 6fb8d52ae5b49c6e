"""Assignment of ready tasks to workers, and their admission to memory.

A worker with a free slot takes a task from the policy. The task is admitted to the worker's node if all missing bytes can be reserved in one step
(`memory/admission`). Otherwise it is blocked: it joins the node's queue, holds nothing and occupies no worker. After the oldest blocked task of a
node, only tasks that need no new memory are admitted. This module knows workers, policy and admission, but not dependencies, failures or replays.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from math import isclose

from .errors import InvalidEvent, TaskError
from .events import Action, RunTask
from .memory.admission import Admission, NothingToRead
from .memory.compaction import Compaction
from .memory.replicas import Replicas
from .performance_model import Estimates
from .policies import Explained, Pinned, Placement, Policy
from .records import ANY, HOST, RAM, RW, NodeId, R, Replay, Task, TaskId, Worker, WorkerId, WorkerKind
from .task_states import FITS, FREED, INPUTS_ARRIVED, INPUTS_MISSING, NO_FREE_BYTES, WORKER_FREE


class Dispatch:
    """Workers, ready tasks and blocked tasks.

    Attributes:
        to_cancel: tasks that can never run, each with the error; the owner of the dispatch cancels them.
        blocked: for each node, the tasks that wait for its memory, oldest first.
        throttled: heap of the recorded tasks that are too far ahead of the planned order.
        num_active: number of running tasks, including those of the program.
        num_ready: number of tasks that the policy holds.
        num_free: number of free slots of all workers that have joined.
        turns: tasks of kind host of the replays in progress that are not admitted yet, in planned order.
    """

    def __init__(self, replicas: Replicas, admission: Admission, policy: Policy) -> None:
        self._replicas, self._admission = replicas, admission
        self._compaction = Compaction(replicas)
        self._foresight = replicas.foresight
        self._copies = replicas.copies
        self.policy = policy
        self.host = Worker(HOST, "host", RAM, depth=1 << 60)
        self.workers: dict[WorkerId, Worker] = {HOST: self.host}
        self.joined: list[Worker] = []
        self.blocked: list[list[Task]] = [[] for _ in replicas.nodes]
        self.to_cancel: list[tuple[Task, BaseException]] = []
        self.num_active = self.num_blocked = self.num_ready = self.num_free = 0
        self.throttled: list[tuple[int, TaskId, Task, Worker | None]] = []
        self.turns: deque[Task] = deque()
        self._num_slots: list[int] = [0 for _ in replicas.nodes]  # per node, the number of tasks that its workers can hold together

    def join(self, worker: Worker, actions: list[Action]) -> None:
        """Add a worker."""
        self.workers[worker.id] = worker
        self.joined.append(worker)
        self.policy.join(worker)
        self._num_slots[worker.node] += worker.depth
        self.num_free += worker.depth
        if self.num_ready:
            self._fill(worker, actions)

    def begin(self, replay: Replay) -> None:
        """Prepare for the tasks of a new replay."""
        self.turns += replay.turns
        if replay.plan.has_pins:
            self.keep_pins()

    def keep_pins(self) -> None:
        """Put a policy that respects pins in front of the current one; to be called before the first pinned task."""
        if not isinstance(self.policy, Pinned):
            self.policy = Pinned(self.policy)

    def explain(self, estimates: Estimates, names: Collection[str], count: int) -> Sequence[Placement]:
        """Record the next `count` placements of recorded tasks with these names; the returned list grows as they happen.

        Args:
            estimates: estimates for the candidates, if the policy does not weigh costs itself.
            names: names of codelets.
            count: number of placements to record.
        """
        holder = self.policy if isinstance(self.policy, Pinned) else self
        policy = holder.policy.policy if isinstance(holder.policy, Explained) else holder.policy
        watched = holder.policy = Explained(policy, estimates, self.joined, names, count)
        return watched.placements

    def push(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """Take a task without unfinished predecessors; `worker` ran the last of them, if any did."""
        task.state = FREED[task.state]
        step = task.step
        if step is not None:
            order = task.order = step.first_order + task.position
            if step.plan.window != ANY and order > self._foresight.order + step.plan.window:
                heapq.heappush(self.throttled, (order, task.id, task, worker))
                return
        self._hand_over(task, worker, actions)

    def _hand_over(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """Give a ready task to the policy; a task of kind "host", which needs no worker, is admitted at once or in its turn."""
        if task.spec.kinds[0] != "host":
            self.num_ready += 1
            self.policy.push(task, worker)
        elif task.step is None:
            self._assign(task, self.host, actions)
        else:
            self.take_turns(actions)

    def take_turns(self, actions: list[Action]) -> None:
        """Admit ready tasks of kind host of recorded steps, in planned order: each waits, holding nothing, until the one before it is admitted.

        Such a task may be one end of an exchange, which ends once another machine has admitted the other end. If all exchanges have one sequence, of
        which each machine has a part in that order, all of them end. Proof: let e be the first unfinished one. A machine that has not admitted its
        end of e holds memory for no later one, and all earlier ones have ended. So only tasks run there that end by themselves, the tasks before e in
        planned order need nothing from other machines, and e is admitted as on a machine of its own (`admission`, `reservations`). Once both ends are
        admitted, e ends. So no memory has to be kept free for other tasks while exchanges wait.
        """
        while self.turns:
            task = self.turns[0]
            if task.state != "ready" or (task.step is not None and task.order > self._foresight.order + task.step.plan.window):
                return
            self._assign(task, self.host, actions)

    def release_throttled(self, actions: list[Action]) -> None:
        """Give the policy the throttled tasks that are within reach now that the planned order has advanced."""
        throttled, order = self.throttled, self._foresight.order
        while throttled:
            task, worker = throttled[0][2:]
            if task.step is not None and task.order > order + task.step.plan.window:
                return
            heapq.heappop(throttled)
            self._hand_over(task, worker, actions)

    def feed(self, actions: list[Action]) -> None:
        """Give ready tasks to workers with free slots; an idle worker that gets none answers for the others of its kind and node."""
        without = set[tuple[WorkerKind, NodeId]]()
        for worker in self.joined:
            if not (self.num_free and self.num_ready):
                return
            if len(worker.assigned) == worker.depth or (worker.kind, worker.node) in without:
                continue
            is_idle = not worker.assigned  # no other one could end a task sooner
            if not self._fill(worker, actions) and is_idle and not worker.assigned and not isinstance(self.policy, Pinned):
                without.add((worker.kind, worker.node))

    def _fill(self, worker: Worker, actions: list[Action]) -> bool:
        """Assign ready tasks to a worker while it has free slots, and while few tasks wait for its memory; return False if there is none for it.

        If all of its tasks wait for copies, the last slot is kept for a task that need not wait, so that the worker does not idle because of a slow
        link. Workers that stand aside are exempt: all of their tasks wait for data from devices.
        """
        assigned, depth = worker.assigned, worker.depth
        line, limit = self.blocked[worker.node], self._num_slots[worker.node]
        while len(assigned) < depth and len(line) < limit:
            task = self.policy.pop(worker)
            if task is None:
                return False
            is_last_slot = len(assigned) == depth - 1 > 0
            if is_last_slot and not worker.aside and all(each.state == "fetching" for each in assigned) and _misses_input(task, worker.node):
                self.policy.push(task, worker)
                return True
            self.num_ready -= 1
            self._assign(task, worker, actions)
        return True

    def _assign(self, task: Task, worker: Worker, actions: list[Action]) -> None:
        """Admit the task for the worker, or block it until there is memory."""
        if task.step is not None:
            leave_pending(task, task.step)
        line = self.blocked[worker.node]
        is_behind = line and line[0].order < task.order and not self._admission.needs_no_bytes(task, worker.node)
        if is_behind or not self._admit(task, worker, actions):
            task.state = NO_FREE_BYTES[task.state]
            task.worker = worker.id
            task.node = worker.node
            line.append(task)
            line.sort(key=_order)
            self.num_blocked += 1

    def _admit(self, task: Task, worker: Worker, actions: list[Action]) -> bool:
        """Admit the task to the worker's node if it fits; a task with nothing to read is marked for cancellation and counts as admitted."""
        task.worker = worker.id
        task.node = worker.node
        try:
            if not self._admission.admit(task, actions):
                return False
        except NothingToRead as unwritten:
            lost = unwritten.handle.lost
            self.to_cancel.append((task, TaskError("lost" if lost else "unwritten", repr(task), data=repr(unwritten.handle), why=lost or "")))
            self.pass_turn(task)
            return True
        worker.assigned.append(task)
        if worker is not self.host:
            self.num_free -= 1
        elif task.step is not None:
            self.pass_turn(task)
        if task.num_arriving:
            task.state = INPUTS_MISSING[task.state]
            return True
        task.state = FITS[task.state]
        if worker.running is None:
            self._run(task, worker, actions)
        return True

    def pass_turn(self, task: Task) -> None:
        """Let the next task of kind host have its turn, because a task is admitted or will never run."""
        if task.spec.kinds[0] == "host" and task in self.turns:
            self.turns.remove(task)

    def stage(self, task: Task, worker: Worker, actions: list[Action]) -> None:
        """Stage a task whose inputs have arrived; run it if its worker is free."""
        task.state = INPUTS_ARRIVED[task.state]
        if worker.running is None:
            self._run(task, worker, actions)

    def _run(self, task: Task, worker: Worker, actions: list[Action]) -> None:
        if self._replicas.has_several:
            self._replicas.invalidate_others(task, actions)
        task.state = WORKER_FREE[task.state]
        if worker is not self.host:
            worker.running = task
        self.num_active += 1
        actions.append(RunTask(worker.id, task))

    def retire(self, task: Task, actions: list[Action]) -> Worker:
        """Free the worker of a task that has ended, run its next staged task, and return the worker."""
        worker = self.workers[task.worker]
        self.num_active -= 1
        worker.assigned.remove(task)
        if worker is not self.host:  # hot path: `withdraw`
            self.num_free += 1
        if worker.running is task:
            worker.running = None
            for waiting in worker.assigned:
                if waiting.state == "staged":
                    self._run(waiting, worker, actions)
                    break
        return worker

    def withdraw(self, task: Task) -> None:
        """Take an admitted task, which will not run, from its worker."""
        worker = self.workers[task.worker]
        worker.assigned.remove(task)
        if worker is not self.host:
            self.num_free += 1

    def refill(self, worker: Worker, actions: list[Action]) -> None:
        """Assign ready tasks to workers, starting with `worker`."""
        if worker is not self.host:
            if len(worker.assigned) < 2:  # one task at most is left: fill once, not after each task
                self._fill(worker, actions)
            if len(self.joined) == 1:
                return
        if self.num_free and self.num_ready:
            self.feed(actions)

    def retry(self, actions: list[Action]) -> None:
        """Admit blocked tasks, oldest first; after one that does not fit, only those that need no new memory."""
        for line in sorted(filter(None, self.blocked), key=lambda line: line[0].order):
            is_head = True
            for task in list(line):
                worker = self._find_worker(task)
                if worker is None or not (is_head or self._admission.needs_no_bytes(task, task.node)):
                    is_head = False
                    continue
                if not self._admit_blocked(task, worker, actions):
                    is_head = False
        self.take_turns(actions)

    def oldest_blocked(self) -> Task | None:
        """Return the oldest task that waits for memory, or None."""
        return min(chain.from_iterable(self.blocked), key=_order, default=None)

    def force_admit(self, actions: list[Action]) -> bool:
        """Admit, when nothing runs or moves, the oldest blocked task that fits on any node, or else any task of the policy that does.

        Returns:
            Whether a task or a copy is in progress now.
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
        """Admit a blocked task on any node with room for it; return whether it, or a write-back that makes room for it, is in progress.

        If only fragmentation prevents the admission, the node is compacted first.
        """
        tried: set[NodeId] = set()
        for worker in (self.host, *self.joined):
            if worker.kind in task.spec.kinds and worker.node not in tried and (task.spec.pin is None or task.spec.pin == worker.id):
                tried.add(worker.node)
                if self._admit_blocked(task, worker, actions) or self._copies:
                    return True
                if self._compaction.compact(task, worker.node, actions):
                    return self._admit_blocked(task, worker, actions)
                if self._copies:
                    return True
        return False

    def _find_worker(self, task: Task) -> Worker | None:
        """Return a worker with a free slot on the node of a blocked task, preferably the worker that took the task from the policy."""
        drawer = self.workers[task.worker]
        if len(drawer.assigned) < drawer.depth:
            return drawer
        if task.spec.pin is not None:
            return None
        for worker in self.joined:
            if worker.node == task.node and worker.kind in task.spec.kinds and len(worker.assigned) < worker.depth:
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
        """Remove a task from the queue of its node, or of `node_id`."""
        self.blocked[task.node if node_id is None else node_id].remove(task)
        self.num_blocked -= 1

    def admitted(self) -> Iterator[Task]:
        """Return the tasks that hold memory now."""
        for worker in self.workers.values():
            yield from worker.assigned

    def validate(self) -> None:
        """Check the counters at rest between two events.

        Raises:
            InvalidEvent: a counter or a state is inconsistent.
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
        if any(task in self.host.assigned for task in self.turns):
            raise InvalidEvent(f"tasks wait for their turns, and some of them are admitted: {[*self.turns]}")
        num_free = sum(worker.depth - len(worker.assigned) for worker in self.joined)
        if num_free != self.num_free:
            raise InvalidEvent(f"workers have {num_free} free slots, {self.num_free} were counted")
        for replay in self._foresight.replays:
            pending = [task for task in replay.tasks if task.state in ("waiting", "ready") and not replay.done[task.position]]
            seconds = sum(task.spec.shared_seconds for task in pending)
            num_counted, counted = sum(replay.pending), replay.pending_seconds
            if len(pending) != num_counted or not isclose(seconds, counted, abs_tol=1e-6):
                raise InvalidEvent(f"{len(pending)} tasks of {seconds} s are pending, {num_counted} of {counted} s were counted")
        num_active = sum(task.state == "running" for task in self.admitted())
        if num_active != self.num_active:
            raise InvalidEvent(f"{num_active} tasks run, {self.num_active} were counted")


def leave_pending(task: Task, replay: Replay) -> None:
    """Count that a task of a replay is not pending any more: a worker has taken it, or it has ended. Only the first call for a task has an effect."""
    if replay.pending[task.position]:
        replay.pending[task.position] = 0
        replay.pending_seconds -= task.spec.shared_seconds


def _misses_input(task: Task, node: NodeId) -> bool:
    """Return whether data that a task reads has yet to arrive on a node."""
    for handle, mode in task.accesses:
        if mode == R or mode == RW:
            replica = handle.replicas.get(node)
            if replica is None or replica.arriving or replica.state == "reserved":
                return True
    return False


def _order(task: Task) -> int:
    return task.order
