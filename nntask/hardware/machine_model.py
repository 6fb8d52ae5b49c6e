"""Machines that a step is planned for: this one with its budgets, or an imaginary one (`imaginary`); and the durations of tasks and copies there.

This machine has the workers and budgets of its `MachineSpec`, and durations and link rates from the models of earlier runs. For tasks that were never
measured, durations follow from the cost function and the measured peak rates of matrix products and of memory. Nothing is written, and no memory is
taken except for measuring.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from scheduler.drivers import THREADS, staging_nbytes
from scheduler.machine import ASIDE_DEPTH, SIM_DEPTH, Models, NodeId, Rate, RecordedTask, StepPlan, WorkerKind, key_of
from scheduler.planning import Pace, pace_of
from scheduler.simulation import Duration
from scheduler.storage import PerfStore, machine_fingerprint
from tiles.kernels import ATTENTION_WORKSPACE_NBYTES, kernel_versions

from .flops import gemm_peak
from .machine_spec import MachineSpec

RAM: Final = "ram"
DISK: Final = "disk"

DEVICE_BANDWIDTH: Final = 2e12
"""Bytes per second at which an imaginary device reads and writes its own memory."""
DEVICE_FLOPS: Final = 1e14
"""Default flop/s of an imaginary device, and of a real one before it has been measured."""
CPU_FLOPS: Final = 5e10
"""Flop/s of a CPU worker of an imaginary machine."""
_BUFFER: Final = 1 << 24
_BANDWIDTH_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class MachineModel:
    """A machine to plan for: its workers and budgets, and known durations and links.

    Args:
        workers: (kind, node, depth) of each worker.
        nodes: (name, budget in bytes) of each memory node, host memory first, the disk tier last.
        storage: whether the last node is a disk tier.
        models: known durations and links.
        policy: name of the scheduling policy.
        rates: worker kind -> rates of a worker, for tasks that were never measured; None to measure this machine.
        staging: bytes taken from the budget of host memory for copies between the disk tier and GPUs.
        aside: whether CPU workers run only tasks that devices may not.
        ram_rate: bytes per second that all such workers of an imaginary machine together read and write in host memory.
        workspace: bytes of each GPU's budget, as flags give it, that cuDNN takes.
        is_mixed: whether CPU workers and devices share the tasks that both can run.
    """

    workers: tuple[tuple[WorkerKind, int, int], ...]
    nodes: tuple[tuple[str, int], ...]
    storage: bool
    models: Models
    policy: str
    rates: Mapping[WorkerKind, Rate] | None = None
    staging: int = 0
    aside: bool = False
    ram_rate: float = 0.0
    workspace: int = 0
    is_mixed: bool = False

    @property
    def budgets(self) -> Mapping[str, int]:
        """Node name -> bytes, as flags give them."""
        return {name: nbytes + (0 if at else self.staging) for at, (name, nbytes) in enumerate(self.nodes)}

    @property
    def num_devices(self) -> int:
        """Number of memory nodes besides host memory."""
        return len(self.memories) - 1

    @property
    def compute_nodes(self) -> list[int]:
        """Nodes where tasks run, without the nodes of CPU workers that run only tasks that devices may not."""
        return sorted({node for _, node in self.computing})

    @property
    def computing(self) -> Sequence[tuple[WorkerKind, int]]:
        """(kind, node) of the workers, without CPU workers that run only tasks that devices may not."""
        return [(kind, node) for kind, node, _ in self.workers if not (self.aside and kind == "cpu")]

    @property
    def memory(self) -> int:
        """Total bytes of the memories where tasks run."""
        return sum(self.nodes[node][1] for node in self.compute_nodes)

    @property
    def largest_node_nbytes(self) -> int:
        """Bytes of the largest memory where a task may run."""
        return max(self.nodes[node][1] for node in self.compute_nodes)

    @property
    def memories(self) -> Sequence[tuple[str, int]]:
        """(name, bytes) of the nodes without the disk tier."""
        return self.nodes[:-1] if self.storage else self.nodes

    @property
    def last(self) -> int:
        """The node that must hold all live data."""
        return len(self.nodes) - 1 if self.storage else 0

    @property
    def channels(self) -> int:
        """Number of requests that the disk tier has in flight at once."""
        return THREADS

    @property
    def is_imaginary(self) -> bool:
        """Whether its rates are given instead of measured."""
        return self.rates is not None

    @property
    def link_rate(self) -> float:
        """Bytes per second of each link between host memory and a device, in each direction; needs a device."""
        assert self.num_devices, "no links without devices"
        return self.models.links[NodeId(0), NodeId(1)].bandwidth

    @property
    def disk_rate(self) -> float:
        """Bytes per second from and to the disk tier, all requests in flight together."""
        return self.channels * self.models.links[NodeId(self.last), NodeId(0)].bandwidth

    def beside(self, num_cpu: int) -> MachineModel:
        """Return the same machine with `num_cpu` CPU workers, which run only tasks that devices may not."""
        workers = [worker for worker in self.workers if worker[0] != "cpu"]
        rates = self.rates
        if rates is not None and num_cpu:
            rates = {**rates, "cpu": Rate(CPU_FLOPS, self.ram_rate / num_cpu)}
        aside: list[tuple[WorkerKind, int, int]] = [("cpu", 0, ASIDE_DEPTH)] * num_cpu
        return replace(self, workers=(*workers, *aside), aside=num_cpu > 0, rates=rates)

    def with_budget(self, node: int, nbytes: int) -> MachineModel:
        """Return the same machine with another budget on one node."""
        nodes = tuple((name, nbytes if at == node else budget) for at, (name, budget) in enumerate(self.nodes))
        return replace(self, nodes=nodes)

    def without(self, nbytes: int) -> MachineModel:
        """Return the same machine with `nbytes` less host memory."""
        return self.with_budget(0, self.nodes[0][1] - nbytes) if nbytes else self

    def enlarged(self, nbytes: Mapping[int, int]) -> MachineModel:
        """Return the same machine with its budgets raised to these, by node, as flags would give them; a budget of one device applies to all."""
        found, devices = self, max((size for at, size in nbytes.items() if 0 < at <= self.num_devices), default=0)
        for at in range(len(self.nodes)):
            size = devices if 0 < at <= self.num_devices else nbytes.get(at, 0) - (0 if at else self.staging)
            found = found.with_budget(at, max(size, self.nodes[at][1]))
        return found

    def with_empty_disk(self) -> MachineModel:
        """Return a machine without a disk tier with an empty one, to find out how large it must be."""
        staging = staging_nbytes(sum(kind == "cuda" for kind, _, _ in self.workers), has_tier=True)
        return replace(self.without(staging), nodes=(*self.without(staging).nodes, (DISK, 0)), storage=True, staging=staging)


def this_machine(machine: MachineSpec) -> MachineModel:
    """Return the model of a process's own machine: the devices and budgets that `open_runtime` uses, with measurements of earlier runs."""
    num_gpus = len(machine.gpus.devices)
    staging = staging_nbytes(num_gpus, has_tier=machine.disk is not None)
    nodes = [(RAM, machine.ram.nbytes - staging)]
    nodes += [(f"sim:{at}", machine.device.nbytes) for at in range(machine.num_simulated)]
    nodes += [(f"cuda:{at}", machine.device.nbytes) for at in range(num_gpus)]
    if machine.disk is not None:
        nodes.append((DISK, machine.disk.budget.nbytes))
    workers: list[tuple[WorkerKind, int, int]] = [("cpu", 0, ASIDE_DEPTH if machine.aside else 1)] * machine.num_cpu
    workers += [("sim", 1 + at, SIM_DEPTH) for at in range(machine.num_simulated)]
    workers += [("cuda", 1 + at, SIM_DEPTH) for at in range(num_gpus)]
    models = Models()
    open_store([name for name, _ in nodes], machine.gpus.names).load(models)
    given = None if machine.link_rate is None else (0.0, machine.link_rate)
    models.declare_links(len(nodes), storage=machine.disk is not None, given=given)
    policy = machine.scheduling.policy
    return MachineModel(
        tuple(workers),
        tuple(nodes),
        machine.disk is not None,
        models,
        policy,
        staging=staging,
        aside=machine.aside,
        workspace=ATTENTION_WORKSPACE_NBYTES if machine.gpus.has_cudnn else 0,
        is_mixed=bool(machine.sharing),
    )


