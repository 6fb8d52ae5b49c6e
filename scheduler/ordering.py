"""Which order a recorded step is planned in: candidates, a forecast of what each costs within the budgets, and the choice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, cast

from .core.forecast import SHARE_BESIDE, SHARE_LEAVING, Forecast, Pace, Spill, departures, forecast
from .core.machine import Machine
from .core.orders import Repetition, candidates, named, repetition
from .core.perf import Models
from .core.records import FILE, RAM, HandleRecord, NodeId, Task, WorkerKind
from .core.steps import RecordedTask, StepPlan
from .drivers.disk import THREADS

AUTO: Final = "auto"
SUBMISSION: Final = "submission"

TaskSeconds = Callable[[RecordedTask, WorkerKind], float]

WINDOW: Final = 256
"""Tasks ahead of the oldest unfinished one that may run where memory is short, per device."""

EQUAL: Final = 1.02
"""Orders whose seconds differ by less than this factor count as equally fast; of these the one that moves least is taken."""

TILE: Final = 1 << 20
"""Bytes of a copy by which the rate of a link is judged."""


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order a step executes in, and why.

    Attributes:
        name: of the order.
        plan: the step's tasks in that order.
        forecasts: what each order that was considered would cost, and the submission order; empty when everything fits.
        moves_least_of_equals: whether others were considered that count as equally fast, and move more.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]
    moves_least_of_equals: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes a step is expected to move."""
        found = self.forecasts.get(self.name)
        return 0 if found is None else found.total

    @property
    def seconds(self) -> float:
        """Seconds a step is expected to take; 0 where nothing was forecast, or without a pace."""
        found = self.forecasts.get(self.name)
        return 0.0 if found is None else found.seconds


def last_tier_bytes(plan: StepPlan, *, computes: bool) -> int:
    """What the last tier must hold for a program around a recorded step: its minimum, and inputs of the same size for other steps (validation).

    Args:
        computes: whether tasks run there.
    """
    return plan.minimum_bytes(is_last=True, computes=computes) + sum(handle.size for handle in plan.uses if handle.kind == "input")


def pace_of(
    plan: StepPlan,
    workers: Sequence[tuple[WorkerKind, NodeId]],
    below: NodeId,
    models: Models,
    *,
    channels: int,
    task_seconds: TaskSeconds | None = None,
    disk: tuple[NodeId, int] | None = None,
) -> Pace:
    """How fast a machine goes through a step, as its models have it.

    Args:
        workers: kind and node of each.
        below: the node that data comes from and leaves to; where tasks run nowhere else, what the step leaves in files still comes from there.
        channels: copies to and from it under way at once, if they share a link; 0 for links of their own, to and from each node where tasks run.
        task_seconds: instead of what the models say.
        disk: the node under `below` that must hold all that lives, and the bytes of `below`; None where nothing is under it.
    """
    seconds_of = task_seconds or (lambda task, kind: models.task_seconds(cast(Task, task), kind))
    kinds = [kind for kind, _ in workers]
    seconds = {task: 1 / sum(1 / max(seconds_of(task, kind), 1e-9) for kind in kinds) if task.kinds[0] != "host" else 0.0 for task in plan.tasks}
    places = sorted({node for _, node in workers} - {below})
    if not places and reads_files(plan):
        places, below, channels = [below], FILE, THREADS
    lanes = channels or len(places)
    read, write = inf, inf
    if places:
        read = lanes * TILE / models.transfer_seconds(below, places[0], TILE)
        write = inf if below == FILE else lanes * TILE / models.transfer_seconds(places[0], below, TILE)
    spill = None
    if places and disk is not None:
        node, room = disk
        read_spill, write_spill = (THREADS * TILE / models.transfer_seconds(*ends, TILE) for ends in ((node, places[0]), (places[0], node)))
        spill = Spill(room, read_spill, write_spill)
    return Pace(seconds, read, write, duplex=not channels, spill=spill)


@dataclass(frozen=True, slots=True)
class Reach:
    """What a real machine has where tasks run.

    Attributes:
        places: the nodes.
        memory: their bytes together, without what readers of files take.
        pace: how fast it goes through a plan.
    """

    places: frozenset[NodeId]
    memory: int
    pace: Callable[[StepPlan], Pace]


