"""A GPU of host memory whose streams run late and in any order that CUDA allows, which reveals missing waits.

Work on a stream is stored, and executed only when a thread waits for an event or queries one, one step at a time, on streams chosen at random. So a
copy that should have waited for a kernel on another stream reads old bytes. A stream held by an event waits for the record that the event marked at
that moment, as in CUDA. Faults can be planted.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..storage.arena import HostArena

_PLANTED: Final = "planted: the device fell off the bus"


class FakeEvent:
    """A point on a stream, identified by its number of records."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.num_asked = 0
        self.num_done = 0
        self.time = 0.0

    def is_done(self) -> bool:
        """Return whether the last record has been executed; before, the device may execute a step or two."""
        return self._gpu.run_a_little(lambda: self.num_done >= self.num_asked)

    def wait(self) -> None:
        """Let the device execute steps until the last record has been executed."""
        number = self.num_asked
        self._gpu.run_until(lambda: self.num_done >= number)

    def seconds_since(self, earlier: FakeEvent) -> float:
        """Return the number of steps between two points, as microseconds."""
        return (self.time - earlier.time) * 1e-6


class FakeStream:
    """A queue of work that has not been executed."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.steps: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()

    def put(self, step: Callable[[], object], when: Callable[[], bool] = lambda: True) -> None:
        """Add a step that can be executed once `when` returns true.

        Raises:
            RuntimeError: the device has stopped working.
        """
        with self._gpu.lock:
            self._gpu._check()
            self.steps.append((when, step))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Add a copy of bytes; the ranges do not overlap."""
        assert abs(target - source) >= nbytes, f"ranges of a copy overlap: {nbytes} bytes from {source:#x} to {target:#x}"
        self.put(lambda: ctypes.memmove(target, source, nbytes))

    def record(self, event: FakeEvent) -> None:
        """Make the event mark the current end of the stream."""
        event.num_asked += 1
        number = event.num_asked

        def pass_by() -> None:
            event.num_done, event.time = max(event.num_done, number), self._gpu.time

        self.put(pass_by)

    def start(self, graph: Sequence[tuple[Callable[[], bool], Callable[[], object]]]) -> None:
        """Add the recorded steps of a graph."""
        self._gpu.num_graphs += 1
        for when, step in graph:
            self.put(step, when)

    def hold(self, event: FakeEvent) -> None:
        """Make later work on this stream wait for the point that the event marks now."""
        number = event.num_asked
        self.put(lambda: None, lambda: event.num_done >= number)


class FakeGpu:
    """A GPU in host memory.

    Kernels of a graph are executed one by one, as if they had been started when the graph was.

    Args:
        name: name in reports.
        seed: seed of the order in which streams advance.
        memory: bytes of the GPU's memory.
        eager: whether kernels are executed as soon as they are started.
        peer: another GPU of the same node; the streams of both may wait for each other.

    Attributes:
        num_started: number of kernels started so far.
        can_pin: whether host memory can be page-locked.
        can_capture: whether kernels can be recorded.
        is_closed: whether `close` was called.
        num_graphs: number of graphs started so far.
        pinned: page-locked ranges, address -> bytes.
        fails_after: number of steps after which the device stops working; None for never.
    """

    def __init__(self, name: str = "fake", *, seed: int = 0, memory: int = 1 << 40, eager: bool = False, peer: FakeGpu | None = None) -> None:
        self.name = name
        self._node: _Node = peer._node if peer is not None else _Node(seed)
        self.lock = self._node.lock
        self.can_pin = self.can_capture = True
        self.is_closed = False
        self.num_graphs = self.num_started = 0
        self.pinned: dict[int, int] = {}
        self.fails_after: int | None = None
        self.memory = memory
        self._eager = eager
        self._reserved: dict[int, tuple[HostArena, int]] = {}
        self._here = threading.local()

    def reserve(self, nbytes: int) -> int:
        """Allocate memory and return its address.

        Raises:
            MemoryError: the GPU has fewer free bytes.
        """
        left = self.memory - self.reserved_nbytes
        if nbytes > left:
            raise MemoryError(f"{self.name} has {left:,} bytes left, fewer than {nbytes:,}")
        arena = HostArena(nbytes)
        self._reserved[arena.address] = arena, nbytes
        return arena.address

    def release(self, address: int) -> None:
        """Free the memory at an address."""
        del self._reserved[address]

    @property
    def reserved_nbytes(self) -> int:
        """Number of allocated bytes."""
        return sum(size for _, size in self._reserved.values())

    def stream(self) -> FakeStream:
        """Return a new stream."""
        with self.lock:
            self._node.streams.append(FakeStream(self))
            return self._node.streams[-1]

    def event(self) -> FakeEvent:
        """Return a new event."""
        return FakeEvent(self)

    def enter(self, stream: FakeStream) -> None:
        """Direct kernels of the calling thread to a stream."""
        self._here.stream = stream

    def capture(self, stream: FakeStream, run: Callable[[], None]) -> Sequence[tuple[Callable[[], bool], Callable[[], object]]]:
        """Record the work that `run` puts on a stream, without executing it."""
        with self.lock:
            assert not stream.steps, "a graph is recorded on a stream of its own"
            if not self.can_capture:
                raise RuntimeError("planted: something cannot be recorded")
            before = self.num_started
            run()
            graph, self.num_started = list(stream.steps), before
            stream.steps.clear()
        return graph

    def adopt(self) -> None:
        """Do nothing: any thread may use the GPU."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory; return whether that is possible."""
        if self.can_pin:
            assert address not in self.pinned, "host memory was locked twice"
            self.pinned[address] = nbytes
        return self.can_pin

    def unpin(self, address: int) -> None:
        """Unlock host memory."""
        del self.pinned[address]

    def close(self) -> None:
        """Note that `close` was called."""
        self.is_closed = True

    def later(self, step: Callable[[], Any]) -> None:
        """Put a kernel on the stream of the calling thread."""
        self.num_started += 1
        self._here.stream.put(step)
        if self._eager:
            self.run_until(lambda: not self._here.stream.steps)

    def run_a_little(self, holds: Callable[[], bool]) -> bool:
        """Execute up to two steps; return whether `holds` returns true then."""
        with self.lock:
            for _ in range(self._node.chance.randrange(3)):
                self._node.step()
            self._check()
            return holds()

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Execute steps until `holds` returns true."""
        while True:
            with self.lock:
                self._check()
                if holds():
                    return
                if not self._node.step():
                    raise RuntimeError(f"a thread waits for {self.name}, which has no work that can begin")

    @property
    def time(self) -> float:
        """Number of steps executed so far on this node."""
        return self._node.time

    def _check(self) -> None:
        if self.fails_after is not None and self.time >= self.fails_after:
            raise RuntimeError(_PLANTED)


class _Node:
    """The streams of GPUs that can wait for each other."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.chance = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.time = 0.0

    def step(self) -> bool:
        """Execute one step of a stream chosen at random; return whether any stream could advance."""
        ready = [stream for stream in self.streams if stream.steps and stream.steps[0][0]()]
        if not ready:
            return False
        _, step = self.chance.choice(ready).steps.popleft()
        self.time += 1.0
        step()
        return True
