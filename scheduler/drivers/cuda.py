"""CUDA workers: the thread that submits a GPU's kernels, and the threads that copy from and to its memory.

This module does not know CUDA: a `gpu.Gpu` executes all work. Together with `gpu.Flow`, the module decides when one stream waits for another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from ..core.errors import DeviceFailed
from ..core.events import CopyTile, TaskFailed, TaskFinished
from ..core.records import Task
from ..storage.device import Arena, DeviceArena, mark_of
from . import cpu
from .gpu import NUM_STARTED, Ended, Event, Flow, Gpu, device_failed

COPIES_IN_FLIGHT: Final = 4
"""Largest number of unfinished copies on one stream."""


_here = threading.local()


def captured(run: Callable[[], None]) -> Callable[[], None] | None:
    """Record a graph with `Flow.capture`, on the GPU whose worker thread calls this."""
    flow: Flow = _here.flow
    return flow.capture(run)


def copy_on_gpu(source: Any, target: Any) -> None:
    """Copy one view over another of the same size, as a kernel of the GPU whose worker thread calls this."""
    flow: Flow = _here.flow
    flow.gpu.num_started += 1
    flow.entered.copy(target.address, source.address, target.nbytes)


class CudaThread(cpu.WorkerThread):
    """The worker thread of a GPU. A task counts as finished once its kernels are on the flow; the device's durations are known later.

    Args:
        arena: memory of the GPU.
        arguments: arguments of `WorkerThread`.
    """

    def __init__(self, arena: DeviceArena, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arena = arena
        self.flow = arena.flow

    def run(self) -> None:
        """Run tasks until `stop`, then wait for the kernels that are on the flow."""
        flow = self.flow
        try:
            flow.gpu.enter(flow.stream)
            _here.flow = flow
            super().run()
            self.drain()
        except BaseException as error:  # every waiting thread must be woken
            self.executor.fail(error)

    def drain(self) -> None:
        """Wait until the device has ended all kernels on the flow, and record their durations; any thread may call it.

        Raises:
            DeviceFailed: a kernel failed.
        """
        self.flow.wait()
        self._note(self.flow.collect())

    def _execute(self, task: Task) -> TaskFinished | TaskFailed:
        flow, watch = self.flow, self.executor.watch
        self._note(flow.begin())
        self.num_tasks += 1
        start, num_started = perf_counter_ns(), flow.gpu.num_started
        try:
            task.spec.codelet.cuda(*self.views_of(task), **task.spec.constants)  # type: ignore[attr-defined]
        except DeviceFailed:
            raise
        except BaseException as error:  # a kernel may raise anything, SystemExit included; the worker must survive it
            _note_mark(task, flow.mark())
            return TaskFailed(task, error, has_begun=getattr(error, NUM_STARTED, None) != num_started)
        _note_mark(task, flow.mark(task))
        try:
            flags = self._flags_of(task)
        except DeviceFailed:
            raise
        except BaseException as error:
            return TaskFailed(task, error)
        if watch.callback is not None:
            flow.wait()
            self.executor.show(self.worker, task, start, perf_counter_ns())
        return TaskFinished(task, flags)

    def _flags_of(self, task: Task) -> bytes | None:
        """Return the flags that a task writes, once its kernels have ended; None if it writes none."""
        condition = task.spec.condition
        if condition is None or condition.flags < 0:
            return None
        handle, replica = task.accesses[condition.flags][0], task.replicas[condition.flags]
        return bytes(self.arena.look(handle.spec.view, replica.offset, handle.spec.nbytes))  # type: ignore[arg-type]

    def _note(self, ended: Sequence[Ended]) -> None:
        if ended:
            self.busy_ns += sum(task.end_ns - task.start_ns for task in ended)
            for task, start_ns, end_ns in ended:
                if task.spec.num_clones:
                    self.clone_ns += (end_ns - start_ns) * task.spec.clone_share
                    self.num_clones += task.spec.num_clones
            self.executor.ended(self.worker, ended)


def _note_mark(task: Task, number: int) -> None:
    """Note the mark after which other streams may use the task's data."""
    for replica in task.replicas:
        replica.kernel_mark = number


class _PendingCopy(NamedTuple):
    action: CopyTile
    begin: Event
    end: Event


class CudaCopier(threading.Thread):
    """A thread that copies over one link of a GPU, on its own stream. Several are in progress at once; each is reported when it has ended.

    Args:
        arenas: memory of every node.
        gpu: GPU whose stream copies.
        done: function called after each copy with the action, its start and its end in nanoseconds.
        fail: function called with the error that ends the thread, if any.
        name: name of the thread.
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
        """Request a copy, ordered after the submitted kernels that may use its bytes; to be called under the executor's lock."""
        ends = ((replica, self.arenas[replica.node]) for replica in (action.source, action.target))
        self._mailbox.put((action, [mark_of(replica, arena) for replica, arena in ends if isinstance(arena, DeviceArena)]))

    def run(self) -> None:
        """Copy until `stop`."""
        in_progress: deque[_PendingCopy] = deque()
        try:
            self.gpu.adopt()
            while True:
                if in_progress and (len(in_progress) >= COPIES_IN_FLIGHT or self._mailbox.empty()):
                    self._finish(in_progress.popleft())
                    continue
                request = self._mailbox.get()
                if request is None:
                    break
                in_progress.append(self._start(*request))
            while in_progress:
                self._finish(in_progress.popleft())
        except BaseException as error:  # every waiting thread must be woken
            self.fail(error)

    def stop(self) -> None:
        """End the thread after the copies requested so far."""
        self._mailbox.put(None)

    def _start(self, action: CopyTile, marks: Sequence[tuple[Flow, int]]) -> _PendingCopy:
        source, target, stream = action.source, action.target, self._stream
        origin, goal, nbytes = self.arenas[source.node], self.arenas[target.node], source.handle.spec.nbytes
        try:
            copy = _PendingCopy(action, self._event(), self._event())
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

    def _finish(self, copy: _PendingCopy) -> None:
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
