"""The scheduler's exceptions.

    SchedulerError
    ├── TaskError        a kernel raised, or a task could not run; dependants were cancelled
    ├── HandleLost       data whose producer failed was asked for
    ├── DoesNotFit       a task's working set exceeds every node that could run it
    ├── TierFailed       the disk tier could not be read or written
    ├── DeviceFailed     a GPU stopped working while it was used
    ├── Deadlock         the program was about to wait for what waits for data that it holds
    ├── PlacementError   a task was placed by hand where it cannot run
    ├── RunStopped       the program's own `on_task` callback asked for the end
    ├── RuntimeBroken    a thread of the runtime died; nothing runs any more
    ├── Stalled          tasks wait and nothing is under way: a bug of the scheduler
    └── InvalidEvent     an event that cannot happen in the present state: a bug of a driver

Messages say the rule, the values and what to do; the last two carry the story of the task or handle.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of everything the scheduler raises on purpose."""


class TaskError(SchedulerError, RuntimeError):
    """A task failed; ``__cause__`` is the kernel's exception."""


class HandleLost(SchedulerError, RuntimeError):
    """The data does not exist any more because the task that should have written it failed."""


class DoesNotFit(SchedulerError, MemoryError):
    """A working set or a reservation exceeds a memory budget.

    Args:
        message: what does not fit where.
        node: name of the memory that is too small, where it is one.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class TierFailed(SchedulerError, OSError):
    """Bytes could not be written to the last tier, or not be read back."""


class DeviceFailed(SchedulerError, RuntimeError):
    """A GPU stopped working; what was in its memory is gone."""


class Deadlock(SchedulerError, RuntimeError):
    """A thread that holds data was about to wait for something that waits for that data; nothing has happened."""


class PlacementError(SchedulerError, ValueError):
    """A task was placed by hand on a worker that does not exist or has no implementation of it."""


class RunStopped(SchedulerError, RuntimeError):
    """A callback of `Runtime.on_task` raised; ``__cause__`` is what. Every task that was submitted has run, so no data is lost."""


class RuntimeBroken(SchedulerError, RuntimeError):
    """A thread of the runtime died, or the program was interrupted inside it; ``__cause__`` says of what. Make a new runtime."""


class Stalled(SchedulerError, RuntimeError):
    """Tasks wait although nothing runs and nothing moves."""


class InvalidEvent(SchedulerError, RuntimeError):
    """The state machine received an impossible event."""
