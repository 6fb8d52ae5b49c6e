"""Who updates the weights of a run, if that is left to the forecast: devices, or CPU workers in host memory
(ZeRO-Offload: Ren et al., 2021), where the optimizer's state then stays.

On devices an update needs master, moments and weight of its tile there: beyond their memory all of these come over a link and go back in each
step. In host memory the gradient goes down and the new weight comes up, and CPU workers read and write the rest. Both steps are captured and
planned; the forecast that chooses orders says which is faster. CPUs round otherwise than GPUs, so a choice is written into the run's settings,
and a run that is continued keeps to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from scheduler.planning import PlannedOrder

from ..config.run_config import RunConfig
from ..errors import DoesNotFit
from ..hardware.imaginary import NUM_CPU
from ..hardware.machine_model import MachineModel, this_machine
from .fit_advice import check_fit
from .memory_fit import CapturedStep, capture, order_or_needs
from .needs import Needs

Updater = Literal["device", "cpu"]

GAIN: Final = 0.95
"""A step with its updates on the CPU must be forecast to take less than this fraction of the seconds with updates on devices: where both are about as
fast, the same arithmetic for everything is worth more."""


class ChosenUpdater(NamedTuple):
    """A run of which it is settled who updates its weights.

    Attributes:
        target: the machine, with the CPU workers that this takes.
        seconds: forecast of a step under each updater, where there was a choice; None where it would not fit, or nothing would move.
        needs: of the step, where it does not fit.
    """

    run: RunConfig
    target: MachineModel
    step: CapturedStep
    order: PlannedOrder
    seconds: Mapping[Updater, float | None]
    needs: Needs | None = None


def choose_updater(run: RunConfig) -> ChosenUpdater:
    """As `check_fit`, with the updater chosen where that is left open.

    Raises:
        DoesNotFit, UsageError: as `check_fit`; where no updater fits, of updates on devices.
    """
    updaters = _open_updaters(run, has_devices=run.machine.has_devices)
    seconds: dict[Updater, float | None] = {}
    found: dict[Updater, ChosenUpdater] = {}
    refusal: DoesNotFit | None = None
    for updater in updaters:
        at = run.updating_on(updater) if run.step.update_on == "auto" else run
        seconds[updater] = None
        try:
            step, order = check_fit(at)
        except DoesNotFit as error:
            refusal = refusal or error
            continue
        found[updater] = ChosenUpdater(at, this_machine(at.machine), step, order, {})
        if not order.forecasts:  # nothing moves
            break
    if not found:
        assert refusal is not None  # one updater at least was tried
        raise refusal
    chosen = found[_faster(found)]
    return chosen._replace(seconds=seconds | _known(found)) if len(updaters) > 1 else chosen


def plan_updater(run: RunConfig, target: MachineModel) -> ChosenUpdater:
    """The step of a run on a machine that need not exist, with the updater chosen where that is left open; it need not fit.

    Raises:
        UsageError: the step has no order of the name that was asked for.
    """
    has_devices = max(target.compute_nodes) > 0
    updaters = _open_updaters(run, has_devices=has_devices)
    seconds: dict[Updater, float | None] = {}
    found: dict[Updater, ChosenUpdater] = {}
    fitting: dict[Updater, ChosenUpdater] = {}
    for updater in updaters:
        at, there = _placed(run, target, updater) if has_devices else (run, target)
        step = capture(at, frozen_base=at.start.frozen_base)
        order, needs = order_or_needs(step, at, there)
        fits = needs is None
        seconds[updater] = None
        if fits or not found:
            found[updater] = ChosenUpdater(at, there, step, order, {}, needs)
        if fits:
            fitting[updater] = found[updater]
        if fits and not order.forecasts:
            break
    chosen = found[_faster(fitting or found)]
    return chosen._replace(seconds=seconds | _known(fitting)) if len(updaters) > 1 else chosen


def told_updater(updater: str, seconds: Mapping[Updater, float | None]) -> str:
    """Who updates weights, and why, after "weights are updated"."""
    where = {"cpu": "by CPU workers in RAM", "device": "where devices compute"}
    if not seconds:
        return where[updater]
    known = [f"{value:.3g} s a step {where[each]}" for each, value in seconds.items() if value is not None]
    does_not_fit = [where[each] for each, value in seconds.items() if value is None and len(seconds) > 1]
    reasons = [*([f"forecast {', '.join(known)}"] if known else ["everything fits"]), *(f"does not fit {each}" for each in does_not_fit if known)]
    return f"{where[updater]} (chosen: {'; '.join(reasons)})"


def _open_updaters(run: RunConfig, *, has_devices: bool) -> tuple[Updater, ...]:
    """Who may update the weights of a run."""
    asked = run.step.update_on
    if asked != "auto":
        return (asked,)
    return ("device", "cpu") if has_devices and run.settings.resources.ncpu != 0 else ("device",)


def _placed(run: RunConfig, target: MachineModel, updater: Updater) -> tuple[RunConfig, MachineModel]:
    """A run with its updater, and the machine with the workers for that."""
    run = run.updating_on(updater)
    if not target.is_imaginary:
        return run, this_machine(run.machine)
    asked = run.settings.resources.ncpu
    machine = replace(run.machine, aside=updater == "cpu")
    return run.on(machine), target.beside(NUM_CPU if asked is None else asked) if updater == "cpu" else target


def _faster(found: Mapping[Updater, ChosenUpdater]) -> Updater:
    """The updater that is worth it: the CPU only where it is clearly faster."""
    if len(found) == 1:
        return next(iter(found))
    seconds = expected({updater: each.order for updater, each in found.items()})
    return "cpu" if found["device"].order.forecasts and seconds["cpu"] < GAIN * seconds["device"] else "device"


def _known(found: Mapping[Updater, ChosenUpdater]) -> dict[Updater, float | None]:
    """What the updaters were compared by; None where nothing would move."""
    return {updater: each or None for updater, each in expected({updater: each.order for updater, each in found.items()}).items()}


def expected(orders: Mapping[Updater, PlannedOrder]) -> dict[Updater, float]:
    """Seconds of planned steps by one measure, since forecasts and virtual time may be half apart: virtual time where all were judged by it, else
    forecasts; 0 where everything fits."""
    are_judged = all(order.judged_seconds for order in orders.values())
    return {updater: order.judged_seconds if are_judged else order.seconds for updater, order in orders.items()}
