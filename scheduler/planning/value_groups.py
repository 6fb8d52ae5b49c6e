"""Groups of values that a step may recompute: values of one kind, in all layers and minibatches.

The values of a group are computed by one operation of one module, such as ``h.*.ln_1``. Groups are sorted by the seconds that it takes to recompute
a byte, so norms and activation functions come first and products later. A group whose values could only be recomputed from one another, such as the
sums along a residual stream, is kept. Within a group, the values that are away for longest come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R
from ..core.step_plan import StepPlan
from .forecast import Pace
from .recompute import BLOCK, NONE, Recomputation, ValueGroup, Values, clones_of

AUTO: Final = "auto"
"""Value of `--recompute`, and of `--order`, that leaves the choice to the planner."""
LEAST_SHARE: Final = 0.01
"""Share of the bytes of all groups below which a group is kept."""
MOST_CLONES: Final = 64
"""Number of tasks to recompute one value above which its group is kept, such as gradients: all of the backward pass before them is dead by then."""
AWAY: Final = 4
"""Ratio of the bytes of other data that is computed in the meantime to those of a value above which the value counts as away for a while."""

PaceOf = Callable[[StepPlan], Pace]


def groups_of(values: Values, pace: PaceOf | None) -> list[ValueGroup]:
    """Return the groups of a step that a planner chooses from, the cheapest first.

    Args:
        pace: function from a plan to the rates of a machine; without it, a byte that a task touches counts as a second.
    """
    groups = all_groups(values)
    total = sum(group.nbytes for group in groups)
    chosen: list[ValueGroup] = []
    recomputed = set[HandleRecord]()
    for group in sorted(
        priced(values, [group for group in groups if group.nbytes >= LEAST_SHARE * total], pace), key=lambda group: group.seconds / group.nbytes
    ):
        handles = set(group.leading(1))
        if not _feeds_itself(values, group, handles, recomputed | handles):
            chosen.append(group)
            recomputed |= handles
    return chosen


def all_groups(values: Values) -> list[ValueGroup]:
    """Return all groups of values that are away for a while, without their seconds.

    A group has the results of one operation of one module, in every layer. Its name is the path of the module with "*" for numbers, the operation,
    and the number of the result if the operation has several. A value outside all modules is a layer of its own. Layers whose first value is not away
    for a while are left out.
    """
    plan = values.plan
    kinds = defaultdict[tuple[str, str], dict[tuple[int, ...], list[HandleRecord]]](lambda: defaultdict(list))
    for handle in plan.uses:
        if (value := values.of(handle)) is None:
            continue
        last = values.last_writer(handle)
        writer = plan.tasks[last]
        results = [result for result, mode in writer.accesses if mode not in (R, SCRATCH)]
        names = writer.label.path.split(".")
        layer = tuple(int(name) for name in names if name.isdecimal()) if writer.label.path else (last,)
        path = ("*" if name.isdecimal() else name for name in names)
        name = ".".join(filter(None, (*path, writer.name))) + (f"[{results.index(handle)}]" if len(results) > 1 else "")
        layers = kinds[writer.name, name]
        if layer in layers or values.is_away_for(value, AWAY):
            layers[layer].append(handle)
    return [
        ValueGroup(
            op, name, tuple(tuple(layers[layer]) for layer in sorted(layers)), sum(handle.spec.size for layer in layers.values() for handle in layer)
        )
        for (op, name), layers in kinds.items()
        if layers
    ]


def priced(values: Values, groups: Sequence[ValueGroup], pace: PaceOf | None) -> list[ValueGroup]:
    """Return the groups whose values take at most `MOST_CLONES` tasks, with their seconds: those of the middle value of each, times the values.

    Args:
        pace: as in `groups_of`.
    """
    clones = [clones_of(values, group.middle, {group.middle})[0] for group in groups]
    groups = [group for group, tasks in zip(groups, clones, strict=True) if len(tasks) <= MOST_CLONES]
    clones = [tasks for tasks in clones if len(tasks) <= MOST_CLONES]
    if pace is None:
        costs = [float(sum(handle.spec.size for task in tasks for handle, _ in task.accesses)) for tasks in clones]
    else:
        seconds = pace(StepPlan([task for tasks in clones for task in tasks], values.plan.owned)).seconds
        costs = [sum(seconds[task] for task in tasks) for tasks in clones]
    return [replace(group, seconds=cost / group.middle.spec.size * group.nbytes) for group, cost in zip(groups, costs, strict=True)]


def _feeds_itself(values: Values, group: ValueGroup, handles: Set[HandleRecord], recomputed: Set[HandleRecord]) -> bool:
    """Return whether a value of a group can only be recomputed from another one of it.

    Args:
        handles: handles of the group.
        recomputed: handles of all values that are not kept.
    """
    value = values.of(group.middle)
    assert value is not None  # it is in a group
    return not clones_of(values, group.middle, recomputed)[1].isdisjoint(handles - set(value.production.results))


def leading_groups(groups: Sequence[ValueGroup], count: int, share: float = 1.0) -> Recomputation:
    """Return the recomputation of the first `count` groups, of the last of them for a share of its layers."""
    chosen = groups[:count]
    handles = {handle for group in chosen for handle in group.leading(share if group is chosen[-1] else 1.0)}
    name = ",".join(group.name for group in chosen) + ("" if share == 1 else f":{share:g}")
    return Recomputation(name or NONE, handles, groups=groups)


def as_asked(plan: StepPlan, recompute: str) -> StepPlan:
    """Return a step that recomputes what "block" or names of operations say; the step itself for "none" and "auto".

    Raises:
        ValueError: one of the operations has no results here that could be recomputed.
    """
    if recompute in (NONE, AUTO):
        return plan
    values = Values(plan)
    return asked_recomputation(values, recompute).apply(values)


def what_is_asked(plan: StepPlan, recompute: str, pace: PaceOf | None) -> Recomputation:
    """Return what "none", "block" or names of operations recompute, among the groups that a planner would choose from.

    Args:
        pace: as in `groups_of`.
    """
    values = Values(plan)
    return replace(asked_recomputation(values, recompute), groups=groups_of(values, pace))


def asked_recomputation(values: Values, recompute: str) -> Recomputation:
    """Return what "none", "block" or names of operations recompute.

    Raises:
        ValueError: as in `as_asked`.
    """
    if recompute == NONE:
        return Recomputation()
    if recompute == BLOCK:
        return values_in_blocks(values)
    handles = set[HandleRecord]()
    groups = all_groups(values)
    for asked in recompute.split(","):
        name, _, share = asked.strip().partition(":")
        matching = [group for group in groups if name in (group.name, group.op) or group.name.startswith(f"{name}.")]
        if not matching:
            known = ", ".join(sorted({repr(group.op) for group in groups}))
            remedy = f"name some of {known}" if known else f"none of its results can be recomputed, so use {NONE!r}"
            raise ValueError(f"this step has no results of {name!r} to recompute; {remedy}")
        handles.update(handle for group in matching for handle in group.leading(_share_of(share)))
    return Recomputation(recompute, handles)


def _share_of(text: str) -> float:
    """Return the share of layers that a text says, such as "0.5" of "gelu:0.5"; 1 for an empty text.

    Raises:
        ValueError: it is no number above 0 and at most 1.
    """
    with suppress(ValueError):
        if 0 < (share := float(text or 1)) <= 1:
            return share
    raise ValueError(f"a share of an operation's layers must be above 0 and at most 1, got {text!r}; for example 0.5")


def most_again(plan: StepPlan) -> Iterator[StepPlan]:
    """Yield the steps with the largest recomputations that a planner chooses from, on any machine; none if nothing can be recomputed."""
    values = Values(plan)
    groups = groups_of(values, None)
    largest = leading_groups(groups, len(groups)), values_in_blocks(values)
    yield from (recomputation.apply(values) for recomputation in largest if recomputation.name != NONE)


def values_in_blocks(values: Values) -> Recomputation:
    """Return the recomputation of all values that nothing outside their block reads before the backward pass; nothing without marked blocks.

    What blocks read from each other is kept.
    """
    plan = values.plan
    inside, between = set[HandleRecord](), set[HandleRecord]()
    for handle, use in plan.uses.items():
        if (value := values.of(handle)) is None:
            continue
        block = plan.tasks[values.last_writer(handle)].label.block
        blocks = [plan.tasks[position].label.block for position in use.positions if position <= value.leaves]
        if block is None or any(other != block for other in blocks):
            between.add(handle)
        elif plan.tasks[value.wanted].label.block != block and values.is_away_for(value, 1):
            inside.add(handle)
    return Recomputation(BLOCK if inside else NONE, inside, between)
