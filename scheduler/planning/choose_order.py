"""The choice of the order in which a recorded step is planned: candidates, and a forecast of the cost of each within the memory budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..core.step_plan import StepPlan
from .forecast import Forecast, Pace
from .ordered_step import SUBMISSION, OrderedStep, PlanningMachine
from .recompute import Mix

AUTO: Final = "auto"

EQUAL: Final = 1.02
"""Orders whose seconds differ by less than this factor count as equally fast; of these the planner takes the one that moves the fewest bytes."""

ALIKE: Final = 1.05
"""Of these, such as move more bytes by less than this factor count as moving equally many, and the fastest is taken."""


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order in which a step executes, and the forecasts it was chosen by.

    Attributes:
        name: name of the order.
        plan: the step's tasks in that order.
        forecasts: cost of each order that was considered, and of the submission order, by name; empty when everything fits.
        moves_least_of_equals: whether another order counts as equally fast and moves more bytes.
        num_tasks: of the step, tasks that are fused counted one by one.
        recompute: what the step makes again, as it can be asked for; "none" for nothing.
        mix: how that was chosen, if a planner has.
        last_bytes: what the last tier must hold (`last_tier_bytes`).
        judged_seconds: of a step, as a more exact judge than forecasts has it (`weighing`); 0 where none was asked.
    """

    name: str
    plan: StepPlan
    forecasts: Mapping[str, Forecast]
    moves_least_of_equals: bool = False
    num_tasks: int = 0
    recompute: str = "none"
    mix: Mix | None = None
    last_bytes: int = 0
    judged_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step is expected to move; 0 where nothing was forecast."""
        found = self.forecasts.get(self.name)
        return 0 if found is None else found.total

    @property
    def seconds(self) -> float:
        """Seconds a step is expected to take; 0 where nothing was forecast, or without a pace."""
        found = self.forecasts.get(self.name)
        return 0.0 if found is None else found.seconds


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

    Several devices get equal numbers of minibatches where the count divides: weights travel, activations stay. Where memory is short, the
    minibatches of all devices then pass through the step side by side.

    Args:
        plan: the step in submission order.
        order: "auto", or the name of a candidate (`orders`).
        memory: bytes of the memory where tasks run, all devices together; what tasks aside touch is elsewhere, and a step that has some moves.
        last: bytes of the last tier, which must back all live data.
        computes_on_last: whether tasks run on the last tier.
        num_devices: D, the number of equal devices if tasks run nowhere else; or 1.
        pace: rates of the machine during a plan, computed only where memory is short; orders are compared by seconds with it, by bytes without.
        only: names of the orders that "auto" chooses from, as far as the step has them, or else the submission order; none for all.

    Raises:
        ValueError: the step has no order of that name.
    """
    return plan_in(OrderedStep(plan, PlanningMachine(memory, last, computes_on_last, num_devices, pace)), order, only=only)


def plan_in(
    step: OrderedStep, order: str, *, only: Sequence[str] = (), beside: Sequence[str] = (SUBMISSION,), is_draft: bool = False
) -> PlannedOrder:
    """As `plan_order`.

    Args:
        beside: what is forecast for comparison, unless "auto" has only some orders to choose from.
        is_draft: whether the plan need not be made: that of the outcome is the step as it was.
    """
    num_tasks = len(step.plan.tasks)
    if order in (AUTO, SUBMISSION) and step.fits:
        return PlannedOrder(SUBMISSION, step.planned(SUBMISSION), {}, num_tasks=num_tasks, last_bytes=step.last_bytes)
    if order == AUTO:
        names = [name for name in only if step.has(name)] or [SUBMISSION] if only else step.names()
        forecasts, considered = _considered(step, names, () if only else beside)
    elif step.has(order):
        forecasts, considered = {name: step.forecast(name) for name in dict.fromkeys([*beside, order]) if step.has(name)}, [order]
    else:
        raise ValueError(f"this step has no order {order!r}; it has {', '.join(step.names())}, and auto")
    order, moves_least = _best({name: forecasts[name] for name in considered})
    chosen = step.plan if is_draft else step.planned(order)
    shown = {name: forecasts[name] for name in dict.fromkeys([SUBMISSION, *considered]) if name in forecasts}
    return PlannedOrder(order, chosen, shown, moves_least, num_tasks=num_tasks, last_bytes=forecasts[order].last_bytes)


def planned_orders(plan: StepPlan, orders: Sequence[str], machine: PlanningMachine) -> Iterator[StepPlan]:
    """A step in some of its orders, without forecasts."""
    step = OrderedStep(plan, machine)
    for order in orders:
        assert step.has(order), order  # it has been forecast
        yield step.planned(order)


def _best(forecasts: Mapping[str, Forecast]) -> tuple[str, bool]:
    """The order to take of those assessed, and whether it moves least of equally fast ones that differ in that."""
    least = min(each.seconds for each in forecasts.values())
    equal = {name: each for name, each in forecasts.items() if each.seconds <= EQUAL * least}
    fewest = min(each.total for each in equal.values())
    alike = [name for name, each in equal.items() if each.total <= ALIKE * fewest]
    order = min(alike, key=lambda name: (equal[name].seconds, equal[name].total))
    return order, equal[order].total == fewest < max(each.total for each in equal.values())


def _considered(step: OrderedStep, names: Sequence[str], always: Iterable[str]) -> tuple[dict[str, Forecast], list[str]]:
    """Forecast orders that are wanted in any case, then one pool of orders after another, until a pool has an order whose data the last tier holds.

    Returns:
        All forecasts, and the names to choose from: the orders of the last pool whose data the tier holds; if no pool has any, the one order that
        needs the fewest bytes of the tier.
    """
    found = {name: step.forecast(name) for name in always if step.has(name)}
    considered: list[str] = []
    for pool in step.pools(names):
        found |= {name: step.forecast(name) for name in pool if name not in found}
        considered = [name for name in pool if found[name].last_bytes <= step.machine.last]
        if considered:
            break
    return found, considered or [min(found, key=lambda name: found[name].last_bytes)]
