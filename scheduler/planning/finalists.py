"""Finalists: planned steps that are forecast to be about as fast as the best, of which virtual time chooses the fastest.

A forecast takes all workers as one and all links as two. Steps that it finds about equally fast may differ by 6 % when the machine's own rules
decide about fetches and write-backs (GPT-2 medium with half the memory that it needs, over a link of 12 GB/s, in two orders). Virtual time runs
these rules, and takes ten times as long as a forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .evaluation import AUTO, PlanCandidate
from .recompute import BLOCK, NONE

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


def finalists(best: PlanCandidate, candidates: Sequence[PlanCandidate], order: str) -> list[tuple[PlanCandidate, str]]:
    """Return other candidates than the best, each with an order, that are forecast to be about as fast.

    Args:
        order: name of the order that was asked for, or "auto".
    """
    least, last = best.cost, best.step.machine.last
    ranked = [(cost, number, name) for number, candidate in enumerate(candidates) for name, cost in _costs(candidate, order, least).items()]
    chosen: list[tuple[PlanCandidate, str]] = []
    for cost, number, name in sorted(ranked):
        candidate = candidates[number]
        if cost > NEAR * least or len(chosen) == FINALISTS - 1:
            break
        num_orders = sum(other is candidate for other, _ in chosen)
        last_bytes = candidate.forecasts[name].last_bytes if candidate.forecasts else candidate.last_bytes
        is_best = candidate is best and name == best.order
        if not is_best and num_orders < FINAL_ORDERS + _is_plain(candidate) and last_bytes <= last:
            chosen.append((candidate, name))
    return chosen


def _is_plain(candidate: PlanCandidate) -> bool:
    """Return whether a program could ask for a recomputation by a word."""
    return candidate.recompute in (NONE, BLOCK)


def _costs(candidate: PlanCandidate, order: str, least: float) -> dict[str, float]:
    """Return the costs by which the orders of a candidate are ranked as finalists.

    Args:
        least: cost of the best candidate.
    """
    own = {name: forecast.cost for name, forecast in candidate.forecasts.items() if order in (AUTO, name)} or {candidate.order: candidate.cost}
    lowest = min(own.values())
    if not _is_plain(candidate) or lowest > NEAR * PLAIN * least:
        return own
    return {name: cost / PLAIN * min(1.0, least / lowest if lowest else 1.0) for name, cost in own.items()}
