"""Choice of the minibatch of ``--minibatch auto``: the fastest divisor of the batch that fits the machine.

Every divisor is a candidate, and each is planned like a run of its own, in tiles of its own. The forecasts of those that fit decide. Sums are rounded
in the order of minibatches, so the chosen number is written into the run's settings, and a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from ..architecture.family_config import ModelConfig
from ..config.resolution import resolve
from ..config.settings import TrainSettings, known
from ..errors import DoesNotFit, UsageError
from ..hardware.machine_model import MachineModel, pace_on, this_machine
from ..hardware.machine_spec import MachineSpec
from ..io.units import format_size
from ..tiling.model_tiling import divisors
from .memory_fit import has_too_many_tasks, no_collections
from .simulate import with_few_tasks
from .updater import ChosenUpdater, plan_updater

AUTO: Final = "auto"
GAIN: Final = 0.95
"""Ratio of forecast seconds below which a smaller minibatch is taken; its tasks are smaller and more, which forecasts see only in part."""


class ChosenMinibatch(NamedTuple):
    """Settings with a minibatch, and the reason for it.

    Attributes:
        settings: settings with the number of sequences.
        reason: phrase for users; "" if the settings were not open.
    """

    settings: TrainSettings
    reason: str = ""


def choose_minibatch(settings: TrainSettings, config: ModelConfig, machine: MachineSpec, target: MachineModel | None = None) -> ChosenMinibatch:
    """Replace ``--minibatch auto`` by the fastest minibatch that fits. If none fits, take the smallest, so that the run is refused with advice.

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
        raise UsageError("auto plans for one machine, and a cluster of --dask has several; give a number", flag="--minibatch")
    batch = known(resolve(_with(settings, -1), config, machine=machine).step.batch)
    per_tile = max(settings.tiling.minibatch_tile or 1, 1)
    with no_collections():
        planned = dict[int, ChosenUpdater]()
        refused = dict[int, ChosenUpdater]()
        for size in (size for size in reversed(divisors(batch)) if size % per_tile == 0):
            run = resolve(_with(settings, size), config, machine=machine)
            try:
                run = run if target is None else with_few_tasks(run, target)
            except DoesNotFit:  # this minibatch, and each smaller one, needs too many tasks
                if not planned and not refused:
                    raise
                break
            if has_too_many_tasks(run):
                break
            chosen = plan_updater(run, target or this_machine(run.machine))
            (planned if chosen.needs is None else refused)[size] = chosen
    if not planned:
        return ChosenMinibatch(_with(settings, min(refused, default=batch)))
    size = _fastest(planned)
    return ChosenMinibatch(_with(settings, size), _reason(size, planned, refused))


def _with(settings: TrainSettings, minibatch: int) -> TrainSettings:
    """Return the settings with another minibatch."""
    return replace(settings, tiling=replace(settings.tiling, minibatch=minibatch))


def _fastest(planned: Mapping[int, ChosenUpdater]) -> int:
    """Return the fastest minibatch by forecast, a smaller one only if it is clearly faster."""
    seconds = {size: _seconds(chosen) for size, chosen in planned.items()}
    best = max(planned)
    for size in sorted(planned, reverse=True):
        if seconds[size] < GAIN * seconds[best]:
            best = size
    return best


def _seconds(chosen: ChosenUpdater) -> float:
    """Return the forecast seconds of a step; those of its tasks if no data moves."""
    order = chosen.order
    return order.seconds if order.forecasts else sum(pace_on(order.plan, chosen.target).seconds.values())


def _reason(size: int, planned: Mapping[int, ChosenUpdater], refused: Mapping[int, ChosenUpdater]) -> str:
    """Return the minibatch with the reason for it."""
    larger = min((other for other in (*refused, *planned) if other > size), default=None)
    if larger is None:
        return f"{size}, the whole batch"
    if larger in planned:
        return f"{size}, the fastest by forecast: {_seconds(planned[size]):.3g} s a step, and {_seconds(planned[larger]):.3g} s with {larger}"
    needs, target = refused[larger].needs, refused[larger].target
    assert needs is not None  # it was refused
    node, nbytes = needs.short(target)[-1]
    return f"{size}, the fastest that fits; {larger} needs {format_size(nbytes)} of {target.nodes[node][0]}"
