"""Candidates for the plan of a step, their evaluation by forecasts, and the margin by which one replaces a simpler one.

A candidate is a recomputation, in one or several orders. A forecast takes a fifth of a second for 10,000 tasks, so a planner can compare dozens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .device_share import device_bytes
from .forecast import Forecast
from .ordered_step import SUBMISSION, OrderedStep
from .recompute import NONE, Recomputation

AUTO: Final = "auto"

MARGIN: Final = 0.99
"""Ratio of costs from which on a candidate replaces one without recomputation."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A step with a recomputation, in one or several orders that were forecast.

    Attributes:
        step: the step.
        recompute: value of --recompute for the recomputation.
        recomputation: the same as an object, if a search has chosen it; else None.
        order: the best of the orders.
        forecasts: forecast of each order that was to choose from, and of the submission order if it was forecast; empty if everything fits.
        last_bytes: bytes of the last tier that the best order needs.
    """

    step: OrderedStep
    recompute: str
    recomputation: Recomputation | None
    order: str
    forecasts: Mapping[str, Forecast]
    last_bytes: int

    @property
    def cost(self) -> float:
        """Cost of the best order, in seconds; of a step that fits, the seconds of its tasks."""
        return self.forecasts[self.order].cost if self.forecasts else self.step.task_seconds

    @property
    def fits(self) -> bool:
        """Whether the last tier holds the data of the step in its best order."""
        return self.last_bytes <= self.step.machine.last

    @property
    def key(self) -> tuple[bool, float, int]:
        """Key by which candidates are compared; the smallest is the best."""
        return not self.fits, self.cost, self.forecasts[self.order].total if self.forecasts else 0

    @property
    def moves_nothing(self) -> bool:
        """Whether no data but that of tasks aside leaves the memory where tasks run."""
        machine, has_aside = self.step.machine, self.step.plan.has_aside
        return not self.forecasts or (has_aside and device_bytes(self.step.planned(self.order), machine.num_devices) <= machine.memory)

    @property
    def is_bound_by_tasks(self) -> bool:
        """Whether the step fits and takes about as long as its tasks alone.

        On several devices the friction of copies counts only if a judge has the last word: it was measured on one device, and a 50B GPT on eight was
        slower by 2 to 3 % with a recomputation that it favoured.
        """
        machine = self.step.machine
        seconds = self.cost if machine.judge is not None or not self.step.plan.partitions else self.forecasts[self.order].seconds
        return machine.pace is not None and self.fits and self.step.task_seconds > MARGIN * seconds


def evaluate(
    step: OrderedStep,
    order: str,
    *,
    recompute: str = NONE,
    recomputation: Recomputation | None = None,
    only: Sequence[str] = (),
    compared: Sequence[str] = (SUBMISSION,),
) -> PlanCandidate:
    """Forecast a step in an order, or in all that "auto" chooses from, and take the best.

    Args:
        recompute, recomputation: attributes of the candidate.
        only: names of the orders that "auto" chooses from, if the step has them, or else the submission order; empty for all.
        compared: names of orders that are also forecast, for comparison.

    Raises:
        ValueError: the step has no order of that name.
    """
    if order in (AUTO, SUBMISSION) and step.fits:
        return PlanCandidate(step, recompute, recomputation, SUBMISSION, {}, step.last_bytes)
    if order == AUTO:
        names = [name for name in only if step.has(name)] or [SUBMISSION] if only else step.names()
        forecasts, considered = _considered(step, names, compared)
    elif step.has(order):
        forecasts, considered = {name: step.forecast(name) for name in dict.fromkeys([*compared, order]) if step.has(name)}, [order]
    else:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(step.names())}, and auto")
    best = min(considered, key=lambda name: (forecasts[name].cost, forecasts[name].total))
    shown = {name: forecasts[name] for name in dict.fromkeys([SUBMISSION, *considered]) if name in forecasts}
    return PlanCandidate(step, recompute, recomputation, best, shown, forecasts[best].last_bytes)


def best_of(candidates: Sequence[PlanCandidate]) -> PlanCandidate:
    """Return the best candidate; the first, without recomputation, unless another one is clearly better."""
    base = candidates[0]
    if len(candidates) == 1:
        return base
    best = min(candidates, key=lambda candidate: candidate.key)
    return best if not base.fits or best.cost <= MARGIN * base.cost else base


def _considered(step: OrderedStep, names: Sequence[str], always: Sequence[str]) -> tuple[dict[str, Forecast], list[str]]:
    """Forecast the orders of `always`, then one pool of orders after another until the last tier holds the data of one of a pool.

    Returns:
        All forecasts; and the names to choose from: of the last pool, the orders whose data the tier holds, or, if no pool has any, the one order
        that needs the fewest bytes of the tier.
    """
    forecasts = {name: step.forecast(name) for name in always if step.has(name)}
    considered: list[str] = []
    for pool in step.pools(names):
        forecasts |= {name: step.forecast(name) for name in pool if name not in forecasts}
        considered = [name for name in pool if forecasts[name].last_bytes <= step.machine.last]
        if considered:
            break
    return forecasts, considered or [min(forecasts, key=lambda name: forecasts[name].last_bytes)]
