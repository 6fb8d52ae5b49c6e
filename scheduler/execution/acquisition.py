"""Acquisition of data by the program: a task without a codelet, which runs as long as the program holds the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..core.errors import DoesNotFit, HandleLost, TierFailed
from ..core.events import TaskFailed, TaskFinished, TaskSubmitted
from ..core.records import NEW, PROGRAM, HandleRecord, Mode, R, Task, TaskSpec
from .executor import Executor
from .waiting import Waiter


@contextmanager
def acquired(
    executor: Executor, record: HandleRecord, mode: Mode, *, is_shared: bool = False, cause: Callable[[], BaseException | None] = lambda: None
) -> Iterator[Any]:
    """Wait for data in host memory and lock it there for the block; yield its view.

    Args:
        is_shared: whether another thread may end the block.
        cause: function that returns the failure that explains lost data, if the machine knows none.

    Raises:
        HandleLost, DoesNotFit, TierFailed: the data cannot be had.
        Deadlock: the data waits for data that this thread holds.
    """
    executor.watch.refuse_inside("acquire()")
    ready = executor.waiters.enter()
    spec = TaskSpec(None, PROGRAM, ("host",), ((record, mode),), {})
    task = Task(NEW, spec, spec.accesses, token=ready)
    try:
        executor.bring(TaskSubmitted(task), task)
        ready.wait()
        if task.state != "running":
            raise _refusal(ready, record, cause())
        view = executor.pool.view_of(task.replicas[0])
    except BaseException:
        executor.waiters.leave(ready)
        executor.abandon(task)
        raise
    held = [] if is_shared else executor.holds.own
    held.append(task)
    try:
        yield view
    except BaseException as error:
        executor.bring(TaskFinished(task) if mode == R else TaskFailed(task, error))  # half-written data is lost
        raise
    finally:
        held.remove(task)
    executor.bring(TaskFinished(task))


def _refusal(ready: Waiter, record: HandleRecord, cause: BaseException | None) -> Exception:
    """Return the error of an acquisition that cannot have its data."""
    if isinstance(ready.refusal, DoesNotFit | TierFailed):
        return ready.refusal
    error = HandleLost(repr(record), record.lost or "")
    error.__cause__ = (ready.refusal.__cause__ if ready.refusal is not None else None) or cause
    return error
