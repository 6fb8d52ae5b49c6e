"""A recorded step in some of its orders: the forecast of each if memory is short, and the plan of one.

Tasks run in one pool of memory, or on equal devices, each of which executes its own minibatches. Copies from another device count as copies from the
tier below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Final

from ..core.records import HandleRecord
from ..core.step_plan import StepPlan
from .device_share import SIDE_BY_SIDE, devices_of_share, devices_of_tasks, largest_device_bytes, of_tasks, own_tasks, share_of
from .forecast import SHARE, SHARE_BESIDE, SHARE_LEAVING, Forecast, Pace, forecast, foresee
from .machine_pace import PlanningMachine, reads_files
from .orders import candidates, named
from .step_structure import StepStructure, structure_of
from .tile_traffic import Touches
from .value_groups import AUTO

SUBMISSION: Final = "submission"

SMALLEST: Final = ("eager-update", "layers")
"""Orders in which live data takes the fewest bytes: one minibatch after another if most of it is activations, all through a layer if most of it is
gradients, because gradients that several minibatches add to live through all of them otherwise."""

WINDOW: Final = 256
"""Scheduling window if memory is short: number of tasks beyond the oldest unfinished one that may run, per device."""

ROOMY: Final = 2
"""Ratio of memory to the needs of a step from which on it runs without a window. Out of order it needs more bytes than in order: GPT-2 XL, which
needs 45 GiB, moved 31 GB a step in 60 GiB."""


def last_tier_bytes(plan: StepPlan, *, computes: bool, ranks: Sequence[int] | None = None) -> int:
    """Return the bytes of the last tier that a program around a recorded step needs: the step's minimum, and a second set of inputs, for validation.

    Args:
        computes: whether tasks run on the last tier.
        ranks: place of each task in the order of execution; that of submission by default.
    """
    return plan.minimum_bytes(is_last=True, computes=computes, ranks=ranks) + sum(
        handle.spec.size for handle in plan.uses if handle.spec.kind == "input"
    )


def order_ranks(plan: StepPlan, order: str) -> Iterator[list[int]]:
    """Yield the place of each task in an order that the step has; for "auto", in those in which live data takes the fewest bytes."""
    structure = structure_of(plan)
    for name in SMALLEST if order == AUTO else (order,):
        if (positions := named(plan, structure, name)) is not None:
            yield _ranks(positions)


def _ranks(positions: Sequence[int]) -> list[int]:
    """Return the place of each task in an order."""
    ranks = [0] * len(positions)
    for rank, position in enumerate(positions):
        ranks[position] = rank
    return ranks


class OrderedStep:
    """A step on a machine, in submission order and in others.

    Args:
        plan: the step in submission order.
        machine: machine that the step runs on.
        is_share: whether the step is the share of one of the machine's equal devices (`device_share`).

    Attributes:
        recorded: the step in submission order.
        plan: the same step with the devices of its tasks if there are several.
    """

    def __init__(self, plan: StepPlan, machine: PlanningMachine, *, is_share: bool = False) -> None:
        self.machine, self.recorded, self.is_share, self._orders = machine, plan, is_share, dict[str, list[int]]()
        self._forecasts: dict[str, Forecast] = {}
        if machine.num_devices > 1:
            plan = plan.divided(devices_of_share(plan, self._structure.updates) if is_share else self._devices(machine.num_devices))
        self.plan = plan
        self._num_devices = machine.num_devices if plan.partitions else 1
        self._memory = machine.memory // self._num_devices

    def rewritten(self, plan: StepPlan) -> OrderedStep:
        """Return a step with a recomputation in its place."""
        return OrderedStep(plan, self.machine, is_share=self.is_share)

    def share(self) -> OrderedStep:
        """Return the share of one of the devices that divide the minibatches between them."""
        return OrderedStep(share_of(self.recorded, self.plan.partitions, self._structure.updates), self.machine, is_share=True)

    @cached_property
    def last_bytes(self) -> int:
        """Bytes of the last tier that the submission order needs."""
        return last_tier_bytes(self.plan, computes=self.machine.computes_on_last)

    @cached_property
    def fits(self) -> bool:
        """Whether no data moves in submission order."""
        return not self.plan.has_aside and self.needed_bytes <= self.machine.memory and self.last_bytes <= self.machine.last

    @cached_property
    def capacity_below(self) -> float:
        """Bytes of the tier below that hold data before any goes to the disk under it; infinite without such a disk."""
        return inf if self._pace is None or self._pace.spill is None else self._pace.spill.capacity

    @cached_property
    def task_seconds(self) -> float:
        """Seconds of all tasks on all workers together, of the share of a device those of its own; 0 without a pace."""
        if (pace := self._pace) is None:
            return 0.0
        own = self._own(range(len(self.plan.tasks)), self.plan.partitions, 0)
        return sum(pace.seconds[self.plan.tasks[position]] for position in own) * self._num_devices

    def names(self) -> list[str]:
        """Return the names of all candidates; for the share of a device, one minibatch after another is an order of all devices, too."""
        self._orders |= candidates(self.recorded, self._structure)
        names = [*self._orders]
        return [*names, alone] if self.is_share and self.has(alone := f"{SIDE_BY_SIDE}:1") else names

    def has(self, name: str) -> bool:
        """Return whether the step has an order of that name, and remember it; it need not be a candidate."""
        if name not in self._orders and (positions := named(self.recorded, self._structure, name)) is not None:
            self._orders[name] = positions
        return name in self._orders

    def pools(self, names: Sequence[str]) -> list[list[str]]:
        """Return the names in pools, of which a planner evaluates the first one with an order whose data fits the last tier.

        On several devices the first pool has the orders in which all devices work side by side, each on a minibatch of the same layer. The second one
        has the others: they keep devices waiting for each other, but may need fewer bytes.
        """
        if not self.plan.partitions:
            return [[*names]]
        beside = [name for name in names if _group_of(name, self._unit) is not None]
        return [beside, [name for name in names if name not in beside]]

    def forecast(self, name: str) -> Forecast:
        """Return the forecast of the step in one of its orders: that of one device, times their number; with the bytes of the last tier."""
        if name in self._forecasts:
            return self._forecasts[name]
        positions, devices = self._positions(name), self._devices_of(name)
        own, pace, num_devices, plan = self._own(positions, devices, 0), self._pace, self._num_devices, self.plan
        if devices and pace is not None and pace.spill is not None:  # data beyond the capacity is spread evenly; that of several devices is held once
            excess = last_tier_bytes(of_tasks(plan, positions), computes=False) - pace.spill.capacity
            capacity = max(0, last_tier_bytes(of_tasks(plan, own), computes=False) - excess // num_devices)
            pace = replace(pace, spill=replace(pace.spill, capacity=capacity))
        only_files = self.machine.computes_on_last and reads_files(plan)
        one = forecast(self._touches, own, self._memory, pace, only_files=only_files, share=SHARE_BESIDE if devices else SHARE)
        last_bytes = last_tier_bytes(plan, computes=self.machine.computes_on_last, ranks=_ranks(positions))
        self._forecasts[name] = replace(one, read=one.read * num_devices, written=one.written * num_devices, last_bytes=last_bytes)
        return self._forecasts[name]

    def planned(self, name: str) -> StepPlan:
        """Return the step in one of its orders; if data moves and there is a tier below, the plan says which data leaves memory."""
        if name == SUBMISSION and self.fits:
            is_roomy = ROOMY * self.needed_bytes <= self.machine.memory
            return self.plan if is_roomy else self._permuted(range(len(self.plan.tasks)), self.plan.partitions)
        positions, devices = self._positions(name), self._devices_of(name)
        chosen = self._permuted(positions, devices)
        if not self.machine.computes_on_last:  # the last tier has no tier below to write back to
            self._foresee(chosen, positions, devices)
        return chosen

    def _positions(self, name: str) -> list[int]:
        """Return the positions of the tasks in an order that the step has."""
        assert self.has(name), name
        return self._orders[name]

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes of `device_bytes` that the submission order needs."""
        return self.device_bytes(self.plan)

    def device_bytes(self, plan: StepPlan) -> int:
        """Return the bytes of the memory where tasks run, all devices together, with which an order's data moves between devices only."""
        return self._num_devices * largest_device_bytes(plan, self.machine.num_devices)

    @cached_property
    def _structure(self) -> StepStructure:
        return structure_of(self.recorded)

    @cached_property
    def _touches(self) -> Touches:
        return Touches(self.plan)

    @cached_property
    def _pace(self) -> Pace | None:
        pace = None if self.machine.pace is None else self.machine.pace(self.plan)
        return pace if pace is None or not self.plan.partitions else replace(pace, num_devices=self._num_devices)

    @property
    def _unit(self) -> int:
        """Number of minibatches of which an order of all devices takes a multiple through each layer side by side."""
        return 1 if self.is_share else self.machine.num_devices

    def _devices(self, group: int | None) -> list[int]:
        return devices_of_tasks(self.recorded, self._structure, self.machine.num_devices, group)

    def _devices_of(self, name: str) -> Sequence[int]:
        """Return the device of each task in an order; nothing for one pool of memory."""
        return self.plan.partitions if self.machine.num_devices == 1 or self.is_share else self._devices(_group_of(name, self._unit))

    def _own(self, positions: Sequence[int], devices: Sequence[int], device: int) -> Sequence[int]:
        """Return the positions of the tasks that one device executes, or of all in one pool of memory."""
        return own_tasks(positions, devices, device, self._num_devices) if devices else positions

    def _foresee(self, chosen: StepPlan, positions: Sequence[int], devices: Sequence[int]) -> None:
        """Note in a plan which data will leave the memory before which use, and when it may come back.

        On several devices, data that several of them use leaves when it leaves any.
        """
        leaves: dict[HandleRecord, set[int]] = {}
        returns: list[list[tuple[int, int]]] = []
        ranks, period = _ranks(positions), len(positions)
        for device in range(self._num_devices):
            own = self._own(positions, devices, device)
            foreseen = foresee(self._touches, own, self._memory, SHARE_LEAVING if devices else SHARE)
            for handle, uses in foreseen.leaves.items():
                leaves.setdefault(handle, set()).update(ranks[own[use]] for use in uses)
            returns.append([(ranks[own[begin % len(own)]] - (period if begin < 0 else 0), ranks[own[use]]) for begin, use in foreseen.returns])
        chosen.foresee(leaves, returns)

    def _permuted(self, positions: Sequence[int], devices: Sequence[int]) -> StepPlan:
        """Return the same tasks in another order. Every order that keeps conflicting accesses in sequence has the same dependencies."""
        plan = self.plan
        tasks = [plan.tasks[position] for position in positions]
        devices = [devices[position] for position in positions] if devices else ()
        return StepPlan(tasks, plan.owned, window=WINDOW * self.machine.num_devices, partitions=devices, idle=plan.idle)


def _group_of(name: str, unit: int) -> int | None:
    """Return the number of minibatches that an order takes through each layer side by side, 0 for all; None unless it is a multiple of `unit`."""
    kind, _, size = name.partition(":")
    group = int(size or 0) if kind == SIDE_BY_SIDE else -1
    return group if group >= 0 and group % unit == 0 else None
