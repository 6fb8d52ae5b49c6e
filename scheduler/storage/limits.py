"""Limits on the host memory of this process: the machine's memory, cgroup limits (v1 and v2), and the memory already in use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

from ..core.errors import DoesNotFit

RESERVE: Final = 256 << 20
"""Bytes reserved beside the budget for the running process: modules, task records (60 MiB at 3,000 tasks a step), and dirty pages of files being
written, which a cgroup counts as well."""

_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit() -> int:
    """Bytes this process may use: the machine's memory or the cgroup's limit, whichever is smaller."""
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
    """Default budget of host memory: 0.9 x (limit - resident memory now); where the limit is small, less by `RESERVE`, but at least half. Bytes."""
    free: int = memory_limit() - psutil.Process().memory_info().rss
    return max(min(int(0.9 * free), max(free - RESERVE, free // 2)), 1 << 20)


def memory_budgets(ram: int | None, device: int | None, num_devices: int) -> tuple[int, int]:
    """Budgets of RAM and of each simulated device, whose memory is RAM as well; their sum is within the limit of this process.

    Args:
        ram, device: requested bytes; None for a default, see `filled_budgets`.
        num_devices: number of simulated devices.

    Returns:
        Bytes of RAM, and of each device.

    Raises:
        DoesNotFit: the requested bytes are above the limit.
    """
    check_budgets(ram, device, num_devices)
    return filled_budgets(ram, device, num_devices)


def check_budgets(ram: int | None, device: int | None, num_devices: int) -> None:
    """Check that requested budgets are within the limit of this process; arguments as of `memory_budgets`.

    Raises:
        DoesNotFit: they are above it.
    """
    limit = memory_limit()
    asked = (ram or 0) + (device or 0) * num_devices
    if asked > limit:
        devices = f" and {num_devices} of {device:,} B for simulated devices" if device and num_devices else ""
        raise DoesNotFit(
            f"a budget of {ram or 0:,} B{devices} is above the {limit:,} B of memory that this process may use (limit of the machine or of its "
            "cgroup); lower it, and name a disk for the rest",
            "ram",
        )


def filled_budgets(ram: int | None, device: int | None, num_devices: int) -> tuple[int, int]:
    """Budgets of RAM and of each simulated device, unchecked: the requested ones as they are, and defaults for the others.

    The default is an equal part of the free memory if neither budget is requested, else the bytes that the other one leaves, for a device at most as
    many as for RAM.
    """
    asked = (ram or 0) + (device or 0) * num_devices
    free = max(default_ram_budget() - asked, 1 << 20)
    if ram is None:
        ram = free // (num_devices + 1) if device is None else free
    if device is None:
        device = min(ram, max(default_ram_budget() - ram, 1 << 20) // max(num_devices, 1))
    return ram, device


def _own_cgroup_files() -> list[Path]:
    """Limit files of the cgroup of this process and of its parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, leaf = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, leaf = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = root / name.lstrip("/")
        found += [directory / leaf for directory in (group, *group.parents) if directory.is_relative_to(root)]
    return found
