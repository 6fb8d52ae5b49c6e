"""``nntask plan``: memory, traffic and time that a training run would need, without running it. It takes the flags of ``nntask train`` and its
own."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final

from nntask.config import ResourceSettings, TrainSettings

from ..options.help import show_requested_help
from ..options.sources import Request, naming, request
from ..options.torch_extra import load_torch, through_torch
from ..output import Doing

OWN_FLAGS: Final[Mapping[str, type[bool] | type[str]]] = {"json": bool, "devices": str, "link": str, "disk-rate": str, "ram-rate": str}
"""Flags of ``nntask plan`` in addition to those of ``nntask train``, with their types."""
SILENT_SECONDS: Final[Mapping[bool, float]] = {True: 2.0, False: 10.0}
"""Whether standard error is a terminal -> time after which it shows what the planner is doing."""
_OF_DEVICES: Final = {"sim_gpu": "0", "ngpu": "0", "gpu_memory": ""}
"""Settings for devices of this machine, each with the value of its flag that asks for none."""


@dataclass(frozen=True, slots=True)
class PlanHelp:
    """Show the memory, traffic and time of a training run without running it. Takes all flags of nntask train; nothing is computed or written."""

    train: TrainSettings = field(default_factory=TrainSettings)
    config: str = ""
    """TOML file with any of these flags; the command line overrides it, and so do the environment variables that --help-all lists"""
    devices: str = ""
    """plan for an imaginary machine of devices, [COUNTx]MEMORY[@FLOPS], e.g. 8x80GiB@150TF; --ram and --disk (a SIZE) are then imaginary too"""
    link: str = ""
    """bytes per second between host memory and each imaginary device, in each direction, e.g. 55GB/s (default 25GB/s)"""
    disk_rate: str = ""
    """bytes per second of the imaginary --disk, all requests and both directions together, e.g. 6GB/s (default 1.6GB/s)"""
    ram_rate: str = ""
    """bytes per second that all CPU workers of the imaginary machine read and write in RAM if they update weights (default 100GB/s)"""
    json: bool = False
    """print JSON"""


def run(argv: Sequence[str]) -> int:
    """Print the plan; returns 0.

    Raises:
        UsageError: a flag or value is wrong.
        DoesNotFit: the run would not fit; the message says with which changes it would.
    """
    show_requested_help(PlanHelp, argv, "nntask plan")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    asked = request(argv, os.environ, extra=OWN_FLAGS)
    from nntask import UsageError
    from nntask.config import devices_of, imaginary_machine, open_tiles, sized
    from nntask.hardware import with_budgets
    from nntask.planning import choose_minibatch, plan_run
    from nntask.training import check_disk

    devices, link, disk_rate, ram_rate = (asked.extra[name] for name in ("devices", "link", "disk-rate", "ram-rate"))
    _check_flags(asked)
    settings = asked.settings
    if asked.untiled is not None:
        return _print(_figures_through_torch(asked), asked)
    assert asked.config is not None  # the model has tiles
    with naming(asked.sources), _offering_devices(asked):
        machine = asked.devices
        if asked.resumed is not None:  # the figures depend on the settings alone, not on the checkpoint's weights
            stored = settings

            def device_class() -> str:
                there = devices_of(stored.resources, stored.model.dtype, checks=False) if asked.devices is None else asked.devices
                return there.gpus.device_class

            filled, _, _ = sized(stored, asked.config, asked.resumed, device_class)
            settings = replace(settings, model=replace(settings.model, attention=filled.model.attention))  # resolved if it was "auto"
        if machine is None:
            settings = replace(settings, resources=_of_another_machine(settings.resources, asked.stated, devices))
        else:
            machine = with_budgets(machine)
            check_disk(machine.disk)
        if settings.tiling.auto_tile == "measured" and open_tiles(settings):
            remedy = "drop it, or see what it finds with nntask train --dry-run --auto-tile measured"
            raise UsageError("runs steps, and nntask plan runs nothing", remedy, flag="--auto-tile", value="measured")
        target = imaginary_machine(devices, settings.resources, link, disk_rate, ram_rate) if devices else None
        there = devices_of(settings.resources, settings.model.dtype, checks=False) if machine is None else machine
        with Doing("nntask.planning", SILENT_SECONDS[sys.stderr.isatty()]):
            settings, minibatch = choose_minibatch(settings, asked.config, there, target)
            figures = plan_run(settings, asked.config, target, machine=machine) | ({"minibatch": minibatch} if minibatch else {})
    return _print(figures, asked)


@contextmanager
def _offering_devices(asked: Request) -> Iterator[None]:
    """Name --devices in the refusal of a budget that this machine does not have."""
    from nntask import DoesNotFit

    try:
        yield
    except DoesNotFit as error:
        if asked.extra["devices"] or error.shortage is None or error.shortage.cause != "reserve":
            raise
        raise error.advising("or plan for another machine with --devices, such as 8x80GiB@150TF") from error


def _check_flags(asked: Request) -> None:
    """Check the flags of an imaginary machine, and --dask.

    Raises:
        UsageError: a flag has no effect.
    """
    from nntask import UsageError

    flags = {name: asked.extra[name] for name in ("ram-rate", "link", "disk-rate")}
    if not asked.extra["devices"] and (given := next((name for name, value in flags.items() if value), None)):
        why = {
            "ram-rate": "the RAM of an imaginary machine, and this one's is measured",
            "link": "imaginary devices and there are none",
            "disk-rate": "the disk of an imaginary machine, and this one's is measured",
        }
        raise UsageError(f"is about {why[given]}", "add --devices 8x80GiB@150TF, or drop it", flag=f"--{given}", value=flags[given])
    if dask := asked.settings.cluster.dask:
        raise UsageError(
            "belongs to nntask train, and a plan is of one machine",
            "drop it, and give the --batch of one node's minibatches",
            flag="--dask",
            value=dask,
        )


def _print(figures: Mapping[str, Any], asked: Request) -> int:
    """Print a plan; returns 0.

    Raises:
        DoesNotFit: the run would not fit.
    """
    from nntask import DoesNotFit
    from scheduler import Shortage

    if asked.untiled is not None and not asked.extra["json"]:
        print(through_torch(asked.untiled))
    print(json.dumps(figures, indent=1) if asked.extra["json"] else "\n".join(_lines(figures)))
    if not figures["feasible"]:
        remedy = f"it would fit with {', or '.join(figures['advice'])}"
        raise DoesNotFit(figures["refusal"], remedy, shortage=Shortage(**figures["shortage"]))
    return 0


def _figures_through_torch(asked: Request) -> Mapping[str, Any]:
    """Return the plan of a model without tiles."""
    from nntask.config import imaginary_machine, request_of

    assert asked.untiled is not None
    devices, link, disk_rate, ram_rate = (asked.extra[name] for name in ("devices", "link", "disk-rate", "ram-rate"))
    settings = asked.settings
    with naming(asked.sources), _offering_devices(asked):
        load_torch(asked.untiled)
        from ...torch.trainer.training import plan

        target = None
        if devices:
            settings = replace(settings, resources=_of_another_machine(settings.resources, asked.stated, devices))
            target = imaginary_machine(devices, settings.resources, link, disk_rate, ram_rate)
        machine = request_of(settings.resources, has_disk=False) if asked.machine is None else asked.machine
        with Doing("nntask.planning", SILENT_SECONDS[sys.stderr.isatty()]):
            return plan(settings, asked.values, *asked.untiled, asked.resumed, machine, target)


def _of_another_machine(resources: ResourceSettings, stated: Collection[str], devices: str) -> ResourceSettings:
    """Return resources without the devices and directories of this machine, which the environment or a resumed run may have set.

    Args:
        resources: the resources.
        stated: names of the flags on the command line or in the TOML file; there they are mistakes.
        devices: value of --devices, for the message.

    Raises:
        UsageError: one of these flags has a value.
    """
    from nntask import UsageError
    from nntask.config import SUFFIXES, flag_of, has_size, typed

    for name, nothing in _OF_DEVICES.items():
        value, names = typed(resources, name), {name, *(inner for inner, suffix in SUFFIXES.items() if suffix.flag == name)}
        if value not in (nothing, "") and {each.replace("_", "-") for each in names} & set(stated):
            raise UsageError(
                f"is about this machine, and --devices {devices} is another one",
                "give its devices, and their memory, with --devices, the rate of their links with --link, or drop it",
                flag=flag_of(name),
                value=value,
            )
    disk = resources.disk if "disk" in stated or has_size(resources.disk) else ""
    return replace(resources, sim_gpu=0, sim_bandwidth="", ngpu=None, split_gpu=1, gpu_memory="", disk=disk)


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plan as lines of text."""
    from nntask.io import format_size
    from nntask.planning import told_updater

    yield f"parameters          {figures['parameters']:,}"
    if figures["trained_parameters"] != figures["parameters"]:
        yield f"trained             {figures['trained_parameters']:,} weights of adapters"
    yield f"tasks per step      {figures['tasks_per_step']:,}"
    sizes = ", ".join(f"{name.removesuffix('_tile')} {size}" for name, size in figures["tiles"].items())
    if "minibatch" in figures:
        yield f"minibatch           {figures['minibatch']}"
    cut = [f"{rows} rows of {name}" for name, rows in figures.get("rows_of_tiles", {}).items()]
    yield f"tiles               {sizes or ', '.join(['each tensor is one', *cut])}"
    yield (
        "workers             "
        + ", ".join(f"{sum(figures['workers'][one] for one in each)} x {name}" for name, each in _alike(figures["workers"]).items())
        + f"; policy {figures['policy']}"
    )
    if figures["link_bytes_per_second"] is not None:
        disk = figures["disk_bytes_per_second"]
        text = f"{figures['link_bytes_per_second'] / 1e9:.3g} GB/s between RAM and each device, in each direction"
        yield f"rates               {text}" + (f"; disk {disk / 1e9:.3g} GB/s, all requests together" if disk is not None else "")
    order = figures["order"]
    in_order = "" if order == "submission" else f"{format_size(figures['needed_bytes'])} in order {order}, "
    yield (
        f"needed              {format_size(figures['submission_needed_bytes'])} at once if nothing moves; {in_order}most of each kind "
        + ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in figures["bytes_by_class"].items() if nbytes)
    )
    yield from _budgets(figures)
    yield from _orders(figures)
    if figures["update_on"] == "cpu" or figures["seconds_by_update"]:
        yield f"weights             updated {told_updater(figures['update_on'], figures['seconds_by_update'])}"
    yield from _recomputed(figures)
    for link, nbytes in _grouped(figures["moved_bytes_per_step"]).items():
        yield f"{link:19} {nbytes / 1e9:.2f} GB per step, simulated"
    if figures["seconds_per_step"] is not None:
        rate = figures["tokens_per_second"]
        pace = f"{figures['seconds_per_step']:.3g}, {rate:{',.0f' if rate >= 10 else '.2g'}} tokens/s, {figures['busy_share']:.0%} busy"
        yield f"seconds per step    {pace}, simulated"
    if (worst := figures["worst_case"]) is not None:
        moved = sum(figures["moved_bytes_per_step"].values())
        yield f"expected            {moved / 1e9:.2f} GB moved and {figures['seconds_per_step']:.3g} s per step: tokens choose experts evenly"
        moved, seconds = worst["moved_bytes_per_step"], worst["seconds_per_step"]
        yield f"worst case          {moved / 1e9:.2f} GB moved and {seconds:.3g} s per step: every expert is chosen; the budget holds this case"
    yield from _result(figures)


