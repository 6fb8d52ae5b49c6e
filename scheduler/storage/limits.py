"""Limits on the host memory and the cores of this process: the machine's, those of its cgroups (v1 and v2), and the memory already in use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from ..core.errors import DoesNotFit
from ..core.shortage import AccessSize, Shortage

RESERVE: Final = 256 << 20
"""Bytes reserved outside the budget for the running process: modules, task records (60 MiB at 3,000 tasks a step), and dirty pages of files being
written, which a cgroup counts as well."""

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def memory_limit(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Return the bytes this process may use: the machine's memory or the cgroup's limit, whichever is smaller.

    Above memory.high of cgroup v2 the system slows a process down until it hardly moves, so this is a limit, too.

    Args:
        groups: directory of the cgroups.
        own: list of the cgroups of this process.
    """
    limits = [int(psutil.virtual_memory().total)]
    for directory, is_v1 in _groups_of("memory", groups, own):
        names = ("memory.limit_in_bytes",) if is_v1 else ("memory.max", "memory.high")
        limits.extend(int(text) for name in names if (text := _read(directory / name)).isdigit())
    return min(limits)


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Return the number of cores that this process may run on, or that its cgroup's share of processor time amounts to, rounded up.

    Args:
        groups: directory of the cgroups.
        own: list of the cgroups of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory, is_v1 in _groups_of("cpu", groups, own):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        share = " ".join(_read(directory / name) for name in files).split()  # microseconds of processor time in each period, and the period
        if len(share) == 2 and all(text.isdigit() and int(text) for text in share):
            cores = min(cores, math.ceil(int(share[0]) / int(share[1])))
    return cores


def default_ram_budget() -> int:
    """Return the default budget of host memory in bytes: 0.9 x (limit - resident memory now).

    If little memory is free, it is less by `RESERVE` instead, but at least half of the free memory.
    """
    free: int = memory_limit() - psutil.Process().memory_info().rss
    return max(min(int(0.9 * free), max(free - RESERVE, free // 2)), 1 << 20)


def memory_budgets(ram: int | None, device: int | None, num_devices: int) -> tuple[int, int]:
    """Return budgets of RAM and of each simulated device, whose memory is RAM as well; their sum is within the limit of this process.

    Args:
        ram, device: requested bytes; None for the default of `filled_budgets`.
        num_devices: number of simulated devices.

    Returns:
        Bytes of RAM and of each device.

    Raises:
        DoesNotFit: the requested bytes are above the limit.
    """
    check_budgets(ram, device, num_devices)
    return filled_budgets(ram, device, num_devices)


def check_budgets(ram: int | None, device: int | None, num_devices: int) -> None:
    """Check that requested budgets are within the limit of this process; the arguments are those of `memory_budgets`.

    Raises:
        DoesNotFit: the requested bytes are above the limit.
    """
    limit = memory_limit()
    requested = (ram or 0) + (device or 0) * num_devices
    if requested > limit:
        sizes = [AccessSize("", "ram", ram or 0), *(AccessSize("", f"sim:{number}", device) for number in range(num_devices) if device)]
        raise DoesNotFit(Shortage("reserve", "ram", requested, limit, sizes=tuple(sizes)))


def filled_budgets(ram: int | None, device: int | None, num_devices: int) -> tuple[int, int]:
    """Return budgets of RAM and of each simulated device, without a check against the limit: requested values, or defaults.

    If neither budget is requested, both default to an equal part of the free memory. If one is, the other defaults to the bytes that it leaves, but a
    device gets at most as many bytes as RAM.
    """
    requested = (ram or 0) + (device or 0) * num_devices
    free = max(default_ram_budget() - requested, 1 << 20)
    if ram is None:
        ram = free // (num_devices + 1) if device is None else free
    if device is None:
        device = min(ram, max(default_ram_budget() - ram, 1 << 20) // max(num_devices, 1))
    return ram, device


def _groups_of(controller: str, groups: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each directory of a cgroup of this process, or of a parent of it, that has the controller; and whether it is of cgroup v1."""
    yield groups, False
    yield groups / controller, True
    for line in _read(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = groups / controller if controllers else groups
            group = root / name.lstrip("/")
            yield from ((directory, bool(controllers)) for directory in (group, *group.parents) if directory.is_relative_to(root))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def without_staging(ram: int, staging: int) -> int:
    """Return the budget of host memory without its buffers between the disk and GPUs.

    Raises:
        DoesNotFit: nothing remains.
    """
    if ram > staging:
        return ram - staging
    fact = f"the budget of host memory must exceed the {staging:,} B between the disk and GPUs, got {ram:,} B"
    raise DoesNotFit(Shortage("full", "ram", staging, ram), fact, "raise it")
