"""What the runtime asks of a GPU, and the order of work on one.

A `Gpu` gives memory and streams; CuPy carries that out, or in tests `testing.FakeGpu`. What is put on a stream is carried out in its order, beside
other streams. A `Flow` is the stream of kernels of one GPU. Nobody waits for a kernel to end before what follows is asked for: a task counts as
finished as soon as its kernels are on the stream, since later kernels come after it there. Whoever uses the same memory from elsewhere (a copy from
or to it on another stream) first lets its stream wait, on the device, until the flow is past a *mark*; the mark it needs is the last one at the
moment the copy was decided on, because whoever used that memory before is in front of it. A copy, on the other hand, is reported only once it has
ended, so host memory, other devices and files never see anything half done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Final, NamedTuple, Protocol

from ..core.errors import DeviceFailed
from ..core.records import Task

BOUNCE_NBYTES: Final = 1 << 20
"""Of the device's memory, beside any budget: bytes that move by less than so much go through it."""
IN_FLIGHT: Final = 8
"""Tasks on a flow that have not ended, at most: the device has the next ones before it ends one, and copies wait for no more than these."""


class Event(Protocol):
    """A point of a stream."""

    def is_done(self) -> bool:
        """Whether the device is past it."""

    def wait(self) -> None:
        """Sleep until it is; other threads run meanwhile.

        Raises:
            Exception: something before it failed.
        """

    def seconds_since(self, earlier: Event) -> float:
        """Between two points that the device is past."""


class Stream(Protocol):
    """Work in order."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes between two addresses, each of host memory or of any GPU; the ranges do not overlap."""

    def record(self, event: Event) -> None:
        """Let the event stand for this point; what it stood for before is forgotten."""

    def hold(self, event: Event) -> None:
        """What is put here from now on begins after the point that the event stands for now."""

    def start(self, graph: object) -> None:
        """Put everything that `Gpu.capture` has recorded here, in its order."""


class Gpu(Protocol):
    """One GPU, or a part of one."""

    @property
    def name(self) -> str:
        """As reports call it."""

    def reserve(self, nbytes: int) -> int:
        """Take memory for good.

        Returns:
            Its address.

        Raises:
            MemoryError: there is not so much.
        """

    def release(self, address: int) -> None:
        """Give it back."""

    def stream(self) -> Stream:
        """A new stream."""

    def event(self) -> Event:
        """A new event, which stands for a point that has passed."""

    def enter(self, stream: Stream) -> None:
        """Kernels that the calling thread starts from now on are for this GPU, on that stream."""

    def capture(self, stream: Stream, run: Callable[[], None]) -> object:
        """Record what `run` puts on that stream, which holds nothing else and which the calling thread has entered; nothing of it is carried out.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """

    def adopt(self) -> None:
        """The calling thread will use streams and events of this GPU."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory in place so that copies of it run at full speed; whether that was possible."""

    def unpin(self, address: int) -> None:
        """Let it go."""

    def close(self) -> None:
        """Give back what it took for itself; nothing can be computed after that."""


class Ended(NamedTuple):
    """A task that the device has ended.

    Args:
        start_ns, end_ns: as `time.perf_counter_ns` counts; the device's durations, added to the moment it began to be busy.
    """

    task: Task
    start_ns: int
    end_ns: int


class _Mark(NamedTuple):
    number: int
    event: Event
    task: Task | None


