"""Task fusion: neighbouring tasks of a recorded step that run on a GPU and move no data become one task, whose kernels start with one call.

The machine spends as long on a task as a GPU computes on a small one, and a kernel start from Python has its own overhead. Where a step fits the
memory of its devices nothing has to be decided between its tasks: neighbours in the planned order are fused, data that lives and dies inside a
fused task becomes one piece of scratch memory, and edges, budgets and lifetimes hold for fused tasks as for any others. Where memory is plenty, all
tasks up to the first that updates data of the program are one task, and all from there on another: so a kernel that fails in a forward or backward
pass loses none of that data. Elsewhere as many are fused as use a half, a quarter or an eighth of the memory.

The kernels of a fused task are recorded as a CUDA graph when it runs the second time on the same addresses; later runs start the graph. Neighbours
of one kind that do not touch each other's results start together, where their codelet knows how (`Codelet.cuda_many`). The price: inner data of a
fused task is allocated for its whole duration, and nobody can look between its tasks: who watches or traces single tasks gets single tasks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from ..core.codelet import Codelet
from ..core.records import RW, SCRATCH, HandleRecord, Mode, W
from ..core.step_plan import RecordedTask, StepPlan
from ..planning.device_share import largest_device_bytes
from ..planning.ordered_step import last_tier_bytes
from ..planning.planned_order import PlannedOrder
from .fused_tasks import Make, ScratchView, join, merged

LOOK_BACK: Final = 8
"""Starts between two tasks that start together, at most: what one of them reads is kept for the other."""
SHARES: Final = (1, 2, 4, 8)
"""A fused task may use this fraction of a device's memory: the largest with which the step leaves enough free."""
_SPARE: Final = 6
"""One in so many bytes of a device's memory stays free of fused tasks: that much is kept clean or free by early write-backs."""


