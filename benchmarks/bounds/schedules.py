"""Seconds and bytes of a step under every scheduling policy on imaginary machines, in virtual time, with lower bounds.

The bounds are those of `scheduler.planning.bounds` for devices with a link of their own each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nntask.hardware import MachineModel
    from scheduler.machine import StepPlan
    from scheduler.simulation import Duration


@dataclass(frozen=True, slots=True)
class SchedSettings:
    """Compare scheduling policies on imaginary machines."""

    json: bool = False
    """print JSON"""
    model: str = "gpt2"
    """preset"""
    config_path: str = ""
    """GPT-2 or LLaMA config, a JSON file with Hugging Face keys; instead of --model"""
    batch: int = 64
    """sequences per step"""
    minibatch: int = 8
    """sequences in flight at once"""
    seq_len: int | None = None
    """tokens per sequence (default: 1024, or as many as the model takes)"""
    counts: str = "1,2,4,8"
    """numbers of devices"""
    device: str = "80GiB@150TF"
    """MEMORY[@FLOPS] of each device"""
    link: str = "55GB/s"
    """bytes per second of each link"""
    ram: str = ""
    """byte budget of RAM (default: boundless)"""
    policies: str = ""
    """which, with commas (default: all)"""
    evict: str = "next-use"
    """eviction policy"""
    order: str = "auto"
    """in which order the step executes when memory is short"""


def run(settings: SchedSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the same figures as lines of text.

    Raises:
        UsageError: a flag is wrong.
        DataError: the config cannot be read.
    """
    from nntask import UsageError
    from nntask.config import check_most, parse_devices
    from scheduler.machine import EVICTION_POLICIES, POLICIES

    try:
        counts = [int(text) for text in settings.counts.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"--counts must be whole numbers of 1 or more with commas, got {settings.counts!r}; for example --counts 1,2,4,8")
    check_most("counts", max(counts))
    parse_devices(settings.device, "--device")
    policies = settings.policies.split(",") if settings.policies else list(POLICIES)
    if set(policies) - set(POLICIES):
        raise UsageError(f"--policies must be some of {', '.join(POLICIES)}, got {settings.policies!r}; for example --policies dmdas,reuse")
    if settings.evict not in EVICTION_POLICIES:
        raise UsageError(f"--evict must be one of {', '.join(EVICTION_POLICIES)}, got {settings.evict!r}; for example --evict lru")
    machines = [_machine(settings, count, policies) for count in counts]
    figures = {"model": settings.config_path or settings.model, "device": settings.device, "link": settings.link, "machines": machines}
    return figures, list(_lines(figures))


def _machine(settings: SchedSettings, count: int, policies: list[str]) -> dict[str, Any]:
    """Return the figures of one machine under every policy."""
    import gc

    from jobs import captured, on_devices

    from nntask import UsageError
    from nntask.config import ModelSettings, TilingSettings
    from nntask.hardware import durations
    from nntask.io import parse_rate
    from nntask.planning import order_on
    from scheduler.planning import Pace, lower_bounds

    model = ModelSettings(model=settings.model, seq_len=settings.seq_len)
    tiling = TilingSettings(batch=settings.batch, minibatch=settings.minibatch)
    train, config, target = on_devices(model, settings.config_path, tiling, settings.ram, f"{count}x{settings.device}", settings.link)
    gc.disable()  # plans are large and contain no garbage
    try:
        plan = captured(train, config, target)
        try:
            order = order_on(plan, settings.order, target, target.policy)
        except ValueError as error:
            raise UsageError(f"--order {settings.order}: {error}") from error
        known = durations(order.plan, target)
        rate = len(target.workers) * parse_rate(settings.link, "--link")
        pace = Pace({}, rate, rate, duplex=True)
        bounds = lower_bounds(order.plan, known.seconds["sim"], num_workers=len(target.workers), memory=target.memory, pace=pace)
        rows = [_row(policy, settings.evict, order.plan, target, known.of, max(bounds.values())) for policy in policies]
    finally:
        gc.enable()
    return {
        "devices": count,
        "tasks": len(plan.tasks),
        "needed_bytes": plan.needed_bytes(),
        "order": order.name,
        "auto": target.policy,
        "bounds_seconds": bounds,
        "policies": rows,
    }


def _row(policy: str, eviction: str, plan: StepPlan, target: MachineModel, duration: Duration, bound: float) -> dict[str, Any]:
    """Return the figures of a step under one policy, with the largest bound; the error message if the step does not fit."""
    from scheduler import SchedulerError
    from scheduler.simulation import simulate

    begin = perf_counter()
    row: dict[str, Any] = {"policy": policy}
    try:
        found = simulate(
            plan,
            workers=target.workers,
            nodes=target.nodes,
            policy=policy,
            duration=duration,
            transfer=target.models.transfer_seconds,
            eviction=eviction,
        )
        row |= {"seconds": found.seconds, "moved_bytes": sum(found.moved_bytes.values()), "over_bound": found.seconds / bound}
    except SchedulerError as error:
        row |= {"seconds": None, "refusal": error.fact}
    return {**row, "took_seconds": perf_counter() - begin}


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"{figures['model']} on devices of {figures['device']}, links of {figures['link']}"
    for machine in figures["machines"]:
        bounds = ", ".join(f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in machine["bounds_seconds"].items())
        size = f"{machine['tasks']:,} tasks, needs {machine['needed_bytes'] / 1e9:.1f} GB"
        yield f"{machine['devices']} devices: {size}, order {machine['order']}; {bounds}"
        for row in machine["policies"]:
            name = f"  {row['policy']:6}" + (" (auto)" if row["policy"] == machine["auto"] else "       ")
            if row["seconds"] is None:
                yield f"{name} {row['refusal']}"
            else:
                yield f"{name} {row['seconds']:9.3f} s  {row['over_bound']:5.2f} x bound  {row['moved_bytes'] / 1e9:9.2f} GB moved"


if __name__ == "__main__":
    from jobs import main

    sys.exit(main(SchedSettings, run))
