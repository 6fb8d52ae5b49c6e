"""What a step needs at least of each memory of a machine, and which of them are too small. `memory_fit` measures it; what to do is said in
`fit_advice`, and for texts in `inference.memory_check`."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.machine import RecordedTask

from ..hardware.machine_model import MachineModel


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes without which a step cannot run.

    Attributes:
        task: that the hungriest task touches.
        tile: of the largest piece of data.
        total: of the last tier, if tasks run there.
        passive: of the last tier, if none do.
        persistent: of what outlives the step and does not stay in files.
        hungriest: that task.
        least: that the task touches which touches least of those that have flops; a device without as much would stay idle, but for copies.
        reading: bytes of host memory besides, for file readers.
        aside: that the hungriest task touches of those that CPU workers run beside devices.
    """

    task: int
    tile: int
    total: int
    passive: int
    persistent: int
    hungriest: RecordedTask
    least: int = 0
    reading: int = 0
    aside: int = 0

    def last(self, target: MachineModel) -> int:
        """Least budget of the last tier of a machine."""
        return self.total if target.last in target.compute_nodes else self.passive

    def minimum(self, target: MachineModel) -> dict[str, int]:
        """Least budget of each node of a machine, as flags give it: of host memory with what file readers and copies to GPUs take of it.

        Where workers of host memory can run the hungriest task, devices need bytes for the smallest one that has flops.
        """
        found = {}
        of_device = self.least if self._fits_task_at(target, 0) else self.task
        for at, (name, _) in enumerate(target.nodes):
            passing = max(self.tile, 0 if at else self.aside) if at not in target.compute_nodes else of_device if at else self.task
            found[name] = max(passing, self.last(target)) if at == target.last else passing
        found[target.nodes[0][0]] += self.reading + target.staging
        return found

    def short(self, target: MachineModel) -> list[tuple[int, int]]:
        """Nodes of a machine whose budgets must be raised, all of them, each with the least that would do.

        A task runs where it fits, so of the memories where tasks run the largest counts; one into which no task with flops fits is a mistake.
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
        """Devices of a machine whose memory holds no task that has flops."""
        return [at for at in target.compute_nodes if at and target.nodes[at][1] < self.least]

    def fit(self, target: MachineModel) -> bool:
        """Whether a machine has as much."""
        return not self.short(target)

    def fits_last(self, target: MachineModel) -> bool:
        """Whether the last tier has as much, which is all that depends on the order of a step and on what it makes again."""
        return all(at != target.last for at, _ in self.short(target))

    def fits_task(self, target: MachineModel) -> bool:
        """Whether some memory holds the hungriest task."""
        return any(self._fits_task_at(target, at) for at in target.compute_nodes)

    def _fits_task_at(self, target: MachineModel, at: int) -> bool:
        """Whether tasks run on a node, and it holds the hungriest."""
        return at in target.compute_nodes and target.nodes[at][1] - (0 if at else self.reading) >= self.task


def shortage(target: MachineModel, needs: Needs) -> str:
    """Which budget is too small; of several, the last tier's."""
    if not needs.fits_task(target):
        data = ", ".join(f"{mode} {handle.name or 'scratch'}" for handle, mode in needs.hungriest.accesses)
        return (
            f"{needs.hungriest.name}({data}) needs {needs.task:,} B at once, more than the {target.largest_node_nbytes:,} B of the largest memory "
            "where it may run" + (f" without the {needs.reading:,} B of RAM that readers of files take" if needs.reading else "")
        )
    short = needs.short(target)
    if [at for at, _ in short] == needs.idle(target):
        at, nbytes = short[0]
        name = target.nodes[at][0]
        return f"the smallest task that computes needs {nbytes:,} B, more than the {target.budgets[name]:,} B of {name}, which would stay idle"
    at, nbytes = max(short, key=lambda each: each[0] == target.last)
    name = target.nodes[at][0]
    return f"the step needs {nbytes:,} B of {name} at least, more than its budget of {target.budgets[name]:,} B"
