"""The planned order of a step, which the scheduler executes, with the forecasts by which it was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.step_plan import StepPlan
from .evaluation import PlanCandidate, evaluate
from .forecast import Forecast, Pace
from .ordered_step import OrderedStep, PlanningMachine
from .recompute import NONE, Recomputation


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order in which a step executes, and the forecasts by which it was chosen.

    Attributes:
        name: name of the order.
        plan: the step's tasks in that order.
        forecasts: forecast of each order that was considered, and of the submission order, by name; empty if everything fits.
        moves_least_of_equals: whether another order counts as equally fast and moves more bytes.
        num_tasks: number of tasks of the step; a fused task counts as all its tasks.
        recompute: value of --recompute for the recomputation; "none" without one.
        recomputation: the same as an object, with all groups of values that a planner chose from; None if none has.
        last_bytes: bytes that the last tier must hold (`last_tier_bytes`).
        judged_seconds: seconds of a step in virtual time; 0 if it was not needed for the choice.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]
    moves_least_of_equals: bool = False
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


def planned_order(step: OrderedStep, candidate: PlanCandidate, name: str | None = None) -> PlannedOrder:
    """Return a step in the best order of a candidate, or in another one of its orders."""
    name = candidate.order if name is None else name
    return PlannedOrder(
        name,
        step.planned(name),
        candidate.forecasts,
        candidate.moves_least_of_equals and name == candidate.order,
        len(step.plan.tasks),
        candidate.recompute,
        candidate.recomputation,
        candidate.forecasts[name].last_bytes if name in candidate.forecasts else candidate.last_bytes,
    )


def plan_order(
    plan: StepPlan,
    order: str,
    *,
    memory: int,
    last: int,
    computes_on_last: bool,
    num_devices: int = 1,
    pace: Callable[[StepPlan], Pace] | None = None,
    only: Sequence[str] = (),
) -> PlannedOrder:
    """Choose the order of a step, and the device of each minibatch.

    If the minibatches can be divided equally, each device gets an equal number: weights travel, activations stay. If memory is short, the
    minibatches of all devices then pass through the step side by side.

    Args:
        plan: the step in submission order.
        order: "auto", or the name of an order (`orders`).
        memory: bytes of the memory where tasks run, all devices together.
        last: bytes of the last tier, which must hold all live data.
        computes_on_last: whether tasks run on the last tier.
        num_devices: number of equal devices if tasks run on no other node; else 1.
        pace: function from a plan to the rates of the machine, called if memory is short. Orders are compared by seconds with it, by bytes without.
        only: names of the orders that "auto" chooses from, if the step has them, or else the submission order; empty for all.

    Raises:
        ValueError: the step has no order of that name.
    """
    step = OrderedStep(plan, PlanningMachine(memory, last, computes_on_last, num_devices, pace))
    return planned_order(step, evaluate(step, order, only=only))
