"""``nntask devices``: processor, workers and memory nodes, and the kernels and links that earlier runs have measured here."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntask.io import format_size

from ..options.help import parse

if TYPE_CHECKING:
    from scheduler.machine import Models, NodeId


@dataclass(frozen=True, slots=True)
class DevicesSettings:
    """Show the processor, memory and GPUs of this machine, and the measured speed of its kernels and links."""

    json: bool = False
    """print JSON"""
    ncpu: int | None = None
    """number of CPU workers (default: one per core, within the CPU quota, or 0 if GPUs are used)"""
    ngpu: int | None = None
    """number of GPUs; -1 is all and requires one, and NxP divides each of N GPUs into P devices (default: all if CuPy is installed)"""
    split_gpu: int = 1
    """number of devices that each GPU is divided into"""
    sim_gpu: int = 0
    """number of simulated devices"""
    gpu_memory: str = ""
    """memory budget of each GPU or simulated device, e.g. 1GiB, or a share of a GPU, e.g. 0.25"""
    ram: str = ""
    """memory budget in RAM, e.g. 2GiB (default: 0.9 of the free memory, shared with simulated devices)"""
    disk: str = ""
    """disk tier below RAM: DIR or DIR:SIZE"""


def run(argv: Sequence[str]) -> int:
    """Print the devices; returns 0.

    Raises:
        UsageError: a flag is wrong.
    """
    settings, _ = parse(DevicesSettings, argv, "nntask devices")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    facts = {**machine_facts(), **speed_facts(settings)}
    print(json.dumps(facts, indent=1) if settings.json else "\n".join(_lines(facts)))
    return 0


def machine_facts() -> dict[str, Any]:
    """Return the processor, cores, memory, and the libraries of fp32 and bf16 products."""
    import psutil

    from scheduler import usable_cores
    from scheduler.storage import default_ram_budget, memory_limit
    from tiles.kernels import bf16_products, fp32_products, has_bf16_products

    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "machine_cores": os.cpu_count() or 1,
        "ram_bytes": int(psutil.virtual_memory().total),
        "ram_limit_bytes": memory_limit(),
        "default_ram_budget_bytes": default_ram_budget(),
        "fp32": {"by": fp32_products()},
        "bf16": {"native": has_bf16_products(), "by": bf16_products()},
    }


def speed_facts(settings: DevicesSettings) -> dict[str, Any]:
    """Return the workers and nodes that `nntask train` would have with these flags, measured rates, and models of links.

    Raises:
        UsageError: a flag is wrong.
    """
    from nntask.config import ResourceSettings, TrainSettings, check_values, devices_of
    from nntask.hardware import RAM, check_budgets, gemm_peak, memory_bandwidth, open_store, this_machine, with_budgets
    from nntask.training import check_disk
    from scheduler.machine import DISK_LINK, MEMORY_LINK, Models

    asked = TrainSettings(resources=ResourceSettings(**{name: value for name, value in asdict(settings).items() if name != "json"}))
    check_values(asked)
    machine = with_budgets(devices_of(asked.resources, "fp32"))
    check_disk(machine.disk)
    check_budgets(machine)
    plan, target = machine.gpus, this_machine(machine)
    names = [*(name for name, _ in target.nodes), *(name for name in ("sim:0", "disk") if name not in dict(target.nodes))]
    store, models = open_store(names, plan.names), Models()
    store.load(models)
    threads = min(max(len(target.workers), 1), os.cpu_count() or 1)
    kernels: dict[str, Counter[str]] = {}
    for name, _, kind in models.series:
        kernels.setdefault(kind, Counter())[name] += 1
    return {
        "gpus": [asdict(card) for card in dict.fromkeys(card for card, _ in plan.devices)],
        "no_gpu_because": plan.why_none,
        "workers": dict(Counter(f"{kind}@{target.nodes[node][0]}" for kind, node, _ in target.workers)),
        "nodes": dict(target.nodes),
        "ram_budget_bytes": target.budgets[RAM],
        "ram_budget_is_given": bool(settings.ram),
        "gemm_peak_flops": gemm_peak(threads),
        "memory_bytes_per_second": memory_bandwidth(threads),
        "measured_on_threads": threads,
        "kernels_known": {kind: dict(sorted(found.items())) for kind, found in sorted(kernels.items())},
        "num_kernels_known": sum(found.total() for found in kernels.values()),
        "links": _links(models, store.names),
        "default_links": {name: {"latency_seconds": a, "bytes_per_second": b} for name, (a, b) in (("memory", MEMORY_LINK), ("disk", DISK_LINK))},
        "models_file": str(store.path),
    }


def _links(models: Models, names: Mapping[NodeId, str]) -> dict[str, dict[str, float]]:
    """Return the measured latency and rate of each link, by the names of its ends."""
    return {
        f"{names[source]}->{names[end]}": {"latency_seconds": link.latency, "bytes_per_second": link.bandwidth, "copies": len(link.samples)}
        for (source, end), link in sorted(models.links.items())
    }


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"cpu      {facts['cpu']}, {facts['cores']} cores for this process of {facts['machine_cores']}"
    yield f"ram      {format_size(facts['ram_bytes'])} in the machine, limit {format_size(facts['ram_limit_bytes'])}"
    yield f"budget   {format_size(facts['ram_budget_bytes'])} for tiles{'' if facts['ram_budget_is_given'] else ' by default'} (--ram)"
    bf16 = facts["bf16"]
    yield f"fp32     products by {facts['fp32']['by']}"
    yield f"bf16     products by {bf16['by']}" if bf16["native"] else f"bf16     computed in fp32: {bf16['by']}"
    for gpu in facts["gpus"]:
        free, whole = format_size(gpu["free_nbytes"]), format_size(gpu["nbytes"])
        yield f"gpu      {gpu['index']}: {gpu['name']}, compute capability {gpu['capability'] / 10:.1f}, {free} of {whole} free"
    if not facts["gpus"]:
        yield f"gpu      {facts['no_gpu_because'] or 'none is used: CuPy is not installed; --sim-gpu N simulates devices'}"
    yield "workers  " + ", ".join(f"{count} x {name}" for name, count in facts["workers"].items())
    yield "nodes    " + ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in facts["nodes"].items())
    yield (
        f"rates    {facts['gemm_peak_flops'] / 1e9:.0f} Gflop/s of fp32 matrix products and {facts['memory_bytes_per_second'] / 1e9:.1f} GB/s "
        f"of memory on {facts['measured_on_threads']} threads"
    )
    for kind, found in facts["kernels_known"].items():
        most = sorted(found, key=lambda name: (-found[name], name))[:6]
        yield (
            f"kernels  {sum(found.values())} measured on {kind} workers, of {len(found)} codelets: "
            + ", ".join(f"{name} ({found[name]})" for name in most)
            + (", ..." if len(found) > len(most) else "")
        )
    if not facts["kernels_known"]:
        yield "kernels  none measured yet; nntask train measures them"
    for name, link in facts["links"].items():
        yield f"link     {name}: {link['latency_seconds'] * 1e6:.0f} us + {link['bytes_per_second'] / 1e9:.2f} GB/s, from {link['copies']} copies"
    if not facts["links"]:
        yield "link     none measured yet; nntask bench links measures them"
    yield f"models   {facts['models_file']}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
