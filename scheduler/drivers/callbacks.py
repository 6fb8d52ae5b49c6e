"""Callbacks on finished tasks (`Runtime.on_task`), and the orderly stop of a run by an exception in the callback.

A stop is orderly: the task that the callback saw has finished, and every task submitted before the program sees the stop still runs. So each piece of
data is complete, belongs to the end of a replay, and can be read and saved. No further task is accepted: `submit` and `replay` raise `RunStopped`,
and so does `wait`, once. The callback is not called again.

A callback observes and must not call the runtime. The worker waits for the callback, so a call that waits for tasks, data or workers could wait for
itself. Such calls raise an error on the worker's thread; if the callback does not catch it, it stops the run like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import RunStopped, SchedulerError
from ..core.records import SCRATCH, HandleRecord, Mode, Replica, Task

Look = Callable[[Any, int, int], Any]
"""Function (view, offset, bytes) -> a read-only view of a node's memory, created by a handle's `view`."""


@dataclass(frozen=True, slots=True)
class SeenTile:
    """A piece of data that a finished task used.

    Attributes:
        name: name of the handle.
        mode: access mode of the task: R, W or RW.
        nbytes: exact size of the data in bytes.
    """

    name: str
    mode: Mode
    nbytes: int
    _replica: Replica
    _look: Look

    @property
    def data(self) -> Any:
        """A read-only view of the data as the task left it, valid until the callback returns; copy it to keep it.

        Data on a GPU is copied to the host.
        """
        handle = self._replica.handle
        return self._look(handle.spec.view, self._replica.offset, handle.spec.nbytes)


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A task whose kernel has returned.

    Attributes:
        name: name of its codelet.
        number: position of the task in the order of all tasks.
        replay: number of its replay; None for a task outside recorded steps.
        worker: name of the worker that ran it, such as "cpu:0".
        node: name of the memory node of its data, such as "ram".
        start_ns, end_ns: start and end of the kernel on the clock of `time.perf_counter_ns`.
        tiles: the task's data in the order of the kernel's arguments, without scratch memory. Each has `name` (of its handle), `mode` (R, W or RW),
            `nbytes` (its exact size) and `data`, a read-only view that is valid until the callback returns; copy it to keep it.
    """

    name: str
    number: int
    replay: int | None
    worker: str
    node: str
    start_ns: int
    end_ns: int
    tiles: tuple[SeenTile, ...]


OnTask = Callable[[FinishedTask], object]
"""A callback for finished tasks, called on the thread of the worker, possibly by several workers at once. An exception in it stops the run."""


class Watch:
    """The callback of a runtime, and the stop that it has caused, if any.

    Attributes:
        callback: function called with finished tasks; None without one.
        stop: error that the program receives; None while the run goes on.
        inside: identifiers of the threads that are in a callback.
    """

    __slots__ = ("_is_reported", "_lock", "callback", "inside", "stop")

    def __init__(self) -> None:
        self.callback: OnTask | None = None
        self.stop: RunStopped | None = None
        self.inside: set[int] = set()
        self._is_reported = False
        self._lock = threading.Lock()

    def begin(self, callback: OnTask | None) -> None:
        """Call `callback` with finished tasks from now on, and end an earlier stop."""
        with self._lock:  # else an exception of the previous callback could still stop the run
            self.stop, self._is_reported = None, False
            self.callback = callback

    def show(self, task: Task, worker: str, node: str, look: Look, start_ns: int, end_ns: int) -> None:
        """Call the callback with a task; its first exception stops the run."""
        callback = self.callback
        if callback is None:
            return
        used: list[tuple[tuple[HandleRecord, Mode], Replica]] = list(zip(task.accesses, task.replicas, strict=True))
        tiles = tuple(SeenTile(handle.spec.name, mode, handle.spec.nbytes, replica, look) for (handle, mode), replica in used if mode != SCRATCH)
        number = None if task.step is None else task.step.number
        me = threading.get_ident()
        self.inside.add(me)
        try:
            callback(FinishedTask(task.spec.name, task.order, number, worker, node, start_ns, end_ns, tiles))
        except BaseException as error:  # SystemExit too: the worker must survive it
            with self._lock:
                if self.callback is callback:  # else another worker's exception came first, or the program has replaced the callback
                    self.callback = None
                    self.stop = _stop(task, worker, error)
        finally:
            self.inside.discard(me)

    def check(self) -> None:
        """Raise the stop, if any; it counts as reported then.

        Raises:
            RunStopped: the callback has stopped the run.
        """
        stop = self.stop
        if stop is not None:
            self._is_reported = True
            raise stop

    def refuse_inside(self, call: str) -> None:
        """Refuse a call that might wait for the worker that waits for the callback.

        Args:
            call: name of the call, for the message.

        Raises:
            SchedulerError: the calling thread is in a callback.
        """
        if self.inside and threading.get_ident() in self.inside:
            raise SchedulerError(
                f"{call} was called inside a callback of on_task, and may wait for the worker that waits for the callback; look at the task's "
                "own tiles there, raise to stop the run, and leave everything else to the program's thread"
            )

    def unreported(self) -> RunStopped | None:
        """Return the stop if it has not been raised in the program yet; it counts as reported from now on."""
        stop = None if self._is_reported else self.stop
        self._is_reported = self._is_reported or stop is not None
        return stop


def _stop(task: Task, worker: str, error: BaseException) -> RunStopped:
    stop = RunStopped(repr(task), worker, f"{type(error).__name__}: {error}")
    stop.__cause__ = error
    return stop
