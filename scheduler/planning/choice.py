"""The choice of a plan: what a recorded step recomputes, and its order.

Candidates are evaluated by forecasts of the whole step (`evaluation`), so recomputation, orders, devices, files and the disk are compared together.
A forecast takes all workers as one and all links as two. Steps that it finds about equally fast may differ by 6 % when the machine's own rules decide
about fetches and write-backs. Virtual time runs these rules, and takes ten times as long, so it judges the few finalists. Of a step of many tasks on
equal devices, candidates are evaluated on the share of one device, and all devices get what is chosen for it (`device_share`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from ..core.step_plan import StepPlan
from .device_share import order_of_all
from .evaluation import MARGIN, NEAR, PlanCandidate, PlannedOrder, best_of, evaluate, unchanged
from .machine_pace import PlanningMachine
from .ordered_step import SUBMISSION, OrderedStep
from .recompute import BLOCK, NONE, Recomputation, Values
from .search import LIKELY, Search
from .value_groups import AUTO, all_groups, as_asked, asked_recomputation

PLAIN: Final = 1.2
"""Further ratio up to which a step is judged that a program could ask for by a word, with no or all blocks recomputed. Forecasts without
recomputation are up to 23 % too long, and "auto" must not be slower than "none" or "block"."""
ORDERS: Final = 4
"""Largest number of orders in which the best recomputation is judged."""
OTHERS: Final = 2
"""Largest number of other recomputations that are judged, besides none and all blocks."""
JUDGED_TASKS: Final = 40_000
"""Number of tasks that all judged steps have together; judging 3,000 tasks takes a second if memory is short. If that is fewer than four steps, two
are judged: a third one of GPT-2 XL has never been the fastest."""
_Judged = tuple[float, PlanCandidate, StepPlan]
"""Seconds of a candidate by the judge, the candidate, and its planned step."""
MOST_JUDGED: Final = 10_000
"""Number of tasks above which steps are chosen by forecasts alone, on several devices by the share of one."""


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
    step = OrderedStep(as_asked(plan, recompute), machine if len(plan.tasks) <= MOST_JUDGED else replace(machine, judge=None))
    for searched in _steps_to_search(step, order, recompute):
        candidates = _searched(searched, order) if recompute == AUTO else evaluate(searched, order, Recomputation(recompute))
        best = _on_all_devices(best_of(candidates), step)
        if best is not None and (best.fits or searched is step):
            break
    assert best is not None  # a candidate of the whole step stays as it is
    if searched is not step:
        return _planned(best, [candidates[0], best])
    return _judged(best, candidates, order) if step.machine.judge is not None else _planned(best, candidates)


def _searched(step: OrderedStep, order: str) -> list[PlanCandidate]:
    """Return candidates for a step: the first ones without recomputation, and those of the best recomputation in more orders.

    Recomputations are compared in likely orders. None is searched if it could not make the step faster. If few steps can be judged, the best one is
    evaluated in its own order and in likely ones: forecasts of the others differ by less than their error.
    """
    candidates = evaluate(step, order, only=() if step.plan.partitions else (SUBMISSION, *LIKELY))
    base = best_of(candidates)
    if not (base.moves_nothing or base.is_bound_by_tasks):
        candidates = Search(candidates, order).candidates()
    best = best_of(candidates)
    likely = () if _most_judged(best.step) >= ORDERS else tuple(dict.fromkeys((best.order, *LIKELY)))
    in_all = evaluate(best.step, order, best.recomputation, only=likely)
    others = [candidate for candidate in candidates if candidate.recomputation is not best.recomputation]
    return [*in_all, *others] if best.recomputation is candidates[0].recomputation else [*others, *in_all]


def _planned(best: PlanCandidate, candidates: Sequence[PlanCandidate], plan: StepPlan | None = None, seconds: float = 0.0) -> PlannedOrder:
    """Return the planned step of a candidate.

    Args:
        candidates: all candidates, the first ones without recomputation.
        plan: the planned step, if it is known.
        seconds: its seconds in virtual time, if they are known.
    """
    base, forecasts = candidates[0], {}
    if base.order != SUBMISSION or not base.step.fits:
        forecasts = {SUBMISSION: (base if base.step.is_share else best).step.forecast(SUBMISSION)}
        forecasts |= {each.order: each.forecast for each in candidates if each.recomputation is best.recomputation}
    plan = best.step.planned(best.order) if plan is None else plan
    return PlannedOrder(best.order, plan, forecasts, len(best.step.plan.tasks), best.recomputation, best.forecast.last_bytes, seconds)


def _judged(best: PlanCandidate, candidates: Sequence[PlanCandidate], order: str) -> PlannedOrder:
    """Return the fastest of the finalists by the judge of the machine; the best by forecast if it is alone, or if the judge finds that none fits.

    First the best recomputation is judged in several orders, then other recomputations in the fastest of these.
    """
    judge, tried = best.step.machine.judge, list[_Judged]()
    assert judge is not None  # the caller knows one

    def try_all(finalists: Sequence[PlanCandidate]) -> PlanCandidate:
        for candidate in finalists:
            planned = candidate.step.planned(candidate.order)
            tried.append((judge(planned), candidate, planned))
        return _fastest(tried)[1]

    base = best_of(unchanged(candidates))
    orders = _orders_to_judge(best, candidates) if order == AUTO else [best]
    if base.moves_nothing or (len(orders) < 2 and not _others_to_judge(best, candidates, best.order)):
        return _planned(best, candidates)
    most = _most_judged(best.step)
    fastest = try_all(orders[: max(2, most - 1)])  # one is for another recomputation
    try_all(_others_to_judge(best, candidates, fastest.order)[: most - len(tried)])
    seconds, fastest, planned = _fastest(tried)
    return _planned(best, candidates) if seconds == inf else _planned(fastest, candidates, planned, seconds)


def _fastest(tried: Sequence[_Judged]) -> _Judged:
    """Return the fastest judged candidate; of its recomputation in orders that are as fast within 1 %, the one that moves the fewest bytes.

    Virtual time charges copies to links, but those of a disk take time of the processors, too.
    """
    seconds, fastest, _ = min(tried, key=lambda row: row[0])
    near = [row for row in tried if row[1].recomputation is fastest.recomputation and MARGIN * row[0] <= seconds]
    return min(near, key=lambda row: row[1].forecast.total)


def _most_judged(step: OrderedStep) -> int:
    """Return the largest number of judged steps."""
    most = JUDGED_TASKS // max(1, len(step.plan.tasks))
    return most if most >= ORDERS else 2


def _orders_to_judge(best: PlanCandidate, candidates: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Return the best candidate, and the same recomputation in other orders that are about as fast, likely ones first."""
    near = [each for each in candidates if each.recomputation is best.recomputation and each.fits and each.forecast.cost <= NEAR * best.forecast.cost]
    rank = {order: number for number, order in enumerate(LIKELY)}
    return sorted(near, key=lambda each: (each is not best, rank.get(each.order, len(rank)), each.forecast.cost))[:ORDERS]


