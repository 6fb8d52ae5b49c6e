"""Recorded steps, compared."""

from __future__ import annotations

from typing import Any

from scheduler.core.step_plan import StepPlan


def shape_of(plan: StepPlan) -> tuple[Any, ...]:
    """What two recordings of one step have in common: everything but the identity of handles."""
    numbers = {handle: number for number, handle in enumerate(plan.uses)}
    tasks = [
        (
            task.name,
            task.kinds,
            dict(task.constants),
            task.priority,
            [(numbers[handle], handle.spec.name, handle.spec.size, handle.spec.kind, handle.spec.data_class, mode) for handle, mode in task.accesses],
        )
        for task in plan.tasks
    ]
    owned = {numbers[handle]: outlives for handle, outlives in plan.owned.items() if handle in numbers}
    return tasks, plan.predecessors, owned, plan.needed_bytes()
