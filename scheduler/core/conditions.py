"""Conditional tasks (`records.Condition`): the decision whether a task runs, and the end of one that is skipped.

A task decides with the flags that the latest task before it wrote, as soon as it waits for no other task. Until then none of its data is fetched. If
its flag is 0, it ends at once, without memory and without a worker. If its flags are lost, it is cancelled like any reader of lost data.
"""

from __future__ import annotations

from collections import deque

from .events import Action
from .losses import Losses
from .memory.replicas import Replicas
from .records import SKIPPED, R, Task, W, Worker
from .task_states import FLAG_IS_ZERO


class Conditions:
    """The conditional tasks of a machine.

    Attributes:
        skipped: tasks to end, each with the worker that ran its last predecessor; a queue, because each may be the last predecessor of the next one.
        num_skipped: number of tasks skipped so far.
        has_log: whether `log` grows.
        log: skipped tasks that have ended, each with the worker that ran its last predecessor; the driver empties it.
        num_hits, num_misses: number of persistent inputs of tasks of replays whose flags were set, that were in the memory where tasks run when the
            flags were written, and number of all others. Not counted on a machine with one node and no files.
    """

    __slots__ = ("_losses", "_replicas", "has_log", "log", "num_hits", "num_misses", "num_skipped", "skipped")

    def __init__(self, losses: Losses, replicas: Replicas) -> None:
        self._losses = losses
        self._replicas = replicas
        self.skipped: deque[tuple[Task, Worker | None]] = deque()
        self.num_skipped = 0
        self.has_log = False
        self.log: list[tuple[Task, Worker | None]] = []
        self.num_hits = 0
        self.num_misses = 0

    def note_flags(self, task: Task, values: bytes | None) -> None:
        """Note the flags that a finished task has written, if it writes any; count the inputs of the tasks that they select, before copies begin."""
        condition = task.spec.condition
        if condition is None or condition.flags < 0:
            return
        flags = task.accesses[condition.flags][0]
        flags.flags = values
        self._replicas.num_flag_writes += 1
        if values is None or task.step is None or not self._replicas.has_several:
            return
        for after in task.successors:
            other = after.spec.condition
            if other is None or other.guard < 0 or after.accesses[other.guard][0] is not flags or not values[other.number]:
                continue
            inputs = [handle for handle, mode in after.accesses if mode == R and handle.spec.kind == "persistent"]
            num_hits = sum(map(self._replicas.is_at_hand, inputs))
            self.num_hits += num_hits
            self.num_misses += len(inputs) - num_hits

    def skips(self, task: Task, worker: Worker | None) -> bool:
        """Return whether a task without unfinished predecessors is skipped; if so, queue it. `worker` ran the last of them."""
        condition = task.spec.condition
        if condition is None or condition.guard < 0:
            return False
        guard = task.accesses[condition.guard][0]
        if self._losses.is_lost(guard, task.step):
            return False
        is_set = guard.flags is None or guard.flags[condition.number] != 0
        self._replicas.note_decision(task, condition.share, is_set=is_set)
        if not is_set:
            self.skipped.append((task, worker))
        return not is_set

    def end(self, task: Task, worker: Worker | None, actions: list[Action]) -> None:
        """End a skipped task, whose last predecessor `worker` ran; data that it was to overwrite is lost."""
        task.state = FLAG_IS_ZERO[task.state]
        if task.step is not None:
            task.step.done[task.position] = SKIPPED
        self.num_skipped += 1
        if self.has_log:
            self.log.append((task, worker))
        for handle, mode in task.accesses:
            handle.num_uses -= 1
            self._replicas.enter_anew(handle)
            if mode == W:
                self._losses.lose(handle, f"{task.spec.name}, which writes it, was skipped", actions)
            if handle.released and not handle.num_uses:
                self._losses.free(handle, actions)