def open_store(names: Sequence[str], devices: Sequence[str] = ()) -> PerfStore:
    """Return the measurements of earlier runs on this machine.

    Args:
        names: names of the memory nodes.
        devices: names of the GPUs.
    """
    return PerfStore(machine_fingerprint(blas_threads=1, devices=devices, versions=kernel_versions()), names)


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of every task of a plan.

    Attributes:
        seconds: worker kind -> seconds of each task, by position in the plan.
        num_measured, num_kinds: number of measured pairs of footprint and worker kind, and of all pairs.
    """

    seconds: Mapping[str, Sequence[float]]
    num_measured: int
    num_kinds: int

    @property
    def of(self) -> Duration:
        """Durations in the form of `simulate`; only for plans over these tasks in this order."""
        tables = self.seconds
        return lambda task, kind: tables[kind][task.position] if task.step is not None else 0.0


def durations(plan: StepPlan, target: MachineModel) -> Durations:
    """Return the durations of a plan's tasks on each kind of worker of a machine."""
    keys = [key_of(task) for task in plan.tasks]
    examples: dict[tuple[str, int], RecordedTask] = dict(zip(keys, plan.tasks, strict=True))
    rates = target.rates
    seconds: dict[str, Sequence[float]] = {}
    num_measured = num_kinds = 0
    for kind in sorted({kind for kind, _, _ in target.workers}):
        known: dict[tuple[str, int], float] = {}
        for key, task in examples.items():
            duration = None if target.rates is not None else _measured(target.models, key, kind)
            num_kinds += 1
            num_measured += duration is not None
            if duration is None:
                if rates is None:
                    rates = measured_rates(len(target.workers))
                duration = _guessed(task, rates[kind] if kind in rates else Rate(CPU_FLOPS, 1e10))
            known[key] = duration
        seconds[kind] = [known[key] for key in keys]
    return Durations(seconds, num_measured, num_kinds)


