"""Deadlock detection: the data that each program thread holds. A thread deadlocks if it waits for a task that waits for data it holds itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ..core.dependencies import waiting_for
from ..core.errors import Deadlock
from ..core.records import Task


class Holds:
    """The acquisitions of the program, by the thread that made them."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def own(self) -> list[Task]:
        """Acquisitions that the calling thread holds."""
        tasks: list[Task] | None = getattr(self._local, "tasks", None)
        if tasks is None:
            tasks = self._local.tasks = []
        return tasks

    def refuse_circle(self, is_awaited: Callable[[Task], bool], call: str, turns: Iterable[Task]) -> None:
        """Raise if this thread is about to wait for a task that waits for data it holds itself. To be called under the executor's lock.

        Args:
            is_awaited: function that returns whether the thread is about to wait for a task.
            call: name of the call that waits, for the message.
            turns: tasks that wait for their turns (`Machine.turns`).

        Raises:
            Deadlock: the wait would never end.
        """
        for hold in self.own:
            if is_awaited(hold) or any(map(is_awaited, waiting_for(hold, turns))):
                raise Deadlock(call, repr(hold.accesses[0][0]))
