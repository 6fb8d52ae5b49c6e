"""How much host memory this process may use: machine and cgroup limits (v1 and v2), and what it uses already."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

RESERVE: Final = 256 << 20
"""What the process may take besides its budget once it runs: modules, task records, pages of files being written, which a cgroup counts as well.

Measured: 60 MiB more than at the start at 3,000 tasks a step; a run that saved 350 MB in a cgroup with 41 MiB left over for all this was killed.
"""

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
    """0.9 x (limit - resident memory now), bytes; where the limit is small, less by `RESERVE`, but at least half."""
    free: int = memory_limit() - psutil.Process().memory_info().rss
    return max(min(int(0.9 * free), max(free - RESERVE, free // 2)), 1 << 20)


def _own_cgroup_files() -> list[Path]:
    """Limit files of the cgroup this process is in, and of its parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, leaf = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            base, leaf = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = base / name.lstrip("/")
        found += [place / leaf for place in (group, *group.parents) if place.is_relative_to(base)]
    return found