def reach_of(machine: Machine, models: Models) -> Reach:
    """What a real machine has where tasks run, as it is now."""
    nodes, residency = machine.nodes, machine.residency
    workers = [(worker.kind, worker.node) for worker in machine.dispatch.crew]
    places = frozenset(node for _, node in workers)
    below = residency.last if RAM in places else RAM
    channels = THREADS if nodes[below].is_storage else 0
    memory = sum(nodes[place].budget for place in places) - (residency.readers_bytes if RAM in places else 0)
    disk = (residency.last, nodes[RAM].budget - residency.readers_bytes) if residency.last not in (RAM, below) else None
    return Reach(places, memory, lambda plan: pace_of(plan, workers, below, models, channels=channels, disk=disk))


def reads_files(plan: StepPlan) -> bool:
    """Whether data of the step stays in files."""
    return any(map(plan.stays_in_file, plan.uses))


def plan_order(
    plan: StepPlan,
    order: str,
    *,
    memory: int,
    last: int,
    computes_on_last: bool,
    num_devices: int = 1,
    pace: Callable[[StepPlan], Pace] | None = None,
) -> PlannedOrder:
    """Choose the order of a step, and where its parts belong.

    On several devices each gets as many minibatches, if that can be: weights travel, activations stay. Where memory is short the minibatches of all
    devices then pass through the step side by side.

    Args:
        plan: in submission order.
        order: "auto", or the name of a candidate: see `orders`.
        memory: bytes where tasks run.
        last: bytes of the last tier, which must hold all that lives.
        computes_on_last: whether tasks run there.
        num_devices: D, memories of equal devices, if tasks run nowhere else; or 1.
        pace: how fast a plan goes, asked only where memory is short; orders are compared in seconds then, without it in bytes.

    Raises:
        ValueError: the step has no order of that name.
    """
    repeated = repetition(plan) if num_devices > 1 else None
    if repeated is not None:
        plan = StepPlan(plan.tasks, plan.owned, parts=parts_of(plan, repeated, num_devices), idle=plan.idle)
    fits = _needed(plan, num_devices) <= memory and last_tier_bytes(plan, computes=computes_on_last) <= last
    if order in (AUTO, SUBMISSION) and fits:
        return PlannedOrder(SUBMISSION, plan, {})
    found = candidates(plan, repeated) if order == AUTO else _asked_for(plan, order, repeated)
    speed = None if pace is None else pace(plan)
    only_files = computes_on_last and reads_files(plan)

    def arranged(name: str) -> StepPlan:
        parts = plan.parts if repeated is None else parts_of(plan, repeated, num_devices, _group_of(name, num_devices))
        return _permuted(plan, found[name], parts, num_devices)

    def look_at(name: str) -> tuple[int, Forecast]:
        each = arranged(name)  # one at a time: all of them together take more memory than the step itself
        return last_tier_bytes(each, computes=computes_on_last), _forecast(each, memory, num_devices, speed, only_files)

    if order == AUTO:
        forecasts, considered = _considered(_pools(found, num_devices if plan.parts else 1), look_at, last)
    else:
        forecasts, considered = {name: look_at(name)[1] for name in dict.fromkeys([SUBMISSION, order])}, [order]
    least = min(forecasts[name].seconds for name in considered)
    equal = [name for name in considered if forecasts[name].seconds <= EQUAL * least]
    order = min(equal, key=lambda name: forecasts[name].total)
    moves_least = any(forecasts[name].total > forecasts[order].total for name in equal)
    chosen = arranged(order)
    if not computes_on_last:  # nothing is written back from there
        _foresee(chosen, memory, num_devices)
    return PlannedOrder(order, chosen, {name: forecasts[name] for name in dict.fromkeys([SUBMISSION, *considered])}, moves_least)


def _considered(pools: Iterable[Sequence[str]], look_at: Callable[[str], tuple[int, Forecast]], last: int) -> tuple[dict[str, Forecast], list[str]]:
    """The submission order and pools of orders in turn, until one has some whose data the last tier holds.

    Args:
        look_at: bytes of the last tier that an order of that name needs, and its forecast.
        last: bytes of the last tier.

    Returns:
        Forecasts of all that were looked at; of the last pool, those whose data the tier holds; if no pool has any, what needs least of it.
    """
    looks = {SUBMISSION: look_at(SUBMISSION)}
    considered: list[str] = []
    for names in pools:
        looks |= {name: look_at(name) for name in names if name not in looks}
        considered = [name for name in names if looks[name][0] <= last]
        if considered:
            break
    return {name: forecast for name, (_, forecast) in looks.items()}, considered or [min(looks, key=lambda name: looks[name][0])]


def _asked_for(plan: StepPlan, order: str, repeated: Repetition | None) -> dict[str, list[int]]:
    """One order, and the submitted one to compare it with.

    Raises:
        ValueError: the step has no order of that name.
    """
    repeated = repetition(plan) if repeated is None else repeated
    positions = named(plan, repeated, order)
    if positions is None:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(candidates(plan, repeated))}, and auto")
    return {SUBMISSION: list(range(len(plan.tasks))), order: positions}