def _orders(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the memory outside the budget, the forecast of each order, and the library for attention."""
    from nntask.io import format_size

    if (outside := figures.get("outside_budget_bytes")) is not None:
        beside = f"up to {format_size(outside['beside'])} of recorded steps and kernels' working memory"
        yield f"outside --ram       {format_size(outside['imports'])} of imports, and {beside}"
    order = figures["order"]
    judged = f": {figures['judged_seconds']:.3g} s in virtual time" if figures.get("judged_seconds") else ""
    mark = " (given)" if figures["order_is_given"] else f" (chosen{judged})"
    for name, nbytes in (figures["forecast_bytes"] or {}).items():
        about = f"forecast about {nbytes / 1e9:.2f} GB moved and {figures['forecast_seconds'][name]:.3g} s a step"
        yield f"{'order ' + name:19} {about}" + (mark if name == order else "")
    if figures["forecast_bytes"] == {}:
        memories = "" if len(figures["minimum_budget_bytes"]) == 1 else ": into the memories where tasks run, all of them together"
        yield f"order               {order}: everything fits{memories}"
    yield from _attention(figures)


def _result(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the largest minibatch and model that fit, and whether the run fits or which changes would make it fit."""
    if (largest := figures["largest_minibatch"]) is not None:
        fits = f"{largest:,} sequence{'' if largest == 1 else 's'} at once" if largest else "none fits"
        more = ", or more in larger ones: a step may have no more tasks" if figures["largest_minibatch_is_of_tasks"] else ""
        yield f"largest minibatch   {fits}, with these tiles{more}"
    if figures["largest_model"] is not None:
        shape = f"with --batch {figures['batch']} --seq-len {figures['seq_len']} or less"
        yield f"largest --model     {figures['largest_model']} of this family, {shape}" + (
            "" if figures["feasible"] else ", in tiles of its own, would fit instead"
        )
    if figures["feasible"]:
        yield "feasible            yes"
    else:
        yield "feasible            no: " + figures["refusal"]
        for change in figures["advice"]:
            yield f"it would fit with   {change}"


def _alike(values: Mapping[str, object]) -> Mapping[str, Sequence[str]]:
    """Return neighbouring names of one kind (``gpu:0``) with equal values, grouped under one name (``gpu:0..7``)."""
    groups = [list(names) for _, names in groupby(values, key=lambda name: (name.partition(":")[0], values[name]))]
    return {names[0] + (f"..{names[-1].partition(':')[2]}" if len(names) > 1 else ""): names for names in groups}


def _budgets(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the budget of each memory, its minimum and its largest use."""
    from nntask.config import BOUNDLESS
    from nntask.hardware import DISK
    from nntask.io import format_least, format_size

    least = figures["minimum_budget_bytes"]
    for name, nodes in _alike({node: (budget, least[node]) for node, budget in figures["budget_bytes"].items()}).items():
        budget, nbytes = figures["budget_bytes"][nodes[0]], least[nodes[0]]
        shown = "boundless" if budget == BOUNDLESS else format_size(budget)
        peaks = [figures["peak_bytes"][node] for node in nodes if node in figures["peak_bytes"]] if figures["feasible"] else []
        word = "reserved" if name == DISK else "peak"
        yield (
            f"{name:19} budget {shown}, at least {format_least(nbytes)} ({nbytes:,} B)"
            + (f", {word}{' at most' if len(peaks) > 1 else ''} {format_size(max(peaks))}" if peaks else "")
        )


def _attention(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the library that computes attention on GPUs, unless it is nntask alone."""
    from nntask.io import format_size
    from tiles.kernels import ATTENTION_WORKSPACE_NBYTES

    size = format_size(ATTENTION_WORKSPACE_NBYTES)
    if figures["gpu_attention"] == "cudnn":
        count = sum(number for name, number in figures["tasks_by_name"].items() if name.startswith("whole_attention"))
        yield f"attention           cuDNN's in {count:,} tasks a step if it can; {size} of each GPU for its workspace are not in the budget"
    if figures["gpu_attention"] == "auto" and any(name.startswith("cuda") for name in figures["workers"]):
        yield f"attention           planned as nntask's own; training also times cuDNN's, for whose workspace {size} of each GPU must be left"


def _recomputed(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the recomputed data, and for each kind of recomputable data the decision and the cost of both ways; nothing if everything is kept."""
    from nntask.planning import headline, value_lines

    if figures["values"] or (figures["recompute_is_given"] and figures["recompute"] != "none"):
        yield f"recompute           {headline(figures)}"
        yield from value_lines(figures)


def _grouped(moved: Mapping[str, int]) -> Mapping[str, int]:
    """Return the bytes by link; if there are many links, by link between kinds of memory."""
    if len(moved) <= 6:
        return moved
    found: Counter[str] = Counter()
    for link, nbytes in moved.items():
        found["->".join(end.partition(":")[0] for end in link.split("->"))] += nbytes
    return found
