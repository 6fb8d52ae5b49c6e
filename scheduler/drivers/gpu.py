"""The interface of a GPU, and the order of work on one.

A `Gpu` provides memory and streams; CuPy implements it, and `testing.FakeGpu` in tests. Work on a stream is executed in order, concurrently with
other streams. A `Flow` is the stream of kernels of one GPU. A task counts as finished as soon as its kernels are on the flow, since later kernels
follow them there: the host does not wait for a kernel before it submits the next. A copy on another stream that uses the same memory first makes its
stream wait, on the device, until the flow has passed a *mark*: the one that follows the last kernel that used these bytes (`Replica.kernel_mark`). If
that is unknown, it is the newest mark at the moment when the machine decides on the copy, since all earlier kernels precede it. A copy is reported
only when it has ended, so host memory, other devices and files never hold half-written data.
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
"""Device memory outside the budget, a buffer for bytes that move by a shorter distance than this; bytes."""
IN_FLIGHT: Final = 8
"""Largest number of unfinished tasks on a flow: enough that the device never waits for the host, and copies wait for at most these."""


class NoGpu(ValueError):
    """The requested GPUs are not available.

    Args:
        fact: the reason, as a clause; with `requested`, the rest of a clause whose subject is that number.
        remedy: advice, as a clause; "" for none.
        requested: requested number of GPUs, if CUDA shows fewer; None for another reason.

    Attributes:
        fact, remedy, requested: the arguments.
    """

    def __init__(self, fact: str, remedy: str = "", *, requested: int | None = None) -> None:
        self.fact, self.remedy, self.requested = fact, remedy, requested
        clause = fact if requested is None else f"the requested number {fact}"
        super().__init__(f"{clause}; {remedy}" if remedy else clause)


class Event(Protocol):
    """A point on a stream."""

    def is_done(self) -> bool:
        """Return whether the device has passed the event."""

    def wait(self) -> None:
        """Wait until the device has passed the event; the GIL is released meanwhile.

        Raises:
            Exception: work before the event failed.
        """

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds on the device between an earlier event and this one, both of which the device has passed."""


class Stream(Protocol):
    """A queue of work that a device executes in order."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes between two addresses, each of host memory or of any GPU; the ranges do not overlap."""

    def record(self, event: Event) -> None:
        """Make the event mark the current end of the stream, and no earlier point."""

    def hold(self, event: Event) -> None:
        """Make later work on this stream wait for the point that the event marks now."""

    def start(self, graph: object) -> None:
        """Append all work that `Gpu.capture` has recorded, in its order."""


NUM_STARTED: Final = "num_started"
"""Attribute of an error raised by a GPU's own calls: the value of `Gpu.num_started` at that moment. If it equals the value before the task, the task
has not begun. An error without the attribute may come from anything that a kernel does by itself."""


class Gpu(Protocol):
    """One GPU, or a partition of one.

    Attributes:
        num_started: number of pieces of work that kernels have put on streams through it, without work recorded for a graph. Only the thread of its
            worker starts kernels, so only that thread reads and writes it.
    """

    num_started: int

    @property
    def name(self) -> str:
        """Name of the GPU in reports."""

    def reserve(self, nbytes: int) -> int:
        """Allocate memory.

        Returns:
            Address of the memory.

        Raises:
            MemoryError: the GPU has fewer than `nbytes` free bytes.
        """

    def release(self, address: int) -> None:
        """Free the memory at an address that `reserve` has returned."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def event(self) -> Event:
        """Return a new event, which counts as passed until it is recorded."""

    def enter(self, stream: Stream) -> None:
        """Direct kernels of the calling thread to a stream of this GPU."""

    def capture(self, stream: Stream, run: Callable[[], None]) -> object:
        """Record the work that `run` puts on a stream, without executing it. The stream is empty, and the calling thread has entered it.

        Raises:
            RuntimeError: some of the work cannot be recorded.
        """

    def adopt(self) -> None:
        """Let the calling thread use streams and events of this GPU."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory so that copies of it run at full speed; return whether the system allowed it."""

    def unpin(self, address: int) -> None:
        """Unlock the host memory at an address that `pin` has locked."""

    def close(self) -> None:
        """Free all memory of the GPU; nothing can be computed after that."""