def parts_of(plan: StepPlan, found: Repetition, num_devices: int, group: int | None = None) -> list[int]:
    """For each task the device, from 0, that its minibatch belongs on, or -1; empty if the minibatches are not a multiple of the devices.

    Neighbours of a group are on one device: what all of them add to goes from device to device once.

    Args:
        group: minibatches that pass a layer side by side, a multiple of the devices; 0 for all, None for as many as there are devices.
    """
    num = found.num_minibatches
    if not num or num % num_devices:
        return []
    group = num_devices if group is None else group or num
    device = [at % group * num_devices // min(group, num - at // group * group) for at in range(num)]
    return [device[at] if at >= 0 and task.pin is None else -1 for task, at in zip(plan.tasks, found.minibatch, strict=True)]


def _share(plan: StepPlan, num_devices: int, device: int = 0) -> list[int]:
    """Positions of what one of the devices executes of a plan with parts: its part, and of the tasks outside all parts what its turn brings."""
    outside = itertools.count()
    return [at for at, part in enumerate(plan.parts) if part == device or (part < 0 and next(outside) % num_devices == device)]


def _only(plan: StepPlan, positions: Sequence[int]) -> StepPlan:
    return StepPlan([plan.tasks[at] for at in positions], plan.owned)


def _foresee(plan: StepPlan, memory: int, num_devices: int) -> None:
    """Note in the plan what will leave the memories of equal devices; of data that several of them use, what leaves any of them."""
    if not plan.parts:
        plan.foresee(departures(plan, memory))
        return
    leaves: dict[HandleRecord, set[int]] = {}
    for device in range(num_devices):
        share = _share(plan, num_devices, device)
        for handle, places in departures(_only(plan, share), memory // num_devices, SHARE_LEAVING).items():
            leaves.setdefault(handle, set()).update(share[place] for place in places)
    plan.foresee(leaves)


def _needed(plan: StepPlan, num_devices: int) -> int:
    """Bytes in all device memory together with which nothing moves but between devices."""
    return num_devices * _only(plan, _share(plan, num_devices)).needed_bytes() if plan.parts else plan.needed_bytes()


def _forecast(plan: StepPlan, memory: int, num_devices: int, pace: Pace | None, only_files: bool) -> Forecast:
    """What a step costs within so much memory: one pool; with parts, the devices alike, with copies between them that come from memory as well."""
    if not plan.parts:
        return forecast(plan, memory, pace, only_files=only_files)
    share = _only(plan, _share(plan, num_devices))
    if pace is not None:
        pace = replace(pace, parts=num_devices)
        if pace.spill is not None:  # what lives and does not fit is spread evenly; what several use lies there once
            excess = last_tier_bytes(plan, computes=False) - pace.spill.room
            room = max(0, last_tier_bytes(share, computes=False) - excess // num_devices)
            pace = replace(pace, spill=replace(pace.spill, room=room))
    one = forecast(share, memory // num_devices, pace, share=SHARE_BESIDE)
    return Forecast(one.read * num_devices, one.written * num_devices, one.seconds)


def _pools(found: Iterable[str], num_devices: int) -> list[list[str]]:
    """The names of candidates in pools: the first that has one that fits is chosen from. Of several devices, what runs side by side comes first."""
    pools: tuple[list[str], list[str]] = ([], [])
    for name in found:
        pools[not _is_side_by_side(name, num_devices)].append(name)
    return [*pools]


def _is_side_by_side(name: str, num_devices: int) -> bool:
    """Whether the order takes as many minibatches through each layer as there are devices, or a multiple: one device, any order."""
    return num_devices == 1 or _group_of(name, num_devices) is not None


def _group_of(name: str, num_devices: int) -> int | None:
    """Minibatches that an order takes through each layer side by side, if they are a multiple of the devices; 0 for all of them, else None."""
    kind, _, size = name.partition(":")
    group = int(size or 0) if kind == "layers" else -1
    return group if group >= 0 and group % num_devices == 0 else None


def _permuted(plan: StepPlan, positions: list[int], parts: Sequence[int], num_devices: int) -> StepPlan:
    """The same tasks in another order; every order that keeps conflicting accesses in theirs has the same dependencies."""
    tasks = [plan.tasks[position] for position in positions]
    parts = [parts[position] for position in positions] if parts else ()
    return StepPlan(tasks, plan.owned, window=WINDOW * num_devices, parts=parts, idle=plan.idle)
