"""What one of several equal devices executes of a step: its own minibatches, and every D-th of the tasks outside all of them.

Forecasts of a step on D devices follow one of them. A planner that weighs many steps rewrites, sorts and forecasts the *share* of one alone, and
gives all devices what it has chosen for that: minibatches of one device, and all updates, by which it is seen what is a gradient. So it knows only
orders that take a multiple of D minibatches through each layer side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from ..core.step_plan import StepPlan
from .repeated_structure import Repetition

SIDE_BY_SIDE: Final = "layers"
"""Orders of one device that all can take at the same time, each with minibatches of its own: this one, and with a number of minibatches behind it."""


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


def own_tasks(positions: Sequence[int], devices: Sequence[int], device: int, num_devices: int) -> list[int]:
    """Positions of the tasks that one device executes.

    Args:
        positions: of all tasks, in their order.
        devices: of each task in submission order, as `devices_of_tasks` has them.
        device: from 0.
    """
    outside = itertools.count()
    return [at for at in positions if devices[at] == device or (devices[at] < 0 and next(outside) % num_devices == device)]


def of_tasks(plan: StepPlan, positions: Sequence[int]) -> StepPlan:
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
    shares = (own_tasks(range(len(plan.tasks)), plan.partitions, device, num_devices) for device in range(num_devices))
    return max(of_tasks(plan, own).needed_bytes() for own in shares)


def share_of(plan: StepPlan, devices: Sequence[int], updates: Sequence[bool]) -> StepPlan:
    """The share of the first device: what is left out are minibatches of others, and what only these read.

    Args:
        devices: of each task, as `devices_of_tasks` has them.
        updates: for each task, whether it is an update.
    """
    own = [at for at, device in enumerate(devices) if device == 0]
    kept, wanted = {*own, *(at for at, update in enumerate(updates) if update)}, own
    while wanted:
        wanted = [before for at in wanted for before in plan.predecessors[at] if devices[before] < 0 and before not in kept]
        kept.update(wanted)
    return of_tasks(plan, sorted(kept))


def devices_of_share(plan: StepPlan, updates: Sequence[bool]) -> list[int]:
    """For each task of a share 0, or -1 for an update, which is one device's of all."""
    return [-1 if update or task.pin is not None else 0 for task, update in zip(plan.tasks, updates, strict=True)]


def order_of_one(order: str, num_devices: int) -> str | None:
    """The name in the share of one device of an order that all take side by side; None for another order."""
    kind, _, size = order.partition(":")
    if kind != SIDE_BY_SIDE or (size and not (size.isdecimal() and int(size) and int(size) % num_devices == 0)):
        return None
    return f"{kind}:{int(size) // num_devices}" if size else kind


def order_of_all(order: str, num_devices: int) -> str:
    """The name for all devices of an order in the share of one."""
    kind, _, size = order.partition(":")
    return f"{kind}:{int(size) * num_devices}" if kind == SIDE_BY_SIDE and size else order
