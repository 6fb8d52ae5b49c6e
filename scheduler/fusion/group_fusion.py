"""Groups of small tasks on CPU workers become one task each (`task_groups`), where a step is recorded so and fits host memory easily.

The machine spends as long on a task as a core that generates text computes on a small one.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.records import ANY, HandleRecord, R
from ..core.step_plan import StepPlan
from ..planning.ordered_step import last_tier_bytes
from ..planning.planned_order import PlannedOrder
from .fused_tasks import Make, join
from .task_groups import TaskGroup, grouped


def fuse_groups_if_they_fit(found: PlannedOrder, num_workers: int, memory: int, make: Make) -> PlannedOrder:
    """A step for CPU workers alone with its groups fused, if it fits host memory easily before and after; else the order as it was.

    Args:
        memory: bytes of host memory.
        make: as in `join`.
    """
    plan = found.plan
    if found.forecasts or plan.window != ANY or plan.partitions:
        return found
    owned, groups = dict(plan.owned), grouped(plan, num_workers)
    own = [_made_again(plan, group) for group in groups]
    users: dict[HandleRecord, set[int]] = {}
    for number, (group, made) in enumerate(zip(groups, own, strict=True)):
        for handle in {handle for at in group.tasks for handle, _ in plan.tasks[at].accesses} - made:
            users.setdefault(handle, set()).add(number)
    tasks = []
    for group, made in zip(groups, own, strict=True):
        if len(group.tasks) == 1:
            tasks.append(plan.tasks[group.tasks[0]])
        else:
            inner = {
                handle for at in group.tasks for handle, _ in plan.tasks[at].accesses if plan.owned.get(handle) is False and len(users[handle]) == 1
            }
            tasks.append(join(plan, [[at] for at in group.tasks], inner | made, make, owned, clones=group.again))
    fused = StepPlan(tasks, owned, window=plan.window, idle=plan.idle)
    fits = max(fused.needed_bytes(), last_tier_bytes(fused, computes=True)) <= memory
    return replace(found, plan=fused) if fits else found


def _made_again(plan: StepPlan, group: TaskGroup) -> set[HandleRecord]:
    """What a group makes for itself although another group has made it."""
    return {handle for at in group.again for handle, mode in plan.tasks[at].accesses if mode != R}
