"""Dask's callbacks (`dask.callbacks`), with the state that Dask's local schedulers pass to them.

Callbacks run one at a time, on the thread that runs the task. `state["cache"]` holds the small results. Large results are only passed to `posttask`,
because a result in the cache could not be evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from dask.callbacks import unpack_callbacks
from dask.local import finish_task, start_state_from_dask

from .plan import Key
from .values import SMALL, weigh


class Observers:
    """The callbacks of one run; false if there are none.

    Args:
        callbacks: Dask's callbacks: tuples of five functions or None.
    """

    def __init__(self, callbacks: Any) -> None:
        self.callbacks = list(callbacks)
        self._started: list[Any] = []
        self._lock = threading.RLock()
        _, _, self._pretask, self._posttask, _ = unpack_callbacks(self.callbacks)
        self._graph: Mapping[Key, Any] = {}
        self._state: dict[str, Any] = {}
        self._positions: dict[Key, int] = {}
        self._wanted: set[Key] = set()

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def start(self, graph: Mapping[Key, Any]) -> None:
        """Call `start` of each callback with the graph, into which it may put values."""
        self._graph = graph
        for callback in self.callbacks:
            if callback[0]:
                callback[0](graph)
            self._started.append(callback)

    def start_state(self, positions: dict[Key, int], wanted: set[Key], cache: dict[Key, Any]) -> None:
        """Call `start_state` of each callback.

        Args:
            positions: position of each key in the order of execution.
            wanted: requested keys.
            cache: known values by key.
        """
        if self.callbacks:
            self._positions, self._wanted = positions, wanted
            self._state = start_state_from_dask(dict(self._graph), keys=wanted, cache=cache, sortkey=self._order)
            for callback in self.callbacks:
                if callback[1]:
                    callback[1](self._graph, self._state)

    def _order(self, key: Key) -> int:
        return self._positions.get(key, -1)

    def begin(self, key: Key) -> None:
        """Call `pretask` of each callback, before a task runs."""
        with self._lock:
            ready = self._state["ready"]
            if ready and ready[-1] == key:
                ready.pop()
            else:
                ready.remove(key)
            self._state["running"].add(key)
            for function in self._pretask:
                function(key, self._graph, self._state)

    def end(self, key: Key, value: Any) -> None:
        """Call `posttask` of each callback, after a task has run."""
        with self._lock:
            self._state["cache"][key] = value if weigh(value) < SMALL else None
            finish_task(self._graph, key, self._state, self._wanted, self._order)
            for function in self._posttask:
                function(key, value, self._graph, self._state, threading.get_ident())

    def finish(self, *, failed: bool) -> None:
        """Call `finish` of each callback whose `start` was called, at the end of the run."""
        for callback in self._started:
            if callback[4]:
                callback[4](self._graph, self._state, failed)
