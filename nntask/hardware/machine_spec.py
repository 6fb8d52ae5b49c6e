"""The devices and budgets of this process, worked out once from its flags: numbers and bytes, which everything behind takes as they are.

`devices_of` says which devices compute and how they are scheduled; `with_budgets` also says how much of each memory there is, for which it looks at
what this process and the disk have free. Neither refuses a budget for its size: a run has other mistakes named first. `check_budgets` does.
A plan of an imaginary machine needs no budgets of this one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scheduler.machine import policy_of
from scheduler.storage import check_budgets as check_memory
from scheduler.storage import filled_budgets

from ..config.disk import disk_of
from ..config.settings import ResourceSettings
from ..config.units import parse_rate, parse_size
from ..errors import DoesNotFit
from .gpu_attention import gpus_with_cudnn
from .gpus import NO_GPUS, GpuPlan, check_devices, check_links, gpus_of, num_cpu_workers


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of a memory.

    Args:
        nbytes: as planned with.
        is_given: whether a flag says so; otherwise it is a share of what was free, and the runtime takes that of what is free when it opens.
        text: the value of the flag, for messages; "" for the default.
    """

    nbytes: int
    is_given: bool
    text: str = ""

    @property
    def given(self) -> int | None:
        """Bytes that a flag says; None for what is free."""
        return self.nbytes if self.is_given else None


