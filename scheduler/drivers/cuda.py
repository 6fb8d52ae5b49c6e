"""CUDA workers: the thread that puts a GPU's tasks on its flow, and the engines that copy from and to it.

Knows no CUDA: a `gpu.Gpu` carries everything out. The order in which one stream waits for another is decided here and in `gpu.Flow`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, Protocol

from ..core.errors import DeviceFailed
from ..core.events import CopyTile, TaskFailed, TaskFinished
from ..core.records import Task, Worker
from ..storage.device import Arena, DeviceArena, marks_of
from . import cpu
from .gpu import Ended, Event, Flow, Gpu, device_failed

COPIES_IN_FLIGHT: Final = 4
"""Copies on a stream that have not ended, at most."""


_here = threading.local()


def captured(run: Callable[[], None]) -> Callable[[], None] | None:
    """See `Flow.capture`, of the GPU whose worker runs this."""
    flow: Flow = _here.flow
    return flow.capture(run)


def copy_on_gpu(source: Any, target: Any) -> None:
    """Copy one view over another of the same size, among the kernels of the GPU whose worker runs this."""
    flow: Flow = _here.flow
    flow.entered.copy(target.address, source.address, target.nbytes)


class Engine(cpu.Engine, Protocol):
    """What the thread of a GPU needs of the runtime."""

    def ended(self, worker: Worker, tasks: Sequence[Ended]) -> None:
        """Take note of how long tasks took on the device."""


class CudaThread(cpu.WorkerThread):
    """The worker of a GPU. A task is finished once its kernels are on the flow; how long they took is known later.

    Args:
        arena: memory of the GPU whose tasks it runs.
    """

    engine: Engine

    def __init__(self, arena: DeviceArena, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.flow = arena.flow

    def run(self) -> None:
        """Run tasks until told to stop; what is on the flow then is waited for."""
        flow = self.flow
        try:
            flow.gpu.enter(flow.stream)
            _here.flow = flow
            super().run()
            self.settle()
        except BaseException as error:  # nobody may be left waiting
            self.engine.fail(error)

    def settle(self) -> None:
        """Wait until the device has ended what is on the flow, and take note of it; called by any thread.

        Raises:
            DeviceFailed: something failed.
        """
        self.flow.gpu.adopt()
        self.flow.wait()
        self._note(self.flow.collect())

    def _execute(self, task: Task) -> TaskFinished | TaskFailed:
        flow, watch = self.flow, self.engine.watch
        self._note(flow.begin())
        self.num_tasks += 1
        start = perf_counter_ns()
        try:
            task.codelet.cuda(*self.views_of(task), **task.constants)  # type: ignore[attr-defined]
        except DeviceFailed:
            raise
        except BaseException as error:  # a kernel may raise anything, SystemExit included; the worker must survive it
            flow.mark()
            return TaskFailed(task, error)
        flow.mark(task)
        if watch.callback is not None:
            flow.wait()
            self.engine.show(self.worker, task, start, perf_counter_ns())
        return TaskFinished(task)

    def _note(self, ended: Sequence[Ended]) -> None:
        if ended:
            self.busy_ns += sum(task.end_ns - task.start_ns for task in ended)
            self.engine.ended(self.worker, ended)


class _Copy(NamedTuple):
    action: CopyTile
    begin: Event
    end: Event


class CudaCopier(threading.Thread):
    """Copies over one link of a GPU, on a stream of its own: several are asked for at a time, and each is reported when it has ended.

    Args:
        arenas: memory of every node.
        gpu: whose stream copies.
        done: called after each copy with the action, its start and end.
        fail: called with what went wrong, if anything; nothing is copied after that.
    """

    def __init__(
        self, arenas: Sequence[Arena], gpu: Gpu, done: Callable[[CopyTile, int, int], None], fail: Callable[[BaseException], None], name: str
    ) -> None:
        super().__init__(name=f"nntask {name}", daemon=True)
        self.arenas = arenas
        self.gpu = gpu
        self.done = done
        self.fail = fail
        self._mailbox: SimpleQueue[tuple[CopyTile, Sequence[tuple[Flow, int]]] | None] = SimpleQueue()
        self._stream = gpu.stream()
        self._events: list[Event] = []

    def put(self, action: CopyTile) -> None:
        """Ask for a copy of what the kernels so far have left, over what they have used; called under the engine's lock."""
        self._mailbox.put((action, marks_of(self.arenas[action.source.node], self.arenas[action.target.node])))

    def run(self) -> None:
        """Copy until told to stop."""
        under_way: deque[_Copy] = deque()
        try:
            self.gpu.adopt()
            while True:
                if under_way and (len(under_way) >= COPIES_IN_FLIGHT or self._mailbox.empty()):
                    self._finish(under_way.popleft())
                    continue
                request = self._mailbox.get()
                if request is None:
                    break
                under_way.append(self._start(*request))
            while under_way:
                self._finish(under_way.popleft())
        except BaseException as error:  # nobody may be left waiting
            self.fail(error)

    def stop(self) -> None:
        """End the thread after the copies already asked for."""
        self._mailbox.put(None)

    def _start(self, action: CopyTile, marks: Sequence[tuple[Flow, int]]) -> _Copy:
        source, target, stream = action.source, action.target, self._stream
        origin, goal, nbytes = self.arenas[source.node], self.arenas[target.node], source.handle.nbytes
        try:
            copy = _Copy(action, self._event(), self._event())
            for flow, number in marks:
                flow.hold(stream, number)
            stream.record(copy.begin)
            if not isinstance(origin, DeviceArena):
                assert isinstance(goal, DeviceArena)
                goal.put(stream, origin.address + source.offset, target.offset, nbytes)
            elif not isinstance(goal, DeviceArena):
                origin.take(stream, goal.address + target.offset, source.offset, nbytes)
            else:
                stream.copy(goal.address + target.offset, origin.address + source.offset, nbytes)
            stream.record(copy.end)
        except RuntimeError as error:
            raise device_failed(self.gpu, error) from error
        return copy

    def _finish(self, copy: _Copy) -> None:
        try:
            copy.end.wait()
            took = copy.end.seconds_since(copy.begin)
        except Exception as error:
            raise device_failed(self.gpu, error) from error
        end = perf_counter_ns()
        self.done(copy.action, end - round(took * 1e9), end)
        self._events += copy[1:]

    def _event(self) -> Event:
        return self._events.pop() if self._events else self.gpu.event()
