"""The share of a step that one of several equal devices executes: its own minibatches, and every D-th of the tasks outside all minibatches.

Forecasts of a step on D devices follow one of them. To evaluate many candidates, a planner rewrites, sorts and forecasts the share of one device
alone, and gives all devices what it has chosen for that. The share has all updates, because they show which data is a gradient. It knows only orders
that take a multiple of D minibatches through each layer side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from ..core.step_plan import StepPlan
from .step_structure import StepStructure

SIDE_BY_SIDE: Final = "layers"
"""Order that all devices can take at the same time, each with minibatches of its own; also with a number of minibatches appended."""


def devices_of_tasks(plan: StepPlan, structure: StepStructure, num_devices: int, group: int | None = None) -> list[int]:
    """Return the device of each task's minibatch, from 0, or -1 outside all minibatches; nothing unless devices divide the number of minibatches.

    Neighbouring minibatches of a group share a device, so a gradient that all of them add to travels from device to device once.

    Args:
        group: number of minibatches that pass a layer side by side, a multiple of the number of devices; 0 for all, None for one on each device.
    """
    num = structure.num_minibatches
    if not num or num % num_devices:
        return []
    group = num_devices if group is None else group or num
    device = [number % group * num_devices // min(group, num - number // group * group) for number in range(num)]
    return [device[number] if number >= 0 and task.pin is None else -1 for task, number in zip(plan.tasks, structure.minibatch, strict=True)]


def own_tasks(positions: Sequence[int], devices: Sequence[int], device: int, num_devices: int) -> list[int]:
    """Return the positions of the tasks that one device executes.

    Args:
        positions: positions of all tasks, in their order.
        devices: device of each task in submission order (`devices_of_tasks`).
        device: number of the device, from 0.
    """
    outside = itertools.count()
    return [position for position in positions if devices[position] == device or (devices[position] < 0 and next(outside) % num_devices == device)]


def of_tasks(plan: StepPlan, positions: Sequence[int]) -> StepPlan:
    """Return a plan of some tasks of another plan."""
    return StepPlan([plan.tasks[position] for position in positions], plan.owned)


def largest_device_bytes(plan: StepPlan, num_devices: int) -> int:
    """Return the bytes of the device that needs most.

    If no task belongs to a device, because devices do not divide the number of minibatches, that is as much as all tasks need one by one: each device
    may compute any minibatch, with all data that lasts.
    """
    if not plan.partitions:
        return plan.needed_bytes()
    shares = (own_tasks(range(len(plan.tasks)), plan.partitions, device, num_devices) for device in range(num_devices))
    return max(of_tasks(plan, own).needed_bytes() for own in shares)


def share_of(plan: StepPlan, devices: Sequence[int], updates: Sequence[bool]) -> StepPlan:
    """Return the share of the first device: the step without the minibatches of other devices and the tasks whose results only these read.

    Args:
        devices: device of each task (`devices_of_tasks`).
        updates: for each task, whether it is an update.
    """
    own = [position for position, device in enumerate(devices) if device == 0]
    chosen, wanted = {*own, *(position for position, is_update in enumerate(updates) if is_update)}, own
    while wanted:
        wanted = [before for position in wanted for before in plan.predecessors[position] if devices[before] < 0 and before not in chosen]
        chosen.update(wanted)
    return of_tasks(plan, sorted(chosen))


def devices_of_share(plan: StepPlan, updates: Sequence[bool]) -> list[int]:
    """Return 0 for each task of a share, or -1 for an update, which belongs to any one of all devices."""
    return [-1 if is_update or task.pin is not None else 0 for task, is_update in zip(plan.tasks, updates, strict=True)]


def order_of_all(order: str, num_devices: int) -> str:
    """Return the name for all devices of an order of the share of one."""
    kind, _, size = order.partition(":")
    return f"{kind}:{int(size) * num_devices}" if kind == SIDE_BY_SIDE and size else order
