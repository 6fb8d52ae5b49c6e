"""Devices and budgets of this process, resolved once from its flags to numbers and bytes, which all later code uses as they are.

`requested_devices` determines the devices and their scheduling. `with_budgets` fills in sizes that no flag sets, for which it reads the free memory
and disk space. Neither refuses a budget for its size, so that other mistakes of a run are reported first; `check_budgets` does. A plan for an
imaginary machine needs no budgets of this one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler import DoesNotFit as NoRoom
from scheduler import Shortage
from scheduler.machine import policy_of
from scheduler.storage import check_budgets as check_memory
from scheduler.storage import filled_budgets, memory_limit

from ..errors import DoesNotFit, Setting
from .gpu_attention import gpus_with_cudnn
from .gpus import NO_GPUS, GpuPlan, check_devices, check_links, gpus_of, num_cpu_workers
from .machine_request import NO_BUDGET, Budget, DiskSpec, MachineRequest, Sharing


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Placement of tasks and movement of tiles, with fields for the flags of the same names.

    Args:
        policy: name of the scheduling policy.
    """

    policy: str
    evict: str
    prefetch: bool
    graphs: bool
    watchdog: float | None


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """Devices and memory of a process.

    Args:
        num_cpu: number of CPU workers.
        gpus: real devices.
        num_simulated: number of simulated devices.
        link_rate: bytes per second of each link of a simulated device; None for the speed of memory copies.
        scheduling: options of the runtime's scheduler.
        ram: budget of host memory.
        device: budget of each GPU or simulated device.
        disk: disk tier; None without one.
        aside: whether CPU workers run only tasks that devices may not, while devices compute the rest.
        sharing: whether CPU workers and devices share the tasks that both can run, as in `MachineRequest`.
    """

    num_cpu: int
    gpus: GpuPlan
    num_simulated: int
    link_rate: float | None
    scheduling: Scheduling
    ram: Budget = NO_BUDGET
    device: Budget = NO_BUDGET
    disk: DiskSpec | None = None
    aside: bool = False
    sharing: Sharing = ""

    @property
    def has_gpus(self) -> bool:
        """Whether real devices compute."""
        return bool(self.gpus.devices)

    @property
    def has_devices(self) -> bool:
        """Whether devices compute, real or simulated."""
        return self.has_gpus or self.num_simulated > 0


def requested_devices(request: MachineRequest, dtype: str, *, checks: bool = True) -> MachineSpec:
    """Return the machine that flags ask for, with the budgets that they set; defaults are open.

    Args:
        dtype: value of --dtype.
        checks: whether to refuse flags about missing devices; False for the flags of another machine.

    Raises:
        UsageError: the flags ask for GPUs that are not available, or a flag is about a missing device.
        DoesNotFit: the budget of GPUs is above the memory of a card.
    """
    if checks:
        check_links(request)
    gpus = gpus_of(request, dtype)
    if checks:
        check_devices(request, gpus)
    is_shared = bool(request.sharing)
    policy = policy_of(request.sched, request.num_simulated or len(gpus.devices), is_mixed=is_shared)
    machine = MachineSpec(
        num_cpu=num_cpu_workers(request.num_cpu, NO_GPUS if is_shared else gpus),
        gpus=gpus,
        num_simulated=request.num_simulated,
        link_rate=request.link_rate,
        scheduling=Scheduling(policy, request.evict, request.prefetch, request.graphs, request.watchdog),
        ram=request.ram,
        device=_device_budget(request, gpus),
        disk=request.disk,
        sharing=request.sharing,
    )
    if not machine.has_devices or request.update_on == "device" or request.num_cpu == 0:
        return machine
    return replace(machine, num_cpu=num_cpu_workers(request.num_cpu, NO_GPUS), aside=True)  # CPU workers run only tasks that devices may not


def _device_budget(request: MachineRequest, gpus: GpuPlan) -> Budget:
    """Return the budget of each GPU, or the requested one of each simulated device."""
    size = request.device
    if gpus.devices:
        return Budget(gpus.nbytes, True, "" if size is None else size.text)
    return NO_BUDGET if size is None or size.share is not None else Budget(size.nbytes, True, size.text)


