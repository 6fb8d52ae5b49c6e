"""The plan of a recorded step on the machine of a runtime: its order and recomputation, the kinds of workers, and the tasks that are fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..core.memory.extents import rounded
from ..core.records import ANY, DataClass, HandleRecord, HandleSpec, NodeId, WorkerKind
from ..core.step_plan import StepPlan
from ..execution.executor import Executor
from ..fusion.fused_tasks import ScratchView
from ..fusion.group_fusion import fuse_groups_if_they_fit
from ..fusion.task_fusion import fuse_if_it_fits
from ..planning.choice import choose_plan
from ..planning.evaluation import PlannedOrder
from ..planning.machine_pace import planning_machine
from ..planning.urgency import by_urgency, on_kinds
from .recording import RecordingError

NewRecord = Callable[[HandleSpec], HandleRecord]
"""Function that creates a record from its size in bytes, view, name, kind and data class."""


def plan_step(executor: Executor, plan: StepPlan, order: str, recompute: str) -> PlannedOrder:
    """Return the plan of a step; `order` and `recompute` are arguments of `Runtime.record`.

    Raises:
        RecordingError: the step has no order of that name, or no results to recompute by such an operation.
    """
    try:
        return choose_plan(plan, order, recompute, planning_machine(executor.machine, executor.models))
    except ValueError as error:
        raise RecordingError(str(error)) from error


def assign_step(executor: Executor, planned: PlannedOrder, kinds: Sequence[WorkerKind] | None, *, is_mixed: bool) -> PlannedOrder:
    """Return a planned step with priorities and kinds of workers for a machine whose CPU workers and devices share tasks; else the same step.

    Args:
        kinds: argument of `Runtime.record`.
        is_mixed: whether CPU workers and devices both run what both can run.

    Raises:
        RecordingError: the step has other tasks than `kinds`.
    """
    if not is_mixed and kinds is None:
        return planned
    machine = executor.machine
    pace = planning_machine(machine, executor.models).pace
    if planned.plan.window == ANY and pace is not None:
        planned = replace(planned, plan=by_urgency(planned.plan, pace(planned.plan).seconds))
    if kinds is None:
        return planned
    try:
        return replace(planned, plan=on_kinds(planned.plan, kinds, {worker.kind for worker in machine.workers}))
    except ValueError as error:
        raise RecordingError(str(error)) from error


def fuse_step(executor: Executor, planned: PlannedOrder, record: NewRecord, *, graphs: bool, groups: bool) -> PlannedOrder:
    """Return a planned step with fused tasks, unless single tasks are observed.

    Args:
        record: function that creates records of the runtime.
        graphs: whether neighbouring GPU tasks are fused.
        groups: argument of `Runtime.record`.
    """
    if executor.trace is not None or executor.watch.callback is not None or not (graphs or groups):  # the first two observe single tasks
        return planned
    machine, nodes = planning_machine(executor.machine, executor.models), executor.machine.memory

    def create(nbytes: int, view: ScratchView, data_class: DataClass) -> HandleRecord:
        """Create a record for the scratch memory of a fused task, or for data that several of them share."""
        return record(HandleSpec(nbytes, rounded(nbytes), view, f"inner {data_class}", "temporary", data_class))

    if graphs:
        devices = [nodes.budget(NodeId(node)) for node, name in enumerate(nodes.names) if name.startswith("cuda")]
        return fuse_if_it_fits(planned, devices, machine.last, create, computes_on_last=machine.computes_on_last)
    kinds = [worker.kind for worker in executor.machine.workers]
    if all(kind == "cpu" for kind in kinds):
        return fuse_groups_if_they_fit(planned, len(kinds), machine.memory, create)
    return planned
