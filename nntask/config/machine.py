"""Settings of devices and memory as numbers: the one place where --ram, --gpu-memory, --disk and the rate of --sim-gpu are parsed."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..errors import UsageError
from ..hardware.machine_request import NO_BUDGET, Budget, DeviceSize, DiskSpec, MachineRequest, Sharing
from ..hardware.machine_spec import MachineSpec, check_budgets, requested_devices, with_budgets
from ..io.units import fraction_of, parse_rate, parse_size
from .disk import disk_of
from .settings import ResourceSettings, flag_of

DEVICES: Final = "devices"
"""Assignment of every task that a device can run to a device."""
PINNED: Final = "pinned:"
"""Beginning of an assignment in a file."""


def request_of(resources: ResourceSettings, *, has_disk: bool = True) -> MachineRequest:
    """Return the devices and memory that settings ask for.

    Args:
        resources: settings whose numbers have been checked.
        has_disk: whether --disk is of this machine; False for an imaginary machine, whose --disk may be a size alone.

    Raises:
        UsageError: a size or a rate is malformed, or a share of a card is asked for simulated devices.
    """
    return MachineRequest(
        num_cpu=resources.ncpu,
        num_gpus=resources.ngpu,
        num_partitions=resources.split_gpu,
        num_simulated=resources.sim_gpu,
        link_rate=parse_rate(resources.sim_bandwidth, "RATE in --sim-gpu") if resources.sim_bandwidth else None,
        link_text=resources.sim_bandwidth,
        ram=Budget(parse_size(resources.ram, "--ram"), True, resources.ram) if resources.ram else NO_BUDGET,
        device=_device_size(resources),
        disk=_disk_tier(resources.disk) if has_disk else None,
        sched=resources.sched,
        evict=resources.evict,
        prefetch=resources.prefetch,
        graphs=resources.graphs,
        watchdog=resources.watchdog,
        update_on=resources.update_on,
        sharing=sharing_of(resources),
    )


def sharing_of(resources: ResourceSettings) -> Sharing:
    """Return whether CPU workers and devices share tasks.

    Raises:
        UsageError: the assignment is malformed.
    """
    text = resources.assignment
    if text not in ("", DEVICES, "mixed") and not text.startswith(PINNED):
        raise UsageError(
            f"must be {DEVICES}, mixed or {PINNED}FILE, got {text!r}", f"for example --sched {resources.sched}@mixed", flag=flag_of("assignment")
        )
    if text == PINNED:
        value = f"{resources.sched}@{text}"
        raise UsageError("names no file", "add the assignment.json of a run with --sched auto@mixed", flag="--sched", value=value)
    return "" if text in ("", DEVICES) else "mixed" if text == "mixed" else "pinned"


def _device_size(resources: ResourceSettings) -> DeviceSize | None:
    text = resources.gpu_memory
    if not text:
        return None
    share = fraction_of(text)
    if share is not None and resources.sim_gpu:
        raise UsageError(f"must be bytes for simulated devices, got {text}, a share of a card", "for example 1GiB", flag="--gpu-memory")
    return DeviceSize(parse_size(text, "--gpu-memory") if share is None else 0, share, text)


def _disk_tier(text: str) -> DiskSpec | None:
    disk = disk_of(text)
    return None if disk is None else DiskSpec(disk[0], Budget(disk[1] or 0, disk[1] is not None, text))


def devices_of(resources: ResourceSettings, dtype: str, *, checks: bool = True) -> MachineSpec:
    """Return the machine that settings ask for, with given budgets and open defaults.

    Args:
        dtype: value of --dtype.
        checks: whether to refuse flags about missing devices; False for the settings of another machine, without its disk.

    Raises:
        UsageError, DoesNotFit: `request_of` or `requested_devices` raises it.
    """
    return requested_devices(request_of(resources, has_disk=checks), dtype, checks=checks)


def machine_of(resources: ResourceSettings, dtype: str = "fp32", *, ram: Budget | None = None) -> MachineSpec:
    """Return the machine that settings ask for, with every budget.

    Args:
        dtype: value of --dtype.
        ram: budget of host memory of a program that has parsed it; None for that of the settings.

    Raises:
        UsageError, DoesNotFit: `devices_of` or `check_budgets` raises it.
    """
    machine = devices_of(resources, dtype)
    machine = with_budgets(machine if ram is None else replace(machine, ram=ram))
    check_budgets(machine)
    return machine
