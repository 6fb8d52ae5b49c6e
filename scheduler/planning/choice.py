"""The choice of a plan: what a recorded step recomputes, and its order.

Candidates are evaluated by forecasts of the whole step (`evaluation`), so recomputation, orders, devices, files and the disk are compared together.
Of the best few, virtual time decides (`finalists`). For a step of many tasks on equal devices, the share of one device is searched, and all devices
get what is chosen for it (`device_share`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ..core.step_plan import StepPlan
from .device_share import device_bytes, devices_of_tasks, order_of_all, order_of_one, share_of
from .evaluation import AUTO, PlanCandidate, best_of, evaluate
from .finalists import JUDGED_TASKS, MOST_JUDGED, orders_to_judge, others_to_judge
from .forecast import Pace
from .ordered_step import OrderedStep, PlanningMachine, last_tier_bytes
from .planned_order import PlannedOrder, planned_order
from .recompute import NONE, Recomputation, Values
from .search import LIKELY, Search, shown_forecasts
from .step_structure import structure_of
from .value_groups import all_groups, as_asked, values_in_blocks


def choose_plan(plan: StepPlan, order: str, recompute: str, machine: PlanningMachine) -> PlannedOrder:
    """Choose what a step recomputes, and its order.

    If its minibatches can be divided equally, each device gets an equal number: weights travel, activations stay. If memory is short, the minibatches
    of all devices then pass through the step side by side.

    Args:
        plan: the step in submission order.
        order: "auto", or the name of an order (`orders`).
        recompute: "none"; "block", to keep only what the blocks of a model read from each other; names of groups of values or of operations,
            separated by commas, whose results are recomputed; or "auto", for the best choice if memory is short.

    Raises:
        ValueError: the step has no order of that name, or no results of such an operation that could be recomputed.
    """
    is_long = len(plan.tasks) > MOST_JUDGED
    if recompute == AUTO and machine.num_devices > 1 and is_long and (planned := _planned_by_share(plan, order, machine)) is not None:
        return planned
    machine = replace(machine, judge=None) if is_long else machine
    step = OrderedStep(as_asked(plan, recompute), machine)
    candidates = _searched(plan, step, order) if recompute == AUTO else [evaluate(step, order, recompute=recompute)]
    base, best = candidates[0], candidates[-1]
    chosen = planned_order(best, best.order, shown_forecasts(base, best))
    return chosen if base.moves_nothing else _judged(chosen, best, candidates, order)


def _searched(plan: StepPlan, step: OrderedStep, order: str) -> list[PlanCandidate]:
    """Return candidates for a step: the first without recomputation, and the last the best, in the best of all orders.

    Recomputations are compared in likely orders. None is searched if it could not make the step faster.
    """
    candidates = [evaluate(step, order, only=() if step.plan.partitions else LIKELY)]
    if not (candidates[0].moves_nothing or candidates[0].is_bound_by_tasks):
        candidates = Search(plan, candidates[0], order).candidates()
    best = best_of(candidates)
    return [*candidates, evaluate(best.step, order, recompute=best.recompute, recomputation=best.recomputation)]


def _judged(chosen: PlannedOrder, best: PlanCandidate, candidates: list[PlanCandidate], order: str) -> PlannedOrder:
    """Return the fastest of a planned step and the finalists, by the judge of the machine; the first if the judge finds that none fits.

    Args:
        best: the candidate of the planned step.
        candidates: all candidates, the first without recomputation.
        order: name of the order that was asked for, or "auto".
    """
    judge, orders = best.step.machine.judge, orders_to_judge(best) if order == AUTO else [chosen.name]
    if judge is None or not chosen.forecasts or (len(orders) < 2 and not others_to_judge(best, candidates, chosen.name)):
        return chosen
    fastest, least = chosen, inf

    def try_all(rows: Sequence[tuple[PlanCandidate, str]]) -> None:
        nonlocal fastest, least
        for candidate, name in rows:
            is_chosen = candidate is best and name == chosen.name
            planned = chosen if is_chosen else planned_order(candidate, name, shown_forecasts(candidates[0], candidate))
            if (seconds := judge(planned.plan)) < least:
                fastest, least = planned, seconds

    most = max(2, JUDGED_TASKS // chosen.num_tasks)
    try_all([(best, name) for name in orders[:most]])
    try_all(others_to_judge(best, candidates, fastest.name)[: max(0, most - len(orders))])
    return chosen if least == inf else replace(fastest, judged_seconds=least)


def _planned_by_share(plan: StepPlan, order: str, machine: PlanningMachine) -> PlannedOrder | None:
    """Plan a step on equal devices by the share of one, whose forecasts are within 1 % of those of all if tasks are many.

    Returns:
        None if the devices cannot share the step like that, if everything fits, or if the tiers below the devices may be short.
    """
    one_order, structure, pace = AUTO if order == AUTO else order_of_one(order, machine.num_devices), structure_of(plan), machine.pace
    devices, below = devices_of_tasks(plan, structure, machine.num_devices), last_tier_bytes(plan, computes=False)
    if one_order is None or not devices or pace is None or below > machine.last:
        return None
    if plan.has_aside and device_bytes(plan.divided(devices), machine.num_devices) <= machine.memory:  # everything fits
        return None

    def pace_of_one(planned: StepPlan) -> Pace:
        return replace(pace(planned), num_devices=machine.num_devices)

    share = share_of(plan, devices, structure.updates)
    one = OrderedStep(share, replace(machine, pace=pace_of_one, judge=None, is_share=True))
    if one.fits or ((spill := pace_of_one(share).spill) is not None and below > spill.capacity):
        return None
    base, *_, best = _searched(share, one, one_order)
    values = Values(plan)
    recomputation = _recomputation_of_all(best, values)
    if recomputation is None:
        return None
    step = OrderedStep(plan, machine, structure) if recomputation.name == NONE else OrderedStep(recomputation.apply(values), machine)
    candidate = evaluate(step, order_of_all(best.order, machine.num_devices), recompute=recomputation.name, recomputation=recomputation, compared=())
    planned = planned_order(candidate, candidate.order, shown_forecasts(base, candidate))
    return planned if planned.last_bytes <= machine.last else None


def _recomputation_of_all(best: PlanCandidate, values: Values) -> Recomputation | None:
    """Return the recomputation of the share of one device for the whole step; None if that has other groups of values.

    Args:
        values: values of the whole step.
    """
    recomputation = best.recomputation
    if recomputation is None:
        return Recomputation()
    known = {group.name: group for group in all_groups(values)}
    if any(group.name not in known for group in recomputation.groups):
        return None
    groups = [replace(known[group.name], seconds=group.seconds * known[group.name].nbytes / group.nbytes) for group in recomputation.groups]
    blocks = values_in_blocks(values) if recomputation.inside else Recomputation()
    whole = replace(recomputation, groups=groups, inside=blocks.inside, between=blocks.between)
    return whole if whole.name == best.recompute else None
