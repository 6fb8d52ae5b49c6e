"""Finalists: planned steps that are forecast to be about as fast as the best, of which virtual time chooses the fastest.

A forecast takes all workers as one and all links as two. Steps that it finds about equally fast may differ by 6 % when the machine's own rules
decide about fetches and write-backs (GPT-2 medium with half the memory that it needs, over a link of 12 GB/s, in two orders). Virtual time runs
these rules, and takes ten times as long as a forecast. So it judges the best recomputation in several orders, and then other recomputations in the
order that was the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .evaluation import PlanCandidate
from .recompute import BLOCK, NONE
from .search import LIKELY

NEAR: Final = 1.1
"""Ratio of costs to that of the best above which a step is not judged."""
PLAIN: Final = 1.2
"""Further ratio up to which a step is judged that a program could ask for by a word, with no or all blocks recomputed. Forecasts without
recomputation are up to 23 % too long, and "auto" must not be slower than "none" or "block"."""
ORDERS: Final = 4
"""Largest number of orders in which the best recomputation is judged."""
OTHERS: Final = 2
"""Largest number of other recomputations that are judged, besides none and all blocks."""
JUDGED_TASKS: Final = 40_000
"""Number of tasks that all judged steps have together, unless they are two; judging 2,000 tasks takes a second if memory is short."""
MOST_JUDGED: Final = 10_000
"""Number of tasks above which steps are chosen by forecasts alone: judging one of them takes more than ten seconds."""


def orders_to_judge(best: PlanCandidate) -> list[str]:
    """Return the orders in which the best candidate is judged: its best one, and others that are about as fast, likely ones first."""
    costs = {name: forecast.cost for name, forecast in best.forecasts.items() if forecast.cost <= NEAR * best.cost and _fits(best, name)}
    return sorted(costs, key=lambda name: (name != best.order, name not in LIKELY, costs[name]))[:ORDERS]


def others_to_judge(best: PlanCandidate, candidates: Sequence[PlanCandidate], fastest: str) -> list[tuple[PlanCandidate, str]]:
    """Return other candidates that are forecast to be about as fast as the best, each with an order.

    Args:
        fastest: the fastest order of the best candidate, in virtual time; a candidate that was not forecast in it is judged in its own best.
    """
    near: list[PlanCandidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (not _is_plain(candidate), candidate.cost)):
        is_judged = _is_plain(candidate) or sum(not _is_plain(other) for other in near) < OTHERS
        limit = NEAR * PLAIN if _is_plain(candidate) else NEAR
        if candidate.recompute != best.recompute and candidate.cost <= limit * best.cost and is_judged:
            near.append(candidate)
    rows = [(candidate, fastest if fastest in candidate.forecasts else candidate.order) for candidate in near]
    return [(candidate, name) for candidate, name in rows if _fits(candidate, name)]


def _is_plain(candidate: PlanCandidate) -> bool:
    """Return whether a program could ask for a recomputation by a word."""
    return candidate.recompute in (NONE, BLOCK)


def _fits(candidate: PlanCandidate, name: str) -> bool:
    """Return whether the last tier holds the data of a candidate in one of its orders."""
    last_bytes = candidate.forecasts[name].last_bytes if name in candidate.forecasts else candidate.last_bytes
    return last_bytes <= candidate.step.machine.last
