"""The scheduler as a state machine: events in, actions out.

Theory of operation. A submitted task gets edges from earlier tasks (`graph`). Without unfinished predecessors it is ready and belongs to the
policy. A worker with room takes a task from the policy; the task is *admitted* to the worker's memory node when all of its missing bytes are
reserved in one step (`memory`), evicting unpinned replicas if need be; otherwise it is blocked, and no younger task is admitted to that node
before it. Inputs that are not valid on the node are copied in (`coherence`); then the task is staged, and runs when its worker is free. A
finished task unpins, invalidates what it overwrote, frees what died, and releases its successors.

Promises:
  - an admitted task holds everything it needs, so it always finishes; blocked tasks hold nothing;
  - a pinned replica is never evicted, moved or freed;
  - when tasks are blocked and nothing runs or moves, the oldest fails with `DoesNotFit`: nothing ever hangs;
  - a task that fails makes its outputs lost; tasks that would read lost data are cancelled; a full overwrite revives it.

No threads, clocks, I/O or arrays: the same machine serves real workers, virtual time and unit tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from . import coherence, graph
from .errors import DoesNotFit, InvalidEvent, Stalled, TaskError
from .events import (
    Action,
    CopyFinished,
    CopyTile,
    Event,
    HandleReleased,
    ReportFailure,
    ReportStepDone,
    RunTask,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from .memory import MemoryNode
from .policies import Policy
from .records import HOST, RAM, RW, SCRATCH, HandleRecord, NodeId, R, Replica, Task, W, Worker, WorkerId
from .story import tell

HISTORY = 512
"""Events remembered for stories."""


class Machine:
    """The state machine.

    Args:
        nodes: memory nodes; a node's id is its position, host memory comes first.
        policy: chooses among ready tasks.
    """

    def __init__(self, nodes: Sequence[MemoryNode], policy: Policy) -> None:
        self.nodes = list(nodes)
        self.policy = policy
        self.host = Worker(HOST, "host", RAM, depth=1 << 60)
        self.workers: dict[WorkerId, Worker] = {HOST: self.host}
        self.resident: list[dict[Replica, None]] = [{} for _ in self.nodes]
        self.blocked: list[list[Task]] = [[] for _ in self.nodes]
        self.history: deque[Event] = deque(maxlen=HISTORY)
        self.clock = 0
        self.num_unfinished = 0
        self.num_finished = 0
        self.num_evictions = 0
        self.num_lost = 0
        self.moved_bytes: dict[tuple[NodeId, NodeId], int] = {}
        self._crew: list[Worker] = []
        self._num_active = 0  # tasks running, the program's included
        self._arrivals: dict[Replica, list[Task]] = {}  # copies under way and who waits for them
        self._outgoing: list[int] = [0 for _ in self.nodes]  # bytes being written back from each node
        self._doomed: deque[tuple[Task, BaseException]] = deque()
        self._freed = False  # something was freed or unpinned: blocked tasks may fit now
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            TaskSubmitted: self._on_task_submitted,
            StepStarted: self._on_step_started,
            TaskFinished: self._on_task_finished,
            TaskFailed: self._on_task_failed,
            CopyFinished: self._on_copy_finished,
            WorkerJoined: self._on_worker_joined,
            HandleReleased: self._on_handle_released,
        }

    def handle(self, event: Event) -> list[Action]:
        """Advance by one event and return what has to be done now.

        Raises:
            InvalidEvent: the event is impossible in this state.
            Stalled: tasks remain although nothing is under way (a bug; the message carries the story).
        """
        self.clock += 1
        self.history.append(event)
        actions = self._actions = []
        self._handlers[type(event)](event)
        if self._doomed or self.blocked[0] or len(self.nodes) > 1 or not self._num_active:
            self._settle()
        return actions

    # --- events -------------------------------------------------------------------------------------------------------

    def _on_worker_joined(self, event: WorkerJoined) -> None:
        worker = event.worker
        if worker.id in self.workers:
            raise InvalidEvent(f"worker {worker.id} joined twice")
        self.workers[worker.id] = worker
        self._crew.append(worker)
        self._fill(worker)

    def _on_task_submitted(self, event: TaskSubmitted) -> None:
        task = event.task
        if task.state != "waiting":
            raise InvalidEvent(f"{task!r} was submitted while {task.state}\n{tell(self.history, task)}")
        self.num_unfinished += 1
        for handle, _ in task.accesses:
            handle.num_uses += 1
        graph.link(task)
        if not task.num_waiting:
            self._make_ready(task, None)
            self._feed()

    def _on_step_started(self, event: StepStarted) -> None:
        replay = event.replay
        if replay.num_unfinished:
            raise InvalidEvent(f"a replay was started while replay {replay.number} still has {replay.num_unfinished} tasks")
        replay.failure = None
        replay.num_unfinished = len(replay.tasks)
        self.num_unfinished += len(replay.tasks)
        for handle, num_uses in replay.owned:
            handle.num_uses = num_uses
            if handle.lost is not None:
                self._revive(handle)
        for use in replay.shared:
            use.handle.num_uses += use.num_uses
        graph.link_step(replay.shared)
        for task in replay.roots:
            if not task.num_waiting:
                self._make_ready(task, None)
        if not replay.tasks:
            self._actions.append(ReportStepDone(replay, replay.number))
        self._feed()

    def _on_task_finished(self, event: TaskFinished) -> None:
        task = event.task
        if task.state != "running":
            raise InvalidEvent(f"{task!r} finished while {task.state}\n{tell(self.history, task)}")
        worker = self.workers[task.worker]
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            replica.pins -= 1
            handle.num_uses -= 1
            if mode != R:
                if mode == SCRATCH:
                    self._drop(replica)
                    continue
                replica.state = "modified"
                if handle.lost is not None:
                    self._revive(handle)
            if handle.released and not handle.num_uses:
                self._free(handle)
        self._freed = True
        task.state = "done"
        self._retire(task, worker)

    def _on_task_failed(self, event: TaskFailed) -> None:
        task = event.task
        if task.state != "running":
            raise InvalidEvent(f"{task!r} failed while {task.state}\n{tell(self.history, task)}")
        for replica in task.replicas:
            replica.pins -= 1
        self._freed = True
        self._give_up(task, event.error, "failed")
        self._retire(task, self.workers[task.worker])

    def _on_copy_finished(self, event: CopyFinished) -> None:
        source, target = event.source, event.target
        waiting = self._arrivals.pop(target, None)
        if waiting is None:
            raise InvalidEvent(f"a copy of {target.handle!r} to node {target.node} finished that was not under way")
        handle = source.handle
        source.pins -= 1
        target.pins -= 1
        target.arriving = False
        coherence.step(source, "copied from")
        coherence.step(target, "copy arrived")
        if target.node == RAM:
            self._outgoing[source.node] -= handle.size
        handle.num_uses -= 1
        self._freed = True
        if handle.released and not handle.num_uses:
            self._free(handle)
        for task in waiting:
            task.num_arriving -= 1
            if not task.num_arriving:
                self._stage(task)

    def _on_handle_released(self, event: HandleReleased) -> None:
        handle = event.handle
        handle.released = True
        if not handle.num_uses:
            self._free(handle)
            if handle.lost is not None:
                self._revive(handle)
            self._freed = True

    # --- the life of a task -------------------------------------------------------------------------------------------

    def _make_ready(self, task: Task, worker: Worker | None) -> None:
        if self.num_lost:
            for handle, mode in task.accesses:
                if handle.lost is not None and (mode == R or mode == RW):
                    reason = f"{task!r} was cancelled: it reads {handle!r}, which is lost because {handle.lost}"
                    self._doomed.append((task, TaskError(reason)))
                    return
        task.state = "ready"
        if task.kinds[0] == "host":
            self._assign(task, self.host)
        else:
            self.policy.push(task, worker)

    def _feed(self) -> None:
        """Give ready tasks to workers with room."""
        if self.policy:
            for worker in self._crew:
                if len(worker.assigned) < worker.depth:
                    self._fill(worker)

    def _fill(self, worker: Worker) -> None:
        while len(worker.assigned) < worker.depth:
            task = self.policy.pop(worker)
            if task is None:
                return
            self._assign(task, worker)

    def _assign(self, task: Task, worker: Worker) -> None:
        task.worker = worker.id
        task.node = worker.node
        worker.assigned.append(task)
        line = self.blocked[worker.node]
        if (line and line[0].order < task.order) or not self._admit(task):
            self._block(task)

    def _block(self, task: Task) -> None:
        task.state = "blocked"
        line = self.blocked[task.node]
        line.append(task)
        line.sort(key=lambda waiting: waiting.order)

    def _admit(self, task: Task) -> bool:
        """Reserve everything the task misses on its node and start its copies; or change nothing and return False."""
        node_id = task.node
        node = self.nodes[node_id]
        resident = self.resident[node_id]
        replicas: list[Replica] = []
        for handle, _ in task.accesses:
            replica = handle.replicas.get(node_id)
            if replica is None:
                offset = node.take(handle.size, handle.data_class)
                if offset is None:
                    self._take_back(replicas)
                    return self._admit_under_pressure(task)
                replica = handle.replicas[node_id] = Replica(handle, node_id, offset)
                resident[replica] = None
            replica.pins += 1
            replica.last_use = self.clock
            replicas.append(replica)
        task.replicas = replicas
        self._fetch(task)
        return True

    def _take_back(self, replicas: list[Replica]) -> None:
        """Undo a half-made reservation."""
        for replica in replicas:
            replica.pins -= 1
            if replica.state == "reserved" and not replica.pins and not replica.arriving:
                self._drop(replica)

    def _admit_under_pressure(self, task: Task) -> bool:
        """`_admit` when there is no hole: pin what is there first, then evict for what is not."""
        node_id = task.node
        present = [handle.replicas[node_id] for handle, _ in task.accesses if node_id in handle.replicas]
        for replica in present:
            replica.pins += 1
        made: dict[HandleRecord, Replica] = {}
        for handle, _ in task.accesses:
            if node_id not in handle.replicas:
                offset = self._take_by_eviction(node_id, handle)
                if offset is None:
                    break
                made[handle] = handle.replicas[node_id] = Replica(handle, node_id, offset, pins=1)
                self.resident[node_id][made[handle]] = None
        else:
            task.replicas = [handle.replicas[node_id] for handle, _ in task.accesses]
            for replica in task.replicas:
                replica.last_use = self.clock
            self._fetch(task)
            return True
        for replica in made.values():
            replica.pins -= 1
            self._drop(replica)
        for replica in present:
            replica.pins -= 1
        return False

    def _take_by_eviction(self, node_id: NodeId, handle: HandleRecord) -> int | None:
        """An extent for `handle` after evicting least recently used replicas; None if none is free yet."""
        node = self.nodes[node_id]
        if len(self.nodes) == 1:
            return node.take(handle.size, handle.data_class)
        victims = sorted((r for r in self.resident[node_id] if not r.pins and r.state != "reserved"), key=lambda r: r.last_use)
        for victim in victims:
            if coherence.is_sole_copy(victim):
                if node_id == RAM or self._outgoing[node_id] >= handle.size or not self._write_back(victim):
                    continue
            else:
                self.num_evictions += 1
                self._drop(victim)
                offset = node.take(handle.size, handle.data_class)
                if offset is not None:
                    return offset
        return node.take(handle.size, handle.data_class)

    def _write_back(self, victim: Replica) -> bool:
        """Start copying a sole copy to host memory, after which it can be dropped; False if there is no room there."""
        handle = victim.handle
        home = handle.replicas.get(RAM)
        if home is None:
            offset = self.nodes[RAM].take(handle.size, handle.data_class)
            if offset is None:
                return False
            home = handle.replicas[RAM] = Replica(handle, RAM, offset)
            self.resident[RAM][home] = None
        if not home.arriving:
            self._copy(victim, home)
        return True

    def _fetch(self, task: Task) -> None:
        """Start the copies the admitted task needs, or stage it."""
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            if replica.arriving:
                self._arrivals[replica].append(task)
                task.num_arriving += 1
            elif replica.state == "reserved" and (mode == R or mode == RW):
                source = coherence.best_source(handle, replica)
                if source is None:
                    error = TaskError(f"{task!r} reads {handle!r}, which nothing has written; write it first")
                    self._fail_unwritten(task, error)
                    return
                self._copy(source, replica)
                self._arrivals[replica].append(task)
                task.num_arriving += 1
            if mode != R and mode != SCRATCH and len(handle.replicas) > 1:
                for other in handle.replicas.values():  # never write what a copy still reads
                    if other.arriving and other is not replica:
                        self._arrivals[other].append(task)
                        task.num_arriving += 1
        if task.num_arriving:
            task.state = "fetching"
        else:
            self._stage(task)

    def _fail_unwritten(self, task: Task, error: BaseException) -> None:
        """Fail an admitted task before it runs; its copies under way, if any, end in shared replicas nobody waits for."""
        for waiting in self._arrivals.values():
            while task in waiting:
                waiting.remove(task)
        task.num_arriving = 0
        self._take_back(task.replicas)
        self._doomed.append((task, error))

    def _copy(self, source: Replica, target: Replica) -> None:
        source.pins += 1
        target.pins += 1
        target.arriving = True
        source.handle.num_uses += 1
        self._arrivals[target] = []
        if target.node == RAM:
            self._outgoing[source.node] += source.handle.size
        link = (source.node, target.node)
        self.moved_bytes[link] = self.moved_bytes.get(link, 0) + source.handle.nbytes
        self._actions.append(CopyTile(source, target))

    def _stage(self, task: Task) -> None:
        """The task's data is in place: run it, or let it wait for its worker."""
        worker = self.workers[task.worker]
        task.state = "staged"
        if worker.id == HOST:
            self._run(task)
        elif worker.running is None:
            self._run(task)
            worker.running = task

    def _run(self, task: Task) -> None:
        if len(self.nodes) > 1:
            for (_, mode), replica in zip(task.accesses, task.replicas, strict=True):
                if mode != R and mode != SCRATCH and len(replica.handle.replicas) > 1:
                    for stale in coherence.stale_after_write(replica):
                        self._drop(stale)
        task.state = "running"
        self._num_active += 1
        self._actions.append(RunTask(task.worker, task))

    def _retire(self, task: Task, worker: Worker) -> None:
        """A task that ran has ended: free its worker, then release its successors."""
        self._num_active -= 1
        worker.assigned.remove(task)
        if worker.running is task:
            worker.running = None
            for waiting in worker.assigned:
                if waiting.state == "staged":
                    self._run(waiting)
                    worker.running = waiting
                    break
        self._release_successors(task, worker)
        if worker.running is None and worker.id != HOST:
            self._fill(worker)
        self._feed()

    def _release_successors(self, task: Task, worker: Worker | None) -> None:
        graph.unlink(task)
        task.replicas = []
        self.num_unfinished -= 1
        self.num_finished += 1
        replay = task.step
        successors = task.successors
        if replay is None:
            task.successors = []
        else:
            task.num_waiting = task.num_predecessors
            task.order += replay.stride
            task.state = "waiting"
        for after in successors:
            after.num_waiting -= 1
            if not after.num_waiting:
                self._make_ready(after, worker)
        if replay is not None:
            if task.late_successors:
                late, task.late_successors = task.late_successors, []
                for after in late:
                    after.num_waiting -= 1
                    if not after.num_waiting:
                        self._make_ready(after, worker)
            replay.num_unfinished -= 1
            if not replay.num_unfinished:
                self._actions.append(ReportStepDone(replay, replay.number))

    # --- failure ------------------------------------------------------------------------------------------------------

    def _give_up(self, task: Task, error: BaseException, state: str) -> None:
        """Mark what the task should have written as lost, and report."""
        task.state = "failed" if state == "failed" else "cancelled"
        for handle, mode in task.accesses:
            handle.num_uses -= 1
            if mode == W or mode == RW:
                for replica in list(handle.replicas.values()):
                    if not replica.pins:  # else a copy is under way, whose result nobody will read
                        self._drop(replica)
                if handle.lost is None:
                    self.num_lost += 1
                handle.lost = f"{task!r} {task.state}: {error}"
            elif mode == SCRATCH:
                for replica in list(handle.replicas.values()):
                    self._drop(replica)
            if handle.released and not handle.num_uses:
                self._free(handle)
        if task.step is not None and task.step.failure is None:
            task.step.failure = error
        self._actions.append(ReportFailure(task, error))

    def _cancel(self, task: Task, error: BaseException) -> None:
        if task.state in ("blocked", "ready", "fetching", "staged"):
            worker = self.workers[task.worker]
            if task in worker.assigned:
                worker.assigned.remove(task)
            line = self.blocked[task.node]
            if task in line:
                line.remove(task)
        self._give_up(task, error, "cancelled")
        self._release_successors(task, None)
        self._freed = True

    def _revive(self, handle: HandleRecord) -> None:
        handle.lost = None
        self.num_lost -= 1

    # --- memory -------------------------------------------------------------------------------------------------------

    def _drop(self, replica: Replica) -> None:
        """Give a replica's extent back."""
        if replica.pins:
            raise InvalidEvent(f"{replica.handle!r} on node {replica.node} would be freed while pinned\n{tell(self.history, replica.handle)}")
        handle = replica.handle
        del handle.replicas[replica.node]
        del self.resident[replica.node][replica]
        replica.view = None
        self.nodes[replica.node].give(replica.offset, handle.size, handle.data_class)

    def _free(self, handle: HandleRecord) -> None:
        """The handle is dead: drop every replica; nothing is written back."""
        for replica in list(handle.replicas.values()):
            self._drop(replica)

    def _settle(self) -> None:
        """Cancel what is doomed, retry what is blocked, and make sure that something is under way while tasks remain."""
        while True:
            while self._doomed:
                task, error = self._doomed.popleft()
                self._cancel(task, error)
            if self._freed:
                self._freed = False
                for line in self.blocked:
                    self._retry(line)
                self._feed()
                if self._doomed:
                    continue
            if self._num_active or self._arrivals or not self.num_unfinished:
                return
            oldest = min((line[0] for line in self.blocked if line), key=lambda task: task.order, default=None)
            if oldest is None:
                self._raise_stalled()
                return
            self._doomed.append((oldest, self._does_not_fit(oldest)))

    def _retry(self, line: list[Task]) -> None:
        while line:
            if not self._admit(line[0]):
                return
            line.pop(0)

    def _does_not_fit(self, task: Task) -> DoesNotFit:
        node = self.nodes[task.node]
        sizes = ", ".join(f"{mode} {handle.name or handle.id} {handle.size:,} B" for handle, mode in task.accesses)
        total = sum(handle.size for handle, _ in task.accesses)
        return DoesNotFit(
            f"{task.name} needs {total:,} B at once on node {node.name} ({sizes}), but of its budget of {node.budget:,} B "
            f"{node.used:,} B are taken by data that has nowhere else to go and the largest hole is {node.extents.largest_hole():,} B; "
            f"raise the budget or use smaller tiles or minibatches"
        )

    def _raise_stalled(self) -> None:
        if not self._crew:
            return
        waiting = len(self.policy)
        kinds = sorted({worker.kind for worker in self._crew})
        raise Stalled(
            f"{self.num_unfinished} tasks remain, {waiting} of them ready, but nothing runs or moves; workers are of kind {', '.join(kinds)}\n"
            f"{tell(self.history)}"
        )

    # --- inspection ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant that can be checked at rest between two events.

        Raises:
            InvalidEvent: one is broken.
        """
        for node, resident in zip(self.nodes, self.resident, strict=True):
            node.validate([(replica.offset, replica.handle.size) for replica in resident])
            for replica in resident:
                coherence.validate(replica.handle)
                if replica.handle.replicas.get(replica.node) is not replica:
                    raise InvalidEvent(f"{replica.handle!r} has an orphaned replica on node {replica.node}")
                if replica.arriving != (replica in self._arrivals):
                    raise InvalidEvent(f"{replica.handle!r} on node {replica.node}: lost track of a copy")
        for worker in self._crew:
            if worker.running is not None and worker.running.state != "running":
                raise InvalidEvent(f"worker {worker.id} runs {worker.running!r}, which is {worker.running.state}")
            if len(worker.assigned) > worker.depth:
                raise InvalidEvent(f"worker {worker.id} holds {len(worker.assigned)} tasks, more than {worker.depth}")

    def story(self, subject: Task | HandleRecord | None = None) -> str:
        """What happened lately, to one task or handle or in general."""
        return tell(self.history, subject)
