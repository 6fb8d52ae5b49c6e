"""Kinds of workers of a step's tasks in a file of the run: written by a run whose CPU workers and devices share tasks, and repeated by a pinned one.

The file is a JSON object with one entry for each task in planned order: "tasks" has names, "kinds" the kind of worker that ran it last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scheduler.machine import StepPlan, WorkerKind
from scheduler.planning import PlannedOrder, on_kinds

from ..config.machine import PINNED
from ..config.run_config import LanguageRun
from ..errors import UsageError
from ..io.json_file import read_object

ASSIGNMENT: Final = "assignment.json"
"""File of a run."""


def assignment_text(plan: StepPlan, kinds: Sequence[WorkerKind]) -> str:
    """Return the content of the file for a step and the kind of worker of each of its tasks."""
    return json.dumps({"tasks": [task.name for task in plan.tasks], "kinds": list(kinds)}) + "\n"


def pinned_kinds(run: LanguageRun, order: PlannedOrder) -> tuple[WorkerKind, ...] | None:
    """Return the kind of worker of each task of a planned step from the file that the run is pinned to; None if it is not pinned.

    Raises:
        DataError: the file cannot be read, or is no JSON object.
        UsageError: it is about other tasks, or about kinds of workers that cannot run them.
    """
    file = run.settings.resources.assignment.removeprefix(PINNED)
    if run.machine.sharing != "pinned":
        return None
    content = read_object(Path(file), "assignment", f"give the {ASSIGNMENT} of a run with --sched auto@mixed")
    names, given, tasks = content.get("tasks"), content.get("kinds"), order.plan.tasks
    if names != [task.name for task in tasks]:
        have = f"{len(names):,}" if isinstance(names, list) else "none"
        raise _refusal(run, order, f"is about other tasks: {have}, and this step has {len(tasks):,} with their own names in their own order")
    kinds: list[WorkerKind] = given if isinstance(given, list) else []
    try:
        on_kinds(order.plan, kinds, ("cpu", "cuda" if run.machine.has_gpus else "sim"))
    except ValueError as error:
        raise _refusal(run, order, f"is not for this step: {error}") from error
    return tuple(kinds)


def _refusal(run: LanguageRun, order: PlannedOrder, clause: str) -> UsageError:
    """Return the error about a file."""
    resources = run.settings.resources
    remedy = f"repeat the flags of the run that wrote it; this step has --order {order.name} and --recompute {order.recompute}"
    return UsageError(clause, remedy, flag="--sched", value=f"{resources.sched}@{resources.assignment}")
