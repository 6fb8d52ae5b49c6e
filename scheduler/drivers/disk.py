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
from ..storage import DiskTier
from ..storage.device import Arena, in_host_memory

THREADS: Final = 4
"""Requests in flight at most."""


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
        self._reads: deque[CopyTile] = deque()
        self._writes: deque[CopyTile] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, name=f"nntask disk {number}", daemon=True) for number in range(THREADS)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def put(self, action: CopyTile) -> None:
        """Ask for a copy."""
        with self._wake:
            (self._writes if action.target.node == self.node else self._reads).append(action)
            self._wake.notify()

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

    def _next(self) -> CopyTile | None:
        with self._wake:
            while not (self._stopping or self._reads or self._writes):
                self._wake.wait()
            if self._stopping:
                return None
            return (self._reads or self._writes).popleft()

    def _run(self) -> None:
        scratch = bytearray()
        while (action := self._next()) is not None:
            try:
                start = perf_counter_ns()
                if action.source.node == FILE:
                    scratch, error = self._read_file(action.source, action.target, scratch)
                else:
                    error = self._carry_out(action)
                if error is None:
                    self._done(action, start, perf_counter_ns())
                else:
                    self._lost(action, error)
            except BaseException as bug:  # nobody may be left waiting
                self._fail(bug)
            del action

    def _read_file(self, file: Replica, target: Replica, scratch: bytearray) -> tuple[bytearray, BaseException | None]:
        """Fill a replica from its file; the working memory, which the next one may use, and what went wrong."""
        source: Source = file.view  # type: ignore[assignment]  # opaque to the core
        view: Any = file.handle.view
        try:
            nbytes = source.scratch_nbytes
            if nbytes > len(scratch):
                scratch = bytearray(nbytes)
            with in_host_memory(self.arenas[target.node], target.offset, file.handle.size, writes=True) as (arena, offset):
                source.read(view(arena.memory, offset), memoryview(scratch)[:nbytes])
        except BaseException as error:  # not ours: it may raise anything, like a kernel
            return scratch, error
        return scratch, None

    def _carry_out(self, action: CopyTile) -> TierFailed | None:
        assert self.tier is not None  # only its node has such copies
        source, target = action.source, action.target
        size = source.handle.size
        try:
            if source.node == self.node:
                with in_host_memory(self.arenas[target.node], target.offset, size, writes=True) as (arena, offset):
                    self.tier.read(arena, offset, source.offset, size)
            else:
                with in_host_memory(self.arenas[source.node], source.offset, size, writes=False) as (arena, offset):
                    self.tier.write(arena, offset, target.offset, size)
        except OSError as error:
            what = "read back from" if source.node == self.node else "written to"
            failure = TierFailed(
                f"{source.handle!r} could not be {what} the disk tier in {self.tier.directory}: {error.strerror or error}; "
                "free space there, choose another directory with --disk, or raise --ram"
            )
            failure.__cause__ = error
            return failure
        return None
