"""The scheduler as a state machine: events in, actions out.

`docs/internals/scheduler.md` describes the life of a task. The machine composes the parts: `dependencies` finds the tasks without unfinished
predecessors, `dispatch` assigns them to workers and admits them to memory, `memory` places and copies data, `prefetchers` look ahead. It handles
failures itself.

Every event has one list of actions: `Machine.handle` creates it, passes it as the argument `actions` to every method that can cause actions, and
returns it. No part keeps the list, so all actions follow from the present event, and a signature shows whether a method can cause actions.

The machine has no threads, clocks, I/O or arrays, so the same code serves real workers, virtual time and unit tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal

from . import dependencies as graph
from .dispatch import Dispatch
from .errors import InvalidEvent, Stalled, TaskError
from .events import (
    Action,
    CopyFailed,
    CopyFinished,
    Event,
    HandleAdopted,
    HandleChanged,
    HandleReleased,
    ReportFailure,
    ReportStepDone,
    SourceAttached,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from .invariants import check_replicas
from .memory import coherence
from .memory.admission import Admission
from .memory.eviction_policies import DEFAULT_EVICTION, EVICTION_POLICIES, Foresight
from .memory.memory_node import MemoryNode
from .memory.replicas import Replicas
from .memory.status import MemoryStatus
from .performance_model import Estimates
from .policies import Placement, Policy
from .prefetchers import Lookaheads
from .records import FILE, RW, SCRATCH, HandleRecord, NodeId, R, Replay, Replica, Task, W, Worker
from .stalls import Stalls
from .story import tell

HISTORY: Final = 512
"""Number of events remembered for stories."""


class Machine:
    """The state machine.

    Guarantees:
      - An admitted task holds everything it needs, so it always ends. A blocked task holds nothing.
      - A pinned replica is never evicted, moved or freed.
      - When nothing runs or moves, any task that fits on any node is admitted. If there is none, the oldest blocked task fails with `DoesNotFit`. So
        nothing hangs, as long as the program releases the data that it has acquired.
      - The outputs of a task that failed or was cancelled are lost. Tasks that would read lost data are cancelled; a task that overwrites lost data
        completely revives it.
      - An exception for tasks of a replay that never began, because they were cancelled or failed before their kernel changed anything: data that
        outlives the replay, and that the replay was to update, keeps its value. It counts as lost for the rest of this replay and is unchanged for
        all other tasks. This does not hold for plain tasks: it is unknown which of the later tasks could use the old value.

    Args:
        nodes: memory nodes; the id of a node is its position, and host memory is the first.
        policy: policy that chooses among ready tasks.
        eviction: name of the eviction policy.
        prefetch: whether data is fetched and written back ahead of the tasks that need it.

    Attributes:
        memory: queries about the memory nodes.
        stalls: time that workers idled although tasks for them were ready.
        handlers: the method that handles each type of event.
        num_unfinished: number of submitted tasks that are neither done, failed nor cancelled.
        num_finished: number of all other tasks ever submitted or replayed.
        num_lost: number of handles whose data is lost.
    """

    def __init__(self, nodes: Sequence[MemoryNode], policy: Policy, *, eviction: str = DEFAULT_EVICTION, prefetch: bool = True) -> None:
        self._foresight = Foresight()
        self._replicas = Replicas(nodes, self._foresight, EVICTION_POLICIES[eviction](self._foresight))
        self._admission = Admission(self._replicas)
        self._nodes = self._replicas.nodes
        self._dispatch = Dispatch(self._replicas, self._admission, policy)
        self._lookaheads = Lookaheads(self._dispatch, self._replicas, enabled=prefetch)
        self.memory = MemoryStatus(self._replicas, self._admission)
        self.stalls = Stalls(self._dispatch, self._replicas.copies)
        self._history: deque[Event] = deque(maxlen=HISTORY)
        self.num_unfinished = 0
        self.num_finished = 0
        self.num_lost = 0
        self._num_stale = 0  # entries of `Replay.stale` of all replays
        self._progress = 0  # number of ended tasks, dropped replicas and ended copies when blocked tasks were last retried
        self.handlers: dict[type, Callable[..., None]] = {
            TaskSubmitted: self._on_task_submitted,
            StepStarted: self._on_step_started,
            TaskFinished: self._on_task_finished,
            TaskFailed: self._on_task_failed,
            CopyFinished: self._on_copy_finished,
            CopyFailed: self._on_copy_failed,
            WorkerJoined: self._on_worker_joined,
            HandleReleased: self._on_handle_released,
            SourceAttached: self._on_source_attached,
            HandleAdopted: self._on_handle_adopted,
            HandleChanged: self._on_handle_changed,
        }

    @property
    def workers(self) -> Sequence[Worker]:
        """Workers in the order in which they joined."""
        return self._dispatch.joined

    @property
    def program(self) -> Worker:
        """The program itself, as the worker of its acquisitions and of tasks of kind "host"."""
        return self._dispatch.host

    @property
    def keeps_partitions(self) -> bool:
        """Whether the policy runs the partitions of a step on the nodes that the plan chose."""
        return self._dispatch.policy.keeps_partitions

    @property
    def computes_on_last(self) -> bool:
        """Whether tasks run on data in the last tier."""
        return any(worker.node == self._replicas.last and not worker.aside for worker in self._dispatch.joined)

    @property
    def num_ready(self) -> int:
        """Number of tasks that wait for a worker."""
        return self._dispatch.num_ready

    def blocked(self, node: NodeId) -> Sequence[Task]:
        """Return the tasks that wait for memory of a node, oldest first."""
        return self._dispatch.blocked[node]

    def explain(self, estimates: Estimates, names: Collection[str], count: int) -> Sequence[Placement]:
        """Record the next `count` placements of recorded tasks with these names; the returned list grows as they happen.

        Args:
            estimates: estimates for the candidates, if the policy does not weigh costs itself.
            names: names of codelets.
            count: number of placements to record.
        """
        return self._dispatch.explain(estimates, names, count)

    def handle(self, event: Event) -> list[Action]:
        """Advance by one event and return the actions to execute now.

        Raises:
            InvalidEvent: the event is impossible in this state.
            Stalled: tasks remain although nothing is in progress (a bug; the message has the latest events).
            DoesNotFit: there are not enough free bytes for the readers of an attached source, or for adopted data in the last tier. The event has no
                effect then.
        """
        dispatch = self._dispatch
        self._foresight.clock += 1
        self._history.append(event)
        actions: list[Action] = []
        self.handlers[type(event)](event, actions)
        if not dispatch.num_active or dispatch.num_blocked or dispatch.to_cancel:
            self._make_progress(actions)
        if self._lookaheads.by_node and self._foresight.replays:
            self._lookaheads.run(event, actions)
        return actions

    def _on_worker_joined(self, event: WorkerJoined, actions: list[Action]) -> None:
        worker = event.worker
        if worker.id in self._dispatch.workers:
            raise InvalidEvent(f"worker {worker.id} joined twice")
        self._dispatch.join(worker, actions)
        self._lookaheads.choose_nodes()

    def _on_task_submitted(self, event: TaskSubmitted, actions: list[Action]) -> None:
        task = event.task
        if task.state != "waiting":
            raise InvalidEvent(f"{task!r} was submitted while {task.state}\n{tell(self._history, task)}")
        self.num_unfinished += 1
        for handle, _ in task.accesses:
            handle.num_uses += 1
        if task.pin is not None:
            self._dispatch.keep_pins()
        if task.next_uses:
            self._foresight.reached = task.order
        graph.link(task)
        if not task.num_waiting:
            self._make_ready(task, None, actions)
            if self._dispatch.num_ready:
                self._dispatch.feed(actions)

    def _on_step_started(self, event: StepStarted, actions: list[Action]) -> None:
        replay = event.replay
        if replay.num_unfinished:
            raise InvalidEvent(f"a replay was started while replay {replay.number} still has {replay.num_unfinished} tasks")
        if replay.has_pins:
            self._dispatch.keep_pins()
        replay.failure = None
        replay.num_unfinished = len(replay.tasks)
        replay.done = bytearray(len(replay.tasks))
        replay.frontier = 0
        replay.partition_nodes = self._lookaheads.partition_nodes if len(self._lookaheads.partition_nodes) == len(replay.partitions) else ()
        replay.heads = [0] * len(replay.partition_nodes)
        if self._replicas.num_cold:
            self._replicas.want(use.handle for use in replay.shared)
        if replay.tasks:
            self._foresight.replays.append(replay)
        self.num_unfinished += len(replay.tasks)
        for handle, num_uses in replay.owned:
            handle.num_uses += num_uses
            if handle.replicas:  # a copy still in progress kept the replicas beyond the last use
                self._lose(handle, "it died with an earlier replay", actions)
                self._replicas.reservations.reenter(handle, replay)
            elif handle.lost is not None:
                self._revive(handle)
        for use in replay.shared:
            use.handle.num_uses += use.num_uses
            use.handle.use_schedule = use.use_schedule
        if replay.tasks:
            self._replicas.reservations.promise(replay)
        graph.link_step(replay.shared)
        for task in replay.roots:
            if not task.num_waiting:
                self._make_ready(task, None, actions)
        if not replay.tasks:
            actions.append(ReportStepDone(replay, replay.number))
        self._dispatch.feed(actions)

    def _on_task_finished(self, event: TaskFinished, actions: list[Action]) -> None:
        task = event.task
        if task.state != "running":
            raise InvalidEvent(f"{task!r} finished while {task.state}\n{tell(self._history, task)}")
        replicas = self._replicas
        has_several = replicas.has_several
        if task.step is not None:
            task.step.done[task.position] = 1
        elif task.next_uses:
            for (handle, _), next_use in zip(task.accesses, task.next_uses, strict=True):
                handle.next_use = next_use
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            uses = handle.num_uses = handle.num_uses - 1
            if mode == SCRATCH:
                replica.pins -= 1
                replicas.drop(replica, actions)
                continue
            if mode != R:
                replica.state = "modified"
                if handle.lost is not None:
                    self._revive(handle)
                if self._num_stale:
                    self._catch_up(task.step, handle)
            if has_several:
                replicas.unpin(replica)
            else:  # the only tier: no replica is ever evicted
                replica.pins -= 1
            if not uses and handle.released:
                self._free(handle, actions)
        task.state = "done"
        self._retire(task, actions)

    def _on_task_failed(self, event: TaskFailed, actions: list[Action]) -> None:
        task = event.task
        if task.state != "running":
            raise InvalidEvent(f"{task!r} failed while {task.state}\n{tell(self._history, task)}")
        for replica in task.replicas:
            if event.has_begun:
                self._replicas.unpin(replica)
                if replica.state == "scratch":
                    self._replicas.drop(replica, actions)
            else:
                self._let_go(replica, actions)
        self._give_up(task, event.error, "failed", actions, keeps=not event.has_begun)
        self._retire(task, actions)

    def _on_copy_finished(self, event: CopyFinished, actions: list[Action]) -> None:
        handle = event.source.handle
        arrived = self._replicas.finish_copy(event.source, event.target)
        if not handle.num_uses and handle.released:
            self._free(handle, actions)
        elif handle.lost is not None:
            self._replicas.drop_unpinned(handle, actions)
        for task in arrived:
            self._dispatch.stage(task, self._dispatch.workers[task.worker], actions)
        if arrived and self._dispatch.num_ready:  # a worker whose tasks all waited for copies may take another one
            self._dispatch.feed(actions)

    def _on_copy_failed(self, event: CopyFailed, actions: list[Action]) -> None:
        """Handle a failed copy. After a failed write, the tier is closed. After a failed read, the data is lost and its readers are cancelled."""
        source, target, error = event.source, event.target, event.error
        handle = source.handle
        waiting = self._replicas.end_copy(source, target)
        self._replicas.changed.discard(handle)
        self._replicas.unpin(source)
        self._replicas.unpin(target)
        if source.node == FILE or self._nodes[source.node].is_storage:
            self._lose(handle, f"it could not be read {'from its file' if source.node == FILE else 'back'}: {error}", actions)
            for task in waiting:
                if any(used is handle and mode != W for used, mode in task.accesses):
                    self._replicas.copies.forget(task)
                    cancelled = TaskError(f"{task!r} was cancelled: it needs {handle!r}, and {handle.lost}")
                    cancelled.__cause__ = error
                    self._dispatch.to_cancel.append((task, cancelled))
                elif not task.num_arriving:
                    self._dispatch.stage(task, self._dispatch.workers[task.worker], actions)
        else:
            self._replicas.break_tier(error)
            if target.node != self._replicas.last:
                self._replicas.drop(target, actions)
            for task in waiting:
                if not task.num_arriving:
                    self._dispatch.stage(task, self._dispatch.workers[task.worker], actions)
        if not handle.num_uses and handle.released:
            self._free(handle, actions)

    def _lose(self, handle: HandleRecord, reason: str, actions: list[Action], root: str | None = None) -> None:
        if handle.lost is None:
            self.num_lost += 1
        handle.lost = reason
        handle.root = root or reason
        self._replicas.drop_unpinned(handle, actions)

    def _on_handle_released(self, event: HandleReleased, actions: list[Action]) -> None:
        handle = event.handle
        handle.released = True
        if handle in self._replicas.held:
            self._replicas.let_go(handle, actions)
        elif not handle.num_uses:
            self._free(handle, actions)

    def _on_handle_adopted(self, event: HandleAdopted, actions: list[Action]) -> None:
        event.handle.next_use = event.next_use
        self._replicas.adopt(event.handle, actions, stays=event.stays)

    def _on_handle_changed(self, event: HandleChanged, actions: list[Action]) -> None:
        self._replicas.change(event.handle)

    def _on_source_attached(self, event: SourceAttached, actions: list[Action]) -> None:
        handle = event.handle
        if handle.num_uses or handle.use_schedule is not None:
            raise InvalidEvent(f"{handle!r} was to be read from a file although tasks use it\n{tell(self._history, handle)}")
        self._replicas.take_for_readers(handle, event.scratch, actions)
        self._free(handle, actions)
        self._replicas.attach(handle, event.source)
        if self._replicas.num_files == 1:
            self._lookaheads.choose_nodes()

    def _make_ready(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """Give a task without unfinished predecessors to the dispatch; `worker` ran the last of them."""
        if not ((self.num_lost or self._num_stale) and self._reads_lost_data(task)):
            self._dispatch.push(task, worker, actions)

    def _reads_lost_data(self, task: Task) -> bool:
        """Return whether the task reads lost data; if so, mark it for cancellation."""
        stale = task.step.stale if task.step is not None else {}
        for handle, mode in task.accesses:
            why = handle.lost or stale.get(handle)
            if why is not None and (mode == R or mode == RW):
                reason = f"{task!r} was cancelled: it reads {handle!r}, which is lost because {why}"
                self._dispatch.to_cancel.append((task, TaskError(reason)))
                return True
        return False

    def _retire(self, task: Task, actions: list[Action]) -> None:
        """Free the worker of a task that has run, release the task's successors, and give the worker a new task."""
        dispatch = self._dispatch
        worker = dispatch.retire(task, actions)
        self._release_successors(task, worker, actions)
        if dispatch.num_ready:
            dispatch.refill(worker, actions)

    def _release_successors(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        if task.is_exit:
            graph.unlink(task)
        task.replicas = ()
        self.num_unfinished -= 1
        self.num_finished += 1
        replay = task.step
        successors = task.successors
        if replay is None:
            task.successors = []
        else:
            task.num_waiting = task.num_predecessors
            task.state = "waiting"
            if task.late_successors:
                successors = successors + task.late_successors
                task.late_successors = []
        for after in successors:
            after.num_waiting -= 1
            if not after.num_waiting:
                self._make_ready(after, worker, actions)
        if replay is not None:
            replay.num_unfinished -= 1
            if task.position == replay.frontier:
                self._advance(replay, actions)
            if not replay.num_unfinished:
                if replay.failure is not None:
                    replay.changed_nothing = all(first is None or handle in replay.stale for handle, first in replay.updated.items())
                    self._num_stale -= len(replay.stale)
                    replay.stale.clear()
                actions.append(ReportStepDone(replay, replay.number))

    def _advance(self, replay: Replay, actions: list[Action]) -> None:
        """Advance the frontier of a replay past the planned tasks that have ended."""
        replay.frontier = replay.done.find(0, replay.frontier)
        if replay.frontier < 0:
            replay.frontier = len(replay.tasks)
            self._foresight.replays.remove(replay)
            self._replicas.reservations.forget(replay)
            if not self._foresight.replays:
                self._lookaheads.rest()
        if self._dispatch.throttled:
            self._dispatch.release_throttled(actions)

    def _give_up(self, task: Task, error: BaseException, state: Literal["failed", "cancelled"], actions: list[Action], *, keeps: bool) -> None:
        """Report a task that failed or was cancelled, and mark its outputs as lost.

        Args:
            keeps: whether the task has not begun, so that outputs of a replay may keep their old values (`_keep_stale`).
        """
        task.state = state
        step = task.step
        if step is not None:
            step.done[task.position] = 1
            if step.failure is None:
                step.updated = {use.handle: use.first_writer for use in step.shared if use.needs_data}
        stale = {} if step is None else step.stale
        root = next((why for handle, mode in task.accesses if mode != W and (why := handle.root or stale.get(handle)) is not None), None)
        reason = f"{task!r} {state}: {error}"
        if root is not None:  # name the first failure only: the text of a long chain of tasks would be as long as the chain
            reason = f"{task!r} was cancelled, because {root}"
        for handle, mode in task.accesses:
            handle.num_uses -= 1
            if (mode == W or mode == RW) and not (keeps and self._keep_stale(task, handle, root or reason, actions)):
                self._lose(handle, reason, actions, root)
            if handle.released and not handle.num_uses:
                self._free(handle, actions)
        if step is not None and step.failure is None:
            step.failure = error
        actions.append(ReportFailure(task, error))

    def _keep_stale(self, task: Task, handle: HandleRecord, reason: str, actions: list[Action]) -> bool:
        """Return whether an output that the task has not begun to write keeps its value from before the replay, and mark it so.

        It does unless another task of the replay has begun to write it, or its old value was discarded because the replay overwrites it unread.
        """
        step = task.step
        if step is None or handle.lost is not None:
            return False
        if handle in step.stale:
            return True
        if step.updated.get(handle) is not task or coherence.best_source(handle, None) is None:
            return False
        self._replicas.forget_write(handle, actions)
        step.stale[handle] = reason
        self._num_stale += 1
        return True

    def _catch_up(self, replay: Replay | None, handle: HandleRecord) -> None:
        """Note that a task of a replay has written a handle, whose value is therefore not an old one any more."""
        if replay is not None and replay.stale.pop(handle, None) is not None:
            self._num_stale -= 1

    def _cancel(self, task: Task, error: BaseException, actions: list[Action]) -> None:
        """End a task that will never run."""
        if task.state == "blocked":
            self._dispatch.unblock(task)
        elif task.state == "fetching":
            self._dispatch.withdraw(task)
            for replica in task.replicas:
                self._let_go(replica, actions)
        self._give_up(task, error, "cancelled", actions, keeps=True)
        self._release_successors(task, None, actions)

    def _let_go(self, replica: Replica, actions: list[Action]) -> None:
        """Unpin a replica of a task that will not run; drop it if it holds no data."""
        self._replicas.unpin(replica)
        if not replica.pins and (replica.state == "scratch" or (replica.state == "reserved" and not replica.is_backing)):
            self._replicas.drop(replica, actions)

    def _revive(self, handle: HandleRecord) -> None:
        handle.lost = handle.root = None
        self.num_lost -= 1

    def _free(self, handle: HandleRecord, actions: list[Action]) -> None:
        """Drop every replica of a dead handle, without write-back."""
        for replica in list(handle.replicas.values()):
            if replica.node in handle.replicas:  # an empty backing replica is dropped along with the last other replica
                self._replicas.drop(replica, actions)
        if handle.lost is not None:
            self._revive(handle)

    def _make_progress(self, actions: list[Action]) -> None:
        """Cancel the tasks marked for it, retry blocked tasks, and ensure that something is in progress while tasks remain."""
        replicas, dispatch = self._replicas, self._dispatch
        while True:
            while dispatch.to_cancel:
                self._cancel(*dispatch.to_cancel.pop(0), actions)
            progress = self.num_finished + replicas.num_released
            if progress != self._progress:
                self._progress = progress
                if dispatch.num_blocked:
                    dispatch.retry(actions)
                if dispatch.num_ready:
                    dispatch.feed(actions)
                if dispatch.to_cancel or progress != self.num_finished + replicas.num_released:
                    continue
            if dispatch.num_active or replicas.copies or not self.num_unfinished:
                return
            if dispatch.force_admit(actions):
                continue
            oldest = dispatch.oldest_blocked()
            if oldest is not None:
                dispatch.to_cancel.append((oldest, replicas.broken or self._admission.does_not_fit(oldest)))
            elif dispatch.joined:
                self._raise_stalled()
            else:
                return

    def _raise_stalled(self) -> None:
        kinds = sorted({worker.kind for worker in self._dispatch.joined})
        raise Stalled(
            f"{self.num_unfinished} tasks remain, {self._dispatch.num_ready} of them ready, but nothing runs or moves; "
            f"workers are of kind {', '.join(kinds)}\n{tell(self._history)}"
        )

    def validate(self) -> None:
        """Check all invariants that hold between two events.

        Raises:
            InvalidEvent: an invariant is violated.
        """
        check_replicas(self._replicas, list(self._dispatch.admitted()))
        self._dispatch.validate()

    def story(self, subject: Task | HandleRecord | None = None) -> str:
        """Return the latest events as text: those that concern one task or handle, or all."""
        return tell(self._history, subject)
