"""``nntask plan``: needs and costs of a training step on a machine, from shapes alone: without data and kernels, and without writing files.

`memory_fit` determines the needs. For the costs, the captured step is replayed in virtual time, in the order that a run would choose
(`virtual_replay`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, Final

import scheduler
from scheduler import SCRATCH, DataClass, W
from scheduler.machine import StepPlan
from scheduler.planning import PlannedOrder, on_kinds
from scheduler.simulation import Simulation

from ..adapters.lora import largest_rank
from ..architecture.family_config import ModelConfig
from ..config.machine import devices_of
from ..config.objective import image_shape
from ..config.resolution import resolve
from ..config.run_config import LanguageRun, RunConfig
from ..config.settings import TrainSettings
from ..hardware.imaginary import coarse_tiling
from ..hardware.machine_model import MachineModel, this_machine
from ..hardware.machine_spec import MachineSpec, check_budgets
from ..models.registry import family_of
from ..telemetry.explain import matching
from ..tiling.model_tiling import default_tiling
from .assignment import pinned_kinds
from .fit_advice import advice, with_free_order
from .memory_fit import (
    CapturedStep,
    capture,
    least_needs,
    least_tasks,
    most_tiles,
    no_collections,
    order_or_needs,
)
from .needs import Needs, shortage
from .run_candidates import best_updater, with_few_tasks
from .value_figures import order_figures
from .virtual_replay import replay

_OF_SHORTAGE: Final = ("cause", "node", "needed", "budget", "taken", "task")
"""Fields of `scheduler.Shortage` that ``nntask plan --json`` contains."""
_LOG: Final = logging.getLogger(__name__)

IN_FLIGHT: Final = 2
"""Number of steps in flight in training."""
LEAST_BYTES_A_WEIGHT: Final = 4
"""Least bytes of the last tier for a trained weight, of any type and with any optimizer. Models that need more than the tier has are not captured."""
MANY_TASKS: Final = 40_000
"""Largest number of tasks for which other models and minibatches are captured."""


def plan_run(
    settings: TrainSettings, config: ModelConfig, target: MachineModel | None = None, *, machine: MachineSpec | None = None, reach: bool = True
) -> dict[str, Any]:
    """Return the figures of ``nntask plan --json``.

    Args:
        target: imaginary machine, for which tiles are large by default; None for this machine with the budgets of the settings.
        machine: devices and budgets of this machine, if they are known; None to take them from the settings.
        reach: whether to search for the largest model and minibatch that fit.

    Raises:
        UsageError: a rule is broken, or the step has no such order, or no task of a name to be explained.
        DoesNotFit: a budget is not available; or imaginary devices are too small to capture a step in their tiles.
    """
    if target is not None:
        machine = devices_of(settings.resources, settings.model.dtype, checks=False)
    run = asked = resolve(settings, config, machine=machine)
    if target is None:
        check_budgets(run.machine)
        target = this_machine(run.machine)
    else:
        run = with_few_tasks(asked, target)
    anew = (lambda larger: with_few_tasks(asked, larger)) if target.is_imaginary else None
    with no_collections():
        chosen = best_updater(run, target)
        run, target = chosen.run, chosen.target
        kinds, order = pinned_kinds(run, chosen.order), chosen.order
        if kinds is not None:
            order = replace(order, plan=on_kinds(order.plan, kinds, {kind for kind, _, _ in target.workers}))
        figures = plan_step(chosen.step, run, target, lambda needs, full: advice(run, target, needs, full=full, anew=anew), order, chosen.needs)
        figures["gpu_attention"] = settings.model.gpu_attention
        figures["update_on"], figures["seconds_by_update"] = run.step.update_on, dict(chosen.seconds)
        figures["tiles"] = {name: getattr(run.model.tiling, name) for name in run.model.tiling.__slots__}
        if reach:
            figures.update(_reach(run, target, len(chosen.step.plan.tasks)))
    return figures


def plan_step(
    found: CapturedStep,
    run: LanguageRun,
    target: MachineModel,
    changes: Callable[[Needs, str], Sequence[str]],
    order: PlannedOrder | None = None,
    needs: Needs | None = None,
) -> dict[str, Any]:
    """Return the figures of a captured step on a machine.

    Args:
        changes: function that returns the changes that would make the step fit. Its arguments are the needs of the step, and the memory that was too
            small although the machine has the least needs ("" for none).
        order: planned order of the step, if it is known.
        needs: needs of the step, if they are known with its order.

    Raises:
        UsageError: the step has no order of the requested name, or no task of a name to be explained.
    """
    plan = found.plan
    matching(run.settings.observe.explain, {task.name for task in plan.tasks})
    if order is None:
        order, needs = order_or_needs(found, run, target)
    if needs is None:
        needs = least_needs(plan, target, run.step.recompute, run.step.order, reading=found.reading)
    simulation, worst, refusal, lack = _simulate(order, run, target, needs)
    num_trained = sum(prod(tensor.shape) for tensor in found.trained.values())
    figures = _figures(run, target, order, needs, num_trained)
    figures["submission_needed_bytes"] = plan.needed_bytes()
    if simulation is not None:
        figures.update(_costs(simulation, run, target))
        if worst is not None:
            figures["worst_case"] = {"moved_bytes_per_step": sum(worst.moved_bytes.values()), "seconds_per_step": worst.seconds}
    else:  # a step that does not run has no traffic and no times
        figures.update(forecast_bytes=None, forecast_seconds=None, seconds_without_recompute=None, values=[])
    figures["feasible"] = simulation is not None
    figures["refusal"] = refusal
    figures["shortage"] = None if lack is None else {name: getattr(lack, name) for name in _OF_SHORTAGE}
    full = lack.node if lack is not None and needs.fit(target) else ""
    figures["advice"] = [] if simulation is not None else list(changes(needs, full))
    return figures


def _simulate(
    order: PlannedOrder, run: LanguageRun, target: MachineModel, needs: Needs
) -> tuple[Simulation | None, Simulation | None, str, scheduler.Shortage | None]:
    """Return the expected costs of the step, with the memory of file readers, and those if all conditional tasks run; or why it cannot run.

    Peaks are the higher ones of both, which the budget must hold. Without conditional tasks there is no second result.
    """
    if not needs.fit(target):
        lack = shortage(target, needs)
        return None, None, lack.fact, lack
    target = target.without(needs.reading)
    shares = [task.share for task in order.plan.tasks if task.condition is not None]
    try:
        replayed = replay(order.plan, target, run.machine.scheduling)
        worst = replay(order.plan, target, run.machine.scheduling, worst=True) if min(shares, default=1.0) < 1.0 else replayed
    except scheduler.DoesNotFit as error:
        return None, None, error.fact, error.shortage
    higher = {node: worst if worst.peak_bytes[node] > replayed.peak_bytes[node] else replayed for node in replayed.peak_bytes}
    classes = {node: dict(result.peak_bytes_by_class[node]) for node, result in higher.items()}
    simulation = replace(replayed, peak_bytes={node: result.peak_bytes[node] for node, result in higher.items()}, peak_bytes_by_class=classes)
    nbytes, data_class = _largest_output(order.plan)
    for node_number, (node, budget) in enumerate(target.memories):
        if node_number and not simulation.peak_bytes[node]:  # no task was sent there
            continue
        workers = sum(node == node_number or node_number == 0 for _, node, _ in target.workers)  # host memory also receives the outputs of devices
        _raise_peak(simulation, node, data_class, min(IN_FLIGHT * workers * nbytes, budget - simulation.peak_bytes[node]))
    _raise_peak(simulation, target.nodes[0][0], "scratch", needs.reading)
    return simulation, worst if shares else None, "", None


def _largest_output(plan: StepPlan) -> tuple[int, DataClass]:
    """Return the bytes and class of the largest temporary tile: written by a task, and dropped after its last reader.

    The peak of a run depends on which of two workers is first: it may grow by these bytes for each worker, in each of the steps in flight.
    """
    made = (handle for task in plan.tasks for handle, mode in task.accesses if mode == W and plan.owned.get(handle) is False)
    largest = max(made, key=lambda handle: handle.spec.size, default=None)
    return (0, "activations") if largest is None else (largest.spec.size, largest.spec.data_class)


def _raise_peak(found: Simulation, node: str, data_class: str, nbytes: int) -> None:
    found.peak_bytes[node] += nbytes
    by_class = found.peak_bytes_by_class[node]
    by_class[data_class] = by_class.get(data_class, 0) + nbytes


def _figures(run: LanguageRun, target: MachineModel, order: PlannedOrder, needs: Needs, num_trained: int) -> dict[str, Any]:
    """Return the figures that are known before virtual time."""
    last = target.nodes[target.last][0]
    names = Counter(task.name for task in order.plan.tasks)
    return {
        "feasible": False,
        "peak_bytes": {last: needs.last(target)},
        "minimum_budget_bytes": needs.minimum(target),
        "persistent_bytes": {last: needs.persistent},
        "moved_bytes_per_step": {},
        "tasks_per_step": len(order.plan.tasks),
        "seconds_per_step": None,
        "batch": run.step.batch,
        "seq_len": run.model.seq_len,
        "parameters": run.model.config.num_parameters,
        "trained_parameters": num_trained,
        "budget_bytes": dict(target.budgets),
        "needed_bytes": order.plan.needed_bytes(),
        "bytes_by_class": _by_class(order.plan),
        **order_figures(order, run, target),
        "link_bytes_per_second": target.link_rate if target.is_imaginary else None,
        "disk_bytes_per_second": target.disk_rate if target.is_imaginary and target.storage else None,
        "policy": target.policy,
        "evict": run.machine.scheduling.evict,
        "workers": dict(Counter(f"{kind}@{target.nodes[node][0]}" for kind, node, _ in target.workers)),
        "worst_case": None,
        "tasks_by_name": dict(names.most_common()),
        "gpu_attention": "own",
        "update_on": "device",
        "seconds_by_update": {},
        "tiles": {},
        "largest_model": None,
        "largest_minibatch": None,
        "largest_minibatch_is_of_tasks": False,
    }


def _by_class(plan: StepPlan) -> dict[str, int]:
    """Return the largest number of bytes of each class that live at once, in the planned order with one task at a time."""
    changes: dict[str, Counter[int]] = {}
    for handle, use in plan.uses.items():
        change = changes.setdefault(handle.spec.data_class, Counter())
        if dict(plan.tasks[use.positions[0]].accesses)[handle] == SCRATCH:
            for position in use.positions:
                change[position] += handle.spec.size
                change[position + 1] -= handle.spec.size
        else:
            change[-1 if use.needs_data else use.positions[0]] += handle.spec.size
            if plan.owned.get(handle) is False:
                change[use.positions[-1] + 1] -= handle.spec.size
    peaks = {}
    for name, change in sorted(changes.items()):
        live = highest = 0
        for position in sorted(change):
            live += change[position]
            highest = max(highest, live)
        peaks[name] = highest
    return peaks


def _costs(found: Simulation, run: LanguageRun, target: MachineModel) -> dict[str, Any]:
    """Return the figures from virtual time. CPU workers that only relieve devices do not count as idle."""
    busy = [seconds for seconds, (kind, _, _) in zip(found.busy_seconds, target.workers, strict=True) if not (target.aside and kind == "cpu")]
    tokens = run.step.batch * run.model.seq_len
    return {
        "peak_bytes": found.peak_bytes,
        "peak_bytes_by_class": found.peak_bytes_by_class,
        "moved_bytes_per_step": {link: nbytes for link, nbytes in found.moved_bytes.items() if nbytes},
        "seconds_per_step": found.seconds,
        "tokens_per_second": tokens / found.seconds if found.seconds else None,
        "busy_share": sum(busy) / (len(busy) * found.seconds) if found.seconds else None,
        "evictions_per_step": found.num_evictions,
    }


def _reach(run: RunConfig, target: MachineModel, num_tasks: int) -> dict[str, Any]:
    """Return the largest preset of the family and the largest minibatch that fit this machine with these flags; None if the search is long."""
    _LOG.info("looking for the largest model and minibatch that fit")
    per_minibatch = num_tasks / run.step.num_minibatches
    run = with_free_order(run)  # other steps have other orders
    largest, is_of_tasks = (None, False) if 4 * per_minibatch > MANY_TASKS else _largest_minibatch(run, target)
    return {
        "largest_model": _largest_model(run, target, per_minibatch / least_tasks(run)),
        "largest_minibatch": largest,
        "largest_minibatch_is_of_tasks": is_of_tasks,
    }


def _largest_model(run: RunConfig, target: MachineModel, ratio: float) -> str | None:
    """Return the largest preset of the family that fits, where steps have `ratio` times `least_tasks`.

    Tile sizes come from the table for each preset. Two minibatches at most are captured, since more need no more memory.
    """
    adapters, minibatch = run.model.adapters, run.step.minibatch
    for name, preset in sorted(family_of(run.model.config).presets.items(), key=lambda item: -item[1].num_parameters):
        if adapters is not None and adapters.rank > largest_rank(preset, experts=adapters.experts):
            continue
        if image_shape(preset) != image_shape(run.model.config):  # its images have another shape than those of the run
            continue
        if adapters is None and LEAST_BYTES_A_WEIGHT * preset.num_parameters > target.nodes[target.last][1]:
            continue
        length = min(run.model.seq_len, preset.n_positions)
        if target.rates is not None:
            tiling = coarse_tiling(preset, minibatch, length, target)
        else:
            tiling = default_tiling(preset, minibatch, length, device=run.machine.gpus.device_class)
        changed = run.with_model(config=preset, seq_len=length, tiling=tiling.resolve(preset, minibatch, length))
        count = min(2, run.step.num_minibatches)
        if count * ratio * least_tasks(changed) > MANY_TASKS:
            continue
        if least_needs(capture(changed, count).plan, target, changed.step.recompute, changed.step.order, quick=True).fit(target):
            return name
    return None


def _largest_minibatch(run: RunConfig, target: MachineModel) -> tuple[int, bool]:
    """Return the largest number of sequences in a minibatch that fits, in whole tiles of this size, and whether only the number of tasks limits it.

    A tile adds at most its bytes in each class of data. The search adds as many tiles as the free bytes allow by that bound, and captures the step
    again while that is quick. If the bound allows none, one more tile is tried, since most tiles add less. The returned size fits.
    """
    step, last = run.model.tiling.minibatch_tile, target.nodes[target.last][0]

    @cache
    def step_of(size: int) -> tuple[RunConfig, CapturedStep]:
        changed = run.cut(batch=size, minibatch=size).with_model(tiling=run.model.tiling.resolve(run.model.config, size, run.model.seq_len))
        return changed, capture(changed)

    def look(size: int, *, quick: bool = True) -> tuple[Needs, int, int]:
        """Return the needs of a step of one such minibatch, the bytes of all classes with inputs for two steps, and the number of tasks.

        Args:
            quick: argument of `least_needs`.
        """
        changed, captured = step_of(size)
        inputs = sum(handle.spec.size for handle in captured.plan.uses if handle.spec.kind == "input")
        nbytes = sum(_by_class(captured.plan).values()) + inputs
        needs = least_needs(captured.plan, target, changed.step.recompute, changed.step.order, quick=quick, reading=captured.reading)
        return needs, nbytes, len(captured.plan.tasks)

    first, least, _ = look(step)
    needs, nbytes, num_tasks = look(2 * step)
    if not needs.fit(target):
        return (step if first.fit(target) else 0), False
    growth = max(nbytes - least, needs.last(target) - first.last(target), 1)
    size, most, quick = 2 * step, most_tiles(run.cut(batch=step, minibatch=step)) * step, MANY_TASKS // 2 // num_tasks * step
    limit = most  # larger sizes do not fit
    if size >= quick:
        needs, _, _ = look(size, quick=False)
    while size < limit:
        free = target.budgets[last] - needs.minimum(target)[last]
        larger = min(size + free // growth * step, limit)
        if size >= quick:
            return larger, larger == most
        larger = min(max(larger, size + step), quick)
        larger_needs, more, _ = look(larger, quick=larger < quick)  # the least needs, since no further step is captured
        growth = max(growth, -(-max(more - nbytes, larger_needs.last(target) - needs.last(target)) * step // (larger - size)))
        if larger_needs.fit(target):
            size, needs, nbytes = larger, larger_needs, more
        else:
            limit = larger - step
    return size, size == most
