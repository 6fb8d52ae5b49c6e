"""The scheduler as a state machine: events in, actions out.

`docs/internals/scheduler.md` describes the life of a task. The machine composes the parts: `dependencies` finds the tasks without unfinished
predecessors, `dispatch` assigns them to workers and admits them to memory, `memory` places and copies data, `prefetchers` look ahead, `conditions`
skips tasks, and `losses` handles failures.

Every event has one list of actions: `Machine.handle` creates it, passes it as the argument `actions` to every method that can cause actions, and
returns it. No part keeps the list, so all actions follow from the present event, and a signature shows whether a method can cause actions.

The machine has no threads, clocks, I/O or arrays, so the same code serves real workers, virtual time and unit tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from . import dependencies as graph
from .conditions import Conditions
from .dispatch import Dispatch, leave_pending
from .errors import InvalidEvent, TaskError
from .events import (
    Action,
    CopyFailed,
    CopyFinished,
    Event,
    HandleReleased,
    ReportStepDone,
    SourceAttached,
    StepStarted,
    TaskFailed,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from .invariants import check_replicas
from .losses import Losses
from .memory.admission import Admission
from .memory.eviction_policies import DEFAULT_EVICTION, EVICTION_POLICIES, Foresight
from .memory.memory_node import MemoryNode
from .memory.replicas import Replicas
from .memory.status import MemoryStatus
from .performance_model import Estimates
from .policies import Placement, Policy
from .prefetchers import Lookaheads
from .records import SCRATCH, HandleRecord, R, Replay, Task, Worker
from .stalls import Stalls
from .step_plan import begin_replay
from .story import stalled, tell
from .task_states import FINISHED, NEVER_FITS, RAISED, READS_LOST_DATA, REPLAYED, ImpossibleTransition

HISTORY: Final = 512
"""Number of events remembered for stories."""


class Machine:
    """The state machine.

    Guarantees:
      - An admitted task holds everything it needs, so it always ends, exchanges included (`Dispatch.take_turns`). A blocked task holds nothing.
      - A pinned replica is never evicted, moved or freed.
      - When nothing runs or moves, any task that fits on any node is admitted. If there is none, the oldest blocked task fails with `DoesNotFit`. So
        nothing hangs, as long as the program releases the data that it has acquired.
      - The outputs of a task that failed or was cancelled are lost, unless they are stale (`losses`); tasks that would read them are cancelled.

    Args:
        nodes: memory nodes; the id of a node is its position, and host memory is the first.
        policy: policy that chooses among ready tasks.
        eviction: name of the eviction policy.
        prefetch: whether data is fetched and written back ahead of the tasks that need it.

    Attributes:
        memory: queries about the memory nodes.
        conditions: the conditional tasks, with counters.
        stalls: time that workers idled although tasks for them were ready.
        handlers: the method that handles each type of event.
        num_unfinished: number of submitted tasks that are neither done, failed nor cancelled.
        num_finished: number of all other tasks ever submitted or replayed.
    """

    def __init__(self, nodes: Sequence[MemoryNode], policy: Policy, *, eviction: str = DEFAULT_EVICTION, prefetch: bool = True) -> None:
        self._foresight = Foresight()
        self._replicas = Replicas(nodes, self._foresight, EVICTION_POLICIES[eviction](self._foresight))
        self._admission = Admission(self._replicas)
        self._dispatch = Dispatch(self._replicas, self._admission, policy)
        self._losses = Losses(self._dispatch, self._replicas)
        self.conditions = Conditions(self._losses, self._replicas)
        self._skipped = self.conditions.skipped
        self._lookaheads = Lookaheads(self._dispatch, self._replicas, enabled=prefetch)
        self.memory = MemoryStatus(self._replicas, self._admission)
        self.stalls = Stalls(self._dispatch, self._replicas.copies)
        self._history: deque[Event] = deque(maxlen=HISTORY)
        self.num_unfinished = 0
        self.num_finished = 0
        self._progress = 0  # number of ended tasks, dropped replicas and ended copies when blocked tasks were last retried
        self.handlers: dict[type, Callable[..., None]] = {
            TaskSubmitted: self._on_task_submitted,
            StepStarted: self._on_step_started,
            TaskFinished: self._on_task_finished,
            TaskFailed: self._on_task_failed,
            CopyFinished: self._on_copy_finished,
            CopyFailed: self._losses.fail_copy,
            WorkerJoined: self._on_worker_joined,
            HandleReleased: self._on_handle_released,
            SourceAttached: self._on_source_attached,
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
    def turns(self) -> Collection[Task]:
        """Tasks of kind host of recorded steps that are not admitted yet; each also waits for the one before it."""
        return self._dispatch.turns

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

    def explain(self, estimates: Estimates, names: Collection[str], count: int) -> Sequence[Placement]:
        """Record the next placements of recorded tasks, see `Dispatch.explain`."""
        return self._dispatch.explain(estimates, names, count)

    def handle(self, event: Event) -> list[Action]:
        """Advance by one event and return the actions to execute now.

        Raises:
            InvalidEvent: the event is impossible in this state.
            Stalled: tasks remain although nothing is in progress (a bug; the message has the latest events).
            DoesNotFit: there are not enough free bytes for the readers of an attached source. The event has no effect then.
        """
        dispatch = self._dispatch
        self._foresight.clock += 1
        self._history.append(event)
        actions: list[Action] = []
        try:
            self.handlers[type(event)](event, actions)
            if not dispatch.num_active or dispatch.num_blocked or dispatch.to_cancel or self._skipped:
                self._make_progress(actions)
        except ImpossibleTransition as error:
            task = getattr(event, "task", None)
            named = type(event).__name__ if task is None else f"{type(event).__name__} of {task!r}"
            raise InvalidEvent(f"during {named}, {error}\n{tell(self._history, task)}") from None
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
        if task.spec.pin is not None:
            self._dispatch.keep_pins()
        graph.link(task)
        if not task.num_waiting:
            self._make_ready(task, None, actions)
            if self._dispatch.num_ready:
                self._dispatch.feed(actions)

    def _on_step_started(self, event: StepStarted, actions: list[Action]) -> None:
        replay = event.replay
        if replay.num_unfinished:
            raise InvalidEvent(f"a replay was started while replay {replay.number} still has {replay.num_unfinished} tasks")
        self._dispatch.begin(replay)
        begin_replay(replay, self._lookaheads.partition_nodes)
        if self._replicas.num_cold:
            self._replicas.want(use.handle for use in replay.shared)
        if replay.tasks:
            self._foresight.replays.append(replay)
        self.num_unfinished += len(replay.tasks)
        self._losses.begin_anew(replay, actions)
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
        task.state = FINISHED[task.state]
        replicas, losses = self._replicas, self._losses
        has_several = replicas.has_several
        if task.spec.condition is not None:
            self.conditions.note_flags(task, event.flags)
        if task.step is not None:
            task.step.done[task.position] = 1
        for (handle, mode), replica in zip(task.accesses, task.replicas, strict=True):
            uses = handle.num_uses = handle.num_uses - 1
            if mode == SCRATCH:
                replica.pins -= 1
                replicas.drop(replica, actions)
                continue
            if mode != R:
                replica.state = "modified"
                if handle.lost is not None:
                    losses.revive(handle)
                if losses.count:
                    losses.catch_up(task.step, handle)
            if has_several:
                replicas.unpin(replica)
            else:  # the only tier: no replica is ever evicted
                replica.pins -= 1
            if not uses and handle.released:
                losses.free(handle, actions)
        self._retire(task, actions)

    def _on_task_failed(self, event: TaskFailed, actions: list[Action]) -> None:
        task = event.task
        task.state = RAISED[task.state]
        for replica in task.replicas:
            if event.has_begun:
                self._replicas.unpin(replica)
                if replica.state == "scratch":
                    self._replicas.drop(replica, actions)
            else:
                self._losses.let_go(replica, actions)
        self._losses.give_up(task, event.error, actions, keeps=not event.has_begun)
        self._retire(task, actions)

    def _on_copy_finished(self, event: CopyFinished, actions: list[Action]) -> None:
        handle = event.source.handle
        arrived = self._replicas.finish_copy(event.source, event.target)
        if not handle.num_uses and handle.released:
            self._losses.free(handle, actions)
        elif handle.lost is not None:
            self._replicas.drop_unpinned(handle, actions)
        for task in arrived:
            self._dispatch.stage(task, self._dispatch.workers[task.worker], actions)
        if arrived and self._dispatch.num_ready:  # a worker whose tasks all waited for copies may take another one
            self._dispatch.feed(actions)

    def _on_handle_released(self, event: HandleReleased, actions: list[Action]) -> None:
        handle = event.handle
        handle.released = True
        if not handle.num_uses:
            self._losses.free(handle, actions)

    def _on_source_attached(self, event: SourceAttached, actions: list[Action]) -> None:
        handle = event.handle
        if handle.num_uses or handle.use_schedule is not None:
            raise InvalidEvent(f"{handle!r} was to be read from a file although tasks use it\n{tell(self._history, handle)}")
        self._replicas.take_for_readers(handle, event.scratch, actions)
        self._losses.free(handle, actions)
        self._replicas.attach(handle, event.source)
        if self._replicas.num_files == 1:
            self._lookaheads.choose_nodes()

    def _make_ready(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """Give a task without unfinished predecessors to the dispatch; `worker` ran the last of them."""
        if task.spec.condition is not None and self.conditions.skips(task, worker):
            return
        if not (self._losses.count and self._losses.cancels(task)):
            self._dispatch.push(task, worker, actions)

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
            task.state = REPLAYED[task.state]
            if task.late_successors:
                successors = [*successors, *task.late_successors]
                task.late_successors = ()
        for after in successors:
            after.num_waiting -= 1
            if not after.num_waiting:
                self._make_ready(after, worker, actions)
        if replay is not None:
            leave_pending(task, replay)
            replay.num_unfinished -= 1
            if task.position == replay.frontier:
                self._advance(replay, actions)
            if not replay.num_unfinished:
                if replay.failure is not None:
                    self._losses.end_replay(replay)
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

    def _cancel(self, task: Task, error: BaseException, actions: list[Action]) -> None:
        """End a task that will never run."""
        self._dispatch.pass_turn(task)
        if task.state == "blocked":
            self._dispatch.unblock(task)
        elif task.state == "fetching":
            self._dispatch.withdraw(task)
            for replica in task.replicas:
                self._losses.let_go(replica, actions)
        task.state = (READS_LOST_DATA if isinstance(error, TaskError) else NEVER_FITS)[task.state]
        self._losses.give_up(task, error, actions, keeps=True)
        self._release_successors(task, None, actions)

    def _make_progress(self, actions: list[Action]) -> None:
        """Cancel the tasks marked for it, retry blocked tasks, and ensure that something is in progress while tasks remain."""
        replicas, dispatch = self._replicas, self._dispatch
        while True:
            while self._skipped:
                task, worker = self._skipped.popleft()
                self.conditions.end(task, worker, actions)
                self._release_successors(task, worker, actions)
            while dispatch.to_cancel:
                self._cancel(*dispatch.to_cancel.pop(0), actions)
            if dispatch.turns:
                dispatch.take_turns(actions)
            progress = self.num_finished + replicas.num_released
            if progress != self._progress:
                self._progress = progress
                if dispatch.num_blocked:
                    dispatch.retry(actions)
                if dispatch.num_ready:
                    dispatch.feed(actions)
                if dispatch.to_cancel or self._skipped or progress != self.num_finished + replicas.num_released:
                    continue
            if dispatch.num_active or replicas.copies or not self.num_unfinished:
                return
            if dispatch.force_admit(actions):
                continue
            oldest = dispatch.oldest_blocked()
            if oldest is not None:
                dispatch.to_cancel.append((oldest, replicas.broken or self._admission.does_not_fit(oldest)))
            elif dispatch.joined:
                raise stalled(self._history, dispatch, self.num_unfinished)
            else:
                return

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
