"""Machines for `FakeDriver`: their creation, garbage collections inside them, and the states in which a task may be seen."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Final

from ..core.events import Action, Event
from ..core.machine import Machine
from ..core.memory.extents import PAGE
from ..core.memory.memory_node import MemoryNode
from ..core.policies import POLICIES
from ..core.task_states import TASK_TRANSITIONS


def fresh_machine(pages: Sequence[int], policy: str, *, storage: bool, eviction: str, prefetch: bool = True) -> Machine:
    """Return a machine whose nodes have the given numbers of pages."""
    last = len(pages) - 1
    nodes = [MemoryNode(f"node {at}", number * PAGE, is_storage=storage and at == last) for at, number in enumerate(pages)]
    return Machine(nodes, POLICIES[policy](), eviction=eviction, prefetch=prefetch)


def collect_inside(machine: Machine) -> None:
    """Make every handler of a machine begin and end with a garbage collection."""
    handlers = machine.handlers

    def wrapped(handler: Callable[..., None]) -> Callable[..., None]:
        def run(event: Event, actions: list[Action]) -> None:
            gc.collect(0)
            handler(event, actions)
            gc.collect(0)

        return run

    for kind in list(handlers):
        handlers[kind] = wrapped(handlers[kind])


def _closure() -> dict[str, set[str]]:
    reach: dict[str, set[str]] = {}
    for (before, event), after in TASK_TRANSITIONS.items():
        if event != "replayed":  # of recorded tasks only
            reach.setdefault(before, set()).add(after)
    grown = True
    while grown:
        grown = False
        for states in reach.values():
            more = set().union(*(reach.get(state, set()) for state in states)) - states
            states |= more
            grown = grown or bool(more)
    return reach


REACHABLE: Final = _closure()
"""States in which a task may be seen after each state, if several transitions happen within one event."""
