"""Fusion of GPU tasks that are neighbours in the planned order of a recorded step, so that one call launches their kernels.

The scheduler spends about as long on a task as a GPU spends in a small kernel, and each kernel launch from Python costs more. Each fused task may use
a fraction of the memory of a device. If the step fits that memory, it is the largest of `SHARES` with which the step still fits. If tiles move, it
is `MOVING_SHARE`, so that the data of the next tasks arrives while one runs. Tasks that update data of the program are never fused with tasks before
them, so that a kernel that fails in a forward or backward pass loses none of that data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from ..core.records import RW, SCRATCH, HandleRecord, Mode, W
from ..core.step_plan import RecordedTask, StepPlan
from ..planning.device_share import largest_device_bytes
from ..planning.evaluation import PlannedOrder
from ..planning.ordered_step import last_tier_bytes
from .fused_tasks import Arrange, Make, ScratchView, by_size, join, merged, packed
from .launches import launches

SHARES: Final = (1, 2, 4, 8)
"""Divisors of a device's memory that bound the data of a fused task; the first with which the step fits is used."""
MOVING_SHARE: Final = 8
"""The divisor if tiles move."""
_SPARE: Final = 6
"""Memory of a device over the bytes that must stay free, because early write-backs keep that much clean or free."""


def fuse_if_it_fits(planned: PlannedOrder, budgets: Sequence[int], last: int, make: Make, *, computes_on_last: bool = False) -> PlannedOrder:
    """Fuse the tasks of a step, if the last tier holds the data of fused tasks.

    Args:
        planned: the step in its planned order.
        budgets: bytes of each device.
        last: bytes of the last tier, which holds all inputs and results of a fused task while that runs.
        make: creates the records of pieces of memory for data of several handles.
        computes_on_last: whether tasks run on the last tier.

    Returns:
        `planned` with the fused step, or `planned` itself.
    """
    plan, budget, num_devices = planned.plan, min(budgets), len(budgets)
    if planned.forecasts:
        fused = fuse(plan, budget // MOVING_SHARE, make, moves=True)
        last_bytes = last_tier_bytes(fused, computes=computes_on_last)
        most = max(2 * (budget // MOVING_SHARE), plan.largest_task())  # launches of several tasks lengthen the lives of temporaries
        fits = last_bytes <= last and fused.largest_task() <= most
        return replace(planned, plan=fused, last_bytes=last_bytes) if fits else planned
    # two fused tasks may be ready, hence hold inner data, at the same time: those of two minibatches, or of two replays that update nothing
    num_sets = 2 if plan.partitions or not any(_updates(plan)) else 1
    for share in SHARES:
        fused = fuse(plan, budget // share, make)
        needed = max(largest_device_bytes(fused, num_devices), fused.largest_task()) + (num_sets - 1) * _largest_inner(fused)
        last_bytes = last_tier_bytes(fused, computes=computes_on_last)
        if needed <= (budget if share == SHARES[-1] else budget - budget // _SPARE) and last_bytes <= last:
            return replace(planned, plan=fused, last_bytes=last_bytes)
    return planned


def fuse(plan: StepPlan, limit: int, make: Make, *, moves: bool = False) -> StepPlan:
    """Return the same step with neighbouring tasks fused.

    Args:
        plan: the step in its planned order.
        limit: largest number of bytes of all data of a fused task.
        make: creates the records of pieces of memory for data of several handles.
        moves: whether tiles move: then handles stay single, and scratch memory has the sizes of tiles, so that holes suffice.
    """
    updates, ends = _updates(plan), [0]
    while ends[-1] < len(plan.tasks):
        ends.append(_end_of(plan, ends[-1], limit, updates, moves=moves))
    bundles = {} if moves else _bundles(plan, ends, make)
    arrange = by_size if moves else packed
    owned = {**plan.owned, **{bundle: False for bundle, _ in bundles.values()}}
    tasks = [plan.tasks[first] if end == first + 1 else _join(plan, first, end, bundles, make, owned, arrange) for first, end in pairwise(ends)]
    devices = [plan.partitions[first] for first in ends[:-1]] if plan.partitions else ()
    fused = StepPlan(tasks, owned, window=plan.window, partitions=devices, idle=plan.idle)
    if moves:
        _foresee(plan, fused, ends)
    return fused


def _foresee(plan: StepPlan, fused: StepPlan, ends: Sequence[int]) -> None:
    """Note in a fused step which data leaves the memory before which fused task, and when it may come back, as in the step before the fusion."""

    def number_of(position: int) -> int:
        turn, within = divmod(position, len(plan.tasks))  # a negative position is in the replay before
        return turn * len(fused.tasks) + bisect_right(ends, within) - 1

    leaves: dict[HandleRecord, set[int]] = {}
    for handle in fused.uses:
        use = plan.uses.get(handle)
        if use is not None and use.leaves:
            earlier = [use.positions[-1] - len(plan.tasks), *use.positions]
            ranges = [(number_of(before), number_of(position)) for before, position in pairwise(earlier) if position in use.leaves]
            leaves[handle] = {number for before, number in ranges if before < number}
    returns = [[(number_of(start), number_of(position)) for start, position in partition] for partition in plan.returns]
    fused.foresee(leaves, [[(start, number) for start, number in dict.fromkeys(partition) if start < number] for partition in returns])


def _bundles(plan: StepPlan, ends: Sequence[int], make: Make) -> dict[HandleRecord, tuple[HandleRecord, int]]:
    """Merge handles that the same fused tasks access in the same modes, such as gradients between the backward pass and the update.

    Args:
        plan: the step before the fusion.
        ends: position of the first task of each fused task, and the number of tasks.
        make: creates the record of a merged handle.

    Returns:
        For each handle that is replaced, the merged handle that contains its data, and the offset in it in bytes.
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
            alike.setdefault((handle.spec.data_class, *modes.items()), []).append(handle)
    bundles: dict[HandleRecord, tuple[HandleRecord, int]] = {}
    for handles in alike.values():
        if len(handles) > 1:
            bundle = make(sum(handle.spec.size for handle in handles), ScratchView(), handles[0].spec.data_class)
            offsets = accumulate((handle.spec.size for handle in handles), initial=0)
            bundles.update((handle, (bundle, offset)) for handle, offset in zip(handles, offsets, strict=False))
    return bundles


def _updates(plan: StepPlan) -> list[bool]:
    """Return, for each task, whether it writes data that outlives the step."""
    return [any(mode in (W, RW) and handle not in plan.owned for handle, mode in task.accesses) for task in plan.tasks]


def _largest_inner(plan: StepPlan) -> int:
    """Return the bytes of the largest piece of scratch memory of a fused task."""
    return max((handle.spec.size for handle in plan.uses if isinstance(handle.spec.view, ScratchView)), default=0)


def _end_of(plan: StepPlan, first: int, limit: int, updates: Sequence[bool], *, moves: bool) -> int:
    """Return one past the position of the last task that is fused with the task at `first`.

    Args:
        moves: whether temporaries share memory only with those of the same size (`by_size`).
    """
    begin = plan.tasks[first]
    seen: set[HandleRecord] = set()
    live, most = Counter[int](), Counter[int]()  # bytes of temporaries that these tasks create, by size if they move: live now, and at most at once
    outer = 0  # bytes of all their other data
    for position in range(first, len(plan.tasks)):
        task = plan.tasks[position]
        handles = {handle: None for handle, _ in task.accesses}
        for handle in handles:
            if handle not in seen:
                is_created = plan.owned.get(handle) is False and plan.uses[handle].positions[0] == position
                if is_created:
                    live[handle.spec.size if moves else 0] += handle.spec.size
                else:
                    outer += handle.spec.size
        seen.update(handles)
        most |= live
        is_alike = task.kinds == ("cuda",) and task.pin is None and (not plan.partitions or plan.partitions[position] == plan.partitions[first])
        is_alike = is_alike and task.condition is None and task.priority == begin.priority and (updates[first] or not updates[position])
        if not is_alike or most.total() + outer > limit:
            return max(position, first + 1)
        for handle in handles:
            uses = plan.uses[handle].positions
            if plan.owned.get(handle) is False and uses[-1] == position and uses[0] >= first:
                live[handle.spec.size if moves else 0] -= handle.spec.size
    return len(plan.tasks)


def _join(
    plan: StepPlan,
    first: int,
    end: int,
    bundles: Mapping[HandleRecord, tuple[HandleRecord, int]],
    make: Make,
    owned: dict[HandleRecord, bool],
    arrange: Arrange,
) -> RecordedTask:
    """Fuse tasks [first, end), and add the scratch memory of the fused task to `owned`."""
    inside = set[HandleRecord]()
    for handle in {handle for task in plan.tasks[first:end] for handle, _ in task.accesses}:
        uses = plan.uses[handle].positions
        if plan.owned.get(handle) is False and uses[0] >= first and uses[-1] < end:
            inside.add(handle)
    return join(plan, launches(plan, first, end), inside, make, owned, bundles, arrange=arrange)
