"""The search for the values that a step recomputes instead of keeping them, where its data exceeds memory.

A candidate recomputes the first K groups of values, cheapest first (`value_groups`), the last of them for the leading share of its values; or all
values inside the blocks that a program marks. What it does not recompute stays in memory or moves, as order and eviction have it. The search
evaluates no group, all groups and all blocks in the orders that are likely then. It bisects to the best K in between, in the orders that were best at
the ends, and tries shares there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from ..core.step_plan import StepPlan
from .evaluation import PlanCandidate, evaluate
from .forecast import Forecast
from .ordered_step import SUBMISSION, OrderedStep
from .recompute import NONE, Recomputation, Values
from .value_groups import groups_of, priced, values_in_blocks

LIKELY: Final = ("eager-update", "layers", "turn:1/8", "turn:4/8")
"""Orders in which recomputations are evaluated; the others are hardly ever the best."""
SHARES: Final = (0.33, 0.67)
"""Leading shares of the last group that are evaluated."""
MANY_TASKS: Final = 20_000
"""Number of tasks above which all or nothing of a group is recomputed: a forecast takes a second for 20,000 tasks."""


class Search:
    """Search for the best recomputation of a step.

    Args:
        plan: the step in submission order.
        base: the candidate without recomputation.
        order: name of the order that was asked for, or "auto".
    """

    def __init__(self, plan: StepPlan, base: PlanCandidate, order: str) -> None:
        self._values, self._order, self._machine = Values(plan), order, base.step.machine
        pace = self._machine.pace
        self._seconds_without = _seconds(base) if base.fits else inf
        self._groups = groups_of(self._values, pace if base.fits else None)
        if pace is not None and not base.fits:  # sorted as `most_again` does, which knows no machine
            self._groups = priced(self._values, self._groups, pace)
        self._base = replace(base, recomputation=self._leading(0))
        self._candidates = {NONE: self._base}

    def candidates(self) -> list[PlanCandidate]:
        """Evaluate and return the candidates; the first is the one without recomputation."""
        likely = [self._fastest(self._base), *LIKELY]
        if self._groups:
            self._evaluate(self._leading(len(self._groups)), likely)
        blocks = replace(values_in_blocks(self._values), groups=self._groups, seconds_without=self._seconds_without)
        if blocks.name != NONE:
            self._evaluate(blocks, likely)
        if self._groups:
            self._evaluate_between(len(self._groups))
        return [*self._candidates.values()]

    def _evaluate_between(self, most: int) -> None:
        """Evaluate fewer groups, and smaller shares of the best number of them, in the orders that were the best at both ends."""
        orders = [self._fastest(self._candidates[self._leading(most).name]), self._fastest(self._base)]

        def key(count: int) -> tuple[bool, float, int]:
            return self._evaluate(self._leading(count), orders).key

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
                self._evaluate(self._leading(count, share), orders)

    def _leading(self, count: int, share: float = 1.0) -> Recomputation:
        """Return the candidate that recomputes the first groups, the last of them for a share of its values."""
        return Recomputation(self._groups, count, share, seconds_without=self._seconds_without)

    def _evaluate(self, recomputation: Recomputation, orders: Sequence[str]) -> PlanCandidate:
        """Return the candidate with a recomputation, evaluated in some orders."""
        if recomputation.name not in self._candidates:
            step = OrderedStep(recomputation.apply(self._values), self._machine)
            self._candidates[recomputation.name] = evaluate(
                step, self._order, recompute=recomputation.name, recomputation=recomputation, only=[*dict.fromkeys(orders)], compared=()
            )
        return self._candidates[recomputation.name]

    def _fastest(self, candidate: PlanCandidate) -> str:
        """Return the fastest order of a candidate; on several devices without the submission order, which is there for comparison."""
        forecasts = shown_forecasts(self._base, candidate)
        names = [name for name in forecasts if name != SUBMISSION or not candidate.step.plan.partitions]
        return min(names, key=lambda name: forecasts[name].cost, default=SUBMISSION)


def shown_forecasts(base: PlanCandidate, candidate: PlanCandidate) -> Mapping[str, Forecast]:
    """Return the forecasts of a candidate, and that of the submission order; if everything fits, the seconds of the tasks."""
    if candidate.recompute == base.recompute:
        return candidate.forecasts
    if candidate.forecasts:
        return {SUBMISSION: base.forecasts[SUBMISSION], **candidate.forecasts}
    return {SUBMISSION: Forecast(0, 0, candidate.step.task_seconds, last_bytes=candidate.last_bytes)}


def _seconds(candidate: PlanCandidate) -> float:
    return candidate.forecasts[candidate.order].seconds if candidate.forecasts else 0.0
