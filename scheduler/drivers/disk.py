"""The disk tier's copies: a few threads that read and write one file, several requests in flight.

Reads go before writes: a task waits for a read, and hardly ever for a write.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Final

from ..core.errors import TierFailed
from ..core.events import CopyTile
from ..core.records import NodeId
from ..storage import DiskTier, HostArena

THREADS: Final = 4
"""Requests in flight at most."""


class DiskEngine:
    """Carries out copies from and to the storage node.

    Args:
        arenas: memory of every other node.
        tier: the file.
        node: the storage node.
        done: called after each copy with the action, its start and end.
        lost: called with a copy that failed and why.
        fail: called with what went wrong in the engine itself.
    """

    def __init__(
        self,
        arenas: Sequence[HostArena],
        tier: DiskTier,
        node: NodeId,
        done: Callable[[CopyTile, int, int], None],
        lost: Callable[[CopyTile, TierFailed], None],
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
            (self._reads if action.source.node == self.node else self._writes).append(action)
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
        self.tier.close()

    def _next(self) -> CopyTile | None:
        with self._wake:
            while not (self._stopping or self._reads or self._writes):
                self._wake.wait()
            if self._stopping:
                return None
            return (self._reads or self._writes).popleft()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                start = perf_counter_ns()
                error = self._carry_out(action)
                if error is None:
                    self._done(action, start, perf_counter_ns())
                else:
                    self._lost(action, error)
            except BaseException as bug:  # nobody may be left waiting
                self._fail(bug)
            del action

    def _carry_out(self, action: CopyTile) -> TierFailed | None:
        source, target = action.source, action.target
        size = source.handle.size
        try:
            if source.node == self.node:
                self.tier.read(self.arenas[target.node], target.offset, source.offset, size)
            else:
                self.tier.write(self.arenas[source.node], source.offset, target.offset, size)
        except OSError as error:
            what = "read back from" if source.node == self.node else "written to"
            failure = TierFailed(
                f"{source.handle!r} could not be {what} the disk tier in {self.tier.directory}: {error.strerror or error}; "
                "free space there, choose another directory with --disk, or raise --ram"
            )
            failure.__cause__ = error
            return failure
        return None