def pace_on(plan: StepPlan, target: MachineModel) -> Pace:
    """Return the pace at which a machine goes through a plan."""
    tables = durations(plan, target).seconds
    position = {task: at for at, task in enumerate(plan.tasks)}
    below = target.last if 0 in target.compute_nodes else 0
    return pace_of(
        plan,
        [(kind, NodeId(node)) for kind, node in target.computing],
        NodeId(below),
        target.models,
        channels=target.channels if target.storage and below else 0,
        task_seconds=lambda task, kind: tables[kind][position[task]],
        disk=(NodeId(target.last), target.nodes[0][1]) if target.storage and not below else None,
        num_aside=len(target.workers) - len(target.computing),
    )


def _measured(models: Models, key: tuple[str, int], kind: WorkerKind) -> float | None:
    """Return the seconds that earlier runs have measured; simulated devices run the kernels of CPU workers."""
    found = models.measured((*key, kind))
    if found is None and kind in ("cpu", "sim"):
        found = models.measured((*key, "cpu" if kind == "sim" else "sim"))
    return found


def _guessed(task: RecordedTask, rate: Rate) -> float:
    """Return operations or bytes over the rate, whichever takes longer."""
    cost = getattr(task.codelet, "cost", None)
    nbytes = float(sum(handle.spec.nbytes for handle, _ in task.accesses))
    flops, nbytes = cost([handle.spec.view for handle, _ in task.accesses], task.constants) if cost is not None else (0.0, nbytes)
    return max(flops / rate.flops, nbytes / rate.nbytes)


@cache
def measured_rates(num_workers: int) -> dict[WorkerKind, Rate]:
    """Return the best rates of one of `num_workers` busy workers on this machine's cores, measured once in a process, which takes 0.3 s."""
    num_threads = max(1, min(num_workers, os.cpu_count() or 1))
    rate = Rate(gemm_peak(num_threads) / max(num_workers, 1), memory_bandwidth(num_threads) / max(num_workers, 1))
    return {"cpu": rate, "sim": rate, "cuda": Rate(DEVICE_FLOPS, DEVICE_BANDWIDTH)}


def memory_bandwidth(num_threads: int) -> float:
    """Return the bytes per second, read plus written, of copies on `num_threads` threads at once."""
    counts = [0] * num_threads
    start = threading.Barrier(num_threads)

    def work(number: int) -> None:
        source, target = np.ones(_BUFFER // 4, np.float32), np.zeros(_BUFFER // 4, np.float32)
        start.wait()
        until = time.perf_counter() + _BANDWIDTH_SECONDS
        while time.perf_counter() < until:
            np.copyto(target, source)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) * 2.0 * _BUFFER / _BANDWIDTH_SECONDS
