"""Which order a recorded step is planned in: candidates, a forecast of what each moves within the budgets, and the choice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .core.forecast import Forecast, forecast
from .core.orders import Repetition, candidates, repetition
from .core.steps import StepPlan

AUTO: Final = "auto"
SUBMISSION: Final = "submission"

WINDOW: Final = 256
"""Tasks ahead of the oldest unfinished one that may run where memory is short, per device."""


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order a step executes in, and why.

    Attributes:
        name: of the order.
        plan: the step's tasks in that order.
        forecasts: what each order that was considered would move; empty when everything fits.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]

    @property
    def moved_bytes(self) -> int:
        """Bytes a step is expected to move."""
        found = self.forecasts.get(self.name)
        return 0 if found is None else found.total


def last_tier_bytes(plan: StepPlan, *, computes: bool) -> int:
    """What the last tier must hold for a program around a recorded step: its minimum, and inputs of the same size for other steps (validation).

    Args:
        computes: whether tasks run there.
    """
    return plan.minimum_bytes(is_last=True, computes=computes) + sum(handle.size for handle in plan.uses if handle.kind == "input")


def plan_order(plan: StepPlan, order: str, *, memory: int, last: int, computes_on_last: bool, num_devices: int = 1) -> PlannedOrder:
    """Choose the order of a step, and where its parts belong.

    On several devices every D-th minibatch goes to the same one, if that leaves as many for each: weights travel, activations stay. Where memory is
    short the minibatches of all devices then pass through the step side by side.

    Args:
        plan: in submission order.
        order: "auto", or the name of a candidate: see `orders`.
        memory: bytes where tasks run.
        last: bytes of the last tier, which must hold all that lives.
        computes_on_last: whether tasks run there.
        num_devices: D, memories of equal devices, if tasks run nowhere else; or 1.

    Raises:
        ValueError: the step has no order of that name.
    """
    repeated = repetition(plan) if num_devices > 1 else None
    if repeated is not None:
        plan = StepPlan(plan.tasks, plan.owned, parts=parts_of(repeated, num_devices))
    fits = _needed(plan, num_devices) <= memory and last_tier_bytes(plan, computes=computes_on_last) <= last
    if order in (AUTO, SUBMISSION) and fits:
        return PlannedOrder(SUBMISSION, plan, {})
    found = {name: _permuted(plan, positions, num_devices) for name, positions in candidates(plan, repeated).items()}
    if order != AUTO and order not in found:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(found)}, and auto")
    considered = [order]
    if order == AUTO:
        least = {name: last_tier_bytes(each, computes=computes_on_last) for name, each in found.items()}
        considered = [name for name in found if least[name] <= last] or [min(least, key=least.__getitem__)]
        if plan.parts:
            considered = [name for name in considered if _is_side_by_side(name, num_devices)] or considered
    forecasts = {name: _forecast(found[name], memory, num_devices) for name in dict.fromkeys([SUBMISSION, *considered])}
    order = min(considered, key=lambda name: forecasts[name].total)
    return PlannedOrder(order, found[order], forecasts)


def parts_of(found: Repetition, num_devices: int) -> list[int]:
    """For each task the device, from 0, that its minibatch belongs on, or -1; empty if the minibatches are not a multiple of the devices."""
    if not found.num_minibatches or found.num_minibatches % num_devices:
        return []
    return [minibatch % num_devices if minibatch >= 0 else -1 for minibatch in found.minibatch]


def _share(plan: StepPlan, num_devices: int) -> StepPlan:
    """What one of the devices executes of a plan with parts: the first part, and as many of the tasks outside all parts as its turn brings."""
    outside = itertools.count()
    return StepPlan(
        [task for task, part in zip(plan.tasks, plan.parts, strict=True) if part == 0 or (part < 0 and next(outside) % num_devices == 0)],
        plan.owned,
    )


def _needed(plan: StepPlan, num_devices: int) -> int:
    """Bytes in all device memory together with which nothing moves but between devices."""
    return num_devices * _share(plan, num_devices).needed_bytes() if plan.parts else plan.needed_bytes()


def _forecast(plan: StepPlan, memory: int, num_devices: int) -> Forecast:
    """Bytes moved within so much memory: one pool; with parts, the devices alike, with copies between them that come from memory as well."""
    if not plan.parts:
        return forecast(plan, memory)
    one = forecast(_share(plan, num_devices), memory // num_devices)
    return Forecast(one.read * num_devices, one.written * num_devices)


def _is_side_by_side(name: str, num_devices: int) -> bool:
    """Whether the order takes as many minibatches through each layer as there are devices, or a multiple."""
    return name == "layers" or (name.startswith("layers:") and int(name.partition(":")[2]) % num_devices == 0)


def _permuted(plan: StepPlan, positions: list[int], num_devices: int) -> StepPlan:
    """The same tasks in another order; every order that keeps conflicting accesses in theirs has the same dependencies."""
    tasks = [plan.tasks[position] for position in positions]
    return StepPlan(tasks, plan.owned, window=WINDOW * num_devices, parts=[plan.parts[position] for position in positions] if plan.parts else ())
