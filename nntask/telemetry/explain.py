"""Tables for ``--explain TASK``: the cost of each worker for the first placements of a task, and the cost of keeping, moving or recomputing each
value of the step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from scheduler import Runtime
from scheduler.machine import Candidate, Placement, WorkerId

from ..errors import UsageError
from .columns import aligned

PLACEMENTS: Final = 3
"""Placements shown."""

_HEAD: Final = ("worker", "execution", "transfer", "queueing", "eviction", "total", "missing bytes", "")


class Explainer:
    """Prints the decisions about the step's values, and the placements of chosen tasks as they happen.

    Args:
        wanted: names of tasks from `matching`; nothing is printed if it is empty.
        planned: lines about the decisions on values.
        say: function that prints a text.
    """

    def __init__(self, runtime: Runtime, wanted: Collection[str], planned: Sequence[str], say: Callable[[str], None]) -> None:
        self._runtime, self._wanted, self._planned, self._say = runtime, wanted, planned, say
        self._placements: Sequence[Placement] | None = None
        self._num_told = 0

    def tell(self) -> None:
        """Print the placements since the last call; the first call begins the record and prints the decisions about values."""
        if not self._wanted:
            return
        if self._placements is None:
            self._placements = self._runtime.explain(self._wanted, PLACEMENTS)
            self._say("\n".join(self._planned))
        for placement in self._placements[self._num_told :]:
            self._num_told += 1
            self._say(table(placement, self._num_told, self._runtime.policy_name, self._runtime.worker_names))


def matching(word: str, names: Collection[str]) -> frozenset[str]:
    """Return the task named `word`, else all tasks whose names contain it; none for an empty word.

    Raises:
        UsageError: no name matches; the message lists the names.
    """
    if not word:
        return frozenset()
    matches = frozenset({word} if word in names else {name for name in names if word in name})
    if not matches:
        near = difflib.get_close_matches(word, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"must name a task of the step, got {word!r}{hint}", f"the tasks are: {', '.join(sorted(names))}", flag="--explain")
    return matches


def table(placement: Placement, number: int, policy: str, workers: Mapping[WorkerId, str]) -> str:
    """Return a placement as lines: seconds of each candidate, cheapest first, the worker that took the task, and whether the plan chose it."""
    how = "goes by these seconds" if placement.weighs_costs else "weighs no costs; these are for comparison"
    if placement.planned_node is not None:
        planned = ", ".join(workers[each.worker] for each in placement.candidates if each.node == placement.planned_node)
        how = f"keeps to the plan, and its part of the step belongs on {planned}; these seconds are for comparison"
    rows = [_HEAD, *(_row(each, workers, placement.chosen) for each in placement.candidates)]
    return "\n".join([f"placement {number} of {placement.name} (task {placement.order}); policy {policy} {how}", *aligned(rows)])


def _row(each: Candidate, workers: Mapping[WorkerId, str], chosen: int) -> tuple[str, ...]:
    seconds = (each.execution, each.transfer, each.queueing, each.eviction, each.total)
    return (workers[each.worker], *(f"{value:.6f}" for value in seconds), f"{each.missing_bytes:,}", "<- chosen" if each.worker == chosen else "")
