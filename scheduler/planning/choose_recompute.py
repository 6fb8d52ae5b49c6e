"""The choice of what a recorded step keeps and what it makes again (`recompute`), by forecasts of whole steps (`choose_order`).

Values of one kind form a *group*: made by the same operation and read by the same ones, in all layers and minibatches. Groups are sorted by the
seconds that it takes to make a byte of them again, so norms and activation functions come first and products later. A group whose values could only
be made from one another, such as the sums along a residual stream, is kept. Within a group, the values that are away for longest come first.

A *mix* makes the first K groups again, the last of them for the leading share of its values; or what lies inside blocks, where the program marks
them. What it does not make again stays in memory or moves, as the planned order and eviction by next use have it. The search begins with no group,
under all orders, and with all groups or all blocks, under those that are likely then. It goes to the best K in between by bisection, under the
orders that were best at the ends, and tries shares there. Every candidate is a forecast of the whole step, so recomputation, orders, devices, files
and the disk are weighed together. A judge has the last word among the best few, if there is one (`weighing`). Of a step of many tasks on equal
devices, the share of one device is searched, and all devices get what is chosen for it (`device_share`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R
from ..core.step_plan import StepPlan
from .choose_order import AUTO, PlannedOrder, plan_in, planned_orders
from .device_share import device_bytes, devices_of_tasks, order_of_all, order_of_one, share_of
from .forecast import Forecast, Pace
from .ordered_step import SUBMISSION, OrderedStep, PlanningMachine, last_tier_bytes
from .recompute import BLOCK, NONE, Mix, ValueGroup, Values, clones_of
from .repeated_structure import Repetition, repetition
from .weighing import CLOSE, MOST_JUDGED, Judge, Rival, Weighing

LEAST_SHARE: Final = 0.01
"""Groups of a smaller share of the bytes of all are kept."""
MOST_CLONES: Final = 64
"""Groups with values that take more tasks to make again are kept, such as gradients: all of the backward pass before them is dead by then."""
AWAY: Final = 4
"""A value counts as away for a while where other data of so many times its size is made in the meantime."""
LIKELY: Final = ("eager-update", "layers", "turn:1/8", "turn:4/8")
"""Orders under which a step that makes all groups again is tried; the others are hardly ever the best of one."""
SHARES: Final = (0.33, 0.67)
"""Leading shares of the last group that are tried."""
MANY_TASKS: Final = 20_000
"""Steps of more tasks make all or nothing of a group again: weighing one mix of them takes a second for 20,000 tasks."""

PaceOf = Callable[[StepPlan], Pace]


def groups_of(values: Values, pace: PaceOf | None) -> list[ValueGroup]:
    """The groups of a step among which a planner chooses, the cheapest first.

    Args:
        pace: rates of a machine during a plan; without it a byte that a task touches counts as a second.
    """
    found = all_groups(values)
    total = sum(group.nbytes for group in found)
    priced = _priced(values, [group for group in found if group.nbytes >= LEAST_SHARE * total], pace)
    chosen: list[ValueGroup] = []
    for group in sorted(priced, key=lambda group: group.seconds / group.nbytes):
        if not _feeds_itself(values, group, chosen):
            chosen.append(group)
    return chosen


def all_groups(values: Values, repeated: Repetition | None = None) -> list[ValueGroup]:
    """All groups of values that are away for a while, without their seconds.

    Args:
        repeated: `repetition` of the step, if it is known.
    """
    plan = values.plan
    stages = (repeated or repetition(plan)).stage
    found = defaultdict[tuple[str, int, tuple[str, ...]], dict[int, list[HandleRecord]]](lambda: defaultdict(list))
    for handle in plan.uses:
        if (value := values.of(handle)) is None:
            continue
        last = values.last_writer(handle)
        writer = plan.tasks[last]
        results = [each for each, mode in writer.accesses if mode not in (R, SCRATCH)]
        late = {plan.tasks[at].name for at in plan.uses[handle].positions if at >= value.wanted}
        layers = found[writer.name, results.index(handle), tuple(sorted(late))]
        layer = stages[last] if stages[last] >= 0 else len(plan.tasks) + last
        if layer in layers or values.is_away_for(value, AWAY):
            layers[layer].append(handle)
    results_of = {op: {number for other, number, _ in found if other == op} for op, _, _ in found}
    names = [f"{op}[{number}]" if len(results_of[op]) > 1 else op for op, number, _ in found]
    groups = []
    for ((op, _, readers), layers), name in zip(found.items(), names, strict=True):
        full = f"{name}>{'+'.join(readers)}" if names.count(name) > 1 else name
        in_order = tuple(tuple(handles) for _, handles in sorted(layers.items()))
        if in_order:
            groups.append(ValueGroup(op, full, in_order, sum(handle.size for handles in in_order for handle in handles)))
    return groups


def _priced(values: Values, groups: Sequence[ValueGroup], pace: PaceOf | None) -> list[ValueGroup]:
    """Groups that are not too long to make, with their seconds, from those of the middle value of each."""
    clones = [clones_of(values, group.middle)[0] for group in groups]
    groups = [group for group, tasks in zip(groups, clones, strict=True) if len(tasks) <= MOST_CLONES]
    clones = [tasks for tasks in clones if len(tasks) <= MOST_CLONES]
    if pace is None:
        costs = [float(sum(handle.size for task in tasks for handle, _ in task.accesses)) for tasks in clones]
    else:
        seconds = pace(StepPlan([task for tasks in clones for task in tasks], values.plan.owned)).seconds
        costs = [sum(seconds[task] for task in tasks) for tasks in clones]
    return [replace(group, seconds=cost / group.middle.size * group.nbytes) for group, cost in zip(groups, costs, strict=True)]


def _feeds_itself(values: Values, group: ValueGroup, others: Sequence[ValueGroup]) -> bool:
    """Whether making a value of a group again takes another one of it, once the values of `others` are not kept."""
    value = values.of(group.middle)
    assert value is not None  # it has been grouped
    made = clones_of(values, group.middle, [handle for each in (*others, group) for handle in each.leading(1)])[1]
    return not made.isdisjoint(set(group.leading(1)).difference(values.made(value)))


def choose_plan(
    plan: StepPlan,
    order: str,
    recompute: str,
    *,
    memory: int,
    last: int,
    computes_on_last: bool,
    num_devices: int = 1,
    pace: PaceOf | None = None,
    judge: Judge | None = None,
) -> PlannedOrder:
    """Choose what a step makes again, and its order.

    Args:
        plan: the step in submission order.
        order, memory, last, computes_on_last, num_devices, pace: as of `plan_order`.
        recompute: "none"; "block", to keep what the blocks of a model read from each other; names of operations, whose results are made again,
            separated by commas; or "auto", for the best mix where memory is short.
        judge: of steps that are forecast to be about as fast as the best, if it is known to need little time; None for forecasts alone.

    Raises:
        ValueError: the step has no order of that name, or nothing that such an operation makes and that could be made again.
    """
    machine = PlanningMachine(memory, last, computes_on_last, num_devices, pace)
    if recompute == AUTO and num_devices > 1 and len(plan.tasks) > MOST_JUDGED and (by_one := _chosen_by_one(plan, order, machine)) is not None:
        return by_one
    asked = as_asked(plan, recompute)
    chosen = replace(plan_in(OrderedStep(asked, machine), order), recompute=NONE if recompute == AUTO else recompute)
    is_settled = not chosen.forecasts or (asked.has_aside and device_bytes(chosen.plan, num_devices) <= memory)  # everything fits
    if is_settled or (recompute != AUTO and judge is None):
        return chosen
    weighing = Weighing(plan, last, pace, judge)
    if recompute != AUTO or weighing.is_bound_by_tasks(chosen):
        return weighing.judged(chosen, [_rival(lambda: asked, chosen, chosen.forecasts, order, machine)])
    return _Search(plan, chosen, order, machine, weighing).best()


def _chosen_by_one(plan: StepPlan, order: str, machine: PlanningMachine) -> PlannedOrder | None:
    """What the share of one device would best make again, for all of equal devices: of steps of many tasks its forecasts are within 1 % of theirs.

    Returns:
        None where the share does not stand for the step, nothing is short, or the tiers below the devices may be.
    """
    one_order, repeated, pace = AUTO if order == AUTO else order_of_one(order, machine.num_devices), repetition(plan), machine.pace
    devices, below = devices_of_tasks(plan, repeated, machine.num_devices), last_tier_bytes(plan, computes=False)
    if one_order is None or not devices or pace is None or below > machine.last:
        return None
    if plan.has_aside and device_bytes(plan.divided(devices), machine.num_devices) <= machine.memory:  # everything fits
        return None

    def pace_of_one(each: StepPlan) -> Pace:
        return replace(pace(each), num_devices=machine.num_devices)

    one = replace(machine, pace=pace_of_one, is_share=True)
    share = share_of(plan, devices, repeated.updates)
    base = replace(plan_in(OrderedStep(share, one), one_order, is_draft=True), recompute=NONE)
    weighing = Weighing(base.plan, machine.last, pace_of_one)
    if not base.forecasts or ((spill := pace_of_one(share).spill) is not None and below > spill.capacity):
        return None
    best, values = base, Values(plan)
    if not weighing.is_bound_by_tasks(base):
        best = _Search(share, base, one_order, one, weighing).ranked()[0].chosen
    mix = _mix_of_all(best, values, repeated)
    if mix is None:
        return None
    step = OrderedStep(plan, machine, repeated) if mix.name == NONE else OrderedStep(mix.apply(values), machine)
    planned = plan_in(step, order_of_all(best.name, machine.num_devices), beside=())
    shown = replace(planned, recompute=mix.name, mix=mix, forecasts=_beside(base, planned, weighing))
    return shown if planned.last_bytes <= machine.last else None


def _beside(base: PlannedOrder, found: PlannedOrder, weighing: Weighing) -> Mapping[str, Forecast]:
    """Forecasts of a step with a mix, beside what would run without a planner; where everything fits, what its tasks take in submission order."""
    if found.forecasts:
        return {SUBMISSION: base.forecasts[SUBMISSION], **found.forecasts}
    return {SUBMISSION: Forecast(0, 0, weighing.alone(found.plan), found.last_bytes)}


def _mix_of_all(chosen: PlannedOrder, values: Values, repeated: Repetition) -> Mix | None:
    """The mix of the share of one device for the whole step; None where that has other groups.

    Args:
        values: of the whole step.
        repeated: `repetition` of it.
    """
    mix = chosen.mix
    if mix is None:  # of a step for which none was looked for
        return Mix()
    known = {group.name: group for group in all_groups(values, repeated)}
    if any(group.name not in known for group in mix.groups):
        return None
    groups = [replace(known[each.name], seconds=each.seconds * known[each.name].nbytes / each.nbytes) for each in mix.groups]
    blocks = blocks_again(values) if mix.inside else Mix()
    found = replace(mix, groups=groups, inside=blocks.inside, between=blocks.between)
    return found if found.name == chosen.recompute else None


def as_asked(plan: StepPlan, recompute: str) -> StepPlan:
    """A step that makes again what "block" or names of operations say; itself for "none" and "auto".

    Raises:
        ValueError: of "none", "block" and "auto" it is none, and one of its operations makes nothing here that could be made again.
    """
    if recompute in (NONE, AUTO):
        return plan
    values = Values(plan)
    return _asked_mix(values, recompute).apply(values)


def what_is_asked(plan: StepPlan, recompute: str, pace: PaceOf | None) -> Mix:
    """What "none", "block" or names of operations make again of a step, among the groups that a planner would choose from.

    Args:
        pace: as of `groups_of`.
    """
    values = Values(plan)
    return replace(_asked_mix(values, recompute), groups=groups_of(values, pace))


def _asked_mix(values: Values, recompute: str) -> Mix:
    """What "none", "block" or names of operations make again.

    Raises:
        ValueError: as of `as_asked`.
    """
    if recompute == NONE:
        return Mix()
    if recompute == BLOCK:
        return blocks_again(values)
    again = set[HandleRecord]()
    groups = all_groups(values)
    for asked in recompute.split(","):
        name, _, share = asked.strip().partition(":")
        matching = [group for group in groups if name in (group.name, group.op)]
        if not matching:
            known = ", ".join(sorted({repr(group.op) for group in groups})) or "no operation"
            raise ValueError(f"this step has no results of {name!r} to recompute; name some of {known}")
        again.update(handle for group in matching for handle in group.leading(_share_of(share)))
    return Mix(inside=again, asked=recompute)


def _share_of(text: str) -> float:
    """The share of layers that a text behind an operation says, all of them where there is none.

    Raises:
        ValueError: it is no number above 0 and at most 1.
    """
    with suppress(ValueError):
        if 0 < (share := float(text or 1)) <= 1:
            return share
    raise ValueError(f"a share of an operation's layers must be above 0 and at most 1, got {text!r}; for example 0.5")


def most_again(plan: StepPlan) -> Iterator[StepPlan]:
    """The steps that make again as much as a planner does where it would not fit otherwise, whatever the machine; none where nothing can be."""
    values = Values(plan)
    groups = groups_of(values, None)
    mixes = Mix(groups, len(groups)), blocks_again(values)
    return (mix.apply(values) for mix in mixes if mix.name != NONE)


def blocks_again(values: Values) -> Mix:
    """The mix that makes again what is inside blocks; nothing, where the program marks none."""
    inside, between = _inside_blocks(values)
    return Mix(inside=inside, between=between)


def _inside_blocks(values: Values) -> tuple[set[HandleRecord], set[HandleRecord]]:
    """Handles of the values that nothing outside their block reads before the backward pass wants them; and of what blocks read from each other."""
    plan = values.plan
    again, kept = set[HandleRecord](), set[HandleRecord]()
    for handle, use in plan.uses.items():
        if (value := values.of(handle)) is None:
            continue
        block = plan.tasks[values.last_writer(handle)].block
        blocks = [plan.tasks[at].block for at in use.positions if at <= value.leaves]
        if block is None or any(each != block for each in blocks):
            kept.add(handle)
        elif plan.tasks[value.wanted].block != block and values.is_away_for(value, 1):
            again.add(handle)
    return again, kept


class _Search:
    """The search for the best mix of a step that does not fit.

    Args:
        base: the step without any.
        machine: where it runs.
    """

    def __init__(self, plan: StepPlan, base: PlannedOrder, order: str, machine: PlanningMachine, weighing: Weighing) -> None:
        self._values, self._base, self._order, self._machine, self._weighing = Values(plan), base, order, machine, weighing
        self._seconds_without = base.seconds if weighing.fits(base) else inf
        self._groups = groups_of(self._values, weighing.pace if weighing.fits(base) else None)
        if weighing.pace is not None and not weighing.fits(base):  # sorted as `most_again` does, which knows no machine
            self._groups = _priced(self._values, self._groups, weighing.pace)
        self._rivals = {NONE: _rival(lambda: plan, replace(base, mix=self._mix(0)), base.forecasts, order, machine)}
        self._keys: dict[str, tuple[bool, float, int]] = {NONE: weighing.key(base)}

    def best(self) -> PlannedOrder:
        """The step with the best mix; the base where none is better."""
        best, *_ = self.ranked()
        planned = best.chosen
        if planned is not self._rivals[NONE].chosen:  # a draft
            (planned,) = best.under([planned.name])
        return self._weighing.judged(planned, [*self._rivals.values()])

    def ranked(self) -> list[Rival]:
        """Steps with and without mixes by forecasts, the best first; that without any before mixes that are hardly better."""
        most, none = len(self._groups), self._keys[NONE]
        blocks = replace(blocks_again(self._values), groups=self._groups, seconds_without=self._seconds_without)
        ends = [mix for mix in (self._mix(most), blocks) if mix.name != NONE]
        for mix in ends:
            is_small = len(self._values.plan.tasks) <= MANY_TASKS
            self._try(mix, () if mix is blocks and is_small else [*_fastest(self._base, 1), *LIKELY])
        if most:
            self._look_between(most)
        names = sorted(self._keys, key=self._keys.__getitem__)
        is_worth_it = none[0] or self._keys[names[0]][1] <= CLOSE * none[1]
        return [self._rivals[name] for name in (names if is_worth_it else [NONE, *(name for name in names if name != NONE)])]

    def _look_between(self, most: int) -> None:
        """Try fewer groups, and smaller shares of the best number of them, under the orders that were the best at both ends."""
        orders = [*_fastest(self._rivals[self._mix(most).name].chosen, 2), *_fastest(self._base, 1)]
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            is_low_better = self._try(self._mix(low), orders) < self._try(self._mix(high), orders)
            low, high = (low, middle) if is_low_better else (middle, high)
        self._try(self._mix(low), orders)
        tried = [count for count in range(1, most + 1) if self._mix(count).name in self._keys]
        count = min(tried, key=lambda count: self._keys[self._mix(count).name])
        if len(self._values.plan.tasks) > MANY_TASKS:
            return
        for kinds in range(count, min(count + 1, most) + 1):
            for share in SHARES:
                self._try(self._mix(kinds, share), orders)

    def _mix(self, count: int, share: float = 1.0) -> Mix:
        return Mix(self._groups, count, share, seconds_without=self._seconds_without)

    def _try(self, mix: Mix, orders: Sequence[str]) -> tuple[bool, float, int]:
        """Plan the step with a mix under the best of some orders, or of all if none is named, unless that has been done; what it is compared by."""
        if mix.name not in self._keys:
            only = [*dict.fromkeys(orders)] if self._order == AUTO else ()
            found = plan_in(OrderedStep(mix.apply(self._values), self._machine), self._order, only=only, is_draft=True)
            chosen = replace(found, recompute=mix.name, mix=mix, forecasts=_beside(self._base, found, self._weighing))
            self._rivals[mix.name] = _rival(lambda: mix.apply(self._values), chosen, found.forecasts, self._order, self._machine)
            self._keys[mix.name] = self._weighing.key(found)
        return self._keys[mix.name]


def _fastest(chosen: PlannedOrder, count: int) -> list[str]:
    """The fastest orders of those that were assessed; on several devices without submission order, which is there for comparison."""
    names = [name for name in chosen.forecasts if name != SUBMISSION or not chosen.plan.partitions]
    return sorted(names, key=lambda name: chosen.forecasts[name].seconds)[:count]


def _rival(step: Callable[[], StepPlan], chosen: PlannedOrder, found: Mapping[str, Forecast], order: str, machine: PlanningMachine) -> Rival:
    """A planned step for the last choice.

    Args:
        step: the same step in submission order.
        found: forecasts of the orders that it was planned from; none where everything fits.
        order: that was asked for.
        machine: where it runs.
    """

    def under(names: Sequence[str]) -> Iterator[PlannedOrder]:
        for name, plan in zip(names, planned_orders(step(), names, machine), strict=True):
            last_bytes = found[name].last_bytes if name in found else chosen.last_bytes
            yield replace(
                chosen, name=name, plan=plan, last_bytes=last_bytes, moves_least_of_equals=chosen.moves_least_of_equals and name == chosen.name
            )

    return Rival(chosen, found if order == AUTO else {name: each for name, each in found.items() if name == order}, under)
