"""The scheduler's exceptions.

    SchedulerError
    ├── TaskError        a kernel raised, or a task could not run; dependent tasks were cancelled
    ├── HandleLost       the program requested data whose producer failed
    ├── DoesNotFit       the working set of a task exceeds every node that could run it
    ├── TierFailed       the disk tier could not be read or written
    ├── DeviceFailed     a GPU stopped working during the run
    ├── Deadlock         the program was about to wait for a task that waits for data that the program holds
    ├── PlacementError   a task was placed by hand on a worker that cannot run it
    ├── RunStopped       an `on_task` callback of the program raised
    ├── RuntimeBroken    a thread of the runtime died; no task runs any more
    ├── Stalled          tasks wait and nothing is in progress: a bug in the scheduler
    └── InvalidEvent     an event that is impossible in the present state: a bug in a driver

A message has the rule, the values and the remedy. Messages of the last two also have the latest events of the task or handle.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base class of all exceptions that the scheduler raises on purpose."""


class TaskError(SchedulerError, RuntimeError):
    """A task failed; ``__cause__`` is the kernel's exception."""


class HandleLost(SchedulerError, RuntimeError):
    """The data does not exist any more, because the task that should have written it failed."""


class DoesNotFit(SchedulerError, MemoryError):
    """A working set or a reservation exceeds a memory budget.

    Args:
        message: the requirement, the limit and the remedy.
        node: name of the memory that is too small, if it is a single one.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class TierFailed(SchedulerError, OSError):
    """Bytes could not be written to the last tier, or could not be read back."""


class DeviceFailed(SchedulerError, RuntimeError):
    """A GPU stopped working; the contents of its memory are lost."""


class Deadlock(SchedulerError, RuntimeError):
    """A thread that holds data was about to wait for a task that waits for this data. The call that raises it has changed nothing."""


class PlacementError(SchedulerError, ValueError):
    """A task was placed by hand on a worker that does not exist or has no implementation of it."""


class RunStopped(SchedulerError, RuntimeError):
    """A callback of `Runtime.on_task` raised; ``__cause__`` is its exception. Every submitted task has run, so no data is lost."""


class RuntimeBroken(SchedulerError, RuntimeError):
    """A thread of the runtime died, or the program was interrupted inside it; ``__cause__`` is the reason. Create a new runtime."""


class Stalled(SchedulerError, RuntimeError):
    """Tasks wait although nothing runs and no copy is in progress."""


class InvalidEvent(SchedulerError, RuntimeError):
    """The state machine received an impossible event."""
