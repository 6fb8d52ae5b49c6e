"""Which order a recorded step is planned in: candidates, a forecast of what each moves within the budgets, and the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .core.forecast import Forecast, forecast
from .core.orders import candidates
from .core.steps import StepPlan

AUTO: Final = "auto"
SUBMISSION: Final = "submission"

WINDOW: Final = 256
"""Tasks ahead of the oldest unfinished one that may run where memory is short."""


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order a step executes in, and why.

    Attributes:
        name: of the order.
        plan: the step's tasks in that order.
        forecasts: what each order that was considered would move; empty when everything fits.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]

    @property
    def moved_bytes(self) -> int:
        """Bytes a step is expected to move."""
        found = self.forecasts.get(self.name)
        return 0 if found is None else found.total


def plan_order(plan: StepPlan, order: str, *, memory: int, last: int) -> PlannedOrder:
    """Choose the order of a step.

    Args:
        plan: in submission order.
        order: "auto", or the name of a candidate: see `orders`.
        memory: bytes where tasks run.
        last: bytes of the last tier, which must hold all that lives.

    Raises:
        ValueError: the step has no order of that name.
    """
    if order in (AUTO, SUBMISSION) and plan.needed_bytes() <= memory:
        return PlannedOrder(SUBMISSION, plan, {})
    found = {name: _permuted(plan, positions) for name, positions in candidates(plan).items()}
    if order != AUTO and order not in found:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(found)}, and auto")
    forecasts = {name: forecast(each, memory) for name, each in found.items() if name in (order, SUBMISSION) or order == AUTO}
    fitting = [name for name in forecasts if found[name].needed_bytes() <= last] or [SUBMISSION]
    name = order if order != AUTO else min(fitting, key=lambda name: forecasts[name].total)
    return PlannedOrder(name, found[name], forecasts)


def _permuted(plan: StepPlan, positions: list[int]) -> StepPlan:
    """The same tasks in another order; every order that keeps conflicting accesses in theirs has the same dependencies."""
    return StepPlan([plan.tasks[position] for position in positions], plan.owned, window=WINDOW)
