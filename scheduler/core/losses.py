"""Failures of tasks and copies: the data that they lose, and the tasks that can therefore not run.

The outputs of a task that failed or was cancelled are lost. Tasks that would read lost data are cancelled; a task that overwrites it completely
revives it. An exception for tasks of a replay that never began, because they were cancelled or failed before their kernel changed anything: data
that outlives the replay, and that the replay was to update, keeps its value. It is *stale*: lost for the rest of this replay, and unchanged for all
other tasks. This does not hold for plain tasks: it is unknown which of the later tasks could use the old value.
"""

from __future__ import annotations

from .dispatch import Dispatch
from .errors import TaskError
from .events import Action, CopyFailed, ReportFailure
from .memory import coherence
from .memory.replicas import Replicas
from .records import ANY, FILE, RW, SCRATCH, SKIPPED, HandleRecord, R, Replay, Replica, SharedUse, Task, W


class Losses:
    """Lost and stale data, and its consequences.

    Attributes:
        count: number of handles whose data is lost, plus entries of `Replay.stale` of all replays; 0 while no task has to be examined.
    """

    __slots__ = ("_dispatch", "_replicas", "count")

    def __init__(self, dispatch: Dispatch, replicas: Replicas) -> None:
        self._dispatch = dispatch
        self._replicas = replicas
        self.count = 0

    def lose(self, handle: HandleRecord, reason: str, actions: list[Action], root: str | None = None) -> None:
        """Mark the data of a handle as lost; `root` is the failure that started the chain, if it is not `reason`."""
        if handle.lost is None:
            self.count += 1
        handle.lost = reason
        handle.root = root or reason
        self._replicas.drop_unpinned(handle, actions)

    def begin_anew(self, replay: Replay, actions: list[Action]) -> None:
        """Let the handles that a new replay owns begin without data."""
        for handle, num_uses in replay.owned:
            handle.num_uses += num_uses
            if handle.replicas:  # a copy still in progress kept the replicas beyond the last use
                self.lose(handle, "it died with an earlier replay", actions)
                self._replicas.reservations.reenter(handle, replay)
            elif handle.lost is not None:
                self.revive(handle)

    def revive(self, handle: HandleRecord) -> None:
        """Note that a task has overwritten lost data, or that its handle begins anew."""
        handle.lost = handle.root = None
        self.count -= 1

    def catch_up(self, replay: Replay | None, handle: HandleRecord) -> None:
        """Note that a task of a replay has written a handle, whose value is therefore not stale any more."""
        if replay is not None and replay.stale.pop(handle, None) is not None:
            self.count -= 1

    def end_replay(self, replay: Replay) -> None:
        """Forget the stale data of a replay that has failed and ended."""
        replay.changed_nothing = all(
            handle in replay.stale or (handle.lost is None and not _has_begun(replay, use)) for handle, use in replay.updated.items()
        )
        self.count -= len(replay.stale)
        replay.stale.clear()

    def is_lost(self, handle: HandleRecord, replay: Replay | None) -> bool:
        """Return whether a task of a replay, or a plain task, cannot read the data of a handle."""
        return handle.lost is not None or (replay is not None and handle in replay.stale)

    def cancels(self, task: Task) -> bool:
        """Return whether a task reads lost data; if so, mark it for cancellation."""
        stale = task.step.stale if task.step is not None else {}
        for handle, mode in task.accesses:
            why = handle.lost or stale.get(handle)
            if why is not None and (mode == R or mode == RW):
                self._dispatch.to_cancel.append((task, TaskError("lost", repr(task), data=repr(handle), why=why)))
                return True
        return False

    def give_up(self, task: Task, error: BaseException, actions: list[Action], *, keeps: bool) -> None:
        """Report a task that has failed or was cancelled, and mark its outputs as lost.

        Args:
            keeps: whether the task has not begun, so that outputs of a replay may become stale instead.
        """
        step = task.step
        if step is not None:
            step.done[task.position] = 1
            if step.failure is None:
                step.updated = {use.handle: use for use in step.shared if use.needs_data}
        stale = {} if step is None else step.stale
        root = next((why for handle, mode in task.accesses if mode != W and (why := handle.root or stale.get(handle)) is not None), None)
        reason = f"{task!r} {task.state}: {error}"
        if root is not None:  # name the first failure only: the text of a long chain of tasks would be as long as the chain
            reason = f"{task!r} was cancelled, because {root}"
        for handle, mode in task.accesses:
            handle.num_uses -= 1
            if (mode == W or mode == RW) and not (keeps and self._keep_stale(task, handle, root or reason, actions)):
                self.lose(handle, reason, actions, root)
            if handle.released and not handle.num_uses:
                self.free(handle, actions)
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
        use = step.updated.get(handle)
        if use is None or _has_begun(step, use, task.position) or coherence.best_source(handle, None) is None:
            return False
        self._replicas.forget_write(handle, actions)
        step.stale[handle] = reason
        self.count += 1
        return True

    def fail_copy(self, event: CopyFailed, actions: list[Action]) -> None:
        """Handle a failed copy. After a failed write, the tier is closed. After a failed read, the data is lost and its readers are cancelled."""
        source, target, error = event.source, event.target, event.error
        handle, replicas, dispatch = source.handle, self._replicas, self._dispatch
        waiting = replicas.end_copy(source, target)
        replicas.unpin(source)
        replicas.unpin(target)
        is_read = source.node == FILE or replicas.nodes[source.node].is_storage
        if is_read:
            self.lose(handle, f"it could not be read {'from its file' if source.node == FILE else 'back'}: {error}", actions)
        else:
            replicas.break_tier(error)
            if target.node != replicas.last:
                replicas.drop(target, actions)
        for task in waiting:
            if is_read and any(used is handle and mode != W for used, mode in task.accesses):
                replicas.copies.forget(task)
                cancelled = TaskError("unread", repr(task), data=repr(handle), why=handle.lost or "")
                cancelled.__cause__ = error
                dispatch.to_cancel.append((task, cancelled))
            elif not task.num_arriving:
                dispatch.stage(task, dispatch.workers[task.worker], actions)
        if not handle.num_uses and handle.released:
            self.free(handle, actions)

    def let_go(self, replica: Replica, actions: list[Action]) -> None:
        """Unpin a replica of a task that will not run; drop it if it holds no data."""
        self._replicas.unpin(replica)
        if not replica.pins and (replica.state == "scratch" or (replica.state == "reserved" and not replica.is_backing)):
            self._replicas.drop(replica, actions)

    def free(self, handle: HandleRecord, actions: list[Action]) -> None:
        """Drop every replica of a dead handle, without write-back."""
        for replica in list(handle.replicas.values()):
            if replica.node in handle.replicas:  # an empty backing replica is dropped along with the last other replica
                self._replicas.drop(replica, actions)
        if handle.lost is not None:
            self.revive(handle)


def _has_begun(replay: Replay, use: SharedUse, before: int = ANY) -> bool:
    """Return whether tasks of a replay have begun to write a handle, of those before a position: skipped ones have not."""
    schedule, done = use.use_schedule, replay.done
    return any(
        mode not in (R, SCRATCH) and done[position] != SKIPPED
        for position, mode in zip(schedule.positions, schedule.modes, strict=True)
        if position < before
    )
