"""The scheduler as a state machine: events in, actions out.

Theory of operation. A submitted task gets edges from earlier tasks (`graph`). Without unfinished predecessors it is ready and belongs to the
policy. A worker with room takes a task from the policy; the task is *admitted* to the worker's memory node when all of its missing bytes are
reserved in one step (`residency`); otherwise it is blocked, holds nothing and occupies no worker, and no younger task that needs new bytes is
admitted to that node before it. Inputs that are not valid on the node are copied in; then the task is staged, and runs when its worker is
free. A finished task unpins, invalidates what it overwrote, frees what died, and releases its successors.

Promises:
  - an admitted task holds everything it needs, so it always finishes; blocked tasks hold nothing;
  - a pinned replica is never evicted, moved or freed;
  - when nothing runs or moves, any task that fits anywhere is let through; if there is none, the oldest blocked one fails with `DoesNotFit`.
    Nothing ever hangs, as long as the program gives back what it has acquired;
  - a task that fails makes its outputs lost; tasks that would read lost data are cancelled; a full overwrite revives it.

No threads, clocks, I/O or arrays: the same machine serves real workers, virtual time and unit tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

from . import graph
from .checks import check_replicas
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
from .eviction import DEFAULT_EVICTION, EVICTION_POLICIES, Horizon
from .lookaheads import Lookaheads
from .memory import MemoryNode
from .policies import Policy
from .records import FILE, RW, SCRATCH, HandleRecord, NodeId, R, Replay, Replica, Task, W, Worker
from .residency import Residency
from .story import tell

HISTORY: Final = 512
"""Events remembered for stories."""


class Machine:
    """The state machine.

    Args:
        nodes: memory nodes; a node's id is its position, host memory comes first.
        policy: chooses among ready tasks.
        eviction: name of the eviction policy.
        prefetch: whether data is fetched and written back ahead of the tasks that ask for it.
    """

    def __init__(self, nodes: Sequence[MemoryNode], policy: Policy, *, eviction: str = DEFAULT_EVICTION, prefetch: bool = True) -> None:
        self.horizon = Horizon()
        self.residency = Residency(nodes, self.horizon, EVICTION_POLICIES[eviction](self.horizon))
        self.nodes = self.residency.nodes
        self.dispatch = Dispatch(self.residency, policy)
        self.lookaheads = Lookaheads(self.dispatch, enabled=prefetch)
        self.history: deque[Event] = deque(maxlen=HISTORY)
        self.num_unfinished = 0
        self.num_finished = 0
        self.num_lost = 0
        self._doomed = self.dispatch.doomed
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[..., None]] = {
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
    def policy(self) -> Policy:
        """Who chooses among ready tasks."""
        return self.dispatch.policy

    @property
    def computes_on_last(self) -> bool:
        """Whether tasks run on data in the last tier."""
        return any(worker.node == self.residency.last for worker in self.dispatch.crew)

    @property
    def num_evictions(self) -> int:
        """Replicas dropped so far to make room for others."""
        return self.residency.num_evictions

    @property
    def moved_bytes(self) -> dict[tuple[NodeId, NodeId], int]:
        """Bytes copied so far over each link."""
        return self.residency.copies.moved_bytes

    def handle(self, event: Event) -> list[Action]:
        """Advance by one event and return what has to be done now.

        Raises:
            InvalidEvent: the event is impossible in this state.
            Stalled: tasks remain although nothing is under way (a bug; the message carries the story).
            DoesNotFit: a source was attached whose readers find no room, or data was adopted for which the last tier has none; it is as if the
                event had not happened.
        """
        residency, dispatch = self.residency, self.dispatch
        self.horizon.clock += 1
        self.history.append(event)
        actions: list[Action] = []
        self._actions = residency.actions = dispatch.actions = actions
        self._handlers[type(event)](event)
        if not dispatch.num_active or dispatch.num_blocked or dispatch.doomed:
            self._settle()
        if self.lookaheads.by_node and self.horizon.replays:
            self.lookaheads.run(event)
        return actions

    def _on_worker_joined(self, event: WorkerJoined) -> None:
        worker = event.worker
        if worker.id in self.dispatch.workers:
            raise InvalidEvent(f"worker {worker.id} joined twice")
        self.dispatch.join(worker)
        self.lookaheads.settle()

    def _on_task_submitted(self, event: TaskSubmitted) -> None:
        task = event.task
        if task.state != "waiting":
            raise InvalidEvent(f"{task!r} was submitted while {task.state}\n{tell(self.history, task)}")
        self.num_unfinished += 1
        for handle, _ in task.accesses:
            handle.num_uses += 1
        if task.pin is not None:
            self.dispatch.keep_pins()
        if task.dues:
            self.horizon.reached = task.order
        graph.link(task)
        if not task.num_waiting:
            self._make_ready(task, None)
            if self.dispatch.num_ready:
                self.dispatch.feed()

    def _on_step_started(self, event: StepStarted) -> None:
        replay = event.replay
        if replay.num_unfinished:
            raise InvalidEvent(f"a replay was started while replay {replay.number} still has {replay.num_unfinished} tasks")
        if replay.has_pins:
            self.dispatch.keep_pins()
        replay.failure = None
        replay.num_unfinished = len(replay.tasks)
        replay.done = bytearray(len(replay.tasks))
        replay.frontier = 0
        replay.part_nodes = self.lookaheads.part_nodes if len(self.lookaheads.part_nodes) == len(replay.parts) else ()
        replay.heads = [0] * len(replay.part_nodes)
        if self.residency.num_cold:
            self.residency.want(use.handle for use in replay.shared)
        if replay.tasks:
            self.horizon.replays.append(replay)
        self.num_unfinished += len(replay.tasks)
        for handle, num_uses in replay.owned:
            handle.num_uses += num_uses
            if handle.replicas:  # a copy has kept it alive beyond its last use
                self._lose(handle, "it died with an earlier replay")
                self.residency.claims.reenter(handle, replay)
            elif handle.lost is not None:
                self._revive(handle)
        for use in replay.shared:
            use.handle.num_uses += use.num_uses
            use.handle.agenda = use.agenda
        if replay.tasks:
            self.residency.claims.promise(replay)
        graph.link_step(replay.shared)
        for task in replay.roots:
            if not task.num_waiting:
                self._make_ready(task, None)
        if not replay.tasks:
            self._actions.append(ReportStepDone(replay, replay.number))
        self.dispatch.feed()

    def _on_task_finished(self, event: TaskFinished) -> None:
        task = event.task
        if task.state != "running":
            raise InvalidEvent(f"{task!r} finished while {task.state}\n{tell(self.history, task)}")
        residency = self.residency
        has_several = residency.has_several
        if task.step is not None:
            task.step.done[task.position] = 1
        elif task.dues:
            for (handle, _), due in zip(task.accesses, task.dues, strict=True):
                handle.due = due
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            uses = handle.num_uses = handle.num_uses - 1
            if mode == SCRATCH:
                replica.pins -= 1
                residency.drop(replica)
                continue
            if mode != R:
                replica.state = "modified"
                if handle.lost is not None:
                    self._revive(handle)
            if has_several:
                residency.unpin(replica)
            else:  # nothing is ever evicted
                replica.pins -= 1
            if not uses and handle.released:
                self._free(handle)
        residency.freed = True
        task.state = "done"
        self._retire(task)

    def _on_task_failed(self, event: TaskFailed) -> None:
        task = event.task
        if task.state != "running":
            raise InvalidEvent(f"{task!r} failed while {task.state}\n{tell(self.history, task)}")
        for replica in task.replicas:
            self.residency.unpin(replica)
            if replica.state == "scratch":
                self.residency.drop(replica)
        self.residency.freed = True
        self._give_up(task, event.error, "failed")
        self._retire(task)

    def _on_copy_finished(self, event: CopyFinished) -> None:
        handle = event.source.handle
        arrived = self.residency.finish_copy(event.source, event.target)
        if not handle.num_uses and handle.released:
            self._free(handle)
        elif handle.lost is not None:
            self.residency.drop_unpinned(handle)
        for task in arrived:
            self.dispatch.stage(task, self.dispatch.workers[task.worker])

    def _on_copy_failed(self, event: CopyFailed) -> None:
        """Bytes could not be written: the tier takes no more. Bytes could not be read: they are lost, and who waits for them is cancelled."""
        source, target, error = event.source, event.target, event.error
        handle = source.handle
        waiting = self.residency.end_copy(source, target)
        self.residency.changed.discard(handle)
        self.residency.unpin(source)
        self.residency.unpin(target)
        if source.node == FILE or self.nodes[source.node].is_storage:
            self._lose(handle, f"it could not be read {'from its file' if source.node == FILE else 'back'}: {error}")
            for task in waiting:
                if any(each is handle and mode != W for each, mode in task.accesses):
                    self.residency.copies.forget(task)
                    cancelled = TaskError(f"{task!r} was cancelled: it needs {handle!r}, and {handle.lost}")
                    cancelled.__cause__ = error
                    self._doomed.append((task, cancelled))
                elif not task.num_arriving:
                    self.dispatch.stage(task, self.dispatch.workers[task.worker])
        else:
            self.residency.break_tier(error)
            if target.node != self.residency.last:
                self.residency.drop(target)
            for task in waiting:
                if not task.num_arriving:
                    self.dispatch.stage(task, self.dispatch.workers[task.worker])
        if not handle.num_uses and handle.released:
            self._free(handle)

    def _lose(self, handle: HandleRecord, reason: str, root: str | None = None) -> None:
        if handle.lost is None:
            self.num_lost += 1
        handle.lost = reason
        handle.root = root or reason
        self.residency.drop_unpinned(handle)

    def _on_handle_released(self, event: HandleReleased) -> None:
        handle = event.handle
        handle.released = True
        if handle in self.residency.held:
            self.residency.let_go(handle)
        elif not handle.num_uses:
            self._free(handle)

    def _on_handle_adopted(self, event: HandleAdopted) -> None:
        event.handle.due = event.due
        self.residency.adopt(event.handle, stays=event.stays)

    def _on_handle_changed(self, event: HandleChanged) -> None:
        self.residency.change(event.handle)

    def _on_source_attached(self, event: SourceAttached) -> None:
        handle = event.handle
        if handle.num_uses or handle.agenda is not None:
            raise InvalidEvent(f"{handle!r} was to be read from a file although tasks use it\n{tell(self.history, handle)}")
        self.residency.take_for_readers(handle, event.scratch)
        self._free(handle)
        self.residency.attach(handle, event.source)
        if self.residency.num_files == 1:
            self.lookaheads.settle()

    def _make_ready(self, task: Task, worker: Worker | None) -> None:
        """The task waits for nobody; `worker` ran the last one it waited for."""
        if not (self.num_lost and self._reads_lost_data(task)):
            self.dispatch.push(task, worker)

    def _reads_lost_data(self, task: Task) -> bool:
        """Whether the task has nothing to read; it is doomed then."""
        for handle, mode in task.accesses:
            if handle.lost is not None and (mode == R or mode == RW):
                reason = f"{task!r} was cancelled: it reads {handle!r}, which is lost because {handle.lost}"
                self._doomed.append((task, TaskError(reason)))
                return True
        return False

    def _retire(self, task: Task) -> None:
        """A task that ran has ended: free its worker, release its successors, and give the worker something new."""
        dispatch = self.dispatch
        worker = dispatch.retire(task)
        self._release_successors(task, worker)
        if dispatch.num_ready:
            dispatch.refill(worker)

    def _release_successors(self, task: Task, worker: Worker | None) -> None:
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
                self._make_ready(after, worker)
        if replay is not None:
            replay.num_unfinished -= 1
            if task.position == replay.frontier:
                self._advance(replay)
            if not replay.num_unfinished:
                self._actions.append(ReportStepDone(replay, replay.number))

    def _advance(self, replay: Replay) -> None:
        """The planned task at the frontier of a replay has ended."""
        replay.frontier = replay.done.find(0, replay.frontier)
        if replay.frontier < 0:
            replay.frontier = len(replay.tasks)
            self.horizon.replays.remove(replay)
            self.residency.claims.forget(replay)
            if not self.horizon.replays:
                self.lookaheads.rest()
        if self.dispatch.held:
            self.dispatch.let_in()

    def _give_up(self, task: Task, error: BaseException, state: Literal["failed", "cancelled"]) -> None:
        """Mark what the task should have written as lost, and report."""
        task.state = state
        if task.step is not None:
            task.step.done[task.position] = 1
        root = next((handle.root for handle, mode in task.accesses if handle.lost is not None and mode != W), None)
        reason = f"{task!r} {state}: {error}"
        if root is not None:  # else a long chain of tasks makes a long chain of texts
            reason = f"{task!r} was cancelled, because {root}"
        for handle, mode in task.accesses:
            handle.num_uses -= 1
            if mode == W or mode == RW:
                self._lose(handle, reason, root)
            if handle.released and not handle.num_uses:
                self._free(handle)
        if task.step is not None and task.step.failure is None:
            task.step.failure = error
        self._actions.append(ReportFailure(task, error))

    def _cancel(self, task: Task, error: BaseException) -> None:
        """End a task that will never run."""
        if task.state == "blocked":
            self.dispatch.unblock(task)
        elif task.state == "fetching":
            self.dispatch.withdraw(task)
            for replica in task.replicas:
                self._let_go(replica)
        self._give_up(task, error, "cancelled")
        self._release_successors(task, None)
        self.residency.freed = True

    def _let_go(self, replica: Replica) -> None:
        """A task that will not run no longer needs a replica; what holds no data goes."""
        self.residency.unpin(replica)
        if not replica.pins and (replica.state == "scratch" or (replica.state == "reserved" and not replica.is_home)):
            self.residency.drop(replica)

    def _revive(self, handle: HandleRecord) -> None:
        handle.lost = handle.root = None
        self.num_lost -= 1

    def _free(self, handle: HandleRecord) -> None:
        """The handle is dead: drop every replica; nothing is written back."""
        for replica in list(handle.replicas.values()):
            if replica.node in handle.replicas:  # an empty home goes with the last other replica
                self.residency.drop(replica)
        if handle.lost is not None:
            self._revive(handle)

    def _settle(self) -> None:
        """Cancel what is doomed, retry what is blocked, and make sure that something is under way while tasks remain."""
        residency, dispatch = self.residency, self.dispatch
        while True:
            while dispatch.doomed:
                self._cancel(*dispatch.doomed.pop(0))
            if residency.freed:
                residency.freed = False
                if dispatch.num_blocked:
                    dispatch.retry()
                if dispatch.num_ready:
                    dispatch.feed()
                if dispatch.doomed or residency.freed:
                    continue
            if dispatch.num_active or residency.copies or not self.num_unfinished:
                return
            if dispatch.rescue():
                continue
            oldest = dispatch.oldest_blocked()
            if oldest is not None:
                dispatch.doomed.append((oldest, residency.broken or residency.does_not_fit(oldest)))
            elif dispatch.crew:
                self._raise_stalled()
            else:
                return

    def _raise_stalled(self) -> None:
        kinds = sorted({worker.kind for worker in self.dispatch.crew})
        raise Stalled(
            f"{self.num_unfinished} tasks remain, {self.dispatch.num_ready} of them ready, but nothing runs or moves; "
            f"workers are of kind {', '.join(kinds)}\n{tell(self.history)}"
        )

    def validate(self) -> None:
        """Check every invariant that can be checked at rest between two events.

        Raises:
            InvalidEvent: one is broken.
        """
        check_replicas(self.residency, list(self.dispatch.admitted()))
        self.dispatch.validate()

    def story(self, subject: Task | HandleRecord | None = None) -> str:
        """What happened lately, to one task or handle or in general."""
        return tell(self.history, subject)
