"""The choice of the order in which a recorded step is planned: candidates, and a forecast of the cost of each within the memory budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..core.records import HandleRecord
from ..core.step_plan import StepPlan
from .forecast import SHARE_BESIDE, SHARE_LEAVING, Forecast, Pace, forecast, foresee
from .machine_pace import reads_files
from .orders import Repetition, candidates, named, repetition
from .recompute import Mix
from .tile_traffic import Touches

AUTO: Final = "auto"
SUBMISSION: Final = "submission"

WINDOW: Final = 256
"""Scheduling window where memory is short: tasks beyond the oldest unfinished one that may run, per device."""

ROOMY: Final = 2
"""A step that fits this many times into the memory runs without a window. Out of order it needs more bytes than in order: GPT-2 XL, which needs
45 GiB, moved 31 GB a step in 60 GiB."""

EQUAL: Final = 1.02
"""Orders whose seconds differ by less than this factor count as equally fast; of these the planner takes the one that moves the fewest bytes."""

ALIKE: Final = 1.05
"""Of these, such as move more bytes by less than this factor count as moving equally many, and the fastest is taken."""


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order in which a step executes, and the forecasts it was chosen by.

    Attributes:
        name: name of the order.
        plan: the step's tasks in that order.
        forecasts: cost of each order that was considered, and of the submission order, by name; empty when everything fits.
        moves_least_of_equals: whether another order counts as equally fast and moves more bytes.
        num_tasks: of the step, tasks that are fused counted one by one.
        recompute: what the step makes again, as it can be asked for; "none" for nothing.
        mix: how that was chosen, if a planner has.
        last_bytes: what the last tier must hold (`last_tier_bytes`).
        judged_seconds: of a step, as a more exact judge than forecasts has it (`weighing`); 0 where none was asked.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]
    moves_least_of_equals: bool = False
    num_tasks: int = 0
    recompute: str = "none"
    mix: Mix | None = None
    last_bytes: int = 0
    judged_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step is expected to move; 0 where nothing was forecast."""
        found = self.forecasts.get(self.name)
        return 0 if found is None else found.total

    @property
    def seconds(self) -> float:
        """Seconds a step is expected to take; 0 where nothing was forecast, or without a pace."""
        found = self.forecasts.get(self.name)
        return 0.0 if found is None else found.seconds


def last_tier_bytes(plan: StepPlan, *, computes: bool, ranks: Sequence[int] | None = None) -> int:
    """Bytes that the last tier must hold for a program around a recorded step: the step's minimum, and a second set of inputs (for validation).

    Args:
        computes: whether tasks run on the last tier.
        ranks: of the tasks, where they run in another order.
    """
    return plan.minimum_bytes(is_last=True, computes=computes, ranks=ranks) + sum(handle.size for handle in plan.uses if handle.kind == "input")


def plan_order(
    plan: StepPlan,
    order: str,
    *,
    memory: int,
    last: int,
    computes_on_last: bool,
    num_devices: int = 1,
    pace: Callable[[StepPlan], Pace] | None = None,
    only: Sequence[str] = (),
    is_draft: bool = False,
) -> PlannedOrder:
    """Choose the order of a step, and the device of each minibatch.

    Several devices get equal numbers of minibatches where the count divides: weights travel, activations stay. Where memory is short, the
    minibatches of all devices then pass through the step side by side.

    Args:
        plan: the step in submission order.
        order: "auto", or the name of a candidate (`orders`).
        memory: bytes of the memory where tasks run, all devices together; what tasks aside touch is elsewhere, and a step that has some moves.
        last: bytes of the last tier, which must back all live data.
        computes_on_last: whether tasks run on the last tier.
        num_devices: D, the number of equal devices if tasks run nowhere else; or 1.
        pace: rates of the machine during a plan, computed only where memory is short; orders are compared by seconds with it, by bytes without.
        only: names of the orders that "auto" chooses from, as far as the step has them, or else the submission order; none for all.
        is_draft: whether the plan need not be made: that of the outcome is the step as it was.

    Raises:
        ValueError: the step has no order of that name.
    """
    repeated = repetition(plan) if num_devices > 1 else None
    if repeated is not None:
        plan = plan.divided(devices_of_tasks(plan, repeated, num_devices))
    needed, last_bytes = device_bytes(plan, num_devices), last_tier_bytes(plan, computes=computes_on_last)
    fits = not plan.has_aside and needed <= memory and last_bytes <= last
    if order in (AUTO, SUBMISSION) and fits:
        chosen = plan if ROOMY * needed <= memory else _permuted(plan, range(len(plan.tasks)), plan.partitions, num_devices)
        return PlannedOrder(SUBMISSION, chosen, {}, num_tasks=len(plan.tasks), last_bytes=last_bytes)
    found = _asked_for(plan, order, repeated) if order != AUTO else _some(plan, only, repeated) if only else candidates(plan, repeated)
    speed = None if pace is None else pace(plan)
    step = _Assessed(plan, memory, num_devices, speed, only_files=computes_on_last and reads_files(plan))

    def devices_of(name: str) -> Sequence[int]:
        return plan.partitions if repeated is None else devices_of_tasks(plan, repeated, num_devices, _group_of(name, num_devices))

    def assess(name: str) -> tuple[int, Forecast]:
        positions = found[name]
        return last_tier_bytes(plan, computes=computes_on_last, ranks=_ranks(positions)), step.forecast(positions, devices_of(name))

    if order == AUTO:
        assessed, considered = _considered(_pools(found, num_devices if plan.partitions else 1), assess, last, () if only else (SUBMISSION,))
    else:
        assessed, considered = {name: assess(name) for name in dict.fromkeys([SUBMISSION, order])}, [order]
    order, moves_least = _best({name: assessed[name][1] for name in considered})
    chosen = plan if is_draft else _permuted(plan, found[order], devices_of(order), num_devices)
    if not (computes_on_last or is_draft):  # the last tier has no tier below to write back to
        step.foresee(chosen, found[order], devices_of(order))
    shown = {name: assessed[name][1] for name in dict.fromkeys([SUBMISSION, *considered]) if name in assessed}
    return PlannedOrder(order, chosen, shown, moves_least, num_tasks=len(plan.tasks), last_bytes=assessed[order][0])


