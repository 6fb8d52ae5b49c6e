"""Least budget of each memory of a machine for a step, and the budgets that are too small.

`memory_fit` measures the needs; `fit_advice`, and for texts `inference.memory_check`, give advice.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler import Shortage
from scheduler.machine import RecordedTask, access_sizes

from ..hardware.machine_model import MachineModel


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory needs of a step, in bytes.

    Attributes:
        tile: size of the largest piece of data.
        total: needs of the last tier if tasks run there.
        passive: needs of the last tier if no tasks run there.
        persistent: size of all data that outlives the step and is not kept in files.
        largest: task with the largest working set; tasks that CPU workers run for devices are left out.
        least: smallest working set of a task with flops; a device with less memory could only copy.
        reading: additional host memory for file readers.
        aside: largest working set of a task that CPU workers run for devices.
    """

    tile: int
    total: int
    passive: int
    persistent: int
    largest: RecordedTask
    least: int = 0
    reading: int = 0
    aside: int = 0

    @property
    def task(self) -> int:
        """Working set of the largest task."""
        return working_set(self.largest)

    def last(self, target: MachineModel) -> int:
        """Return the least budget of the last tier of a machine."""
        return self.total if target.last in target.compute_nodes else self.passive

    def minimum(self, target: MachineModel) -> dict[str, int]:
        """Return the least budget of each node of a machine, as flags give it. File readers and copies to GPUs count for host memory.

        If workers of host memory can run the task with the largest working set, devices only need room for the smallest task with flops.
        """
        budgets = {}
        of_device = self.least if self._fits_task_at(target, 0) else self.task
        for at, (name, _) in enumerate(target.nodes):
            passing = max(self.tile, 0 if at else self.aside) if at not in target.compute_nodes else of_device if at else self.task
            budgets[name] = max(passing, self.last(target)) if at == target.last else passing
        budgets[target.nodes[0][0]] += self.reading + target.staging
        return budgets

    def short(self, target: MachineModel) -> list[tuple[int, int]]:
        """Return all nodes of a machine whose budgets must be raised, each with its least sufficient budget.

        A task runs on any node that it fits, so the largest memory with workers must hold the largest task. A device that holds no task with flops is
        treated as a mistake.
        """
        minimum, budgets = self.minimum(target), target.budgets
        devices = dict.fromkeys(self.idle(target), self.least)
        if not self.fits_task(target):
            largest = max(target.compute_nodes, key=lambda at: target.nodes[at][1])
            devices[largest] = minimum[target.nodes[largest][0]]
        others = {
            at: minimum[name]
            for at, (name, _) in enumerate(target.nodes)
            if budgets[name] < minimum[name] and (at == target.last or at not in target.compute_nodes)
        }
        return sorted({**devices, **others}.items())

    def idle(self, target: MachineModel) -> list[int]:
        """Return the devices of a machine whose memory holds no task with flops."""
        return [at for at in target.compute_nodes if at and target.nodes[at][1] < self.least]

    def fit(self, target: MachineModel) -> bool:
        """Return whether a machine satisfies the needs."""
        return not self.short(target)

    def fits_last(self, target: MachineModel) -> bool:
        """Return whether the last tier is large enough. Only its needs depend on the order of a step and on its recomputation."""
        return all(at != target.last for at, _ in self.short(target))

    def fits_task(self, target: MachineModel) -> bool:
        """Return whether some memory with workers holds the task with the largest working set."""
        return any(self._fits_task_at(target, at) for at in target.compute_nodes)

    def _fits_task_at(self, target: MachineModel, at: int) -> bool:
        """Return whether tasks run on a node that holds the largest working set."""
        return at in target.compute_nodes and target.nodes[at][1] - (0 if at else self.reading) >= self.task


def working_set(task: RecordedTask) -> int:
    """Return the bytes that a task uses while it runs."""
    return sum(handle.spec.size for handle, _ in task.accesses)


def shortage(target: MachineModel, needs: Needs) -> Shortage:
    """Return the budget that is too small; if there are several, the last tier's."""
    if not needs.fits_task(target):
        node = max(target.compute_nodes, key=lambda at: target.nodes[at][1])
        largest = needs.largest
        sizes = access_sizes(largest.accesses)
        name, nbytes = target.nodes[node]
        return Shortage("task", name, needs.task, nbytes, task=largest.name, sizes=sizes, reading=needs.reading)
    short = needs.short(target)
    if [node for node, _ in short] == needs.idle(target):
        node, nbytes = short[0]
        name = target.nodes[node][0]
        return Shortage("idle", name, nbytes, target.budgets[name])
    node, nbytes = max(short, key=lambda each: each[0] == target.last)
    name = target.nodes[node][0]
    return Shortage("step", name, nbytes, target.budgets[name])
