"""Where the weights of a run are updated, if that is left to the forecast: where devices compute, or in host memory, by CPU workers
(ZeRO-Offload: Ren et al., 2021), where the optimizer's state then stays.

On devices an update needs master, moments and weight of its tile there: beyond their memory all of these come over a link and go back in each
step. In host memory the gradient goes down and the new weight comes up, and CPU workers read and write the rest. Both steps are captured and
planned; the forecast that chooses orders says which is faster. CPUs round otherwise than GPUs, so a choice is written into the run's settings,
and a run that is continued keeps to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from scheduler.planning import PlannedOrder

from ..config.run_config import RunConfig
from ..errors import DoesNotFit
from ..hardware.imaginary import NUM_CPU
from ..hardware.machine_model import MachineModel, this_machine
from .memory_fit import CapturedStep, capture, check_fit, choose_order, least_needs

Place = Literal["device", "cpu"]

GAIN: Final = 0.95
"""A step with its updates on the CPU must be forecast to take less than this fraction of the seconds with updates on devices: where both are about as
fast, the same arithmetic for everything is worth more."""


@dataclass(frozen=True, slots=True)
class PlacedUpdate:
    """A run whose weights are updated somewhere.

    Attributes:
        target: the machine, with the CPU workers that this takes.
        seconds: forecast of a step with updates in each place, where there was a choice; None where it would not fit, or nothing would move.
    """

    run: RunConfig
    target: MachineModel
    step: CapturedStep
    order: PlannedOrder
    seconds: Mapping[Place, float | None]


def place_update(run: RunConfig) -> PlacedUpdate:
    """As `check_fit`, with the place of updates chosen where that is left open.

    Raises:
        DoesNotFit, UsageError: as `check_fit`; where there are two places, of updates on devices.
    """
    places = _open_places(run, has_devices=run.machine.has_devices)
    seconds: dict[Place, float | None] = {}
    found: dict[Place, PlacedUpdate] = {}
    refusal: DoesNotFit | None = None
    for place in places:
        at = run.updating_on(place) if run.step.update_on == "auto" else run
        try:
            step, order = check_fit(at)
        except DoesNotFit as error:
            refusal, seconds[place] = refusal or error, None
            continue
        found[place] = PlacedUpdate(at, this_machine(at.machine), step, order, {})
        seconds[place] = order.seconds or None
        if not order.forecasts:  # nothing moves
            break
    if not found:
        assert refusal is not None  # one place at least was tried
        raise refusal
    chosen = found[_faster(found)]
    return replace(chosen, seconds=seconds) if len(places) > 1 else chosen


def plan_update(run: RunConfig, target: MachineModel) -> PlacedUpdate:
    """The step of a run on a machine that need not exist, with the place of updates chosen where that is left open; it need not fit.

    Raises:
        UsageError: the step has no order of the name that was asked for.
    """
    has_devices = max(target.compute_nodes) > 0
    places = _open_places(run, has_devices=has_devices)
    seconds: dict[Place, float | None] = {}
    found: dict[Place, PlacedUpdate] = {}
    for place in places:
        at, there = _placed(run, target, place) if has_devices else (run, target)
        step = capture(at, frozen_base=at.start.frozen_base)
        order = choose_order(step.plan, at, there.without(step.reading))
        fits = least_needs(step.plan, at, there, order, reading=step.reading).fit(there)
        seconds[place] = (order.seconds or None) if fits else None
        if fits or not found:
            found[place] = PlacedUpdate(at, there, step, order, {})
        if fits and not order.forecasts:
            break
    fitting = {place: each for place, each in found.items() if seconds[place] is not None} or found
    chosen = found[_faster(fitting)]
    return replace(chosen, seconds=seconds) if len(places) > 1 else chosen


def told_place(place: str, seconds: Mapping[Place, float | None]) -> str:
    """Where weights are updated, and why: "by CPU workers in RAM (chosen; forecast 3.2 s a step, 3.6 s on devices)"."""
    where = {"cpu": "by CPU workers in RAM", "device": "where devices compute"}
    if not seconds:
        return where[place]
    known = [f"{value:.3g} s a step {where[each]}" for each, value in seconds.items() if value is not None]
    does_not_fit = [where[each] for each, value in seconds.items() if value is None and len(seconds) > 1]
    reasons = [*([f"forecast {', '.join(known)}"] if known else ["everything fits"]), *(f"does not fit {each}" for each in does_not_fit if known)]
    return f"{where[place]} (chosen: {'; '.join(reasons)})"


def _open_places(run: RunConfig, *, has_devices: bool) -> tuple[Place, ...]:
    """Where the weights of a run may be updated."""
    asked = run.step.update_on
    if asked != "auto":
        return (asked,)
    return ("device", "cpu") if has_devices and run.settings.resources.ncpu != 0 else ("device",)


def _placed(run: RunConfig, target: MachineModel, place: Place) -> tuple[RunConfig, MachineModel]:
    """A run with its updates in a place, and the machine with the workers for them."""
    run = run.updating_on(place)
    if not target.is_imaginary:
        return run, this_machine(run.machine)
    asked = run.settings.resources.ncpu
    machine = replace(run.machine, aside=place == "cpu")
    return run.on(machine), target.beside(NUM_CPU if asked is None else asked) if place == "cpu" else target


def _faster(found: Mapping[Place, PlacedUpdate]) -> Place:
    """The place that is worth it: the CPU only where it is clearly faster."""
    if len(found) == 1:
        return next(iter(found))
    device, cpu = found["device"].order, found["cpu"].order
    return "cpu" if device.forecasts and cpu.seconds < GAIN * device.seconds else "device"