class Ended(NamedTuple):
    """A task whose kernels the device has ended.

    Args:
        task: the task.
        start_ns, end_ns: start and end on the clock of `time.perf_counter_ns`: device durations, added to the time when the device became busy.
    """

    task: Task
    start_ns: int
    end_ns: int


class _Mark(NamedTuple):
    number: int
    event: Event
    task: Task | None


class Flow:
    """The stream of kernels of one GPU, and its progress.

    Args:
        gpu: the GPU.

    Attributes:
        number: number of the newest mark; to be read under the executor's lock, under which tasks finish and copies are decided.
        entered: the stream to which the worker's thread submits kernels: that of the flow, or the one on which a graph is recorded.

    Raises:
        MemoryError: the GPU has fewer than `BOUNCE_NBYTES` free bytes.
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
        self._aside: Stream | None = None  # a stream for recording graphs, on which nothing else runs
        self.entered = self.stream

    def close(self) -> None:
        """Free the flow's memory; all work on the stream has ended."""
        self.gpu.release(self._bounce)

    def begin(self) -> list[Ended]:
        """Wait until the flow may take one more task.

        Returns:
            Tasks that the device has ended since the last call of `begin` or `collect`.

        Raises:
            DeviceFailed: work on the stream failed.
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

    def mark(self, task: Task | None = None) -> int:
        """Mark the current end of the stream, as the end of `task` or of work that belongs to no task; return the number of the mark.

        Raises:
            DeviceFailed: the GPU stopped working.
        """
        with self._lock:
            event = self._spare.pop() if self._spare else self.gpu.event()
            self._record(event)
            self._marks.append(_Mark(self.number + 1, event, task))
            self._num_tasks += task is not None
            self.number += 1
            return self.number

    def move(self, target: int, origin: int, nbytes: int) -> None:
        """Move bytes within the device, even if source and target overlap: in pieces, none of which is overwritten before it is read.

        Raises:
            DeviceFailed: the GPU stopped working.
        """
        distance = abs(target - origin)
        step = max(distance, BOUNCE_NBYTES)
        pieces = range(0, nbytes, step)
        try:
            for start in pieces if target <= origin else reversed(pieces):
                size = min(step, nbytes - start)
                source = origin + start
                if size > distance:
                    self.stream.copy(self._bounce, source, size)
                    source = self._bounce
                self.stream.copy(target + start, source, size)
        except RuntimeError as error:
            raise device_failed(self.gpu, error) from error
        self.mark()

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Record all work that `run` submits as a graph; to be called by the worker's thread.

        Returns:
            A function that launches the graph on the flow; None if the work cannot be recorded.

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
        """Return the tasks that the device has ended since the last call.

        Raises:
            DeviceFailed: work on the stream failed.
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
        """Make later work on another stream wait for the mark of that number."""
        with self._lock:
            position = number - self._marks[0].number if self._marks else -1
            if position >= 0:  # else the device is past the mark
                stream.hold(self._marks[position].event)

    def wait(self) -> None:
        """Wait until all work on the stream has ended.

        Raises:
            DeviceFailed: some of it failed.
        """
        with self._lock:
            newest = self._marks[-1].event if self._marks else None
        if newest is not None:
            self._wait(newest)

    def _enter(self, stream: Stream) -> None:
        self.gpu.enter(stream)
        self.entered = stream

    def _too_many(self) -> Event | None:
        """Return the oldest event if the flow is full; threads other than the worker may collect ended tasks meanwhile."""
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
    """Return the error that a program receives when a GPU has stopped working."""
    return DeviceFailed(gpu.name, str(error))
