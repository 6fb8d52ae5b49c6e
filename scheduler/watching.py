"""What `Runtime.on_task` shows of each task that has finished, and how what the callback raises stops the run.

A stop is an orderly end. The task that was seen has finished, and every task submitted before the program hears of the stop runs, so each piece of
data is whole and belongs to the end of a replay: it can be read and saved. Nothing new is taken on: `submit` and `replay` raise `RunStopped`, and so
does `wait` once. The callback is not called any more.

A callback looks on; it does not call back. The worker waits for it, so what waits for tasks, data or workers would wait for itself: such calls raise
on the worker's thread, and if the callback lets that through, it is a stop like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .core.errors import RunStopped, SchedulerError
from .core.records import SCRATCH, HandleRecord, Mode, Replica, Task

Look = Callable[[Any, int, int], Any]
"""Of the memory of a node: a read-only view, made by a handle's `view`, of so many bytes at an offset."""


@dataclass(frozen=True, slots=True)
class SeenTile:
    """A piece of data that a finished task used.

    Attributes:
        name: of the data.
        mode: how the task used it: R, W or RW.
        nbytes: its exact size.
    """

    name: str
    mode: Mode
    nbytes: int
    _replica: Replica
    _look: Look

    @property
    def data(self) -> Any:
        """A read-only view of what the task left there, for as long as the callback runs; copy what is to be kept. Of a GPU's memory, a copy."""
        handle = self._replica.handle
        return self._look(handle.view, self._replica.offset, handle.nbytes)


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A task whose kernel has returned.

    Attributes:
        name: of its codelet.
        number: its place in the order of all tasks.
        replay: number of the replay it belongs to; None for a task outside recorded steps.
        worker: who ran it, such as "cpu:0".
        node: the memory whose data it used, such as "ram".
        start_ns, end_ns: of the kernel, as `time.perf_counter_ns` counts.
        tiles: its data in the order of the kernel's arguments, scratch memory left out.
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
"""Sees a finished task, on the thread of the worker that ran it: several may call at a time. What it raises stops the run."""


class Watch:
    """The callback of a runtime, if there is one, and the stop it has asked for, if it has.

    Attributes:
        callback: who sees finished tasks.
        stop: what the program is told.
        inside: threads that are in a callback.
    """

    __slots__ = ("_is_told", "_lock", "callback", "inside", "stop")

    def __init__(self) -> None:
        self.callback: OnTask | None = None
        self.stop: RunStopped | None = None
        self.inside: set[int] = set()
        self._is_told = False
        self._lock = threading.Lock()

    def begin(self, callback: OnTask | None) -> None:
        """Show tasks to `callback` from now on; an earlier stop is over."""
        with self._lock:  # else the last one could still stop the run for the new one
            self.stop, self._is_told = None, False
            self.callback = callback

    def show(self, task: Task, worker: str, node: str, look: Look, start_ns: int, end_ns: int) -> None:
        """Show a task; what the callback raises becomes the stop, if it is the first."""
        callback = self.callback
        if callback is None:
            return
        used: list[tuple[tuple[HandleRecord, Mode], Replica]] = list(zip(task.accesses, task.replicas, strict=True))
        tiles = tuple(SeenTile(handle.name, mode, handle.nbytes, replica, look) for (handle, mode), replica in used if mode != SCRATCH)
        number = None if task.step is None else task.step.number
        me = threading.get_ident()
        self.inside.add(me)
        try:
            callback(FinishedTask(task.name, task.order, number, worker, node, start_ns, end_ns, tiles))
        except BaseException as error:  # a SystemExit too: the worker must survive it
            with self._lock:
                if self.callback is callback:  # else another worker's came first, or the program has replaced it
                    self.callback = None
                    self.stop = _stop(task, worker, error)
        finally:
            self.inside.discard(me)

    def check(self) -> None:
        """Raise the stop, if there is one.

        Raises:
            RunStopped: the callback has asked for the end.
        """
        stop = self.stop
        if stop is not None:
            self._is_told = True
            raise stop

    def refuse_inside(self, call: str) -> None:
        """Refuse what might wait for the worker that waits for the callback.

        Args:
            call: what was called.

        Raises:
            SchedulerError: a callback has called it.
        """
        if self.inside and threading.get_ident() in self.inside:
            raise SchedulerError(
                f"{call} was called inside a callback of on_task, and may wait for the very worker that waits for the callback; look at the task's "
                "own tiles there, raise to stop the run, and leave everything else to the program's thread"
            )

    def untold(self) -> RunStopped | None:
        """The stop, if the program has not heard of it; it counts as told then."""
        stop = None if self._is_told else self.stop
        self._is_told = self._is_told or stop is not None
        return stop


def _stop(task: Task, worker: str, error: BaseException) -> RunStopped:
    stop = RunStopped(
        f"the callback of on_task stopped the run at {task!r} on {worker}: {type(error).__name__}: {error}; every task submitted before runs to its "
        "end and its data can be read and saved; on_task(None), or another callback, lets the runtime take on new ones"
    )
    stop.__cause__ = error
    return stop
