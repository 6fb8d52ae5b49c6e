"""Copies from and to files: a few threads that read and write the disk tier and read attached source files, with several requests in progress.

Reads are served before writes, because tasks wait for reads and rarely for writes. An exception of a source is a regular outcome: the data of its
handle is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Final, Protocol

from ..core.errors import TierFailed
from ..core.events import CopyTile
from ..core.records import FILE, NodeId, Replica
from ..storage.arena import HostArena
from ..storage.device import STAGE_NBYTES, Arena, DeviceArena
from ..storage.tier import DiskTier
from .gpu import Flow

THREADS: Final = 4
"""Number of threads, and so the largest number of requests in progress."""


def readers_nbytes(size: int, source: Source, *, has_gpus: bool) -> int:
    """Return the bytes of host memory that the threads need to read a source: scratch memory and, on the way to a GPU, a staging buffer.

    Args:
        size: bytes of the handle.
        source: source to read.
        has_gpus: whether the data may be read for a GPU.
    """
    return THREADS * (source.scratch_nbytes + (size if has_gpus else 0))


def staging_nbytes(num_gpus: int, *, has_tier: bool) -> int:
    """Return the bytes of host memory for staging buffers between the disk tier and GPUs, which tiles cannot use."""
    return THREADS * STAGE_NBYTES if num_gpus and has_tier else 0


Marks = Sequence[tuple[Flow, int]]
"""For each GPU at an end of a request, its flow and the mark that the flow must have passed."""
_Request = tuple[CopyTile, Marks]


class Source(Protocol):
    """The data of a handle, as stored in a file."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch memory that `read` needs."""

    def read(self, out: Any, scratch: memoryview, /) -> None:
        """Fill the handle's view with the data.

        Any thread may call it, once for each time the data is fetched. It must give the same data each time.

        Args:
            out: the handle's view.
            scratch: `scratch_nbytes` bytes of memory.

        Raises:
            Exception: any error; programs that read the handle receive it.
        """


class DiskEngine:
    """The threads that copy from and to files.

    Args:
        arenas: memory of every other node.
        tier: the disk tier; None without one.
        node: the memory node of the tier.
        done: function called after each copy with the action, its start and its end in nanoseconds.
        lost: function called with a copy that failed and the error.
        fail: function called with an error of the engine itself.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        tier: DiskTier | None,
        node: NodeId,
        done: Callable[[CopyTile, int, int], None],
        lost: Callable[[CopyTile, BaseException], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.arenas = arenas
        self.tier = tier
        self.node = node
        self._done, self._lost, self._fail = done, lost, fail
        self._reads: deque[_Request] = deque()
        self._writes: deque[_Request] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, name=f"nntask disk {number}", daemon=True) for number in range(THREADS)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def put(self, action: CopyTile) -> None:
        """Request a copy; to be called under the executor's lock."""
        is_write = action.source.node != FILE and action.target.node == self.node
        request = action, self._marks(action.source.node if is_write else action.target.node)
        with self._wake:
            (self._writes if is_write else self._reads).append(request)
            self._wake.notify()

    def _marks(self, node: NodeId) -> Marks:
        """Return the flow and newest mark of a GPU node: once passed, other streams may use the memory of all its kernels so far."""
        arena = self.arenas[node]
        return [(arena.flow, arena.flow.number)] if isinstance(arena, DeviceArena) else []

    def stop(self) -> None:
        """End the threads after their current requests; requests that no thread has begun are dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def join(self) -> None:
        """Wait for the threads to end, then close the file."""
        for thread in self._threads:
            thread.join()
        if self.tier is not None:
            self.tier.close()

    def _next(self) -> _Request | None:
        with self._wake:
            while not (self._stopping or self._reads or self._writes):
                self._wake.wait()
            if self._stopping:
                return None
            return (self._reads or self._writes).popleft()

    def _run(self) -> None:
        buffers = _Buffers()
        while (request := self._next()) is not None:
            action, marks = request
            try:
                start = perf_counter_ns()
                if action.source.node == FILE:
                    error = self._read_file(action.source, action.target, marks, buffers)
                else:
                    error = self._carry_out(action, marks, buffers)
                if error is None:
                    self._done(action, start, perf_counter_ns())
                else:
                    self._lost(action, error)
            except BaseException as bug:  # every waiting thread must be woken
                self._fail(bug)
            del action, request

    def _read_file(self, file: Replica, target: Replica, marks: Marks, buffers: _Buffers) -> BaseException | None:
        """Fill a replica from its source file; return the source's error, or None."""
        source: Source = file.view  # type: ignore[assignment]  # opaque to the core
        view: Any = file.handle.spec.view
        arena, nbytes = self.arenas[target.node], file.handle.spec.nbytes
        try:
            scratch = buffers.scratch_of(source.scratch_nbytes)
            if isinstance(arena, HostArena):
                source.read(view(arena.memory, target.offset), scratch)
                return None
            stage = buffers.stage_of(nbytes)
            source.read(view(stage.memory, 0), scratch)
        except BaseException as error:  # the source belongs to the program and may raise anything, like a kernel
            return error
        arena.exchange(stage.address, target.offset, nbytes, marks[0][1], writes=True)
        return None

    def _carry_out(self, action: CopyTile, marks: Marks, buffers: _Buffers) -> TierFailed | None:
        assert self.tier is not None  # only its node takes part in such copies
        source, target = action.source, action.target
        reads = source.node == self.node
        here, there = (target, source) if reads else (source, target)
        arena, size = self.arenas[here.node], source.handle.spec.size
        try:
            if isinstance(arena, HostArena):
                (self.tier.read if reads else self.tier.write)(arena, here.offset, there.offset, size)
            else:
                self._stage(arena, here.offset, there.offset, size, marks[0][1], buffers.stage_of(STAGE_NBYTES), reads=reads)
        except OSError as error:
            failure = TierFailed(repr(source.handle), str(self.tier.directory), error.strerror or str(error), reads=reads)
            failure.__cause__ = error
            return failure
        return None

    def _stage(self, arena: DeviceArena, offset: int, file_offset: int, size: int, after: int, stage: HostArena, *, reads: bool) -> None:
        """Copy between the tier and a GPU, piece by piece through the staging buffer of this thread."""
        assert self.tier is not None
        for start in range(0, size, STAGE_NBYTES):
            count = min(STAGE_NBYTES, size - start)
            if reads:
                self.tier.read(stage, 0, file_offset + start, count)
            arena.exchange(stage.address, offset + start, count, after, writes=reads)
            if not reads:
                self.tier.write(stage, 0, file_offset + start, count)


class _Buffers:
    """Scratch memory and staging buffer of one thread, each with the size of its largest request so far."""

    def __init__(self) -> None:
        self._scratch = bytearray()
        self._stage: HostArena | None = None
        self._nbytes = 0

    def scratch_of(self, nbytes: int) -> memoryview:
        """Return scratch memory of `nbytes` bytes for a source."""
        if nbytes > len(self._scratch):
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def stage_of(self, nbytes: int) -> HostArena:
        """Return a staging buffer of at least `nbytes` bytes for data on its way from or to a GPU."""
        if self._stage is None or nbytes > self._nbytes:
            self._stage, self._nbytes = HostArena(nbytes), nbytes
        return self._stage
