"""Candidates for a run that leaves choices open: the size of minibatches (``--minibatch auto``) and the workers that update the weights
(``--update-on auto``).

Each candidate is captured and planned like a run of its own. They are listed in order of preference: larger minibatches first, because smaller ones
have more and smaller tasks, which forecasts see only in part; then updates on devices, because CPUs round otherwise. A later one is chosen only if it
is clearly faster. Losses depend on the choice in their last bits, so it is written into the run's settings, and a resumed run keeps it.

CPU workers update in host memory, where the optimizer's state then stays (ZeRO-Offload: Ren et al., 2021): gradients come down and weights go up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeVar

import scheduler
from scheduler.planning import AUTO, PlannedOrder

from ..architecture.family_config import ModelConfig
from ..config.imaginary import BOUNDLESS, format_devices
from ..config.resolution import resolve
from ..config.run_config import RunConfig
from ..config.settings import TrainSettings, known
from ..config.tile_sizes import retiled
from ..errors import DoesNotFit, UsageError
from ..hardware.imaginary import COARSE_SHARE, LARGEST_SHARE, NUM_CPU, coarse_tiling
from ..hardware.machine_model import MachineModel, pace_on, this_machine
from ..hardware.machine_spec import MachineSpec, check_budgets
from ..io.units import format_size
from ..tiling.model_tiling import divisors
from .fit_advice import advice
from .memory_fit import MOST_TASKS, CapturedStep, capture, does_not_fit, has_too_many_tasks, no_collections, order_or_needs
from .needs import Needs

Updater = Literal["device", "cpu"]
Choice = TypeVar("Choice", bound="int | str")

GAIN: Final = 0.95
"""Ratio of seconds below which a candidate is clearly faster than a preferred one."""


class PlannedRun(NamedTuple):
    """A candidate of a run, with its planned step.

    Attributes:
        run: run with the choices in its settings.
        target: machine, with the CPU workers that the updater needs.
        step: captured step.
        order: planned order of the step.
        needs: needs of the step, if it does not fit.
        seconds: seconds of a step under each updater, if there was a choice; None for one that would not fit, or would move nothing.
    """

    run: RunConfig
    target: MachineModel
    step: CapturedStep
    order: PlannedOrder
    needs: Needs | None = None
    seconds: Mapping[Updater, float | None] = {}


class ChosenMinibatch(NamedTuple):
    """Settings with a minibatch.

    Attributes:
        settings: settings with the number of sequences.
        reason: phrase for users on the choice; "" if the settings were not open.
    """

    settings: TrainSettings
    reason: str = ""


def planned_run(run: RunConfig) -> PlannedRun:
    """Check that a run fits this machine, and choose its updater if that is open.

    The check takes no memory, and a second for 20,000 tasks; it takes longer to compare orders if budgets are short.

    Raises:
        DoesNotFit: a budget is too small or not available; the message has the shortage and changes that would make the step fit. If no updater fits,
            the message is about updates on devices.
        UsageError: the step has too many tasks, or no order of the requested name.
    """
    with no_collections():
        chosen = best_updater(run, this_machine(run.machine))
        if chosen.needs is not None:
            raise does_not_fit(chosen.target, chosen.needs, advice(chosen.run, chosen.target, chosen.needs))
    return chosen


def best_updater(run: RunConfig, target: MachineModel) -> PlannedRun:
    """Plan the step of a run on a machine that may be imaginary, with the best updater if that is open; the step need not fit.

    Raises:
        UsageError: the step has no order of the requested name.
    """
    candidates, updaters = dict[Updater, PlannedRun](), _open_updaters(run, target)
    for updater in updaters:
        candidates[updater] = candidate = _with_updater(run, target, updater)
        if candidate.needs is None and not candidate.order.forecasts:  # nothing is faster
            break
    fitting = {updater: candidate for updater, candidate in candidates.items() if candidate.needs is None}
    chosen = _preferred(fitting) if fitting else next(iter(candidates))
    if len(updaters) == 1:
        return candidates[chosen]
    moving = {updater: candidate.order for updater, candidate in fitting.items() if candidate.order.forecasts}
    return candidates[chosen]._replace(seconds={**dict.fromkeys(candidates), **expected(moving)})


def told_updater(updater: str, seconds: Mapping[Updater, float | None]) -> str:
    """Return the updater and the reason for it, to follow "weights are updated"."""
    where = {"cpu": "by CPU workers in RAM", "device": "where devices compute"}
    if not seconds:
        return where[updater]
    known = [f"{value:.3g} s a step {where[each]}" for each, value in seconds.items() if value is not None]
    does_not_fit = [where[each] for each, value in seconds.items() if value is None and len(seconds) > 1]
    reasons = [*([f"forecast {', '.join(known)}"] if known else ["everything fits"]), *(f"does not fit {each}" for each in does_not_fit if known)]
    return f"{where[updater]} (chosen: {'; '.join(reasons)})"


def choose_minibatch(settings: TrainSettings, config: ModelConfig, machine: MachineSpec, target: MachineModel | None = None) -> ChosenMinibatch:
    """Replace ``--minibatch auto`` by the best minibatch that fits. If none fits, take the smallest, so that the run is refused with advice.

    Args:
        machine: devices and budgets of this machine.
        target: imaginary machine; None for this one.

    Raises:
        UsageError: the run is on a cluster, whose nodes would choose for themselves; or another rule is broken.
        DoesNotFit: a budget is not available.
    """
    if settings.tiling.minibatch != AUTO:
        return ChosenMinibatch(settings)
    if settings.cluster.dask:
        raise UsageError("plans for one machine, and a cluster of --dask has several", "give a number", flag="--minibatch", value=AUTO)
    batch = known(resolve(_with(settings, -1), config, machine=machine).step.batch)
    per_tile = max(settings.tiling.minibatch_tile or 1, 1)
    candidates = dict[int, PlannedRun]()
    with no_collections():
        for size in (size for size in reversed(divisors(batch)) if size % per_tile == 0):
            run = resolve(_with(settings, size), config, machine=machine)
            try:
                run = run if target is None else with_few_tasks(run, target)
            except DoesNotFit:  # this minibatch, and each smaller one, needs too many tasks
                if not candidates:
                    raise
                break
            if has_too_many_tasks(run):
                break
            candidates[size] = best_updater(run, target or this_machine(run.machine))
    fitting = {size: candidate for size, candidate in candidates.items() if candidate.needs is None}
    if not fitting:
        return ChosenMinibatch(_with(settings, min(candidates, default=batch)))
    size = _preferred(fitting)
    return ChosenMinibatch(_with(settings, size), _reason(size, candidates, _seconds(fitting)))


def _preferred(candidates: Mapping[Choice, PlannedRun]) -> Choice:
    """Return the first candidate, unless a later one is clearly faster."""
    seconds = _seconds(candidates)
    best = next(iter(candidates))
    for choice in candidates:
        if seconds[choice] < GAIN * seconds[best]:
            best = choice
    return best


def _seconds(candidates: Mapping[Choice, PlannedRun]) -> dict[Choice, float]:
    """Return the seconds of planned runs by one measure; those of its tasks for a step that moves nothing."""
    seconds = expected({choice: candidate.order for choice, candidate in candidates.items()})
    return {choice: seconds[choice] or sum(pace_on(each.order.plan, each.target).seconds.values()) for choice, each in candidates.items()}


def expected(orders: Mapping[Choice, PlannedOrder]) -> dict[Choice, float]:
    """Return the seconds of planned steps by one measure, since forecasts and virtual time may differ by half.

    The measure is virtual time if all plans were judged by it, else the forecast; it is 0 if everything fits.
    """
    are_judged = all(order.judged_seconds for order in orders.values())
    return {choice: order.judged_seconds if are_judged else order.seconds for choice, order in orders.items()}


def _open_updaters(run: RunConfig, target: MachineModel) -> Sequence[Updater]:
    """Return the updaters that a run may have."""
    if run.step.update_on != AUTO:
        return (run.step.update_on,)
    return ("device", "cpu") if max(target.compute_nodes) > 0 and run.settings.resources.ncpu != 0 else ("device",)


def _with_updater(run: RunConfig, target: MachineModel, updater: Updater) -> PlannedRun:
    """Return a run with its updater, planned on the machine with the workers for it."""
    if run.step.update_on != updater or max(target.compute_nodes) > 0:
        run = run.updating_on(updater)
    if max(target.compute_nodes) > 0 and target.is_imaginary:
        asked = run.settings.resources.ncpu
        run = run.on(replace(run.machine, aside=updater == "cpu"))
        target = target.beside(NUM_CPU if asked is None else asked) if updater == "cpu" else target
    elif not target.is_imaginary:
        target = this_machine(run.machine)
    step = capture(run, frozen_base=run.start.frozen_base)
    if not target.is_imaginary:
        check_budgets(run.machine)  # after the rules of the step: budgets are reported last
    return PlannedRun(run, target, step, *order_or_needs(step, run, target))


def _with(settings: TrainSettings, minibatch: int) -> TrainSettings:
    """Return the settings with another minibatch."""
    return replace(settings, tiling=replace(settings.tiling, minibatch=minibatch))


def _reason(size: int, candidates: Mapping[int, PlannedRun], seconds: Mapping[int, float]) -> str:
    """Return the minibatch with the reason for it.

    Args:
        seconds: seconds of those that fit, by one measure.
    """
    larger = min((other for other in candidates if other > size), default=None)
    if larger is None:
        return f"{size}, the whole batch"
    needs, target = candidates[larger].needs, candidates[larger].target
    if needs is None:
        return f"{size}, the fastest by forecast: {seconds[size]:.3g} s a step, and {seconds[larger]:.3g} s with {larger}"
    node, nbytes = needs.short(target)[-1]
    return f"{size}, the fastest that fits; {larger} needs {format_size(nbytes)} of {target.nodes[node][0]}"


def with_few_tasks(run: RunConfig, target: MachineModel, flag: str = "--devices") -> RunConfig:
    """Return the run in coarse tiles for the memory of imaginary devices, in larger ones if its step would be refused for its number of tasks.

    Args:
        flag: flag that gives the devices.

    Raises:
        DoesNotFit: the step has too many tasks even in the largest tiles for such devices; the message names devices for which it has fewer.
    """
    factor = 1
    while factor * LARGEST_SHARE <= COARSE_SHARE:
        coarse = _in_coarse_tiles(run, target, factor)
        if not has_too_many_tasks(coarse):
            return coarse
        factor *= 2
    enough = target.largest_node_nbytes
    while enough <= BOUNDLESS:
        enough *= 2
        larger = target.enlarged(dict.fromkeys(target.compute_nodes, enough))
        if target.rates is not None and not has_too_many_tasks(_in_coarse_tiles(run, larger)):
            flops = target.rates["sim"].flops
            raise DoesNotFit(
                f"tiles for devices of {target.largest_node_nbytes:,} B would make more than {MOST_TASKS:,} tasks of a step",
                f"plan for larger ones, such as {flag} {format_devices(target.num_devices, enough, flops).removeprefix('1x')}, or lower --batch",
                shortage=scheduler.Shortage("step", target.nodes[target.compute_nodes[0]][0], enough, target.largest_node_nbytes),
            )
    return _in_coarse_tiles(run, target)  # the tiles that were given are too small: `capture` says so


def _in_coarse_tiles(run: RunConfig, target: MachineModel, factor: int = 1) -> RunConfig:
    """Return the run in coarse tiles, except for the sizes that flags give."""
    return retiled(run, coarse_tiling(run.model.config, run.step.minibatch, run.model.seq_len, target, factor))
