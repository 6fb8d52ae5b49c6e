"""A Dask graph ready to run: the requested keys and their dependencies as numbered tasks, in the order of `dask.order`.

An alias is no task: its readers read its target. Callbacks see aliases as tasks of their own, as in Dask's schedulers, so with callbacks aliases
stay.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dask._task_spec import Alias, DataNode, GraphNode, convert_legacy_graph
from dask.core import flatten
from dask.order import order

Key = Any
"""A key of a Dask graph: a string, a number, or a tuple of them."""


@dataclass(slots=True)
class GraphPlan:
    """Numbered tasks of a graph; ready tasks run in the order of their numbers.

    Attributes:
        nodes: node of each task.
        keys: key of each task.
        names: aliases of some tasks, by number.
        reads: for each task, the numbers of the tasks whose values it reads.
        readers: for each task, the numbers of the tasks that read its value.
        data: values that are known from the start, by key.
        wanted: requested keys.
    """

    nodes: list[GraphNode]
    keys: list[Key]
    names: dict[int, list[Key]]
    reads: list[list[int]]
    readers: list[list[int]]
    data: dict[Key, Any]
    wanted: set[Key]

    def is_wanted(self, number: int) -> bool:
        """Return whether a task's value was requested, under its own key or an alias."""
        names = self.names.get(number)
        return self.keys[number] in self.wanted or (names is not None and not self.wanted.isdisjoint(names))


def prepare(graph: Any, keys: Any) -> tuple[dict[Key, GraphNode], set[Key]]:
    """Return the graph as new-style nodes, and the requested keys."""
    if not isinstance(graph, Mapping):
        graph = graph.__dask_graph__()
    wanted = set(flatten(keys)) if isinstance(keys, list) else {keys}
    return convert_legacy_graph(graph), wanted


def make_plan(graph: Mapping[Key, GraphNode], wanted: set[Key], cache: Mapping[Key, Any], *, keep_aliases: bool) -> GraphPlan:
    """Number the tasks of a graph in the order of their execution.

    Args:
        graph: nodes by key.
        wanted: requested keys.
        cache: known values by key, of keys in the graph or not.
        keep_aliases: whether an alias is a task.

    Raises:
        ValueError: a task reads a key that is in neither the graph nor the cache.
        RuntimeError: the graph has a cycle.
    """
    targets: dict[Key, Key] = {}
    data: dict[Key, Any] = {}
    tasks = _needed(graph, wanted, cache, data, targets if not keep_aliases else None)
    aliases = {key: _resolve(key, targets) for key in targets}
    reads_of = {key: {aliases.get(each, each) for each in node.dependencies} - data.keys() for key, node in tasks.items()}
    positions = order(tasks if not (targets or data) else {key: _OrderNode(key, frozenset(reads)) for key, reads in reads_of.items()})
    ordered = sorted(tasks, key=positions.__getitem__)
    number_of = {key: number for number, key in enumerate(ordered)}
    reads = [[number_of[each] for each in reads_of[key]] for key in ordered]
    readers: list[list[int]] = [[] for _ in ordered]
    for number, each in enumerate(reads):
        for source in each:
            readers[source].append(number)
    names: dict[int, list[Key]] = {}
    for key, target in aliases.items():
        if target in data:
            data[key] = data[target]
        elif target in number_of:
            names.setdefault(number_of[target], []).append(key)
    return GraphPlan([tasks[key] for key in ordered], ordered, names, reads, readers, data, wanted)


class _OrderNode(GraphNode):  # type: ignore[misc]  # mypy does not look into Dask
    """The dependencies of a task, for `dask.order` alone."""

    def __init__(self, key: Key, dependencies: frozenset[Key]) -> None:
        self.key = key
        self._dependencies = dependencies


def _needed(
    graph: Mapping[Key, GraphNode], wanted: set[Key], cache: Mapping[Key, Any], data: dict[Key, Any], targets: dict[Key, Key] | None
) -> dict[Key, GraphNode]:
    """Return the tasks that the requested keys depend on; known values are added to `data`, aliases to `targets`."""
    tasks: dict[Key, GraphNode] = {}
    stack = [(key, None) for key in wanted]
    while stack:
        key, reader = stack.pop()
        if key in tasks or key in data or (targets is not None and key in targets):
            continue
        if key in cache:
            data[key] = cache[key]
            continue
        node = graph.get(key)
        if node is None:
            if reader is not None:
                raise ValueError(f"Missing dependency {key} for dependents { {reader} }")
        elif type(node) is DataNode:
            data[key] = node.value
        else:
            if type(node) is Alias and targets is not None:
                targets[key] = node.target
            else:
                tasks[key] = node
            stack.extend((each, key) for each in node.dependencies)
    return tasks


def _resolve(key: Key, targets: Mapping[Key, Key]) -> Key:
    """Return the target at the end of a chain of aliases.

    Raises:
        RuntimeError: the chain is a circle.
    """
    seen = [key]
    while (key := targets.get(key, key)) in targets:
        if key in seen:
            raise RuntimeError(f"Cycle detected between the following keys:\n  -> {key}")
        seen.append(key)
    return key


_pauses_lock = threading.Lock()
_num_pauses = 0


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which otherwise visits millions of new live objects again and again: for a bag of 200,000 tasks Dask makes and
    optimizes its graph in 6 s of processor time instead of 16."""
    global _num_pauses
    with _pauses_lock:
        _num_pauses += gc.isenabled() or _num_pauses > 0
        paused = _num_pauses > 0
        gc.disable()
    try:
        yield
    finally:
        with _pauses_lock:
            if paused:
                _num_pauses -= 1
                if not _num_pauses:
                    gc.enable()


def nested(keys: Any, values: Mapping[Key, Any]) -> Any:
    """Return the values in the shape of the requested keys; lists become tuples.

    Raises:
        KeyError: a key is not in the graph.
    """
    return tuple(nested(each, values) for each in keys) if isinstance(keys, list) else values[keys]


def prefix_of(key: Key) -> Any:
    """Return the common part of keys of one kind: the name of a tuple, else the key itself (`dask.utils.key_split` strips its token)."""
    return key[0] if type(key) is tuple and key else key