def _ranks(positions: Sequence[int]) -> list[int]:
    """The place of each task in an order."""
    ranks = [0] * len(positions)
    for at, position in enumerate(positions):
        ranks[position] = at
    return ranks


def _best(forecasts: Mapping[str, Forecast]) -> tuple[str, bool]:
    """The order to take of those assessed, and whether it moves least of equally fast ones that differ in that."""
    least = min(each.seconds for each in forecasts.values())
    equal = {name: each for name, each in forecasts.items() if each.seconds <= EQUAL * least}
    fewest = min(each.total for each in equal.values())
    alike = [name for name, each in equal.items() if each.total <= ALIKE * fewest]
    order = min(alike, key=lambda name: (equal[name].seconds, equal[name].total))
    return order, equal[order].total == fewest < max(each.total for each in equal.values())


def _considered(
    pools: Iterable[Sequence[str]], assess: Callable[[str], tuple[int, Forecast]], last: int, always: Iterable[str]
) -> tuple[dict[str, tuple[int, Forecast]], list[str]]:
    """Assess orders that are wanted in any case, then one pool of orders after another, until a pool has an order whose data the last tier holds.

    Args:
        assess: bytes of the last tier that the named order needs, and the order's forecast.
        last: bytes of the last tier.

    Returns:
        What `assess` says of all assessed orders, and the names to choose from: the orders of the last pool whose data the tier holds; if no pool
        has any, the one order that needs the fewest bytes of the tier.
    """
    assessed = {name: assess(name) for name in always}
    considered: list[str] = []
    for names in pools:
        assessed |= {name: assess(name) for name in names if name not in assessed}
        considered = [name for name in names if assessed[name][0] <= last]
        if considered:
            break
    return assessed, considered or [min(assessed, key=lambda name: assessed[name][0])]


def _some(plan: StepPlan, names: Sequence[str], repeated: Repetition | None) -> dict[str, list[int]]:
    """Positions of the named orders that the step has; those of the submission order if it has none."""
    repeated = repetition(plan) if repeated is None else repeated
    orders = {name: named(plan, repeated, name) for name in names}
    return {name: positions for name, positions in orders.items() if positions is not None} or {SUBMISSION: list(range(len(plan.tasks)))}


def _asked_for(plan: StepPlan, order: str, repeated: Repetition | None) -> dict[str, list[int]]:
    """Positions of the named order, and of the submission order for comparison.

    Raises:
        ValueError: the step has no order of that name.
    """
    repeated = repetition(plan) if repeated is None else repeated
    positions = named(plan, repeated, order)
    if positions is None:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(candidates(plan, repeated))}, and auto")
    return {SUBMISSION: list(range(len(plan.tasks))), order: positions}


