"""The plan of a recorded step on the machine of a runtime: its order, its recomputation, and the tasks that are fused."""

from __future__ import annotations

from ..core.records import RAM, NodeId
from ..core.step_plan import StepPlan
from ..execution.executor import Executor
from ..fusion.fused_tasks import Make
from ..fusion.group_fusion import fuse_groups_if_they_fit
from ..fusion.task_fusion import fuse_if_it_fits
from ..planning.choice import choose_plan
from ..planning.machine_pace import reach_of
from ..planning.ordered_step import PlanningMachine
from ..planning.planned_order import PlannedOrder
from .recording import RecordingError


def plan_step(executor: Executor, plan: StepPlan, order: str, recompute: str, create: Make, *, graphs: bool, groups: bool) -> PlannedOrder:
    """Return the plan of a step.

    Args:
        order, recompute, groups: the arguments of `Runtime.record`.
        create: function that creates records for scratch memory of fused tasks, and for data that several of them share.
        graphs: whether neighbouring GPU tasks are fused.

    Raises:
        RecordingError: the step has no order of that name, or no results to recompute by such an operation.
    """
    machine = executor.machine
    nodes, below = machine.memory, machine.memory.last
    reach, last = reach_of(machine, executor.models), nodes.budget(below) - (nodes.readers_bytes if below == RAM else 0)
    try:
        num_devices = len(reach.nodes) if machine.keeps_partitions and RAM not in reach.nodes else 1
        planned = choose_plan(plan, order, recompute, PlanningMachine(reach.memory, last, machine.computes_on_last, num_devices, reach.pace))
    except ValueError as error:
        raise RecordingError(str(error)) from error
    if executor.trace is not None or executor.watch.callback is not None:  # both observe single tasks
        return planned
    if graphs:
        devices = [nodes.budget(NodeId(node)) for node, name in enumerate(nodes.names) if name.startswith("cuda")]
        return fuse_if_it_fits(planned, devices, last, create, computes_on_last=machine.computes_on_last)
    kinds = [worker.kind for worker in machine.workers]
    if groups and all(kind == "cpu" for kind in kinds):
        return fuse_groups_if_they_fit(planned, len(kinds), reach.memory, create)
    return planned
