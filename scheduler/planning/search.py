"""The search for the values that a step recomputes instead of keeping them, where its data exceeds memory.

A candidate recomputes the first K groups of values, cheapest first (`value_groups`), the last of them for the leading share of its values; or all
values inside the blocks that a program marks. What it does not recompute stays in memory or moves, as order and eviction have it. The search
evaluates no group and all groups in the orders that are likely then, and all blocks in those of them that were near the best. It bisects to the best
K in between, in the order that was best for all groups, and tries shares there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final

from .evaluation import NEAR, PlanCandidate, evaluate
from .recompute import NONE, Recomputation, Values
from .value_groups import groups_of, leading_groups, priced, values_in_blocks

LIKELY: Final = ("turn:1/8", "layers", "turn:4/8", "eager-update")
"""Orders in which recomputations are evaluated, the likeliest first; the others are hardly ever the best. Turns are often equally fast by forecast,
and the narrowest is then the fastest in virtual time (GPT-2 XL in 20 GiB, by 1.7 %)."""
SHARES: Final = (0.33, 0.67)
"""Leading shares of the last group that are evaluated."""
MANY_TASKS: Final = 20_000
"""Number of tasks above which all or nothing of a group is recomputed: a forecast takes half a second for 20,000 tasks."""


class Search:
    """Search for the best recomputation of a step.

    Args:
        base: the candidates without recomputation.
        order: name of the order that was asked for, or "auto".
    """

    def __init__(self, base: Sequence[PlanCandidate], order: str) -> None:
        best = _best(base)
        self._values, self._order, self._step = Values(best.step.recorded), order, best.step
        pace = best.step.machine.pace
        self._seconds_without = best.forecast.seconds if best.fits else inf
        self._groups = groups_of(self._values, pace if best.fits else None)
        if pace is not None and not best.fits:  # sorted as `most_again` does, which knows no machine
            self._groups = priced(self._values, self._groups, pace)
        nothing = self._leading(0)
        self._candidates = {NONE: [replace(candidate, recomputation=nothing) for candidate in base]}

    def candidates(self) -> list[PlanCandidate]:
        """Evaluate and return the candidates; the first ones are those without recomputation."""
        likely, most = [_best(self._candidates[NONE]).order, *LIKELY], len(self._groups)
        if most:
            best = self._evaluate(self._leading(most), likely)
            likely = [each.order for each in self._candidates[best.recomputation.name] if each.forecast.cost <= NEAR * best.forecast.cost]
        blocks = replace(values_in_blocks(self._values), groups=self._groups, seconds_without=self._seconds_without)
        if blocks.name != NONE:
            self._evaluate(blocks, likely)
        if most:
            self._evaluate_between(most)
        return [candidate for candidates in self._candidates.values() for candidate in candidates]

    def _evaluate_between(self, most: int) -> None:
        """Evaluate fewer groups, and smaller shares of the best number of them, in the order that was the best for all groups."""
        order = _best(self._candidates[self._leading(most).name]).order

        def key(count: int) -> tuple[int, float, int]:
            return self._evaluate(self._leading(count), [order]).key

        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if key(low) < key(high) else (middle, high)
        key(low)
        best = min((count for count in range(1, most + 1) if self._leading(count).name in self._candidates), key=key)
        if len(self._values.plan.tasks) > MANY_TASKS:
            return
        for count in range(best, min(best + 1, most) + 1):
            for share in SHARES:
                self._evaluate(self._leading(count, share), [order])

    def _leading(self, count: int, share: float = 1.0) -> Recomputation:
        """Return the recomputation of the first groups, of the last of them for a share of its values."""
        return replace(leading_groups(self._groups, count, share), seconds_without=self._seconds_without)

    def _evaluate(self, recomputation: Recomputation, orders: Sequence[str]) -> PlanCandidate:
        """Evaluate a recomputation in some orders, if that is not done yet; return its best candidate."""
        if recomputation.name not in self._candidates:
            step = self._step.rewritten(recomputation.apply(self._values))
            self._candidates[recomputation.name] = evaluate(step, self._order, recomputation, [*dict.fromkeys(orders)])
        return _best(self._candidates[recomputation.name])


def _best(candidates: Sequence[PlanCandidate]) -> PlanCandidate:
    return min(candidates, key=lambda candidate: candidate.key)