def devices_of_tasks(plan: StepPlan, found: Repetition, num_devices: int, group: int | None = None) -> list[int]:
    """For each task the device of its minibatch, from 0, or -1 outside all minibatches; empty if the minibatches are not a multiple of the devices.

    Neighbouring minibatches of a group share a device, so a gradient that all of them add to travels from device to device once.

    Args:
        group: number of minibatches that pass a layer side by side, a multiple of the devices; 0 for all, None for as many as there are devices.
    """
    num = found.num_minibatches
    if not num or num % num_devices:
        return []
    group = num_devices if group is None else group or num
    device = [at % group * num_devices // min(group, num - at // group * group) for at in range(num)]
    return [device[at] if at >= 0 and task.pin is None else -1 for task, at in zip(plan.tasks, found.minibatch, strict=True)]


class _Assessed:
    """A step whose orders are forecast: as one pool of memory, or with parts as equal devices, whose copies from each other count as from below.

    Args:
        plan: the step in submission order.
        memory: bytes where tasks run, all devices together.
        only_files: as of `forecast`.
    """

    def __init__(self, plan: StepPlan, memory: int, num_devices: int, pace: Pace | None, *, only_files: bool) -> None:
        self._touches, self._num_devices, self._only_files = Touches(plan), num_devices if plan.partitions else 1, only_files
        self._memory = memory // self._num_devices
        self._pace = pace if pace is None or not plan.partitions else replace(pace, num_devices=num_devices)

    def forecast(self, positions: Sequence[int], devices: Sequence[int]) -> Forecast:
        """The cost of a step.

        Args:
            positions: of all tasks, in their order.
            devices: of each task in submission order, its device; empty for one pool.
        """
        if not devices:
            return forecast(self._touches, positions, self._memory, self._pace, only_files=self._only_files)
        own, pace, plan = _own(positions, devices, 0, self._num_devices), self._pace, self._touches.plan
        if pace is not None and pace.spill is not None:  # live data beyond the capacity is spread evenly; data of several devices is held once
            excess = last_tier_bytes(_of_tasks(plan, positions), computes=False) - pace.spill.capacity
            capacity = max(0, last_tier_bytes(_of_tasks(plan, own), computes=False) - excess // self._num_devices)
            pace = replace(pace, spill=replace(pace.spill, capacity=capacity))
        one = forecast(self._touches, own, self._memory, pace, share=SHARE_BESIDE)
        return Forecast(one.read * self._num_devices, one.written * self._num_devices, one.seconds)

    def foresee(self, chosen: StepPlan, positions: Sequence[int], devices: Sequence[int]) -> None:
        """Note in the plan in that order which data will leave the memory of equal devices before which use, and when it may come back; for data that
        several devices use, departures from any."""
        if not devices:
            found = foresee(self._touches, positions, self._memory)
            chosen.foresee(found.leaves, [found.returns])
            return
        leaves: dict[HandleRecord, set[int]] = {}
        returns: list[list[tuple[int, int]]] = []
        ranks, period = {position: at for at, position in enumerate(positions)}, len(positions)
        for device in range(self._num_devices):
            own = _own(positions, devices, device, self._num_devices)
            found = foresee(self._touches, own, self._memory, SHARE_LEAVING)
            for handle, uses in found.leaves.items():
                leaves.setdefault(handle, set()).update(ranks[own[at]] for at in uses)
            returns.append([(ranks[own[begin % len(own)]] - (period if begin < 0 else 0), ranks[own[at]]) for begin, at in found.returns])
        chosen.foresee(leaves, returns)


def _of_tasks(plan: StepPlan, positions: Sequence[int]) -> StepPlan:
    """A plan of some tasks of another."""
    return StepPlan([plan.tasks[at] for at in positions], plan.owned)


def device_bytes(plan: StepPlan, num_devices: int) -> int:
    """Bytes of device memory, all devices together, with which data moves between devices only."""
    return num_devices * largest_device_bytes(plan, num_devices) if plan.partitions else plan.needed_bytes()


def largest_device_bytes(plan: StepPlan, num_devices: int) -> int:
    """Bytes of the device that needs most. Where no task belongs to a device, as when minibatches are not a multiple of the devices, that is as much
    as all tasks need one by one: each device may compute any minibatch, with all data that lasts."""
    if not plan.partitions:
        return plan.needed_bytes()
    return max(_of_tasks(plan, _own(range(len(plan.tasks)), plan.partitions, device, num_devices)).needed_bytes() for device in range(num_devices))


def _own(positions: Iterable[int], devices: Sequence[int], device: int, num_devices: int) -> list[int]:
    """Positions of the tasks that one device executes, in their order: its own minibatches', and every D-th of the tasks outside all of them."""
    outside = itertools.count()
    return [at for at in positions if devices[at] == device or (devices[at] < 0 and next(outside) % num_devices == device)]


def _pools(found: Iterable[str], num_devices: int) -> list[list[str]]:
    """Names of candidates in pools, of which the first with a fitting order decides. On several devices, the first pool has the side-by-side
    orders."""
    pools: tuple[list[str], list[str]] = ([], [])
    for name in found:
        pools[not _is_side_by_side(name, num_devices)].append(name)
    return [*pools]


def _is_side_by_side(name: str, num_devices: int) -> bool:
    """Whether the order takes a multiple of `num_devices` minibatches through each layer side by side; true of any order on one device."""
    return num_devices == 1 or _group_of(name, num_devices) is not None


def _group_of(name: str, num_devices: int) -> int | None:
    """Number of minibatches that an order takes through each layer side by side, 0 for all of them; None unless it is a multiple of the devices."""
    kind, _, size = name.partition(":")
    group = int(size or 0) if kind == "layers" else -1
    return group if group >= 0 and group % num_devices == 0 else None


def _permuted(plan: StepPlan, positions: Sequence[int], devices: Sequence[int], num_devices: int) -> StepPlan:
    """The same tasks in another order. Every order that keeps conflicting accesses in sequence has the same dependencies."""
    tasks = [plan.tasks[position] for position in positions]
    devices = [devices[position] for position in positions] if devices else ()
    return StepPlan(tasks, plan.owned, window=WINDOW * num_devices, partitions=devices, idle=plan.idle)
