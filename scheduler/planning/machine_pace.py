"""Machines that steps are planned for, and the rates at which they compute and copy during a step, from performance models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ..core.machine import Machine
from ..core.performance_model import Models
from ..core.records import FILE, RAM, NodeId, WorkerKind
from ..core.step_plan import RecordedTask, StepPlan
from ..drivers.disk import THREADS
from .forecast import Pace, Spill

TaskSeconds = Callable[[RecordedTask, WorkerKind], float]
"""Returns the duration of a task on a kind of worker, in seconds."""

SMALL: Final = 64 << 10
"""Data of fewer bytes is ignored in the mean size of copies, because it is hardly ever evicted."""


def pace_of(
    plan: StepPlan,
    workers: Sequence[tuple[WorkerKind, NodeId]],
    below: NodeId,
    models: Models,
    *,
    channels: int,
    task_seconds: TaskSeconds | None = None,
    disk: tuple[NodeId, int] | None = None,
    num_aside: int = 0,
) -> Pace:
    """Return the rates at which a machine computes and copies during a step, according to its performance models.

    Args:
        plan: the step.
        workers: kind and memory node of each worker, without those that stand aside.
        below: node that data is fetched from and evicted to. If all tasks run on that node, files are the tier below it.
        models: measured or estimated durations of kernels and copies.
        channels: number of simultaneous copies from and to `below` on one shared link; 0 if each node has its own link in each direction.
        task_seconds: duration of a task on a kind of worker, in place of the estimate of the models.
        disk: node under `below`, which backs all data, and the capacity of `below` in bytes; None without such a node.
        num_aside: number of CPU workers that stand aside.
    """
    seconds_of = task_seconds or models.spec_seconds
    kinds = [kind for kind, _ in workers]
    aside = {task for task, is_aside in zip(plan.tasks, plan.aside, strict=True) if is_aside and num_aside}
    seconds = {
        task: task.share / sum(1 / max(seconds_of(task, kind), 1e-9) for kind in kinds) if task.kinds[0] != "host" and task not in aside else 0.0
        for task in plan.tasks
    }
    nodes = sorted({node for _, node in workers} - {below})
    if not nodes and reads_files(plan):
        nodes, below, channels = [below], FILE, THREADS
    num_streams, tile = channels or len(nodes), _typical_nbytes(plan)
    read, write = inf, inf
    if nodes:
        read = num_streams * tile / models.transfer_seconds(below, nodes[0], tile)
        write = inf if below == FILE else num_streams * tile / models.transfer_seconds(nodes[0], below, tile)
    spill = None
    if nodes and disk is not None:
        node, capacity = disk
        read_spill, write_spill = (THREADS * tile / models.transfer_seconds(*ends, tile) for ends in ((node, nodes[0]), (nodes[0], node)))
        spill = Spill(capacity, read_spill, write_spill)
    return Pace(seconds, read, write, duplex=not channels, spill=spill, aside={task: seconds_of(task, "cpu") / num_aside for task in aside})


def _typical_nbytes(plan: StepPlan) -> int:
    """Return the mean size of data that a step copies if memory is short; the rate of a link depends on it, because smaller copies are slower."""
    sizes = [handle.spec.size for handle in plan.uses]
    large = [size for size in sizes if size >= SMALL] or sizes
    return max(1, sum(large) // max(1, len(large)))


Judge = Callable[[StepPlan], float]
"""Seconds of a step in its planned order; infinite if it would not fit."""


@dataclass(frozen=True, slots=True)
class PlanningMachine:
    """Machine that a step is planned for.

    Attributes:
        memory: bytes of the memory where tasks run, all devices together.
        last: bytes of the last tier, which must hold all live data.
        computes_on_last: whether tasks run on the last tier.
        num_devices: number of equal devices if tasks run on no other node; else 1.
        pace: function from a plan to the rates of the machine, called if memory is short; None to compare orders by bytes.
        judge: function that returns the seconds of a planned step, infinite if it would not fit, for the few that are forecast to be about as fast as
            the best; None for forecasts alone.
    """

    memory: int
    last: int
    computes_on_last: bool
    num_devices: int = 1
    pace: Callable[[StepPlan], Pace] | None = None
    judge: Judge | None = None


def planning_machine(machine: Machine, models: Models) -> PlanningMachine:
    """Return a real machine in its present state, with the rates of its models."""
    memory = machine.memory
    workers = [(worker.kind, worker.node) for worker in machine.workers if not worker.aside]
    num_aside = len(machine.workers) - len(workers)
    nodes = {node for _, node in workers}
    below = memory.last if RAM in nodes else RAM
    channels = THREADS if below == memory.tier else 0
    nbytes = sum(map(memory.budget, nodes)) - (memory.readers_bytes if RAM in nodes else 0)
    last = memory.budget(memory.last) - (memory.readers_bytes if memory.last == RAM else 0)
    disk = (memory.last, memory.budget(RAM) - memory.readers_bytes) if memory.last not in (RAM, below) else None
    num_devices = len(nodes) if machine.keeps_partitions and RAM not in nodes else 1

    def pace(plan: StepPlan) -> Pace:
        return pace_of(plan, workers, below, models, channels=channels, disk=disk, num_aside=num_aside)

    return PlanningMachine(nbytes, last, machine.computes_on_last, num_devices, pace)


def reads_files(plan: StepPlan) -> bool:
    """Whether the step reads data that stays in files."""
    return any(map(plan.stays_in_file, plan.uses))
