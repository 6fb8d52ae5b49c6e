"""Choice of the workers that update the weights: devices, or CPU workers in host memory, where the optimizer's state then stays
(ZeRO-Offload: Ren et al., 2021).

On devices an update needs the master, moments and weight of its tile there; beyond their memory, all of these cross a link in both directions in
each step. In host memory the gradient comes down and the new weight goes up, and CPU workers read and write the rest. Both steps are captured and
planned, and compared by the forecast that also chooses orders. CPUs round otherwise than GPUs, so the choice is written into the run's settings,
and a continued run keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from scheduler.planning import PlannedOrder

from ..config.run_config import RunConfig
from ..hardware.imaginary import NUM_CPU
from ..hardware.machine_model import MachineModel, this_machine
from ..hardware.machine_spec import check_budgets
from .fit_advice import advice
from .memory_fit import CapturedStep, capture, does_not_fit, no_collections, order_or_needs
from .needs import Needs

Updater = Literal["device", "cpu"]

GAIN: Final = 0.95
"""Ratio of forecast seconds, CPU to devices, below which the CPU updates weights.

At about equal speed, the same arithmetic for all tasks is better.
"""


class ChosenUpdater(NamedTuple):
    """Run with its choice of updater.

    Attributes:
        run: run with the updater in its settings.
        target: machine, with the CPU workers that the updater needs.
        step: captured step.
        order: planned order of the step.
        seconds: forecast of a step under each updater, if there was a choice; None for one that would not fit, or would move nothing.
        needs: needs of the step, if it does not fit.
    """

    run: RunConfig
    target: MachineModel
    step: CapturedStep
    order: PlannedOrder
    seconds: Mapping[Updater, float | None]
    needs: Needs | None = None


def choose_updater(run: RunConfig) -> ChosenUpdater:
    """Check that a run fits this machine, and choose its updater if that is open.

    The check takes no memory, and a second for 20,000 tasks; it takes longer to compare orders if budgets are short.

    Raises:
        DoesNotFit: a budget is too small or not available; the message has the shortage and changes that would make the step fit. If no updater fits,
            the message is about updates on devices.
        UsageError: the step has too many tasks, or no order of the requested name.
    """
    with no_collections():
        chosen = plan_updater(run, this_machine(run.machine))
        if chosen.needs is not None:
            raise does_not_fit(chosen.target, chosen.needs, advice(chosen.run, chosen.target, chosen.needs))
    return chosen


def plan_updater(run: RunConfig, target: MachineModel) -> ChosenUpdater:
    """Plan the step of a run on a machine that may be imaginary, and choose the updater if that is open; the step need not fit.

    Raises:
        UsageError: the step has no order of the requested name.
    """
    has_devices = max(target.compute_nodes) > 0
    updaters = _open_updaters(run, has_devices=has_devices)
    seconds: dict[Updater, float | None] = {}
    choices: dict[Updater, ChosenUpdater] = {}
    fitting: dict[Updater, ChosenUpdater] = {}
    for updater in updaters:
        if has_devices:
            candidate, there = _placed(run, target, updater)
        else:
            candidate, there = run if run.step.update_on == updater else run.updating_on(updater), target
        step = capture(candidate, frozen_base=candidate.start.frozen_base)
        if not there.is_imaginary:
            check_budgets(candidate.machine)  # after the rules of the step: budgets are reported last
        order, needs = order_or_needs(step, candidate, there)
        fits = needs is None
        seconds[updater] = None
        if fits or not choices:
            choices[updater] = ChosenUpdater(candidate, there, step, order, {}, needs)
        if fits:
            fitting[updater] = choices[updater]
        if fits and not order.forecasts:
            break
    chosen = choices[_faster(fitting or choices)]
    return chosen._replace(seconds=seconds | _known(fitting)) if len(updaters) > 1 else chosen


def told_updater(updater: str, seconds: Mapping[Updater, float | None]) -> str:
    """Return the updater and the reason for it, to follow "weights are updated"."""
    where = {"cpu": "by CPU workers in RAM", "device": "where devices compute"}
    if not seconds:
        return where[updater]
    known = [f"{value:.3g} s a step {where[each]}" for each, value in seconds.items() if value is not None]
    does_not_fit = [where[each] for each, value in seconds.items() if value is None and len(seconds) > 1]
    reasons = [*([f"forecast {', '.join(known)}"] if known else ["everything fits"]), *(f"does not fit {each}" for each in does_not_fit if known)]
    return f"{where[updater]} (chosen: {'; '.join(reasons)})"


def _open_updaters(run: RunConfig, *, has_devices: bool) -> tuple[Updater, ...]:
    """Return the updaters that a run may have."""
    asked = run.step.update_on
    if asked != "auto":
        return (asked,)
    return ("device", "cpu") if has_devices and run.settings.resources.ncpu != 0 else ("device",)


def _placed(run: RunConfig, target: MachineModel, updater: Updater) -> tuple[RunConfig, MachineModel]:
    """Return a run with its updater, and the machine with the workers for it."""
    run = run.updating_on(updater)
    if not target.is_imaginary:
        return run, this_machine(run.machine)
    asked = run.settings.resources.ncpu
    machine = replace(run.machine, aside=updater == "cpu")
    return run.on(machine), target.beside(NUM_CPU if asked is None else asked) if updater == "cpu" else target


def _faster(found: Mapping[Updater, ChosenUpdater]) -> Updater:
    """Return the better updater: the CPU only if it is clearly faster."""
    if len(found) == 1:
        return next(iter(found))
    seconds = expected({updater: each.order for updater, each in found.items()})
    return "cpu" if found["device"].order.forecasts and seconds["cpu"] < GAIN * seconds["device"] else "device"


def _known(found: Mapping[Updater, ChosenUpdater]) -> dict[Updater, float | None]:
    """Return the forecast seconds of each updater; None if no data would move."""
    return {updater: each or None for updater, each in expected({updater: each.order for updater, each in found.items()}).items()}


def expected(orders: Mapping[Updater, PlannedOrder]) -> dict[Updater, float]:
    """Return the seconds of planned steps by one measure, since forecasts and virtual time may differ by half.

    The measure is virtual time if all plans were judged by it, else the forecast; it is 0 if everything fits.
    """
    are_judged = all(order.judged_seconds for order in orders.values())
    return {updater: order.judged_seconds if are_judged else order.seconds for updater, order in orders.items()}
