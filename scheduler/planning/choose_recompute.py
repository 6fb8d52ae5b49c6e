"""The choice of what a recorded step keeps and what it makes again (`recompute`), by forecasts of whole steps (`choose_order`).

Values of one kind form a *group*: made by the same operation and read by the same ones, in all layers and minibatches. Groups are sorted by the
seconds that it takes to make a byte of them again, so norms and activation functions come first and products later. A group whose values could only
be made from one another, such as the sums along a residual stream, is kept. Within a group, the values that are away for longest come first.

A *mix* makes the first K groups again, each for the leading share of its values. What it does not make again stays in memory or moves, as the planned
order and eviction by next use have it. The search begins with no group, under all orders, and with all groups, under those that are likely then. It
goes to the best K in between by bisection, under the orders that were best at the ends, and tries smaller shares there. Every candidate is a forecast
of the whole step, so recomputation, orders, devices, files and the disk are weighed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R
from ..core.step_plan import StepPlan
from .choose_order import AUTO, PlannedOrder, device_bytes, last_tier_bytes, plan_order
from .forecast import Pace
from .orders import repetition
from .recompute import Mix, ValueGroup, Values, clones_of, recomputed

NONE: Final = "none"
BLOCK: Final = "block"

LEAST_SHARE: Final = 0.01
"""Groups of a smaller share of the bytes of all are kept."""
MOST_CLONES: Final = 64
"""Groups with values that take more tasks to make again are kept, such as gradients: all of the backward pass before them is dead by then."""
AWAY: Final = 4
"""A value counts as away for a while where other data of so many times its size is made in the meantime."""
CLOSE: Final = 0.99
"""A mix that is forecast to take more than this fraction of the seconds without any is not worth its flops."""
FRICTION: Final = 0.5
"""Of the seconds that copies take in the busier direction, the share that mixes are charged beside the forecast, which hides copies behind tasks
better than a machine does: by 0.3 to 1.0 of them where computing decides (GPT-2 medium and XL on one device of a half to a twelfth of their need)."""
LIKELY: Final = ("eager-update", "layers", "turn:1/8", "turn:4/8")
"""Orders under which a step that makes all it can again is tried; the others are hardly ever the best of one."""
SHARES: Final = (0.25, 0.5, 0.75)

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


def all_groups(values: Values) -> list[ValueGroup]:
    """All groups of values that are away for a while, without their seconds."""
    plan = values.plan
    stages = repetition(plan).stage
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
) -> PlannedOrder:
    """Choose what a step makes again, and its order.

    Args:
        plan: the step in submission order.
        order, memory, last, computes_on_last, num_devices, pace: as of `plan_order`.
        recompute: "none"; "block", to keep what the blocks of a model read from each other; names of operations, whose results are made again,
            separated by commas; or "auto", for the best mix where memory is short.

    Raises:
        ValueError: the step has no order of that name, or nothing that such an operation makes and that could be made again.
    """
    find = partial(plan_order, memory=memory, last=last, computes_on_last=computes_on_last, num_devices=num_devices, pace=pace)
    if recompute != AUTO:
        return replace(find(as_asked(plan, recompute), order), recompute=recompute)
    found = find(plan, order)
    if not found.forecasts or (plan.has_aside and device_bytes(found.plan, num_devices) <= memory):  # everything fits
        return found
    return _Search(plan, found, order, find, lambda chosen: last_tier_bytes(chosen.plan, computes=computes_on_last) <= last, pace).best()


def as_asked(plan: StepPlan, recompute: str) -> StepPlan:
    """A step that makes again what "block" or names of operations say; itself for "none" and "auto".

    Raises:
        ValueError: of "none", "block" and "auto" it is none, and one of its operations makes nothing here that could be made again.
    """
    if recompute in (NONE, AUTO):
        return plan
    values = Values(plan)
    if recompute == BLOCK:
        return recomputed(values, *inside_blocks(values))
    again: list[HandleRecord] = []
    groups = all_groups(values)
    for asked in recompute.split(","):
        name, _, share = asked.strip().partition(":")
        found = [group for group in groups if name in (group.name, group.op)]
        if not found:
            known = ", ".join(sorted({group.op for group in groups})) or "no operation"
            raise ValueError(f"this step has nothing to make again that {name!r} makes; it has of {known}")
        again += [handle for group in found for handle in group.leading(float(share or 1))]
    return recomputed(values, again)


def most_again(plan: StepPlan) -> StepPlan:
    """The step that makes again as much as a planner does where it would not fit otherwise, whatever the machine."""
    values = Values(plan)
    groups = groups_of(values, None)
    return recomputed(values, Mix(groups, len(groups)).handles)


def inside_blocks(values: Values) -> tuple[list[HandleRecord], set[HandleRecord]]:
    """Handles of the values that nothing outside their block reads before the backward pass wants them; and of what blocks read from each other."""
    plan = values.plan
    again, kept = list[HandleRecord](), set[HandleRecord]()
    for handle, use in plan.uses.items():
        if (value := values.of(handle)) is None:
            continue
        block = plan.tasks[values.last_writer(handle)].block
        blocks = [plan.tasks[at].block for at in use.positions if at <= value.leaves]
        if block is None or any(each != block for each in blocks):
            kept.add(handle)
        elif plan.tasks[value.wanted].block != block and values.is_away_for(value, 1):
            again.append(handle)
    return again, kept


class _Search:
    """The search for the best mix of a step that does not fit.

    Args:
        base: the step without any.
        find: plans a step under an order, or the best of some.
        fits: whether the last tier holds the data of a planned step.
    """

    def __init__(
        self,
        plan: StepPlan,
        base: PlannedOrder,
        order: str,
        find: Callable[..., PlannedOrder],
        fits: Callable[[PlannedOrder], bool],
        pace: PaceOf | None,
    ) -> None:
        self._plan, self._base, self._order, self._find, self._fits, self._pace = plan, base, order, find, fits, pace
        self._found: dict[tuple[int, float], PlannedOrder] = {(0, 1.0): base}
        self._keys: dict[tuple[int, float], tuple[bool, float, int]] = {}
        self._orders: Sequence[str] = ()
        self._least, self._slowness = 0.0, (0.0, 0.0)
        if pace is not None:
            rates = pace(plan)
            self._least, self._slowness = sum(rates.seconds.values()), (1 / rates.read, 1 / rates.write)

    def best(self) -> PlannedOrder:
        """The step with the best mix; the base where none is better."""
        if self._pace is not None and self._fits(self._base) and self._least > CLOSE * self._cost(self._base):
            return self._base  # tasks alone take as long
        self._values = Values(self._plan)
        self._groups = groups_of(self._values, self._pace if self._fits(self._base) else None)
        if not self._groups:
            return self._base
        most = len(self._groups)
        if self._order == AUTO:
            self._orders = [*dict.fromkeys([*_fastest(self._base, 1), *LIKELY])]
        full = self._of(most, 1.0)
        if self._order == AUTO:
            self._orders = [*dict.fromkeys([*_fastest(full, 2), *_fastest(self._base, 1)])]
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._key((low, 1.0)) < self._key((high, 1.0)) else (middle, high)
        count = min(self._found, key=self._key)[0] or 1
        for share in SHARES:
            self._of(count, share)
        count, share = min(self._found, key=self._key)
        chosen = self._found[count, share]
        if not count or (self._fits(self._base) and self._cost(chosen) > CLOSE * self._cost(self._base)):
            return replace(self._base, mix=Mix(self._groups, 0, 1.0, self._base.seconds))
        mix = Mix(self._groups, count, share, self._base.seconds)
        return replace(chosen, recompute=mix.name, mix=mix)

    def _of(self, count: int, share: float) -> PlannedOrder:
        """The best order of a mix."""
        if (count, share) not in self._found:
            plan = recomputed(self._values, Mix(self._groups, count, share).handles)
            self._found[count, share] = self._find(plan, self._order, only=self._orders)
        return self._found[count, share]

    def _key(self, mix: tuple[int, float]) -> tuple[bool, float, int]:
        """What a mix is compared by, worked out once."""
        if mix not in self._keys:
            chosen = self._of(*mix)
            self._keys[mix] = not self._fits(chosen), self._cost(chosen), chosen.moved_bytes
        return self._keys[mix]

    def _cost(self, chosen: PlannedOrder) -> float:
        """What mixes are compared by: seconds, and some of what copies take; of a step that fits, what its tasks take."""
        found = chosen.forecasts.get(chosen.name)
        if found is not None:
            return found.seconds + FRICTION * max(found.read * self._slowness[0], found.written * self._slowness[1])
        return 0.0 if self._pace is None else sum(self._pace(chosen.plan).seconds.values())


def _fastest(chosen: PlannedOrder, count: int) -> list[str]:
    """The fastest orders of those that were assessed."""
    return sorted(chosen.forecasts, key=lambda name: chosen.forecasts[name].seconds)[:count]
