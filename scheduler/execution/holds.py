"""What the threads of a program hold, so that none waits for itself: a thread that holds data and waits for a task that waits for that data would
sleep for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..core.dependencies import waiting_for
from ..core.errors import Deadlock
from ..core.records import Task


class Holds:
    """The program's tasks that hold data, thread by thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def own(self) -> list[Task]:
        """Those of this thread."""
        found: list[Task] | None = getattr(self._local, "found", None)
        if found is None:
            found = self._local.found = []
        return found

    def refuse_circle(self, is_awaited: Callable[[Task], bool], call: str) -> None:
        """Raise if this thread is about to wait for tasks of which one is, or waits for, its own hold of some data. Under the executor's lock.

        Raises:
            Deadlock: it would wait for ever.
        """
        for hold in self.own:
            if is_awaited(hold) or any(map(is_awaited, waiting_for(hold))):
                raise Deadlock(
                    f"{call} would wait for ever: it waits for a task that waits for {hold.accesses[0][0]!r}, which this thread holds; leave "
                    "the block of its acquire() or borrow() first"
                )
