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

An error is data: its attributes hold the facts, `fact` states them (the rule and the values) and `remedy` says what to do. This module and `shortage`
write these sentences once, and no code reads them back. Messages of the last two also have the latest events of the task or handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .shortage import Shortage

TaskCause = Literal["raised", "unwritten", "lost", "unread"]
"""Reason why a task failed: its kernel raised, it reads data that nothing has written, data that was lost, or data that could not be read."""


class SchedulerError(Exception):
    """Base class of all exceptions that the scheduler raises on purpose.

    Args:
        fact: the rule and the values, as a clause.
        remedy: advice, as a clause; "" for none.

    Attributes:
        fact, remedy: the arguments.
    """

    def __init__(self, fact: str = "", remedy: str = "") -> None:
        super().__init__(f"{fact}; {remedy}" if remedy else fact)
        self.fact, self.remedy = fact, remedy

    def __reduce__(self) -> Any:
        """Return the parts of a copy, which has the same fields; subclasses have constructors of their own."""
        return _bare, (type(self),), {"args": self.args, **vars(self)}

    def __copy__(self) -> SchedulerError:
        """Return the same error without causes and frames, also if tblib, which distributed may load, has registered another way to copy."""
        other = _bare(type(self))
        assert isinstance(other, SchedulerError)
        other.args = self.args
        vars(other).update(vars(self))
        return other


def _bare(kind: type[BaseException]) -> BaseException:
    """Return an error without fields; `kind.__new__` may be that of a base which does not lay out its instances, such as `MemoryError`."""
    base: Any = kind
    while base.__module__ != "builtins":
        base = base.__base__
    error: BaseException = base.__new__(kind)
    return error


class TaskError(SchedulerError, RuntimeError):
    """A task failed; ``__cause__`` is the kernel's exception.

    Attributes:
        cause: reason of the failure.
        task: number and name of the task, with its data, as in messages.
        data: data that the task lacks; "" if its kernel raised.
        why: error of the kernel, or reason why the data was lost; "" for none.
    """

    def __init__(self, cause: TaskCause, task: str, *, data: str = "", why: str = "") -> None:
        self.cause, self.task, self.data, self.why = cause, task, data, why
        remedy = ""
        match cause:
            case "raised":
                fact = f"{task} raised {why}"
            case "unwritten":
                fact, remedy = f"{task} reads {data}, which nothing has written", "write it first"
            case "lost":
                fact = f"{task} was cancelled: it reads {data}, which is lost because {why}"
            case "unread":
                fact = f"{task} was cancelled: it needs {data}, and {why}"
        super().__init__(fact, remedy)


class HandleLost(SchedulerError, RuntimeError):
    """The data does not exist any more, because the task that should have written it failed.

    Attributes:
        data: the data.
        why: reason of the loss; "" if nothing has written the data.
        is_step: whether a recorded step reads the data, rather than the program.
    """

    def __init__(self, data: str, why: str = "", *, is_step: bool = False) -> None:
        self.data, self.why, self.is_step = data, why, is_step
        if is_step:
            super().__init__(f"the step reads {data}, which is lost because {why}", "restore or overwrite it first")
        elif why:
            super().__init__(f"{data} cannot be read: {why}")
        else:
            super().__init__(f"{data} cannot be read: nothing has written it", "write it first")


class DoesNotFit(SchedulerError, MemoryError):
    """A working set or a reservation exceeds a memory budget.

    Args:
        shortage: the memory that is too small, and the bytes.
        fact, remedy: sentences of a program with other terms for tasks and budgets; "" for those of `shortage`.

    Attributes:
        shortage: the argument.
    """

    def __init__(self, shortage: Shortage, fact: str = "", remedy: str = "") -> None:
        super().__init__(fact or shortage.fact, remedy or shortage.remedy)
        self.shortage = shortage


class TierFailed(SchedulerError, OSError):
    """Bytes could not be written to the last tier, or could not be read back.

    Attributes:
        data: the data.
        directory: directory of the tier.
        reads: whether the data was to be read back.
        why: error of the system.
    """

    def __init__(self, data: str, directory: str, why: str, *, reads: bool) -> None:
        self.data, self.directory, self.why, self.reads = data, directory, why, reads
        super().__init__(
            f"{data} could not be {'read back from' if reads else 'written to'} the disk tier in {directory}: {why}",
            "free space there, choose another directory for the tier, or raise the budget of host memory",
        )


