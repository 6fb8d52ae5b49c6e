"""Candidates for the plan of a step, their evaluation by forecasts, and the margin by which one replaces a step without recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..core.step_plan import StepPlan
from .forecast import Forecast
from .ordered_step import SUBMISSION, OrderedStep
from .recompute import Recomputation
from .value_groups import AUTO

MARGIN: Final = 0.99
"""Ratio of costs from which on a candidate replaces one without recomputation. Costs that are closer count as equal."""
NEAR: Final = 1.1
"""Ratio of costs up to which a candidate may be faster than the best one, since forecasts err: such orders are evaluated further, and judged."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A way to execute a step.

    Attributes:
        step: the step with its recomputation, divided between the devices of a machine; or the share of one of them.
        recomputation: selection of the values that it recomputes.
        order: name of its order.
        forecast: its costs; of a step that fits, only the seconds of its tasks, and without recomputation not even those.
    """

    step: OrderedStep
    recomputation: Recomputation
    order: str
    forecast: Forecast

    @property
    def fits(self) -> bool:
        """Whether the last tier holds the data of the step."""
        return self.forecast.last_bytes <= self.step.machine.last

    @property
    def key(self) -> tuple[int, float, int]:
        """Key by which candidates are compared, the smallest first: missing bytes of the last tier, cost, bytes moved."""
        return max(0, self.forecast.last_bytes - self.step.machine.last), self.forecast.cost, self.forecast.total

    @property
    def moves_nothing(self) -> bool:
        """Whether no data but that of tasks aside leaves the memory where tasks run."""
        if not self.step.plan.has_aside:
            return self.order == SUBMISSION and self.step.fits
        return self.step.device_bytes(self.step.planned(self.order)) <= self.step.machine.memory

    @property
    def is_bound_by_tasks(self) -> bool:
        """Whether the step fits and takes about as long as its tasks alone.

        On several devices the friction of copies counts only if a judge has the last word: it was measured on one device, and a 50B GPT on eight was
        slower by 2 to 3 % with a recomputation that it favoured.
        """
        machine = self.step.machine
        seconds = self.forecast.cost if machine.judge is not None or not self.step.plan.partitions else self.forecast.seconds
        return machine.pace is not None and self.fits and self.step.task_seconds > MARGIN * seconds


def evaluate(step: OrderedStep, order: str, recomputation: Recomputation | None = None, only: Sequence[str] = ()) -> list[PlanCandidate]:
    """Forecast a step in an order, or in those that "auto" chooses from.

    Args:
        recomputation: selection of the values that the step recomputes; None for none.
        only: names of the orders that "auto" chooses from, if the step has them; empty for all.

    Raises:
        ValueError: the step has no order of that name.
    """
    recomputation = Recomputation() if recomputation is None else recomputation
    if order in (AUTO, SUBMISSION) and step.fits:
        seconds = step.task_seconds if recomputation.handles else 0.0  # without recomputation, no other candidate is better
        return [PlanCandidate(step, recomputation, SUBMISSION, Forecast(0, 0, seconds, last_bytes=step.last_bytes))]
    if order != AUTO and not step.has(order):
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(step.names())}, and auto")
    names = [order] if order != AUTO else [name for name in only if step.has(name)] or step.names()
    candidates: list[PlanCandidate] = []
    for pool in step.pools(names):
        candidates += [PlanCandidate(step, recomputation, name, step.forecast(name)) for name in pool]
        if any(candidate.fits for candidate in candidates):
            break
    return candidates


def unchanged(candidates: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Return the candidates without recomputation. In every list of candidates these come first, and share one `Recomputation`."""
    return [candidate for candidate in candidates if candidate.recomputation is candidates[0].recomputation]


def best_of(candidates: Sequence[PlanCandidate]) -> PlanCandidate:
    """Return the best candidate; the best one without recomputation, unless another one is clearly better."""
    best = min(candidates, key=lambda candidate: candidate.key)
    base = min(unchanged(candidates), key=lambda candidate: candidate.key)
    return best if not base.fits or best.forecast.cost <= MARGIN * base.forecast.cost else base


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order in which a step executes, and the forecasts by which it was chosen.

    Attributes:
        name: name of the order.
        plan: the step's tasks in that order.
        forecasts: forecast of each order that was considered, and of the submission order, by name; empty if everything fits.
        num_tasks: number of tasks of the step; a fused task counts as all its tasks.
        recomputation: selection of the values that the step recomputes, with the groups that a planner chose from.
        last_bytes: bytes that the last tier must hold (`last_tier_bytes`).
        judged_seconds: seconds of a step in virtual time; 0 if it was not needed for the choice.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]
    num_tasks: int = 0
    recomputation: Recomputation = field(default_factory=Recomputation)
    last_bytes: int = 0
    judged_seconds: float = 0.0

    @property
    def recompute(self) -> str:
        """Value of --recompute for the recomputation; "none" without one."""
        return self.recomputation.name

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