def devices_alone(machine: MachineSpec, asked: int | None) -> MachineSpec:
    """Return the machine without CPU workers that assist its devices; a machine with GPUs keeps those that a flag asks for."""
    if not machine.aside:
        return machine
    return replace(machine, num_cpu=num_cpu_workers(asked, machine.gpus) if machine.has_gpus else 0, aside=False)


def with_budgets(machine: MachineSpec) -> MachineSpec:
    """Return the machine with the size of each memory that no flag sets, from the free memory and disk space, which are read here alone.

    Sizes may exceed what this process may use.

    Args:
        machine: machine from `requested_devices`.
    """
    ram, simulated, disk = machine.ram, machine.device, machine.disk
    ram_nbytes, simulated_nbytes = filled_budgets(ram.given, None if machine.has_gpus else simulated.given, machine.num_simulated)
    if disk is not None and not disk.budget.is_given:
        disk = replace(disk, budget=replace(disk.budget, nbytes=free_bytes(disk.directory)))
    return replace(
        machine,
        ram=replace(ram, nbytes=ram_nbytes),
        device=simulated if machine.has_gpus else replace(simulated, nbytes=simulated_nbytes),
        disk=disk,
    )


def with_cudnn(machine: MachineSpec) -> MachineSpec:
    """Return the same machine with cuDNN for attention on its GPUs and its workspace taken from their budgets; a second call changes nothing.

    Raises:
        UsageError: there is no GPU, or the frontend of cuDNN is not installed.
        DoesNotFit: no budget remains.
    """
    if machine.gpus.has_cudnn:
        return machine
    gpus = gpus_with_cudnn(machine.gpus)
    return replace(machine, gpus=gpus, device=replace(machine.device, nbytes=gpus.nbytes) if machine.device.is_given else machine.device)


def check_budgets(machine: MachineSpec) -> None:
    """Check that the budgets of a machine are available.

    Raises:
        DoesNotFit: a budget is above the memory that this process may use, or above the free space of the disk.
    """
    try:
        check_memory(machine.ram.given, None if machine.has_gpus else machine.device.given, machine.num_simulated)
    except MemoryError as error:
        raise cannot_reserve(machine, error) from error
    disk = machine.disk
    if disk is not None and disk.budget.is_given and disk.budget.nbytes > (free := free_bytes(disk.directory)):
        raise DoesNotFit(
            f"{disk.directory}: SIZE is {disk.budget.nbytes:,} B, and {free:,} B are free there",
            "lower it, or free some room",
            flag="--disk",
            shortage=Shortage("reserve", "disk", disk.budget.nbytes, free),
        )


def cannot_reserve(machine: MachineSpec, error: Exception) -> DoesNotFit:
    """Return the error for budgets that the system refuses, with their flags."""
    given = [Setting(flag, text) for flag, text in (("--ram", machine.ram.text), ("--gpu-memory", machine.device.text)) if text]
    first = given[0] if given else Setting("")
    size = "".join(f" and {{{number}}}" for number, _ in enumerate(given[1:])).lstrip() if given else "the default --ram"
    if isinstance(error, NoRoom):
        why, shortage = error.fact, error.shortage
        if shortage.cause != "reserve":  # the runtime itself needs more than the budget
            remedy = error.remedy
        elif shortage.node == "ram":
            remedy = "lower it, and name a disk for the rest"
        else:
            remedy = "lower --gpu-memory, or end other programs that use the card"
    else:  # an error of mmap
        nbytes = machine.ram.nbytes + machine.device.nbytes * machine.num_simulated
        why, remedy, shortage = str(error), "lower it", Shortage("reserve", "ram", nbytes, memory_limit(), detail=str(error))
    clause = f"{size} cannot be reserved: {why}".lstrip()
    return DoesNotFit(clause, remedy, flag=first.flag, value=first.value, others=given[1:], shortage=shortage)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system at a directory, which need not exist."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
