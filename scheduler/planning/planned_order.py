"""The planned order of a step, which the scheduler executes, with the forecasts by which it was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.step_plan import StepPlan
from .evaluation import PlanCandidate
from .forecast import Forecast
from .recompute import NONE, Recomputation


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order in which a step executes, and the forecasts by which it was chosen.

    Attributes:
        name: name of the order.
        plan: the step's tasks in that order.
        forecasts: forecast of each order that was considered, and of the submission order, by name; empty if everything fits.
        num_tasks: number of tasks of the step; a fused task counts as all its tasks.
        recompute: value of --recompute for the recomputation; "none" without one.
        recomputation: the same as an object, with all groups of values that a planner chose from; None if none has.
        last_bytes: bytes that the last tier must hold (`last_tier_bytes`).
        judged_seconds: seconds of a step in virtual time; 0 if it was not needed for the choice.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]
    num_tasks: int = 0
    recompute: str = NONE
    recomputation: Recomputation | None = None
    last_bytes: int = 0
    judged_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step is expected to move; 0 without a forecast."""
        forecast = self.forecasts.get(self.name)
        return 0 if forecast is None else forecast.total

    @property
    def seconds(self) -> float:
        """Seconds that a step is expected to take; 0 without a forecast or a pace."""
        forecast = self.forecasts.get(self.name)
        return 0.0 if forecast is None else forecast.seconds


def planned_order(candidate: PlanCandidate, name: str, forecasts: Mapping[str, Forecast]) -> PlannedOrder:
    """Return the step of a candidate in one of its orders.

    Args:
        forecasts: forecasts to show, of that order among others.
    """
    step = candidate.step
    last_bytes = candidate.forecasts[name].last_bytes if name in candidate.forecasts else candidate.last_bytes
    return PlannedOrder(name, step.planned(name), forecasts, len(step.plan.tasks), candidate.recompute, candidate.recomputation, last_bytes)
