"""Tasks that workers of several kinds may run: their priorities, and a given kind for each.

If everything fits, the order in which tasks become ready hardly bounds the policy, and priorities decide how well fast and slow workers are used: a
task is the more urgent the longer the path to the end of the step is (upward rank: Topcuoglu, Hariri, Wu 2002). The seconds of a task on a path are
those that all workers sharing it would take, so a task that a GPU hardly speeds up counts more. Priorities of the program come first. The policy
compares the path of a task with the work left, to see whether a slow worker may take it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace

from ..core.records import WorkerKind
from ..core.step_plan import RecordedTask, StepPlan


def by_urgency(plan: StepPlan, seconds: Mapping[RecordedTask, float]) -> StepPlan:
    """Return the same step with priorities by the longest path from each task to the end of the step, and the seconds of both.

    Args:
        seconds: duration of each task if all workers shared it (`forecast.Pace.seconds`).
    """
    path = [0.0] * len(plan.tasks)
    for position in reversed(range(len(plan.tasks))):
        path[position] = seconds[plan.tasks[position]] + max((path[after] for after in plan.successors[position]), default=0.0)
    keys = [(task.priority, length) for task, length in zip(plan.tasks, path, strict=True)]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    ranked = [
        replace(task, priority=ranks[key], shared_seconds=seconds[task], path_seconds=key[1]) for task, key in zip(plan.tasks, keys, strict=True)
    ]
    return _with_tasks(plan, ranked)


def on_kinds(plan: StepPlan, kinds: Sequence[WorkerKind], present: Collection[WorkerKind]) -> StepPlan:
    """Return the same step with each task restricted to one kind of worker, by position in the planned order.

    Args:
        present: kinds of the workers of the machine.

    Raises:
        ValueError: the number of kinds is not that of the tasks, or a task has no kernel or no worker for its kind.
    """
    if len(kinds) != len(plan.tasks):
        raise ValueError(f"kinds must have one entry for each of the {len(plan.tasks)} tasks of the step, got {len(kinds)}")
    for position, (task, kind) in enumerate(zip(plan.tasks, kinds, strict=True)):
        able = getattr(task.codelet, "kinds", task.kinds)  # those of the task are fewer if devices compute alone
        if kind not in able or kind not in (*present, "host"):
            here = ", ".join(each for each in able if each in present)
            raise ValueError(f"task {position} of the step, {task.name}, runs on {here} here, got {repr(kind)[:40]}")
    return _with_tasks(plan, [replace(task, kinds=(kind,)) for task, kind in zip(plan.tasks, kinds, strict=True)])


def _with_tasks(plan: StepPlan, tasks: list[RecordedTask]) -> StepPlan:
    """Return the same step with other records of the same tasks; everything else is shared."""
    changed = copy(plan)
    changed.tasks = tasks
    return changed
