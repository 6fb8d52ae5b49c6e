"""A recorded step in some of its orders: what each would cost where memory is short, and the plan of the one that is taken.

Tasks run in one pool of memory, or on equal devices, each of which executes its own minibatches; copies from another device count as from below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ..core.records import HandleRecord
from ..core.step_plan import StepPlan
from .device_share import SIDE_BY_SIDE, device_bytes, devices_of_share, devices_of_tasks, of_tasks, own_tasks
from .forecast import SHARE_BESIDE, SHARE_LEAVING, Forecast, Pace, forecast, foresee
from .machine_pace import reads_files
from .orders import candidates, named
from .repeated_structure import Repetition, repetition
from .tile_traffic import Touches

SUBMISSION: Final = "submission"

THRIFTY: Final = ("eager-update", "layers")
"""Orders in which data that lives at once takes the fewest bytes: one minibatch after another where activations are most of it, all through a layer
where gradients are, because those that several minibatches add to live through all of them otherwise."""

WINDOW: Final = 256
"""Scheduling window where memory is short: tasks beyond the oldest unfinished one that may run, per device."""

ROOMY: Final = 2
"""A step that fits this many times into the memory runs without a window. Out of order it needs more bytes than in order: GPT-2 XL, which needs
45 GiB, moved 31 GB a step in 60 GiB."""


def last_tier_bytes(plan: StepPlan, *, computes: bool, ranks: Sequence[int] | None = None) -> int:
    """Bytes that the last tier must hold for a program around a recorded step: the step's minimum, and a second set of inputs (for validation).

    Args:
        computes: whether tasks run on the last tier.
        ranks: of the tasks, where they run in another order.
    """
    return plan.minimum_bytes(is_last=True, computes=computes, ranks=ranks) + sum(handle.size for handle in plan.uses if handle.kind == "input")


def least_last_bytes(plan: StepPlan) -> tuple[int, int]:
    """As `last_tier_bytes` if tasks run on the last tier, and if none does, each in the better of the `THRIFTY` orders."""
    repeated = repetition(plan)
    ranks = [_ranks(order) for name in THRIFTY if (order := named(plan, repeated, name)) is not None]
    with_tasks, without = (min(last_tier_bytes(plan, computes=computes, ranks=each) for each in ranks) for computes in (True, False))
    return with_tasks, without


def _ranks(positions: Sequence[int]) -> list[int]:
    """Of each task, its place in an order."""
    ranks = [0] * len(positions)
    for at, position in enumerate(positions):
        ranks[position] = at
    return ranks


@dataclass(frozen=True, slots=True)
class PlanningMachine:
    """Where a step runs; attributes as the arguments of `plan_order`.

    Attributes:
        is_share: whether plans are the share of one of the devices (`device_share`), whose orders are those of one.
    """

    memory: int
    last: int
    computes_on_last: bool
    num_devices: int = 1
    pace: Callable[[StepPlan], Pace] | None = None
    is_share: bool = False


class OrderedStep:
    """A step on a machine, in submission order and in others.

    Args:
        repeated: `repetition` of the step, if it is known.

    Attributes:
        machine: where it runs.
        plan: the step in submission order, with the devices of its tasks where it has such.
    """

    def __init__(self, plan: StepPlan, machine: PlanningMachine, repeated: Repetition | None = None) -> None:
        self.machine, self._recorded, self._known, self._orders = machine, plan, repeated, dict[str, list[int]]()
        if machine.num_devices > 1:
            plan = plan.divided(devices_of_share(plan, self._repeated.updates) if machine.is_share else self._devices(machine.num_devices))
        self.plan = plan
        self._num_devices = machine.num_devices if plan.partitions else 1
        self._memory = machine.memory // self._num_devices

    @cached_property
    def last_bytes(self) -> int:
        """What the last tier must hold in submission order."""
        return last_tier_bytes(self.plan, computes=self.machine.computes_on_last)

    @cached_property
    def fits(self) -> bool:
        """Whether nothing moves in submission order."""
        return not self.plan.has_aside and self._needed_bytes <= self.machine.memory and self.last_bytes <= self.machine.last

    def names(self) -> list[str]:
        """Names of all candidates; one minibatch after another is a side-by-side order for the share of a device."""
        self._orders |= candidates(self._recorded, self._repeated)
        found = [*self._orders]
        return [*found, alone] if self.machine.is_share and self.has(alone := f"{SIDE_BY_SIDE}:1") else found

    def has(self, name: str) -> bool:
        """Whether the step has an order of that name, if no candidate."""
        if name not in self._orders:
            found = named(self._recorded, self._repeated, name)
            if found is None:
                return False
            self._orders[name] = found
        return True

    def pools(self, names: Sequence[str]) -> list[list[str]]:
        """The names in pools, of which the first with a fitting order decides: on several devices, that of the orders that take a multiple of their
        number of minibatches through each layer side by side."""
        if not self.plan.partitions:
            return [[*names]]
        pools: tuple[list[str], list[str]] = ([], [])
        for name in names:
            pools[_group_of(name, self._unit) is None].append(name)
        return [*pools]

    def forecast(self, name: str) -> Forecast:
        """The cost of the step in an order, and what the last tier must hold."""
        positions, devices = self._orders[name], self._devices_of(name)
        if devices:
            found = self._of_device(positions, devices)
        else:
            found = forecast(self._touches, positions, self._memory, self._pace, only_files=self._only_files)
        return replace(found, last_bytes=last_tier_bytes(self.plan, computes=self.machine.computes_on_last, ranks=_ranks(positions)))

    def planned(self, name: str) -> StepPlan:
        """The step in an order, with what will leave the memory where tasks run, if something moves and there is a tier below."""
        if name == SUBMISSION and self.fits:
            is_roomy = ROOMY * self._needed_bytes <= self.machine.memory
            return self.plan if is_roomy else self._permuted(range(len(self.plan.tasks)), self.plan.partitions)
        positions, devices = self._orders[name], self._devices_of(name)
        chosen = self._permuted(positions, devices)
        if not self.machine.computes_on_last:  # the last tier has no tier below to write back to
            self._foresee(chosen, positions, devices)
        return chosen

    @cached_property
    def _needed_bytes(self) -> int:
        return device_bytes(self.plan, self.machine.num_devices)

    @cached_property
    def _repeated(self) -> Repetition:
        return repetition(self._recorded) if self._known is None else self._known

    @cached_property
    def _touches(self) -> Touches:
        return Touches(self.plan)

    @cached_property
    def _pace(self) -> Pace | None:
        found = None if self.machine.pace is None else self.machine.pace(self.plan)
        return found if found is None or not self.plan.partitions else replace(found, num_devices=self._num_devices)

    @cached_property
    def _only_files(self) -> bool:
        """As of `forecast`."""
        return self.machine.computes_on_last and reads_files(self.plan)

    @property
    def _unit(self) -> int:
        """Minibatches of which an order takes a multiple through each layer side by side on all devices."""
        return 1 if self.machine.is_share else self.machine.num_devices

    def _devices(self, group: int | None) -> list[int]:
        return devices_of_tasks(self._recorded, self._repeated, self.machine.num_devices, group)

    def _devices_of(self, name: str) -> Sequence[int]:
        """The device of each task in an order; none for one pool."""
        return self.plan.partitions if self.machine.num_devices == 1 or self.machine.is_share else self._devices(_group_of(name, self._unit))

    def _of_device(self, positions: Sequence[int], devices: Sequence[int]) -> Forecast:
        """The cost for equal devices, by that of the first."""
        own, pace, plan = own_tasks(positions, devices, 0, self._num_devices), self._pace, self.plan
        if pace is not None and pace.spill is not None:  # live data beyond the capacity is spread evenly; data of several devices is held once
            excess = last_tier_bytes(of_tasks(plan, positions), computes=False) - pace.spill.capacity
            capacity = max(0, last_tier_bytes(of_tasks(plan, own), computes=False) - excess // self._num_devices)
            pace = replace(pace, spill=replace(pace.spill, capacity=capacity))
        one = forecast(self._touches, own, self._memory, pace, share=SHARE_BESIDE)
        return replace(one, read=one.read * self._num_devices, written=one.written * self._num_devices)

    def _foresee(self, chosen: StepPlan, positions: Sequence[int], devices: Sequence[int]) -> None:
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
            own = own_tasks(positions, devices, device, self._num_devices)
            found = foresee(self._touches, own, self._memory, SHARE_LEAVING)
            for handle, uses in found.leaves.items():
                leaves.setdefault(handle, set()).update(ranks[own[at]] for at in uses)
            returns.append([(ranks[own[begin % len(own)]] - (period if begin < 0 else 0), ranks[own[at]]) for begin, at in found.returns])
        chosen.foresee(leaves, returns)

    def _permuted(self, positions: Sequence[int], devices: Sequence[int]) -> StepPlan:
        """The same tasks in another order. Every order that keeps conflicting accesses in sequence has the same dependencies."""
        plan = self.plan
        tasks = [plan.tasks[position] for position in positions]
        devices = [devices[position] for position in positions] if devices else ()
        return StepPlan(tasks, plan.owned, window=WINDOW * self.machine.num_devices, partitions=devices, idle=plan.idle)


def _group_of(name: str, unit: int) -> int | None:
    """Number of minibatches that an order takes through each layer side by side, 0 for all of them; None unless it is a multiple of a unit."""
    kind, _, size = name.partition(":")
    group = int(size or 0) if kind == SIDE_BY_SIDE else -1
    return group if group >= 0 and group % unit == 0 else None
