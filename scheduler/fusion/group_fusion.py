"""Fusion of small tasks for CPU workers: groups of tasks (`task_groups`) become one task each.

The scheduler spends about as long on a task as a core spends in a small kernel of text generation. Steps are fused only if they were recorded with
`groups` and fit host memory before and after the fusion.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.records import ANY, HandleRecord, R
from ..core.step_plan import StepPlan
from ..planning.evaluation import PlannedOrder
from ..planning.ordered_step import last_tier_bytes
from .fused_tasks import Make, PlannedLaunch, join
from .task_groups import TaskGroup, grouped


def fuse_groups_if_they_fit(planned: PlannedOrder, num_workers: int, memory: int, make: Make) -> PlannedOrder:
    """Fuse the groups of a step that only CPU workers run, if it fits host memory without copies before and after.

    Args:
        planned: the step in its planned order.
        num_workers: number of CPU workers.
        memory: bytes of host memory.
        make: creates the record of the scratch memory of a fused task.

    Returns:
        `planned` with the fused step, or `planned` itself.
    """
    plan = planned.plan
    if planned.forecasts or plan.window != ANY or plan.partitions:
        return planned
    fused = _fused(plan, grouped(plan, num_workers), make)
    fits = max(fused.needed_bytes(), last_tier_bytes(fused, computes=True)) <= memory
    return replace(planned, plan=fused) if fits else planned


def _fused(plan: StepPlan, groups: list[TaskGroup], make: Make) -> StepPlan:
    """Return the step with each group of several tasks as one task."""
    owned = dict(plan.owned)
    recomputed = [_recomputed_data(plan, group) for group in groups]
    users: dict[HandleRecord, set[int]] = {}  # numbers of the groups that need the data of a handle from outside or compute it for others
    for number, (group, own) in enumerate(zip(groups, recomputed, strict=True)):
        for handle in {handle for position in group.tasks for handle, _ in plan.tasks[position].accesses} - own:
            users.setdefault(handle, set()).add(number)
    tasks = []
    for group, own in zip(groups, recomputed, strict=True):
        if len(group.tasks) == 1:
            tasks.append(plan.tasks[group.tasks[0]])
            continue
        accessed = (handle for position in group.tasks for handle, _ in plan.tasks[position].accesses)
        inner = {handle for handle in accessed if plan.owned.get(handle) is False and len(users[handle]) == 1}
        tasks.append(join(plan, [PlannedLaunch([position]) for position in group.tasks], inner | own, make, owned, clones=group.clones))
    return StepPlan(tasks, owned, window=plan.window, idle=plan.idle)


def _recomputed_data(plan: StepPlan, group: TaskGroup) -> set[HandleRecord]:
    """Return the handles whose data a group recomputes for itself."""
    return {handle for position in group.clones for handle, mode in plan.tasks[position].accesses if mode != R}