class Flow:
    """The kernels of one GPU, and how far it is with them.

    Args:
        gpu: whose.

    Attributes:
        number: of the last mark; read it under the engine's lock, where tasks finish and copies are decided on.
        entered: where the worker's thread puts kernels now: the stream of the flow, or the one where a graph is recorded.

    Raises:
        MemoryError: the GPU has no room for `BOUNCE_NBYTES`.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.stream = gpu.stream()
        self.number = 0
        self._lock = threading.Lock()
        self._marks: deque[_Mark] = deque()
        self._spare: list[Event] = []
        self._last = gpu.event()  # the newest point known to have passed
        self._record(self._last)
        self._last_ns = perf_counter_ns()
        self._num_tasks = 0
        self._bounce = gpu.reserve(BOUNCE_NBYTES)
        self._aside: Stream | None = None  # where graphs are recorded: nobody else puts anything there
        self.entered = self.stream

    def close(self) -> None:
        """Give back its memory; everything on the stream has ended."""
        self.gpu.release(self._bounce)

    def begin(self) -> list[Ended]:
        """A task is about to be put on the stream: wait until there is room for it.

        Returns:
            Tasks that the device has ended since the last time.

        Raises:
            DeviceFailed: something on the stream failed.
        """
        ended = self.collect()
        while (oldest := self._too_many()) is not None:
            self._wait(oldest)
            ended += self.collect()
        with self._lock:
            if not self._marks:  # idle: time counts from here
                self._record(self._last)
                self._last_ns = perf_counter_ns()
        return ended

    def mark(self, task: Task | None = None) -> None:
        """What was put on the stream so far is one more piece of work, that of `task` or of nobody.

        Raises:
            DeviceFailed: the GPU stopped working.
        """
        with self._lock:
            event = self._spare.pop() if self._spare else self.gpu.event()
            self._record(event)
            self._marks.append(_Mark(self.number + 1, event, task))
            self._num_tasks += task is not None
            self.number += 1

    def move(self, target: int, origin: int, nbytes: int) -> None:
        """Move bytes within the device, even where they overlap: in pieces, none overwritten before it is read.

        Raises:
            DeviceFailed: the GPU stopped working.
        """
        distance = abs(target - origin)
        step = max(distance, BOUNCE_NBYTES)
        pieces = range(0, nbytes, step)
        try:
            for start in pieces if target <= origin else reversed(pieces):
                size = min(step, nbytes - start)
                place = origin + start
                if size > distance:
                    self.stream.copy(self._bounce, place, size)
                    place = self._bounce
                self.stream.copy(target + start, place, size)
        except RuntimeError as error:
            raise device_failed(self.gpu, error) from error
        self.mark()

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """What puts on the flow, with one call, all that `run` would start; None where that cannot be recorded. Called by the worker's thread.

        Raises:
            DeviceFailed: the GPU stopped working.
        """
        if self._aside is None:
            self._aside = self.gpu.stream()
        self._enter(self._aside)
        try:
            graph = self.gpu.capture(self._aside, run)
        except DeviceFailed:
            raise
        except RuntimeError:
            return None
        finally:
            self._enter(self.stream)
        return partial(self.stream.start, graph)

    def collect(self) -> list[Ended]:
        """Tasks that the device has ended since the last time.

        Raises:
            DeviceFailed: something on the stream failed.
        """
        ended: list[Ended] = []
        with self._lock:
            while self._marks and self._is_done(self._marks[0].event):
                _, event, task = self._marks.popleft()
                start = self._last_ns
                self._last_ns += round(event.seconds_since(self._last) * 1e9)
                self._spare.append(self._last)
                self._last = event
                if task is not None:
                    self._num_tasks -= 1
                    ended.append(Ended(task, start, self._last_ns))
        return ended

    def hold(self, stream: Stream, number: int) -> None:
        """What is put on another stream from now on begins after the mark of that number."""
        with self._lock:
            place = number - self._marks[0].number if self._marks else -1
            if place >= 0:  # else the device is past it
                stream.hold(self._marks[place].event)

    def wait(self) -> None:
        """Until everything that was put on the stream has ended.

        Raises:
            DeviceFailed: something failed.
        """
        with self._lock:
            newest = self._marks[-1].event if self._marks else None
        if newest is not None:
            self._wait(newest)

    def _enter(self, stream: Stream) -> None:
        self.gpu.enter(stream)
        self.entered = stream

    def _too_many(self) -> Event | None:
        """The oldest event, where as many tasks are on the flow as may be; others than the worker collect them too."""
        with self._lock:
            return self._marks[0].event if self._num_tasks >= IN_FLIGHT else None

    def _record(self, event: Event) -> None:
        try:
            self.stream.record(event)
        except Exception as error:
            raise device_failed(self.gpu, error) from error

    def _wait(self, event: Event) -> None:
        try:
            event.wait()
        except Exception as error:
            raise device_failed(self.gpu, error) from error

    def _is_done(self, event: Event) -> bool:
        try:
            return event.is_done()
        except Exception as error:
            raise device_failed(self.gpu, error) from error


def device_failed(gpu: Gpu, error: BaseException) -> DeviceFailed:
    """What a program is told when a GPU has stopped working."""
    return DeviceFailed(f"{gpu.name} stopped working: {error}; continue from the last checkpoint, on another GPU or after a reset")
