"""The scheduler as a state machine: events in, actions out.

Theory of operation. A submitted task gets edges from earlier tasks (`dependencies`). Without unfinished predecessors it is ready and belongs to the
policy. A worker with a free slot takes a task from the policy; the task is *admitted* to the worker's memory node when all of its missing bytes are
reserved in one step (`memory/admission`); otherwise it is blocked, holds nothing and occupies no worker, and no younger task that needs new bytes is
admitted to that node before it. Inputs that are not valid on the node are copied in; then the task is staged, and runs when its worker is
free. A finished task unpins, invalidates what it overwrote, frees what died, and releases its successors.

Promises:
  - an admitted task holds everything it needs, so it always finishes; blocked tasks hold nothing;
  - a pinned replica is never evicted, moved or freed;
  - when nothing runs or moves, any task that fits anywhere is let through; if there is none, the oldest blocked one fails with `DoesNotFit`.
    Nothing ever hangs, as long as the program gives back what it has acquired;
  - a task that fails or is cancelled makes its outputs lost; tasks that would read lost data are cancelled; a full overwrite revives it;
  - but a task of a replay that never began, because it was cancelled or its device took nothing of it, leaves data alone that outlives the replay
    and that the replay was to update: to the rest of this replay it is lost, to all other tasks it is what it was before. What a plain task was to
    write is lost all the same: nothing says which of the tasks behind it may do without.

Actions. Every event has one list of actions: `Machine.handle` makes it, hands it down as the argument `actions` of whatever may cause some, and
returns it. No part keeps it, so no action comes of anything but the event at hand, and a signature says whether a method can cause actions at all.

No threads, clocks, I/O or arrays: the same machine serves real workers, virtual time and unit tests.
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
from .memory.extents import MemoryNode
from .memory.replicas import Replicas
from .memory.status import MemoryStatus
from .performance_model import Estimates
from .policies import Placement, Policy
from .prefetchers import Lookaheads
from .records import FILE, RW, SCRATCH, HandleRecord, NodeId, R, Replay, Replica, Task, W, Worker
from .stalls import Stalls
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

    Attributes:
        memory: what may be asked of the memory nodes.
        stalls: how long ready work waited beside idle workers.
        handlers: the method that handles each type of event.
        num_unfinished: tasks that are neither done, failed nor cancelled.
        num_finished: all others ever submitted or replayed.
        num_lost: handles whose data is lost.
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
        self._num_behind = 0  # entries of `Replay.behind`
        self._progress = 0  # tasks ended, replicas dropped and copies ended when blocked tasks were last tried
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
        """Those that have joined, in that order."""
        return self._dispatch.joined

    @property
    def program(self) -> Worker:
        """The program itself, as the worker of its acquisitions and of tasks of kind host."""
        return self._dispatch.host

    @property
    def keeps_partitions(self) -> bool:
        """Whether the policy runs the parts of a step where the plan wants them."""
        return self._dispatch.policy.keeps_partitions

    @property
    def computes_on_last(self) -> bool:
        """Whether tasks run on data in the last tier."""
        return any(worker.node == self._replicas.last and not worker.aside for worker in self._dispatch.joined)

    @property
    def num_ready(self) -> int:
        """Tasks that wait for a worker."""
        return self._dispatch.num_ready

    def blocked(self, node: NodeId) -> Sequence[Task]:
        """Tasks that wait for memory of a node, oldest first."""
        return self._dispatch.blocked[node]

    def explain(self, estimates: Estimates, names: Collection[str], count: int) -> Sequence[Placement]:
        """Write down the next placements of recorded tasks of these names; the list grows as they happen.

        Args:
            estimates: what the policy goes by, or would.
            count: placements wanted.
        """
        return self._dispatch.explain(estimates, names, count)

    def handle(self, event: Event) -> list[Action]:
        """Advance by one event and return what has to be done now.

        Raises:
            InvalidEvent: the event is impossible in this state.
            Stalled: tasks remain although nothing is under way (a bug; the message carries the story).
            DoesNotFit: a source was attached whose readers find no free bytes, or data was adopted for which the last tier has none; it is as if the
                event had not happened.
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
            if handle.replicas:  # a copy has kept it alive beyond its last use
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
                if self._num_behind:
                    self._catch_up(task.step, handle)
            if has_several:
                replicas.unpin(replica)
            else:  # nothing is ever evicted
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
        if arrived and self._dispatch.num_ready:  # a worker whose tasks all waited may take one more
            self._dispatch.feed(actions)

    def _on_copy_failed(self, event: CopyFailed, actions: list[Action]) -> None:
        """Bytes could not be written: the tier takes no more. Bytes could not be read: they are lost, and tasks that wait for them are cancelled."""
        source, target, error = event.source, event.target, event.error
        handle = source.handle
        waiting = self._replicas.end_copy(source, target)
        self._replicas.changed.discard(handle)
        self._replicas.unpin(source)
        self._replicas.unpin(target)
        if source.node == FILE or self._nodes[source.node].is_storage:
            self._lose(handle, f"it could not be read {'from its file' if source.node == FILE else 'back'}: {error}", actions)
            for task in waiting:
                if any(each is handle and mode != W for each, mode in task.accesses):
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
        """The task waits for no other; `worker` ran the last one it waited for."""
        if not ((self.num_lost or self._num_behind) and self._reads_lost_data(task)):
            self._dispatch.push(task, worker, actions)

    def _reads_lost_data(self, task: Task) -> bool:
        """Whether the task has nothing to read; it is to be cancelled then."""
        behind = task.step.behind if task.step is not None else {}
        for handle, mode in task.accesses:
            why = handle.lost or behind.get(handle)
            if why is not None and (mode == R or mode == RW):
                reason = f"{task!r} was cancelled: it reads {handle!r}, which is lost because {why}"
                self._dispatch.to_cancel.append((task, TaskError(reason)))
                return True
        return False

    def _retire(self, task: Task, actions: list[Action]) -> None:
        """A task that ran has ended: free its worker, release its successors, and give the worker something new."""
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
                    replay.changed_nothing = all(first is None or handle in replay.behind for handle, first in replay.updated.items())
                    self._num_behind -= len(replay.behind)
                    replay.behind.clear()
                actions.append(ReportStepDone(replay, replay.number))

    def _advance(self, replay: Replay, actions: list[Action]) -> None:
        """The planned task at the frontier of a replay has ended."""
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
        """Mark what the task should have written as lost, or where it `keeps` what was there as behind, and report."""
        task.state = state
        step = task.step
        if step is not None:
            step.done[task.position] = 1
            if step.failure is None:
                step.updated = {use.handle: use.first_writer for use in step.shared if use.needs_data}
        behind = {} if step is None else step.behind
        root = next((why for handle, mode in task.accesses if mode != W and (why := handle.root or behind.get(handle)) is not None), None)
        reason = f"{task!r} {state}: {error}"
        if root is not None:  # else a long chain of tasks makes a long chain of texts
            reason = f"{task!r} was cancelled, because {root}"
        for handle, mode in task.accesses:
            handle.num_uses -= 1
            if (mode == W or mode == RW) and not (keeps and self._leave_behind(task, handle, root or reason, actions)):
                self._lose(handle, reason, actions, root)
            if handle.released and not handle.num_uses:
                self._free(handle, actions)
        if step is not None and step.failure is None:
            step.failure = error
        actions.append(ReportFailure(task, error))

    def _leave_behind(self, task: Task, handle: HandleRecord, reason: str, actions: list[Action]) -> bool:
        """Whether a handle that a task has not begun to write still holds what it held before the replay, and is therefore not lost.

        It does if no task of the replay has begun to write it, and if the replay has not made it worthless by planning to overwrite it unread.
        """
        step = task.step
        if step is None or handle.lost is not None:
            return False
        if handle in step.behind:
            return True
        if step.updated.get(handle) is not task or coherence.best_source(handle, None) is None:
            return False
        self._replicas.forget_write(handle, actions)
        step.behind[handle] = reason
        self._num_behind += 1
        return True

    def _catch_up(self, replay: Replay | None, handle: HandleRecord) -> None:
        """A task of a replay has written a handle: it is not behind any more."""
        if replay is not None and replay.behind.pop(handle, None) is not None:
            self._num_behind -= 1

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
        """A task that will not run no longer needs a replica; what holds no data goes."""
        self._replicas.unpin(replica)
        if not replica.pins and (replica.state == "scratch" or (replica.state == "reserved" and not replica.is_backing)):
            self._replicas.drop(replica, actions)

    def _revive(self, handle: HandleRecord) -> None:
        handle.lost = handle.root = None
        self.num_lost -= 1

    def _free(self, handle: HandleRecord, actions: list[Action]) -> None:
        """The handle is dead: drop every replica; nothing is written back."""
        for replica in list(handle.replicas.values()):
            if replica.node in handle.replicas:  # an empty backing replica goes with the last other replica
                self._replicas.drop(replica, actions)
        if handle.lost is not None:
            self._revive(handle)

    def _make_progress(self, actions: list[Action]) -> None:
        """Cancel what is to be cancelled, retry what is blocked, and make sure that something is under way while tasks remain."""
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
        """Check every invariant that can be checked at rest between two events.

        Raises:
            InvalidEvent: one is broken.
        """
        check_replicas(self._replicas, list(self._dispatch.admitted()))
        self._dispatch.validate()

    def story(self, subject: Task | HandleRecord | None = None) -> str:
        """What happened lately, to one task or handle or in general."""
        return tell(self._history, subject)