class DeviceFailed(SchedulerError, RuntimeError):
    """A GPU stopped working; the contents of its memory are lost.

    Attributes:
        device: name of the GPU.
        why: error of its driver.
    """

    def __init__(self, device: str, why: str, remedy: str = "continue from the last checkpoint, on another GPU or after a reset") -> None:
        super().__init__(f"{device} stopped working: {why}", remedy)
        self.device, self.why = device, why


class Deadlock(SchedulerError, RuntimeError):
    """A thread that holds data was about to wait for a task that waits for this data. The call that raises it has changed nothing.

    Attributes:
        call: name of the call that waits.
        data: data that the thread holds.
    """

    def __init__(self, call: str, data: str) -> None:
        super().__init__(
            f"{call} would deadlock: it waits for a task that waits for {data}, which this thread holds",
            "leave the block of its acquire() or borrow() first",
        )
        self.call, self.data = call, data


class PlacementError(SchedulerError, ValueError):
    """A task was placed by hand on a worker that does not exist or has no implementation of it.

    Attributes:
        worker: name of the worker.
        codelet: name of the codelet; "" if there is no such worker.
        kinds: kinds of workers that the codelet has implementations for.
        workers: names of the workers of the runtime, if the worker does not exist.
    """

    def __init__(self, worker: str, *, codelet: str = "", kinds: Sequence[str] = (), workers: Sequence[str] = ()) -> None:
        self.worker, self.codelet, self.kinds, self.workers = worker, codelet, tuple(kinds), tuple(workers)
        if not codelet:
            super().__init__(f"place() takes the name of a worker of this runtime, got {worker!r}", f"name one of {', '.join(workers)}")
            return
        super().__init__(
            f"Codelet({codelet!r}) was placed on {worker} and runs on {', '.join(kinds) or 'nothing'}",
            f"give it an implementation for {worker.partition(':')[0]} workers, or submit it outside place({worker!r})",
        )


class RunStopped(SchedulerError, RuntimeError):
    """A callback of `Runtime.on_task` raised; ``__cause__`` is its exception. Every submitted task has run, so no data is lost.

    Attributes:
        task: number and name of the task, with its data, as in messages.
        worker: name of the worker that ran the task.
        why: exception of the callback.
    """

    def __init__(self, task: str, worker: str, why: str) -> None:
        super().__init__(
            f"the callback of on_task stopped the run at {task} on {worker}: {why}",
            "every task submitted before runs to its end and its data can be read and saved; on_task(None), or another callback, lets the runtime "
            "take on new ones",
        )
        self.task, self.worker, self.why = task, worker, why


class RuntimeBroken(SchedulerError, RuntimeError):
    """A thread of the runtime died, or the program was interrupted inside it; ``__cause__`` is the reason. Create a new runtime.

    Attributes:
        why: the reason.
        thread: name of the thread that died; "" if it is unknown.
        subject: noun phrase for the broken part of the program.
    """

    def __init__(self, why: str, *, thread: str = "", subject: str = "the runtime") -> None:
        super().__init__(f"{subject} broke{f' in thread {thread!r}' if thread else ''}: {why}", "create a new runtime")
        self.why, self.thread, self.subject = why, thread, subject


class Stalled(SchedulerError, RuntimeError):
    """Tasks wait although nothing runs and no copy is in progress.

    Attributes:
        num_unfinished: number of tasks that have not ended.
        num_ready: number of those that wait only for a worker.
        kinds: kinds of the workers.
        story: the latest events as text.
    """

    def __init__(self, num_unfinished: int, num_ready: int, kinds: Sequence[str], story: str) -> None:
        super().__init__(
            f"{num_unfinished} tasks remain, {num_ready} of them ready, but nothing runs or moves; workers are of kind {', '.join(kinds)}"
        )
        self.args = (f"{self.fact}\n{story}",)
        self.num_unfinished, self.num_ready, self.kinds, self.story = num_unfinished, num_ready, tuple(kinds), story


class InvalidEvent(SchedulerError, RuntimeError):
    """The state machine received an impossible event."""
