"""Copy engines of simulated devices: one thread per device and direction, optionally with a limited bandwidth."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter_ns

from ..core.events import CopyTile
from ..storage.arena import HostArena


class CopyEngine(threading.Thread):
    """A thread that copies in the order of the requests.

    Args:
        arenas: memory of every node.
        done: function called after each copy with the action, its start and its end in nanoseconds.
        fail: function called with the error of a copy.
        bandwidth: simulated bytes per second of the link; None for the speed of memory.
        name: name of the thread.
    """

    def __init__(
        self,
        arenas: Sequence[HostArena],
        done: Callable[[CopyTile, int, int], None],
        fail: Callable[[BaseException], None],
        bandwidth: float | None,
        name: str,
    ) -> None:
        super().__init__(name=f"nntask {name}", daemon=True)
        self.arenas = arenas
        self.done = done
        self.fail = fail
        self.bandwidth = bandwidth
        self._mailbox: SimpleQueue[CopyTile | None] = SimpleQueue()
        self._pace = threading.Event()

    def put(self, action: CopyTile) -> None:
        """Request a copy."""
        self._mailbox.put(action)

    def run(self) -> None:
        """Copy until `stop`."""
        while (action := self._mailbox.get()) is not None:
            try:
                self._copy(action)
            except BaseException as error:  # every waiting thread must be woken
                self.fail(error)
            del action

    def _copy(self, action: CopyTile) -> None:
        source, target = action.source, action.target
        nbytes = source.handle.spec.nbytes
        start = perf_counter_ns()
        self.arenas[target.node].copy_from(self.arenas[source.node], source.offset, target.offset, nbytes)
        if self.bandwidth is not None:
            remaining = nbytes / self.bandwidth - (perf_counter_ns() - start) / 1e9
            if remaining > 0:
                self._pace.wait(remaining)  # the simulated link is busy for that long
        self.done(action, start, perf_counter_ns())

    def stop(self) -> None:
        """End the thread after the pending copies, which no longer wait for the simulated bandwidth."""
        self._pace.set()
        self._mailbox.put(None)
