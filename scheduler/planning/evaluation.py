"""Candidates for the plan of a step, their evaluation by forecasts, and the cost by which they are compared.

A candidate is a recomputation, in one or several orders. A forecast takes a fifth of a second for 10,000 tasks, so a planner can compare dozens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..core.step_plan import StepPlan
from .device_share import own_tasks
from .forecast import Forecast, Pace
from .ordered_step import SUBMISSION, OrderedStep, PlanningMachine
from .recompute import NONE, Recomputation

AUTO: Final = "auto"

EQUAL: Final = 1.02
"""Ratio of seconds up to which orders count as equally fast; of these the one that moves the fewest bytes is taken."""
ALIKE: Final = 1.05
"""Ratio of bytes up to which equally fast orders count as moving equally many; of these the fastest is taken."""
CLOSE: Final = 0.99
"""Share of the seconds of a step without recomputation above which recomputation is not worth its flops."""
FRICTION: Final = 0.2
"""Share of the seconds of copies in the busier direction that is added to a forecast, which overlaps copies and tasks better than a machine does:
by 0.1 to 0.7 of them where computing decides (GPT-2 medium on one device of a half to an eighth of its need)."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A step with a recomputation, in one or several orders that were forecast.

    Attributes:
        recompute: value of --recompute for the recomputation.
        recomputation: the same as an object, if a search has chosen it; else None.
        step: the step with it, in submission order.
        order: the best of the orders.
        forecasts: forecast of each order that was to choose from, and of the submission order if it was forecast; empty if everything fits.
        last_bytes: bytes of the last tier that the best order needs.
        moves_least_of_equals: whether another order counts as equally fast and moves more bytes.
    """

    recompute: str
    recomputation: Recomputation | None
    step: StepPlan
    order: str
    forecasts: Mapping[str, Forecast]
    last_bytes: int
    moves_least_of_equals: bool = False

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the best order; None if everything fits."""
        return self.forecasts.get(self.order)

    @property
    def seconds(self) -> float:
        """Forecast seconds of a step; 0 if everything fits, or without a pace."""
        return 0.0 if self.forecast is None else self.forecast.seconds


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
        compared: names of orders that are also forecast, for comparison, unless `only` is given.

    Raises:
        ValueError: the step has no order of that name.
    """
    if order in (AUTO, SUBMISSION) and step.fits:
        return PlanCandidate(recompute, recomputation, step.plan, SUBMISSION, {}, step.last_bytes)
    if order == AUTO:
        names = [name for name in only if step.has(name)] or [SUBMISSION] if only else step.names()
        forecasts, considered = _considered(step, names, () if only else compared)
    elif step.has(order):
        forecasts, considered = {name: step.forecast(name) for name in dict.fromkeys([*compared, order]) if step.has(name)}, [order]
    else:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(step.names())}, and auto")
    best, moves_least = _best({name: forecasts[name] for name in considered})
    shown = {name: forecasts[name] for name in dict.fromkeys([SUBMISSION, *considered]) if name in forecasts}
    return PlanCandidate(recompute, recomputation, step.plan, best, shown, forecasts[best].last_bytes, moves_least)


class Costs:
    """Comparison of candidates of one step.

    Args:
        plan: the step without recomputation; with its partitions, if it is the share of a device.
        machine: machine that the step runs on; without a pace, candidates are compared by the bytes that they move.
    """

    def __init__(self, plan: StepPlan, machine: PlanningMachine) -> None:
        self._pace_of, self._last = machine.pace, machine.last
        self._task_seconds, self._slowness = 0.0, (0.0, 0.0)
        if machine.pace is not None:
            pace = machine.pace(plan)
            self._task_seconds, self._slowness = _task_seconds(plan, pace), (1 / pace.read, 1 / pace.write)

    def key(self, candidate: PlanCandidate) -> tuple[bool, float, int]:
        """Return the key by which candidates are compared; the smallest is the best."""
        moved = 0 if candidate.forecast is None else candidate.forecast.total
        return not self.fits(candidate), self.of(candidate), moved

    def of(self, candidate: PlanCandidate) -> float:
        """Return the seconds of a step and a share of those of its copies; of a step that fits, the seconds of its tasks."""
        return self.task_seconds(candidate.step) if candidate.forecast is None else self.of_forecast(candidate.forecast)

    def of_forecast(self, forecast: Forecast) -> float:
        """Return the forecast seconds and a share of those of the copies."""
        return forecast.seconds + FRICTION * max(forecast.read * self._slowness[0], forecast.written * self._slowness[1])

    def task_seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a step if no task waits for copies; 0 without a pace."""
        return 0.0 if self._pace_of is None else _task_seconds(plan, self._pace_of(plan))

    def holds(self, last_bytes: int) -> bool:
        """Return whether the last tier has a number of bytes."""
        return last_bytes <= self._last

    def fits(self, candidate: PlanCandidate) -> bool:
        """Return whether the last tier holds the data of a step."""
        return self.holds(candidate.last_bytes)

    def is_bound_by_tasks(self, base: PlanCandidate, *, is_judged: bool) -> bool:
        """Return whether a step without recomputation fits and takes about as long as its tasks alone.

        On several devices `FRICTION` counts only if a judge has the last word: it was measured on one device, and a 50B GPT on eight was slower by
        2 to 3 % with a recomputation that it favoured.
        """
        seconds = self.of(base) if is_judged or not base.step.partitions else base.seconds
        return self._pace_of is not None and self.fits(base) and self._task_seconds > CLOSE * seconds


def _task_seconds(plan: StepPlan, pace: Pace) -> float:
    """Return the seconds of all tasks on all workers together; for the share of a device, of its own tasks."""
    if pace.num_devices == 1:
        return sum(pace.seconds.values())
    own = own_tasks(range(len(plan.tasks)), plan.partitions, 0, pace.num_devices)
    return sum(pace.seconds[plan.tasks[position]] for position in own) * pace.num_devices


def _best(forecasts: Mapping[str, Forecast]) -> tuple[str, bool]:
    """Return the order to take, and whether it moves the fewest bytes of equally fast ones that differ in that."""
    least = min(forecast.seconds for forecast in forecasts.values())
    equal = {name: forecast for name, forecast in forecasts.items() if forecast.seconds <= EQUAL * least}
    fewest = min(forecast.total for forecast in equal.values())
    alike = [name for name, forecast in equal.items() if forecast.total <= ALIKE * fewest]
    order = min(alike, key=lambda name: (equal[name].seconds, equal[name].total))
    return order, equal[order].total == fewest < max(forecast.total for forecast in equal.values())


def _considered(step: OrderedStep, names: Sequence[str], always: Iterable[str]) -> tuple[dict[str, Forecast], list[str]]:
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
