"""Finalists: planned steps that are forecast to be about as fast as the best, of which virtual time chooses the fastest.

A forecast takes all workers as one and all links as two. Steps that it finds about equally fast may differ by 6 % when the machine's own rules
decide about fetches and write-backs (GPT-2 medium with half the memory that it needs, over a link of 12 GB/s, in two orders). Virtual time runs
these rules, and takes ten times as long as a forecast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from ..core.step_plan import StepPlan
from .evaluation import AUTO, Costs, PlanCandidate
from .planned_order import PlannedOrder
from .recompute import BLOCK, NONE

Judge = Callable[[StepPlan], float]
"""Seconds of a step in its planned order; infinite if it would not fit."""

FINALISTS: Final = 12
"""Largest number of planned steps that are judged."""
FINAL_ORDERS: Final = 3
"""Largest number of orders of one recomputation that are judged; one more for those that a program could ask for by a word."""
NEAR: Final = 1.1
"""Ratio of forecast seconds to those of the best above which a step is not judged."""
PLAIN: Final = 1.2
"""Further ratio up to which a step is judged that a program could ask for by a word, with no or all blocks recomputed. Forecasts without
recomputation are up to 23 % too long, and who leaves the choice to a planner expects no worse than either."""
MOST_JUDGED: Final = 10_000
"""Number of tasks above which steps are chosen by forecasts alone: judging one of them takes more than ten seconds."""


def finalists(best: PlanCandidate, candidates: Sequence[PlanCandidate], order: str, costs: Costs) -> list[tuple[PlanCandidate, list[str]]]:
    """Return candidates, each with the orders that are forecast to be about as fast as the best order of the best candidate.

    Args:
        order: name of the order that was asked for, or "auto".
    """
    least = costs.of(best)
    ranked = [_own_costs(candidate, order, costs, least) for candidate in candidates]
    rows = sorted((cost, number, name) for number, own in enumerate(ranked) for name, cost in own.items())
    chosen = defaultdict[int, list[str]](list)
    for cost, number, name in rows:
        if cost > NEAR * least or sum(map(len, chosen.values())) == FINALISTS - 1:
            break
        candidate = candidates[number]
        last_bytes = candidate.forecasts[name].last_bytes if candidate.forecasts else candidate.last_bytes
        is_best = candidate is best and name == best.order
        if not is_best and len(chosen[number]) < FINAL_ORDERS + _is_plain(candidate) and costs.holds(last_bytes):
            chosen[number].append(name)
    return [(candidates[number], names) for number, names in chosen.items() if names]


def judged(
    chosen: PlannedOrder,
    others: Iterable[tuple[PlanCandidate, list[str]]],
    judge: Judge,
    plans: Callable[[PlanCandidate, Sequence[str]], Iterable[PlannedOrder]],
) -> PlannedOrder:
    """Return the fastest of a planned step and others, by a judge; the first if there is no other, or the judge finds that none fits.

    Args:
        plans: function that plans the step of a candidate in some orders.
    """
    others = [*others]
    if not others:
        return chosen
    fastest, least = chosen, judge(chosen.plan)
    for candidate, names in others:
        for planned in plans(candidate, names):
            seconds = judge(planned.plan)
            if seconds < least:
                fastest, least = planned, seconds
    return chosen if least == inf else replace(fastest, judged_seconds=least)


def _is_plain(candidate: PlanCandidate) -> bool:
    """Return whether a program could ask for a recomputation by a word."""
    return candidate.recompute in (NONE, BLOCK)


def _own_costs(candidate: PlanCandidate, order: str, costs: Costs, least: float) -> dict[str, float]:
    """Return the costs by which the orders of a candidate are ranked as finalists.

    Args:
        least: cost of the best candidate.
    """
    forecasts = {name: forecast for name, forecast in candidate.forecasts.items() if order in (AUTO, name)}
    own = {name: costs.of_forecast(forecast) for name, forecast in forecasts.items()} or {candidate.order: costs.of(candidate)}
    lowest = min(own.values())
    if not _is_plain(candidate) or lowest > NEAR * PLAIN * least:
        return own
    return {name: cost / PLAIN * min(1.0, least / lowest if lowest else 1.0) for name, cost in own.items()}