def _others_to_judge(best: PlanCandidate, candidates: Sequence[PlanCandidate], order: str) -> list[PlanCandidate]:
    """Return other recomputations that are forecast to be about as fast as the best, each in `order`, or else in its own best order."""
    others: dict[str, list[PlanCandidate]] = {}
    for candidate in sorted(candidates, key=lambda each: (each.recomputation.name not in (NONE, BLOCK), each.forecast.cost)):
        limit = NEAR * PLAIN if candidate.recomputation.name in (NONE, BLOCK) else NEAR
        if candidate.recomputation.name != best.recomputation.name and candidate.fits and candidate.forecast.cost <= limit * best.forecast.cost:
            others.setdefault(candidate.recomputation.name, []).append(candidate)
    most = OTHERS + sum(name in others for name in (NONE, BLOCK))
    return [next((each for each in rows if each.order == order), rows[0]) for rows in [*others.values()][:most]]


def _steps_to_search(step: OrderedStep, order: str, recompute: str) -> Iterator[OrderedStep]:
    """Yield the step, before it the share of one device if that is searched faster and forecasts are within 1 % of those of all.

    That is so if tasks are many and everything is left to the planner, unless everything fits or the tiers below the devices may be short.
    """
    if len(step.plan.tasks) > MOST_JUDGED and order == recompute == AUTO and step.plan.partitions and step.machine.pace is not None:
        share = step.share()
        if not share.fits and step.last_bytes <= min(step.machine.last, share.capacity_below):
            yield share
    yield step


def _on_all_devices(candidate: PlanCandidate, step: OrderedStep) -> PlanCandidate | None:
    """Return a candidate for all devices like the best one of a share.

    It recomputes the groups of values with the same names. None if the whole step lacks a group of such a name; then the whole step is searched.
    """
    if not candidate.step.is_share:
        return candidate
    chosen, values = candidate.recomputation, Values(step.recorded)
    known = {group.name: group for group in all_groups(values)}
    if any(group.name not in known for group in chosen.groups):
        return None
    groups = [replace(known[group.name], seconds=group.seconds * known[group.name].nbytes / group.nbytes) for group in chosen.groups]
    recomputation = replace(asked_recomputation(values, chosen.name), groups=groups, seconds_without=chosen.seconds_without)
    step = step if chosen.name == NONE else step.rewritten(recomputation.apply(values))
    (whole,) = evaluate(step, order_of_all(candidate.order, step.machine.num_devices), recomputation)
    return whole
