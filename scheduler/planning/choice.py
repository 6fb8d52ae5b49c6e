"""The choice of a plan: what a recorded step recomputes, and its order.

Candidates are evaluated by forecasts of the whole step (`evaluation`), so recomputation, orders, devices, files and the disk are compared together.
Of the best few, virtual time decides (`finalists`). For a step of many tasks on equal devices, the share of one device is searched, and all devices
get what is chosen for it (`device_share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ..core.step_plan import StepPlan
from .device_share import device_bytes, devices_of_tasks, order_of_all, order_of_one, share_of
from .evaluation import AUTO, Costs, PlanCandidate, evaluate
from .finalists import MOST_JUDGED, Judge, finalists, judged
from .forecast import Pace
from .ordered_step import OrderedStep, PlanningMachine, last_tier_bytes
from .planned_order import PlannedOrder, planned_order
from .recompute import NONE, Recomputation, Values
from .search import Search, best_of, shown_forecasts
from .step_structure import structure_of
from .value_groups import all_groups, as_asked, values_in_blocks


def choose_plan(
    plan: StepPlan,
    order: str,
    recompute: str,
    *,
    memory: int,
    last: int,
    computes_on_last: bool,
    num_devices: int = 1,
    pace: Callable[[StepPlan], Pace] | None = None,
    judge: Judge | None = None,
) -> PlannedOrder:
    """Choose what a step recomputes, and its order.

    Args:
        plan: the step in submission order.
        order, memory, last, computes_on_last, num_devices, pace: the arguments of `plan_order`.
        recompute: "none"; "block", to keep only what the blocks of a model read from each other; names of operations, separated by commas, whose
            results are recomputed; or "auto", for the best choice if memory is short.
        judge: function that returns the seconds of a planned step, for the few that are forecast to be about as fast as the best; None for
            forecasts alone.

    Raises:
        ValueError: the step has no order of that name, or no results of such an operation that could be recomputed.
    """
    machine = PlanningMachine(memory, last, computes_on_last, num_devices, pace)
    if recompute == AUTO and num_devices > 1 and len(plan.tasks) > MOST_JUDGED and (planned := _planned_by_share(plan, order, machine)) is not None:
        return planned
    step = OrderedStep(as_asked(plan, recompute), machine)
    base = evaluate(step, order, recompute=NONE if recompute == AUTO else recompute)
    chosen = planned_order(step, base)
    judge = judge if len(plan.tasks) <= MOST_JUDGED else None
    everything_fits = not base.forecasts or (step.plan.has_aside and device_bytes(chosen.plan, num_devices) <= memory)
    if everything_fits or (recompute != AUTO and judge is None):
        return chosen
    costs, candidates = Costs(plan, machine), [base]
    if recompute == AUTO and not costs.is_bound_by_tasks(base, is_judged=judge is not None):
        candidates = Search(plan, base, order, machine, costs).candidates()
        base = candidates[0]
        chosen = replace(chosen, recomputation=base.recomputation)
    plans = partial(_plans, base, machine, costs)
    if (best := best_of(candidates, costs)) is not base:
        (chosen,) = plans(best, [best.order])
    if judge is None or not chosen.forecasts:
        return chosen
    return judged(chosen, finalists(best, candidates, order, costs), judge, plans)


def _plans(base: PlanCandidate, machine: PlanningMachine, costs: Costs, candidate: PlanCandidate, names: Sequence[str]) -> Iterator[PlannedOrder]:
    """Plan a step in some orders of a candidate.

    Args:
        base: the candidate without recomputation, or with the one that was asked for.
    """
    step, forecasts = OrderedStep(candidate.step, machine), shown_forecasts(base, candidate, costs)
    for name in names:
        yield replace(planned_order(step, candidate, name), forecasts=forecasts)


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

    one = replace(machine, pace=pace_of_one, is_share=True)
    share = share_of(plan, devices, structure.updates)
    best = base = evaluate(OrderedStep(share, one), one_order)
    costs = Costs(base.step, one)
    if not base.forecasts or ((spill := pace_of_one(share).spill) is not None and below > spill.capacity):
        return None
    if not costs.is_bound_by_tasks(base, is_judged=False):
        candidates = Search(share, base, one_order, one, costs).candidates()
        base, best = candidates[0], best_of(candidates, costs)
    values = Values(plan)
    recomputation = _recomputation_of_all(best, values)
    if recomputation is None:
        return None
    step = OrderedStep(plan, machine, structure) if recomputation.name == NONE else OrderedStep(recomputation.apply(values), machine)
    candidate = evaluate(step, order_of_all(best.order, machine.num_devices), recompute=recomputation.name, recomputation=recomputation, compared=())
    planned = replace(planned_order(step, candidate), forecasts=shown_forecasts(base, candidate, costs))
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