def fuse_if_it_fits(found: PlannedOrder, budgets: Sequence[int], last: int, make: Make) -> PlannedOrder:
    """A step in its planned order with its tasks fused, if it fits its devices and leaves bytes for inner data; else the order as it was.

    Args:
        budgets: bytes of each device.
        last: bytes of the last tier: it holds all that a fused task reads beside all that it makes, for as long as that runs.
        make: as in `fuse`.
    """
    if found.forecasts:
        return found
    plan, budget, num_devices = found.plan, min(budgets), len(budgets)
    # two fused tasks have their inner data at once where they can be ready at once: of two minibatches, of two replays that change nothing
    num_sets = 2 if plan.partitions or not any(_updates(plan)) else 1
    for share in SHARES:
        fused = fuse(plan, budget // share, make)
        needed = max(largest_device_bytes(fused, num_devices), fused.largest_task()) + (num_sets - 1) * _largest_inner(fused)
        last_bytes = last_tier_bytes(fused, computes=False)
        if needed <= (budget if share == SHARES[-1] else budget - budget // _SPARE) and last_bytes <= last:
            return replace(found, plan=fused, last_bytes=last_bytes)
    return found


def fuse(plan: StepPlan, most: int, make: Make) -> StepPlan:
    """The same step with neighbouring tasks fused.

    Args:
        most: bytes of all data of a fused task.
        make: creates the records of pieces of memory for data of several handles.
    """
    updates, ends = _updates(plan), [0]
    while ends[-1] < len(plan.tasks):
        ends.append(_end_of(plan, ends[-1], most, updates))
    bundles = _bundles(plan, ends, make)
    owned = {**plan.owned, **{bundle: False for bundle, _ in bundles.values()}}
    tasks = [plan.tasks[first] if end == first + 1 else _join(plan, first, end, bundles, make, owned) for first, end in pairwise(ends)]
    devices = [plan.partitions[first] for first in ends[:-1]] if plan.partitions else ()
    return StepPlan(tasks, owned, window=plan.window, partitions=devices, idle=plan.idle)


def _bundles(plan: StepPlan, ends: Sequence[int], make: Make) -> dict[HandleRecord, tuple[HandleRecord, int]]:
    """Data that the same fused tasks use in the same way, as gradients between the backward pass and the update, becomes data of one handle.

    Args:
        ends: where the tasks begin that are fused to one, and the end of the last ones.

    Returns:
        For each handle that goes, the one that holds its data, and the offset there; bytes.
    """
    alike: dict[tuple[Any, ...], list[HandleRecord]] = {}
    for handle, is_output in plan.owned.items():
        if is_output or handle not in plan.uses:
            continue
        modes: dict[int, Mode] = {}
        for position, mode in zip(plan.uses[handle].positions, plan.uses[handle].modes, strict=True):
            number = bisect_right(ends, position)
            modes[number] = merged(modes.get(number), mode)
        if len(modes) > 1 and SCRATCH not in modes.values() and all(ends[number] - ends[number - 1] > 1 for number in modes):
            alike.setdefault((handle.data_class, *modes.items()), []).append(handle)
    bundles: dict[HandleRecord, tuple[HandleRecord, int]] = {}
    for handles in alike.values():
        if len(handles) > 1:
            bundle = make(sum(handle.size for handle in handles), ScratchView(), handles[0].data_class)
            offsets = accumulate((handle.size for handle in handles), initial=0)
            bundles.update((handle, (bundle, offset)) for handle, offset in zip(handles, offsets, strict=False))
    return bundles


def _updates(plan: StepPlan) -> list[bool]:
    """Of each task, whether it writes data that outlives the step."""
    return [any(mode in (W, RW) and handle not in plan.owned for handle, mode in task.accesses) for task in plan.tasks]


def _largest_inner(plan: StepPlan) -> int:
    """Bytes of the largest piece of inner data of a step with fused tasks."""
    return max((handle.size for handle in plan.uses if isinstance(handle.view, ScratchView)), default=0)


def _end_of(plan: StepPlan, first: int, most: int, updates: Sequence[bool]) -> int:
    """One past the last task that is fused with the task at `first`."""
    begin = plan.tasks[first]
    found: set[HandleRecord] = set()
    live = inner = outer = 0  # bytes of the step's data that these tasks make: now, and most at once; bytes of what they find
    for position in range(first, len(plan.tasks)):
        task = plan.tasks[position]
        handles = {handle: None for handle, _ in task.accesses}
        for handle in handles:
            if handle not in found:
                is_made = plan.owned.get(handle) is False and plan.uses[handle].positions[0] == position
                live, outer = (live + handle.size, outer) if is_made else (live, outer + handle.size)
        found.update(handles)
        inner = max(inner, live)
        is_alike = task.kinds == ("cuda",) and task.pin is None and (not plan.partitions or plan.partitions[position] == plan.partitions[first])
        is_alike = is_alike and task.priority == begin.priority and (updates[first] or not updates[position])
        if not is_alike or inner + outer > most:
            return max(position, first + 1)
        for handle in handles:
            uses = plan.uses[handle].positions
            if plan.owned.get(handle) is False and uses[-1] == position and uses[0] >= first:
                live -= handle.size
    return len(plan.tasks)


class _Group(NamedTuple):
    """Tasks that start together, by their positions, and the data that they use and write; scratch counts as written."""

    codelet: object
    positions: list[int]
    uses: set[HandleRecord]
    writes: set[HandleRecord]


def _together(tasks: Sequence[RecordedTask], first: int, end: int) -> list[list[int]]:
    """The positions of tasks [first, end) that start together, in the order of their starts.

    A task joins an earlier one of its codelet, if that is not far, neither writes what the other uses, and none between them is in its way.
    """
    groups: list[_Group] = []
    for position in range(first, end):
        task = tasks[position]
        assert isinstance(task.codelet, Codelet)
        uses = {handle for handle, _ in task.accesses}
        writes = {handle for handle, mode in task.accesses if mode in (W, RW, SCRATCH)}
        joined = None
        for group in reversed(groups[-LOOK_BACK:]) if task.codelet.cuda_many is not None else ():
            if group.uses & writes or group.writes & uses:
                break
            if group.codelet is task.codelet:
                joined = group
                break
        if joined is None:
            groups.append(_Group(task.codelet, [position], uses, writes))
        else:
            joined.positions.append(position)
            joined.uses.update(uses)
            joined.writes.update(writes)
    return [group.positions for group in groups]


def _join(
    plan: StepPlan,
    first: int,
    end: int,
    bundles: Mapping[HandleRecord, tuple[HandleRecord, int]],
    make: Make,
    owned: dict[HandleRecord, bool],
) -> RecordedTask:
    """Tasks [first, end) as one fused task; its scratch memory is added to `owned`."""
    inside = set[HandleRecord]()
    for handle in {handle for task in plan.tasks[first:end] for handle, _ in task.accesses}:
        uses = plan.uses[handle].positions
        if plan.owned.get(handle) is False and uses[0] >= first and uses[-1] < end:
            inside.add(handle)
    return join(plan, _together(plan.tasks, first, end), inside, make, owned, bundles)
