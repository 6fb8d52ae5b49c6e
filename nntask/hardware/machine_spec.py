"""The devices and budgets of this process, worked out once from its flags: numbers and bytes, which everything behind takes as they are.

`devices_of` says which devices compute; `machine_of` also says how much of each memory there is, for which it looks at the limits of the process and
of the disk. The client of a cluster and a plan of an imaginary machine need no budgets of this one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scheduler.storage import memory_budgets

from ..config.disk import disk_of
from ..config.settings import ResourceSettings
from ..config.units import parse_rate, parse_size
from ..errors import DoesNotFit
from .gpus import GpuPlan, check_devices, gpus_of, num_cpu_workers


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of a memory.

    Args:
        nbytes: as planned with.
        is_given: whether a flag says so; otherwise it is a share of what was free, and the runtime takes that of what is free when it opens.
    """

    nbytes: int
    is_given: bool

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
class MachineSpec:
    """What a process computes with.

    Args:
        num_cpu: workers of the CPU.
        gpus: real devices.
        num_simulated: simulated devices.
        ram: of host memory.
        device: of each GPU or simulated device.
        link_rate: bytes per second of each link of a simulated device; None for as fast as copies are.
        disk: None without a disk tier.
        asked: the flags: scheduling, and what messages say of budgets.
    """

    num_cpu: int
    gpus: GpuPlan
    num_simulated: int
    ram: Budget
    device: Budget
    link_rate: float | None
    disk: DiskSpec | None
    asked: ResourceSettings

    @property
    def has_gpus(self) -> bool:
        """Whether real devices compute."""
        return bool(self.gpus.devices)


def devices_of(resources: ResourceSettings, dtype: str, *, checks: bool = True) -> MachineSpec:
    """Who computes, with no budgets.

    Args:
        dtype: value of --dtype.
        checks: whether flags about devices that are not there are refused; False where the flags are of another machine.

    Raises:
        UsageError: GPUs were asked for that are not to be had, or a flag is about a device that is not there.
        DoesNotFit: the budget of GPUs is above what a card has.
    """
    gpus = gpus_of(resources, dtype)
    if checks:
        check_devices(resources, gpus)
    link_rate = parse_rate(resources.sim_bandwidth, "--sim-bandwidth") if resources.sim_bandwidth else None
    return MachineSpec(num_cpu_workers(resources.ncpu, gpus), gpus, resources.sim_gpu, NO_BUDGET, NO_BUDGET, link_rate, None, resources)


def machine_of(resources: ResourceSettings, dtype: str = "auto") -> MachineSpec:
    """The machine that flags ask for.

    Raises:
        UsageError, DoesNotFit: see `devices_of` and `with_budgets`.
    """
    return with_budgets(devices_of(resources, dtype))


def with_budgets(machine: MachineSpec) -> MachineSpec:
    """The machine with bytes of each of its memories.

    Raises:
        UsageError: a size is none.
        DoesNotFit: the budgets are above what this process may use.
    """
    asked, gpus = machine.asked, machine.gpus
    ram = parse_size(asked.ram, "--ram") if asked.ram else None
    simulated = parse_size(asked.gpu_memory, "--gpu-memory") if asked.gpu_memory and not gpus.devices else None
    try:
        ram_nbytes, simulated_nbytes = memory_budgets(ram, simulated, machine.num_simulated)
    except MemoryError as error:
        raise cannot_reserve(asked, error) from error
    disk = disk_of(asked.disk)
    return replace(
        machine,
        ram=Budget(ram_nbytes, ram is not None),
        device=Budget(gpus.nbytes, is_given=True) if gpus.devices else Budget(simulated_nbytes, simulated is not None),
        disk=None if disk is None else DiskSpec(disk[0], Budget(_tier_bytes(*disk), disk[1] is not None)),
    )


def cannot_reserve(resources: ResourceSettings, error: Exception) -> DoesNotFit:
    """The refusal of budgets that the system does not give, with their flags."""
    given = (("--ram", resources.ram), ("--gpu-memory", resources.gpu_memory))
    flags = " and ".join(f"{flag} {text}" for flag, text in given if text) or "the default --ram"
    return DoesNotFit(f"{flags} cannot be reserved: {error}")


def _tier_bytes(directory: Path, asked: int | None) -> int:
    """Budget of a disk tier: what is free, or what was asked for.

    Raises:
        DoesNotFit: more than is free.
    """
    free = free_bytes(directory)
    if asked is not None and asked > free:
        raise DoesNotFit(f"--disk {directory}: SIZE is {asked:,} B, and {free:,} B are free there; lower it, or free some room")
    return asked or free


def free_bytes(directory: Path) -> int:
    """Bytes free where a directory lies, or would lie."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
