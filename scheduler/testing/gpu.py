"""A GPU of host memory whose streams run late and in any order that CUDA allows, to find what waits for nothing where it should wait for something.

What is put on a stream is kept and carried out only when a thread waits for an event, or asks for one, and then a step at a time on streams chosen
by chance: a copy that should have waited for a kernel on another stream reads what was there before. A stream held by an event waits for the record
that the event stood for at that moment, as CUDA's does. Faults can be planted.
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
    """A point of a stream, known by its number of records."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.num_asked = 0
        self.num_done = 0
        self.time = 0.0

    def is_done(self) -> bool:
        """Whether the last record has been carried out; asking lets the device go on for a step or two."""
        return self._gpu.run_a_little(lambda: self.num_done >= self.num_asked)

    def wait(self) -> None:
        """Let the device go on until it has been."""
        number = self.num_asked
        self._gpu.run_until(lambda: self.num_done >= number)

    def seconds_since(self, earlier: FakeEvent) -> float:
        """Steps between two points, as microseconds."""
        return (self.time - earlier.time) * 1e-6


class FakeStream:
    """Work in order, not yet carried out."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.steps: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()

    def put(self, step: Callable[[], object], when: Callable[[], bool] = lambda: True) -> None:
        """Add a step that can be carried out once `when` holds.

        Raises:
            RuntimeError: the device has stopped working.
        """
        with self._gpu.lock:
            self._gpu._check()
            self.steps.append((when, step))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes, later; the ranges do not overlap."""
        assert abs(target - source) >= nbytes, f"ranges of a copy overlap: {nbytes} bytes from {source:#x} to {target:#x}"
        self.put(lambda: ctypes.memmove(target, source, nbytes))

    def record(self, event: FakeEvent) -> None:
        """Let the event stand for this point."""
        event.num_asked += 1
        number = event.num_asked

        def pass_by() -> None:
            event.num_done, event.time = max(event.num_done, number), self._gpu.time

        self.put(pass_by)

    def start(self, graph: Sequence[tuple[Callable[[], bool], Callable[[], object]]]) -> None:
        """Put recorded steps here."""
        self._gpu.num_graphs += 1
        for when, step in graph:
            self.put(step, when)

    def hold(self, event: FakeEvent) -> None:
        """What follows waits for what the event stands for now."""
        number = event.num_asked
        self.put(lambda: None, lambda: event.num_done >= number)


class FakeGpu:
    """A GPU in host memory.

    Kernels of a graph are carried out one by one, as if they had been started then.

    Args:
        name: in reports.
        seed: of the order in which streams go on.
        memory: bytes that it has.
        eager: whether kernels are carried out as soon as they are started.
        beside: another GPU of the same node, which each may wait for.

    Attributes:
        num_started: kernels so far.
        can_pin: whether host memory can be locked in place; `can_capture`: whether kernels can be recorded.
        is_closed: whether `close` was called; num_graphs: graphs started so far.
        pinned: what is, address -> bytes.
        fails_after: steps after which the device stops working, if that is planted.
    """

    def __init__(self, name: str = "fake", *, seed: int = 0, memory: int = 1 << 40, eager: bool = False, beside: FakeGpu | None = None) -> None:
        self.name = name
        self._node: _Node = beside._node if beside is not None else _Node(seed)
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
        """Take memory.

        Raises:
            MemoryError: it has less left.
        """
        left = self.memory - self.reserved_nbytes
        if nbytes > left:
            raise MemoryError(f"{self.name} has {left:,} bytes left, fewer than {nbytes:,}")
        arena = HostArena(nbytes)
        self._reserved[arena.address] = arena, nbytes
        return arena.address

    def release(self, address: int) -> None:
        """Give it back."""
        del self._reserved[address]

    @property
    def reserved_nbytes(self) -> int:
        """Memory that is taken."""
        return sum(size for _, size in self._reserved.values())

    def stream(self) -> FakeStream:
        """A new stream."""
        with self.lock:
            self._node.streams.append(FakeStream(self))
            return self._node.streams[-1]

    def event(self) -> FakeEvent:
        """A new event."""
        return FakeEvent(self)

    def enter(self, stream: FakeStream) -> None:
        """What the calling thread starts goes to that stream."""
        self._here.stream = stream

    def capture(self, stream: FakeStream, run: Callable[[], None]) -> Sequence[tuple[Callable[[], bool], Callable[[], object]]]:
        """What `run` puts on that stream."""
        with self.lock:
            assert not stream.steps, "a graph is recorded on a stream of its own"
            if not self.can_capture:
                raise RuntimeError("planted: something cannot be recorded")
            before = self.num_started
            run()
            found, self.num_started = list(stream.steps), before
            stream.steps.clear()
        return found

    def adopt(self) -> None:
        """Nothing to do."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory."""
        if self.can_pin:
            assert address not in self.pinned, "host memory was locked twice"
            self.pinned[address] = nbytes
        return self.can_pin

    def unpin(self, address: int) -> None:
        """Let it go."""
        del self.pinned[address]

    def close(self) -> None:
        """Remember that a thread has asked."""
        self.is_closed = True

    def later(self, step: Callable[[], Any]) -> None:
        """Put a kernel on the stream of the calling thread."""
        self.num_started += 1
        self._here.stream.put(step)
        if self._eager:
            self.run_until(lambda: not self._here.stream.steps)

    def run_a_little(self, holds: Callable[[], bool]) -> bool:
        """Carry out no step, or a few; whether something holds then."""
        with self.lock:
            for _ in range(self._node.chance.randrange(3)):
                self._node.step()
            self._check()
            return holds()

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Carry out steps until something holds."""
        while True:
            with self.lock:
                self._check()
                if holds():
                    return
                if not self._node.step():
                    raise RuntimeError(f"{self.name} is waited for and has nothing to do that may begin")

    @property
    def time(self) -> float:
        """Steps carried out so far on this node."""
        return self._node.time

    def _check(self) -> None:
        if self.fails_after is not None and self.time >= self.fails_after:
            raise RuntimeError(_PLANTED)


class _Node:
    """Streams of GPUs that know each other."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.chance = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.time = 0.0

    def step(self) -> bool:
        """Carry out one step of a stream chosen by chance; whether one could go on."""
        ready = [stream for stream in self.streams if stream.steps and stream.steps[0][0]()]
        if not ready:
            return False
        _, step = self.chance.choice(ready).steps.popleft()
        self.time += 1.0
        step()
        return True
