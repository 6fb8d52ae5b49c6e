"""``nntask devices``: the processor, its cores and the memory this process may use."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nntask.sizes import format_size

from .help import parse


@dataclass(frozen=True, slots=True)
class DevicesSettings:
    """Show what this machine offers."""

    json: bool = False
    """print JSON"""


def run(argv: Sequence[str]) -> int:
    """Print the devices."""
    settings, _ = parse(DevicesSettings, argv, "nntask devices")
    facts = machine_facts()
    if settings.json:
        print(json.dumps(facts, indent=1))
        return 0
    print(f"cpu     {facts['cpu']}, {facts['cores']} cores for this process of {facts['machine_cores']}")
    print(f"ram     {format_size(facts['ram_bytes'])} in the machine, limit {format_size(facts['ram_limit_bytes'])}")
    print(f"budget  {format_size(facts['default_ram_budget_bytes'])} for tiles by default (--ram)")
    print("gpu     none used by this version; --sim-gpu N simulates devices")
    return 0


def machine_facts() -> dict[str, Any]:
    """Processor, cores and memory."""
    import os

    import psutil

    from scheduler.runtime import usable_cores
    from scheduler.storage.limits import default_ram_budget, memory_limit

    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "machine_cores": os.cpu_count() or 1,
        "ram_bytes": int(psutil.virtual_memory().total),
        "ram_limit_bytes": memory_limit(),
        "default_ram_budget_bytes": default_ram_budget(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
