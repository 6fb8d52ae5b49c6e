"""Dask's callbacks (`dask.callbacks`): what they are shown is kept as Dask's local schedulers keep it.

They are called one at a time, on the thread that runs the task. In `state["cache"]` stand the results that are not large; others are only shown to
`posttask`, because what is kept there could not leave memory.
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
    """Callbacks that want to know of one run; none of them, and it is false.

    Args:
        callbacks: of Dask's: tuples of five functions or None.
    """

    def __init__(self, callbacks: Any) -> None:
        self.callbacks = list(callbacks)
        self._started: list[Any] = []
        self._lock = threading.RLock()
        _, _, self._pretask, self._posttask, _ = unpack_callbacks(self.callbacks)
        self._graph: Mapping[Key, Any] = {}
        self._state: dict[str, Any] = {}
        self._places: dict[Key, int] = {}
        self._wanted: set[Key] = set()

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def start(self, graph: Mapping[Key, Any]) -> None:
        """A graph is about to be looked at; callbacks may put values into it."""
        self._graph = graph
        for callback in self.callbacks:
            if callback[0]:
                callback[0](graph)
            self._started.append(callback)

    def start_state(self, places: dict[Key, int], wanted: set[Key], cache: dict[Key, Any]) -> None:
        """The graph is in order."""
        if self.callbacks:
            self._places, self._wanted = places, wanted
            self._state = start_state_from_dask(dict(self._graph), keys=wanted, cache=cache, sortkey=self._order)
            for callback in self.callbacks:
                if callback[1]:
                    callback[1](self._graph, self._state)

    def _order(self, key: Key) -> int:
        return self._places.get(key, -1)

    def begin(self, key: Key) -> None:
        """A task is about to run."""
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
        """A task has run."""
        with self._lock:
            self._state["cache"][key] = value if weigh(value) < SMALL else None
            finish_task(self._graph, key, self._state, self._wanted, self._order)
            for function in self._posttask:
                function(key, value, self._graph, self._state, threading.get_ident())

    def finish(self, *, failed: bool) -> None:
        """The run is over."""
        for callback in self._started:
            if callback[4]:
                callback[4](self._graph, self._state, failed)
