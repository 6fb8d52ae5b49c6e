"""Memory of a node of a cluster: its budgets, and the check that a step fits them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from nntask import DoesNotFit, UsageError
from nntask.engine import PlannedStep
from nntask.hardware import RAM, Budget, MachineSpec, check_budgets, this_machine, with_budgets, without_nccl
from nntask.planning import capture, needs_of, no_collections, order_on, shortage
from scheduler import Shortage
from scheduler.planning import AUTO, NONE
from scheduler.storage import default_ram_budget

if TYPE_CHECKING:
    from nntask.config import RunConfig
    from nntask.optim import DataShard, Transport
    from scheduler.machine import StepPlan

    from .nccl import NcclTransport


def machine_of_node(
    worker: Any, devices: MachineSpec, run: RunConfig, nccl: NcclTransport | None, *, on_host: int, passing_nbytes: int
) -> MachineSpec:
    """Return the devices and budgets of a node, with the requested CPU workers, by default one per thread of its Dask worker.

    Args:
        worker: the Dask worker.
        devices: devices of its machine.
        run: settings of the run.
        nccl: transport that uses memory of the GPU; None without NCCL.
        on_host: number of nodes of this training on the node's machine, this one included.
        passing_nbytes: maximum bytes of buckets in transit.

    Raises:
        DoesNotFit: a budget is not available, or too small for the buckets in transit between nodes.
    """
    asked = run.settings.resources
    if asked.ncpu is None:
        devices = replace(devices, num_cpu=int(worker.state.nthreads))
    ram = _ram(worker, run.machine.ram.given, devices, on_host) - passing_nbytes
    if ram <= 0:
        raise DoesNotFit(
            f"on worker {worker.address} the budget of RAM must hold {passing_nbytes:,} B for buckets in transit between nodes in addition to the "
            f"step, got {ram + passing_nbytes:,} B",
            "raise --ram, or use fewer nodes",
            shortage=Shortage("full", RAM, passing_nbytes, ram + passing_nbytes),
        )
    if nccl is not None:
        gpus = without_nccl(devices.gpus, asked.split_gpu, nccl.taken_nbytes())
        devices = replace(devices, gpus=gpus, device=_stated(gpus.nbytes))
    machine = with_budgets(replace(devices, ram=_stated(ram)))
    check_budgets(machine)
    return machine


def _stated(nbytes: int) -> Budget:
    """Return a budget in the form in which messages show it."""
    return Budget(nbytes, is_given=True, text=f"{nbytes}B")


def _ram(worker: Any, requested: int | None, devices: MachineSpec, on_host: int) -> int:
    """Return the requested bytes of host memory; by default the memory limit of the Dask worker, or this node's share of the machine's memory."""
    if requested is not None:
        return requested
    nbytes = default_ram_budget() // on_host
    limit = worker.memory_manager.memory_limit
    if limit:
        nbytes = min(nbytes, int(0.9 * (limit - psutil.Process().memory_info().rss)))
    return nbytes // (1 + devices.num_simulated)


def planned_share(run: RunConfig, shard: DataShard, transport: Transport | None, worker: str) -> PlannedStep:
    """Capture a node's share of a step, plan it on the node's machine, and check its memory.

    Args:
        run: settings of the run, with the node's budgets.
        shard: share of the node.
        transport: connection to the other nodes; None if there are none.
        worker: address of the node's worker, for messages.

    Raises:
        DoesNotFit: a budget of this node is too small.
        UsageError: the step has no order or recomputation of the requested name.
    """
    target = this_machine(run.machine)
    with no_collections():
        step = capture(run, frozen_base=run.start.frozen_base, share=None if transport is None else (shard, transport))
        try:
            recompute = AUTO if run.step.recompute == AUTO else NONE
            order = order_on(step.plan, run.step.order, target.without(step.reading), target.policy, recompute)
        except ValueError as error:
            raise UsageError(f"on worker {worker} {error}") from error
    check_memory(order.plan, run, worker, step.reading)
    assert step.symbols is not None  # the model is made of tiles
    return PlannedStep(order, step.symbols)


def check_memory(plan: StepPlan, run: RunConfig, worker: str, reading: int) -> None:
    """Refuse a step with a budget below its minimum, at which tasks and exchanges get their memory one after another.

    Args:
        plan: tasks of the step.
        run: settings of the run, with the node's budgets.
        worker: address of the node's worker, for messages.
        reading: bytes of host memory that readers of files need.

    Raises:
        DoesNotFit: a budget of this node is too small.
    """
    target, needs = this_machine(run.machine), needs_of(plan, reading=reading)
    if not needs.fit(target):
        smaller = "" if run.start.is_continued else "lower --minibatch, "  # a checkpoint has its tiling
        lack = shortage(target, needs)
        raise DoesNotFit(
            f"on worker {worker} {lack.fact}, without buckets in transit between nodes",
            f"raise --ram, {smaller}add --disk DIR, or use more nodes",
            shortage=lack,
        )