NO_BUDGET: Final = Budget(0, is_given=False)


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A disk tier: its directory, and the bytes it may have there."""

    directory: Path
    budget: Budget


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How tasks are placed and tiles are moved; see the flags of these names.

    Args:
        policy: name of a scheduling policy.
    """

    policy: str
    evict: str
    prefetch: bool
    graphs: bool


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """What a process computes with.

    Args:
        num_cpu: workers of the CPU.
        gpus: real devices.
        num_simulated: simulated devices.
        link_rate: bytes per second of each link of a simulated device; None for as fast as copies are.
        scheduling: of its runtime.
        ram: of host memory.
        device: of each GPU or simulated device.
        disk: None without a disk tier.
        aside: whether the workers of the CPU run only what devices may not, which compute the rest.
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

    @property
    def has_gpus(self) -> bool:
        """Whether real devices compute."""
        return bool(self.gpus.devices)

    @property
    def has_devices(self) -> bool:
        """Whether devices compute, real or simulated."""
        return self.has_gpus or self.num_simulated > 0


def devices_of(resources: ResourceSettings, dtype: str, *, checks: bool = True) -> MachineSpec:
    """Who computes, with no budgets.

    Args:
        dtype: value of --dtype.
        checks: whether flags about devices that are not there are refused; False where the flags are of another machine.

    Raises:
        UsageError: GPUs were asked for that are not to be had, or a flag is about a device that is not there.
        DoesNotFit: the budget of GPUs is above what a card has.
    """
    if checks:
        check_links(resources)
    gpus = gpus_of(resources, dtype)
    if checks:
        check_devices(resources, gpus)
    found = MachineSpec(
        num_cpu=num_cpu_workers(resources.ncpu, gpus),
        gpus=gpus,
        num_simulated=resources.sim_gpu,
        link_rate=parse_rate(resources.sim_bandwidth, "--sim-bandwidth") if resources.sim_bandwidth else None,
        scheduling=Scheduling(
            policy_of(resources.sched, resources.sim_gpu or len(gpus.devices)), resources.evict, resources.prefetch, resources.graphs
        ),
    )
    return beside_devices(found, resources.ncpu) if resources.update_on != "device" and resources.ncpu != 0 else found


def beside_devices(machine: MachineSpec, asked: int | None) -> MachineSpec:
    """A machine whose CPU workers only do what devices may not; the same where there are no devices.

    Args:
        asked: CPU workers that a flag asks for.
    """
    return replace(machine, num_cpu=num_cpu_workers(asked, NO_GPUS), aside=True) if machine.has_devices else machine


def devices_alone(machine: MachineSpec, asked: int | None) -> MachineSpec:
    """A machine with CPU workers beside its devices without them; of GPUs, with those that a flag asks for."""
    if not machine.aside:
        return machine
    return replace(machine, num_cpu=num_cpu_workers(asked, machine.gpus) if machine.has_gpus else 0, aside=False)


def machine_of(resources: ResourceSettings, dtype: str = "fp32") -> MachineSpec:
    """The machine that flags ask for.

    Raises:
        UsageError, DoesNotFit: see `devices_of`, `with_budgets` and `check_budgets`.
    """
    machine = with_budgets(devices_of(resources, dtype), resources)
    check_budgets(machine)
    return machine


def with_budgets(machine: MachineSpec, resources: ResourceSettings, *, ram: Budget | None = None) -> MachineSpec:
    """Devices with bytes of each memory, as flags say them or as much as is free; they may be more than this process may use.

    Args:
        machine: from `devices_of`.
        ram: of host memory, where it is known already; None to take it from the flags.

    Raises:
        UsageError: a size is none.
    """
    gpus = machine.gpus
    if ram is None:
        ram = Budget(parse_size(resources.ram, "--ram"), is_given=True, text=resources.ram) if resources.ram else NO_BUDGET
    simulated = parse_size(resources.gpu_memory, "--gpu-memory") if resources.gpu_memory and not gpus.devices else None
    ram_nbytes, simulated_nbytes = filled_budgets(ram.given, simulated, machine.num_simulated)
    return replace(
        machine,
        ram=replace(ram, nbytes=ram_nbytes),
        device=Budget(*((gpus.nbytes, True) if gpus.devices else (simulated_nbytes, simulated is not None)), resources.gpu_memory),
        disk=_disk_tier(resources.disk),
    )


def with_cudnn(machine: MachineSpec) -> MachineSpec:
    """The same, with cuDNN for attention on its GPUs, whose workspace comes out of their budgets; twice is once.

    Raises:
        UsageError: there is no GPU, or the frontend of cuDNN is not installed.
        DoesNotFit: nothing is left of the budgets.
    """
    if machine.gpus.has_cudnn:
        return machine
    gpus = gpus_with_cudnn(machine.gpus)
    return replace(machine, gpus=gpus, device=replace(machine.device, nbytes=gpus.nbytes) if machine.device.is_given else machine.device)


def check_budgets(machine: MachineSpec) -> None:
    """Check that the budgets of a machine are to be had.

    Raises:
        DoesNotFit: they are above what this process may use, or above what is free on the disk.
    """
    try:
        check_memory(machine.ram.given, None if machine.has_gpus else machine.device.given, machine.num_simulated)
    except MemoryError as error:
        raise cannot_reserve(machine, error) from error
    disk = machine.disk
    if disk is not None and disk.budget.is_given and disk.budget.nbytes > (free := free_bytes(disk.directory)):
        raise DoesNotFit(f"--disk {disk.directory}: SIZE is {disk.budget.nbytes:,} B, and {free:,} B are free there; lower it, or free some room")


def cannot_reserve(machine: MachineSpec, error: Exception) -> DoesNotFit:
    """The refusal of budgets that the system does not give, with their flags."""
    given = (("--ram", machine.ram.text), ("--gpu-memory", machine.device.text))
    flags = " and ".join(f"{flag} {text}" for flag, text in given if text) or "the default --ram"
    return DoesNotFit(f"{flags} cannot be reserved: {error}")


def _disk_tier(text: str) -> DiskSpec | None:
    """The disk tier that --disk asks for, as large as it says or as what is free there."""
    disk = disk_of(text)
    if disk is None:
        return None
    directory, size = disk
    return DiskSpec(directory, Budget(free_bytes(directory) if size is None else size, size is not None, text))


def free_bytes(directory: Path) -> int:
    """Bytes free where a directory lies, or would lie."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
