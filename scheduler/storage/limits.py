"""Limits on the host memory of this process: the machine's memory, cgroup limits (v1 and v2), and the memory already in use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

from ..core.errors import DoesNotFit
from ..core.shortage import AccessSize, Shortage

RESERVE: Final = 256 << 20
"""Bytes reserved outside the budget for the running process: modules, task records (60 MiB at 3,000 tasks a step), and dirty pages of files being
written, which a cgroup counts as well."""

_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit() -> int:
    """Return the bytes this process may use: the machine's memory or the cgroup's limit, whichever is smaller."""
    limits = [int(psutil.virtual_memory().total)]
    for path in (*_own_cgroup_files(), *map(Path, _FILES)):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


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


def _own_cgroup_files() -> list[Path]:
    """Return the limit files of the cgroup of this process and of its parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, leaf = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, leaf = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = root / name.lstrip("/")
        paths += [directory / leaf for directory in (group, *group.parents) if directory.is_relative_to(root)]
    return paths


def without_staging(ram: int, staging: int) -> int:
    """Return the budget of host memory without its buffers between the disk and GPUs.

    Raises:
        DoesNotFit: nothing remains.
    """
    if ram > staging:
        return ram - staging
    fact = f"the budget of host memory must exceed the {staging:,} B between the disk and GPUs, got {ram:,} B"
    raise DoesNotFit(Shortage("full", "ram", staging, ram), fact, "raise it")
