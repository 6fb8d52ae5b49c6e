"""Copies from and to files: a few threads that read and write the disk tier, and read the files that data begins in, several requests in flight.

Reads go before writes: a task waits for a read, and hardly ever for a write. What a source raises is an answer like any other: its data is lost.
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
from ..storage import DiskTier, HostArena
from ..storage.device import STAGE_NBYTES, Arena, DeviceArena, marks_of
from .gpu import Flow

THREADS: Final = 4
"""Requests in flight at most."""


def readers_nbytes(size: int, source: Source, *, has_gpus: bool) -> int:
    """Host memory that the threads need to read a source for a handle of that size: what it works in and, on the way to a GPU, the data."""
    return THREADS * (source.scratch_nbytes + (size if has_gpus else 0))


def staging_nbytes(num_gpus: int, *, has_tier: bool) -> int:
    """Host memory that the threads need between the disk tier and GPUs; it is no longer there for tiles."""
    return THREADS * STAGE_NBYTES if num_gpus and has_tier else 0


Marks = Sequence[tuple[Flow, int]]
"""Of the GPU at one end of a request, if it is one: how far its kernels must be."""
_Request = tuple[CopyTile, Marks]


class Source(Protocol):
    """Where a handle's data lies in a file."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of working memory that `read` needs."""

    def read(self, out: Any, scratch: memoryview, /) -> None:
        """Fill the handle's view; called in any thread, again whenever the data is wanted, and must give the same data each time.

        Args:
            scratch: `scratch_nbytes` of bytes.

        Raises:
            Exception: anything; whoever reads the handle is told.
        """


class DiskEngine:
    """Carries out copies from and to files.

    Args:
        arenas: memory of every other node.
        tier: the disk tier, if there is one.
        node: its node.
        done: called after each copy with the action, its start and end.
        lost: called with a copy that failed and why.
        fail: called with what went wrong in the engine itself.
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
        """Ask for a copy; called under the engine's lock."""
        is_write = action.source.node != FILE and action.target.node == self.node
        request = action, self._marks(action.source.node if is_write else action.target.node)
        with self._wake:
            (self._writes if is_write else self._reads).append(request)
            self._wake.notify()

    def _marks(self, node: NodeId) -> Marks:
        """What a copy from or to a node has to wait for there."""
        return marks_of(self.arenas[node])

    def stop(self) -> None:
        """End the threads after the requests they are in; requests that nobody began are dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def join(self) -> None:
        """Wait for the threads, then close the file."""
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
        room = _Room()
        while (request := self._next()) is not None:
            action, marks = request
            try:
                start = perf_counter_ns()
                if action.source.node == FILE:
                    error = self._read_file(action.source, action.target, marks, room)
                else:
                    error = self._carry_out(action, marks, room)
                if error is None:
                    self._done(action, start, perf_counter_ns())
                else:
                    self._lost(action, error)
            except BaseException as bug:  # nobody may be left waiting
                self._fail(bug)
            del action, request

    def _read_file(self, file: Replica, target: Replica, marks: Marks, room: _Room) -> BaseException | None:
        """Fill a replica from its file; what went wrong."""
        source: Source = file.view  # type: ignore[assignment]  # opaque to the core
        view: Any = file.handle.view
        arena, nbytes = self.arenas[target.node], file.handle.nbytes
        try:
            scratch = room.scratch_of(source.scratch_nbytes)
            if isinstance(arena, HostArena):
                source.read(view(arena.memory, target.offset), scratch)
                return None
            stage = room.stage_of(nbytes)
            source.read(view(stage.memory, 0), scratch)
        except BaseException as error:  # not ours: it may raise anything, like a kernel
            return error
        arena.exchange(stage.address, target.offset, nbytes, marks[0][1], writes=True)
        return None

    def _carry_out(self, action: CopyTile, marks: Marks, room: _Room) -> TierFailed | None:
        assert self.tier is not None  # only its node has such copies
        source, target = action.source, action.target
        reads = source.node == self.node
        here, there = (target, source) if reads else (source, target)
        arena, size = self.arenas[here.node], source.handle.size
        try:
            if isinstance(arena, HostArena):
                (self.tier.read if reads else self.tier.write)(arena, here.offset, there.offset, size)
            else:
                self._stage(arena, here.offset, there.offset, size, marks[0][1], room.stage_of(STAGE_NBYTES), reads=reads)
        except OSError as error:
            what = "read back from" if reads else "written to"
            failure = TierFailed(
                f"{source.handle!r} could not be {what} the disk tier in {self.tier.directory}: {error.strerror or error}; "
                "free space there, choose another directory with --disk, or raise --ram"
            )
            failure.__cause__ = error
            return failure
        return None

    def _stage(self, arena: DeviceArena, offset: int, place: int, size: int, after: int, stage: HostArena, *, reads: bool) -> None:
        """Copy between the tier and a GPU, piece by piece through the memory of this thread."""
        assert self.tier is not None
        for start in range(0, size, STAGE_NBYTES):
            count = min(STAGE_NBYTES, size - start)
            if reads:
                self.tier.read(stage, 0, place + start, count)
            arena.exchange(stage.address, offset + start, count, after, writes=reads)
            if not reads:
                self.tier.write(stage, 0, place + start, count)


class _Room:
    """Working memory of one thread, as large as its largest request so far."""

    def __init__(self) -> None:
        self._scratch = bytearray()
        self._stage: HostArena | None = None
        self._nbytes = 0

    def scratch_of(self, nbytes: int) -> memoryview:
        """For what a source asks for."""
        if nbytes > len(self._scratch):
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def stage_of(self, nbytes: int) -> HostArena:
        """For data on its way from or to a GPU."""
        if self._stage is None or nbytes > self._nbytes:
            self._stage, self._nbytes = HostArena(nbytes), nbytes
        return self._stage
