"""Seconds of a planned step on an imaginary device, compared with a lower bound over all ways to keep, move and recompute
its data (`time_bound`; needs SciPy).

The plan and its seconds are those of `nntask plan` with `--recompute auto`; the time is virtual. A bound holds for one order of the recorded step.
There is one for each order of the planners, and one for the order in which the plan executes these tasks (without clones), if that is another one.
The smallest bound limits what a better choice of kept, moved and recomputed data could reach; the machine follows the planned order closely, but not
always exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from time_bound import TimedStep

    from nntask.hardware import MachineModel
    from scheduler.planning import PlannedOrder

PLANNED: Final = "as planned"
"""The order in which the plan executes the tasks of the recorded step, if no candidate is the same."""


@dataclass(frozen=True, slots=True)
class BoundSettings:
    """Compare the plan of a step for a device of little memory with a lower bound."""

    json: bool = False
    """print JSON"""
    model: str = "gpt2"
    """preset"""
    config_path: str = ""
    """config, a JSON file with Hugging Face keys; instead of --model"""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    """what products compute in"""
    batch: int = 32
    """sequences per step"""
    minibatch: int = 8
    """sequences in flight at once"""
    seq_len: int | None = None
    """tokens per sequence (default: 1024, or as many as the model takes)"""
    device: str = "4GiB@150TF"
    """MEMORY[@FLOPS] of the device"""
    link: str = "25GB/s"
    """bytes per second of its link, in each direction"""
    ram: str = ""
    """byte budget of RAM (default: boundless)"""


def run(settings: BoundSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the same figures as lines of text.

    Raises:
        UsageError: a flag is wrong, or SciPy is not installed.
        DataError: the config cannot be read.
        DoesNotFit: the step does not fit the device.
    """
    from importlib.util import find_spec

    from jobs import on_devices, run_of

    from nntask import DoesNotFit, UsageError
    from nntask.config import ModelSettings, TilingSettings, parse_devices
    from nntask.planning import capture, no_collections, order_or_needs, plan_step, with_few_tasks

    if find_spec("scipy") is None:
        raise UsageError('the bound is a linear program for SciPy, which is not installed; pip install -e ".[bench]"')
    parse_devices(settings.device, "--device")
    model = ModelSettings(model=settings.model, dtype=settings.dtype, seq_len=settings.seq_len)
    tiling = TilingSettings(batch=settings.batch, minibatch=settings.minibatch)
    train, config, target = on_devices(model, settings.config_path, tiling, settings.ram, f"1x{settings.device}", settings.link)
    job = with_few_tasks(run_of(train, config), target, "--device")
    with no_collections():
        found = capture(job)
        order, needs = order_or_needs(found, job, target)
        planned = plan_step(found, job, target, lambda needs, full: (), order, needs)
        if not planned["feasible"]:
            raise DoesNotFit(f"{planned['refusal']}; enlarge --device {settings.device}" + (f" or --ram {settings.ram}" if settings.ram else ""))
        names = ("seconds_per_step", "order", "recompute", "tasks_per_step", "needed_bytes", "moved_bytes_per_step")
        figures: dict[str, Any] = {"model": settings.config_path or settings.model, "device": settings.device, "link": settings.link}
        figures |= {name: planned[name] for name in names} | _bounds(_timed(found.plan, target), order, target)
    figures["over_bound"] = figures["seconds_per_step"] / figures["bound_seconds"]
    return figures, list(_lines(figures))


def _timed(plan: Any, target: MachineModel) -> TimedStep:
    """Return the step with the seconds of its tasks and copies on the one device of a machine."""
    from time_bound import TimedStep

    from nntask.hardware import pace_on
    from scheduler.machine import NodeId

    (device,), host, models = (NodeId(node) for node in target.compute_nodes), NodeId(0), target.models
    return TimedStep(
        plan,
        lambda planned: pace_on(planned, target).seconds,
        lambda nbytes: models.transfer_seconds(host, device, nbytes),
        lambda nbytes: models.transfer_seconds(device, host, nbytes),
    )


def _bounds(step: TimedStep, order: PlannedOrder, target: MachineModel) -> dict[str, Any]:
    """Return the seconds of all tasks, the bounds of all orders with and without recomputation, and the smallest bound with recomputation."""
    from time_bound import order_in

    from scheduler.planning import candidates

    orders, planned = candidates(step.plan), order_in(step.plan, order)
    same = next((name for name, positions in orders.items() if positions == planned), None)
    if same is None:
        orders[PLANNED] = planned
    rows: list[dict[str, Any]] = [
        {
            "order": name,
            "is_planned": name == (same or PLANNED),
            "seconds": step.least_seconds(positions, target.memory),
            "seconds_without_recompute": step.least_seconds(positions, target.memory, again=False),
        }
        for name, positions in orders.items()
    ]
    least = min(rows, key=lambda row: row["seconds"])
    return {"task_seconds": step.tasks, "bounds": rows, "bound_seconds": least["seconds"], "bound_order": least["order"]}


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figures['model']} on a device of {figures['device']}, link of {figures['link']}: {figures['tasks_per_step']:,} tasks, "
        f"needs {figures['needed_bytes'] / 1e9:.1f} GB"
    )
    yield f"plan   {figures['seconds_per_step']:9.4g} s in order {figures['order']}; made again: {figures['recompute']}"
    yield f"tasks  {figures['task_seconds']:9.4g} s, nothing made again"
    yield f"bound  {figures['bound_seconds']:9.4g} s, the least of the orders below; the plan takes {figures['over_bound']:.3f} times as long"
    for row in figures["bounds"]:
        mark = "  (the plan's)" if row["is_planned"] else ""
        yield f"  {row['order']:13} {row['seconds']:9.4g} s, with nothing made again {row['seconds_without_recompute']:9.4g} s{mark}"


if __name__ == "__main__":
    from jobs import main

    sys.exit(main(BoundSettings, run))
