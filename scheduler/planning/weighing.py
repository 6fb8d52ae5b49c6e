"""What planned steps are compared by: their forecasts, and of the best few a more exact judge, such as virtual time.

A forecast costs a planner a fifth of a second for 10,000 tasks, so that it can weigh dozens of steps; it takes all workers as one and all links as
two. Steps that it finds about equally fast may differ by 6 % when the machine's own rules decide what is fetched and written when (GPT-2 medium in
a half of its need behind 12 GB/s, under two orders). A judge runs these rules, and takes ten times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from ..core.step_plan import StepPlan
from .choose_order import PlannedOrder
from .device_share import own_tasks
from .forecast import Forecast, Pace
from .recompute import BLOCK, NONE

Judge = Callable[[StepPlan], float]
"""Seconds of a step in its planned order; infinite where it would not fit."""

CLOSE: Final = 0.99
"""A mix that is forecast to take more than this fraction of the seconds without any is not worth its flops."""
FRICTION: Final = 0.2
"""Of the seconds that copies take in the busier direction, the share that mixes are charged beside the forecast, which hides copies behind tasks
better than a machine does: by 0.1 to 0.7 of them where computing decides (GPT-2 medium on one device of a half to an eighth of its need)."""
FINALISTS: Final = 12
"""Planned steps that are judged, at most."""
FINAL_ORDERS: Final = 3
"""Orders of one of them, at most; one more of what a program could ask for, as many as are judged then."""
NEAR: Final = 1.1
"""A step that is forecast to take longer than the best by more than this factor is not judged."""
PLAIN: Final = 1.2
"""What a program could ask for instead of a choice, nothing or all blocks made again, is judged where it is forecast to take longer by up to this
factor more, under as many of its own best orders as if it had been asked for. Forecasts without recomputation are up to 23 % too long, and who leaves
the choice to a planner expects no worse than either."""
MOST_JUDGED: Final = 10_000
"""Steps of more tasks are chosen by forecasts alone: judging one of them takes more than ten seconds."""


class Rival(NamedTuple):
    """A step with one mix, planned under the best of some orders.

    Attributes:
        orders: forecasts of those orders; none where everything fits.
        under: plans it under some of them.
    """

    chosen: PlannedOrder
    orders: Mapping[str, Forecast]
    under: Callable[[Sequence[str]], Iterable[PlannedOrder]]

    @property
    def is_plain(self) -> bool:
        """Whether it could be asked for by a word."""
        return self.chosen.recompute in (NONE, BLOCK)


def _tasks_alone(plan: StepPlan, pace: Pace) -> float:
    """Seconds of a step where nothing waits for copies; of the share of a device, those of its own tasks."""
    if pace.num_devices == 1:
        return sum(pace.seconds.values())
    own = own_tasks(range(len(plan.tasks)), plan.partitions, 0, pace.num_devices)
    return sum(pace.seconds[plan.tasks[at]] for at in own) * pace.num_devices


class Weighing:
    """What planned steps are compared by.

    Args:
        plan: the step that makes nothing again; with its partitions, where it is the share of a device.
        last: bytes of the last tier.
        pace: rates of the machine during a plan; without it steps are compared by the bytes that they move.
        judge: of the best few; None for none.
    """

    def __init__(self, plan: StepPlan, last: int, pace: Callable[[StepPlan], Pace] | None, judge: Judge | None = None) -> None:
        self.pace = pace
        self._last = last
        self._judge = judge if len(plan.tasks) <= MOST_JUDGED else None
        self._least, self._slowness = 0.0, (0.0, 0.0)
        if pace is not None:
            rates = pace(plan)
            self._least, self._slowness = _tasks_alone(plan, rates), (1 / rates.read, 1 / rates.write)

    def fits(self, chosen: PlannedOrder) -> bool:
        """Whether the last tier holds the data of a planned step."""
        return chosen.last_bytes <= self._last

    def is_bound_by_tasks(self, base: PlannedOrder) -> bool:
        """Whether the step without any fits, and its tasks alone take about as long as it does.

        What copies may cost beside a forecast (`FRICTION`) was found on one device. A 50B GPT on eight was slower by 2 to 3 % with a mix that was
        chosen for it than without any, so on several it counts only where a judge looks.
        """
        seconds = base.seconds if self._judge is None and base.plan.partitions else self.cost(base)
        return self.pace is not None and self.fits(base) and self._least > CLOSE * seconds

    def key(self, chosen: PlannedOrder) -> tuple[bool, float, int]:
        """The smallest is the best."""
        return not self.fits(chosen), self.cost(chosen), chosen.moved_bytes

    def cost(self, chosen: PlannedOrder) -> float:
        """Seconds, and some of what copies take; of a step that fits, what its tasks take."""
        found = chosen.forecasts.get(chosen.name)
        if found is not None:
            return self._cost(found)
        return self.alone(chosen.plan)

    def alone(self, plan: StepPlan) -> float:
        """Seconds of a step where nothing waits for copies; 0 without a pace."""
        return 0.0 if self.pace is None else _tasks_alone(plan, self.pace(plan))

    def _cost(self, found: Forecast) -> float:
        return found.seconds + FRICTION * max(found.read * self._slowness[0], found.written * self._slowness[1])

    def judged(self, best: PlannedOrder, rivals: Sequence[Rival]) -> PlannedOrder:
        """The fastest of the best few steps; the best by forecasts where nobody judges, or there is no other.

        Args:
            best: by forecasts.
            rivals: it and others.
        """
        if self._judge is None or not best.forecasts:
            return best
        finalists = self._finalists(best, rivals)
        if not finalists:
            return best
        fastest, least = best, self._judge(best.plan)
        for at, names in finalists.items():
            for planned in rivals[at].under(names):
                seconds = self._judge(planned.plan)
                if seconds < least:
                    fastest, least = planned, seconds
        return best if least == inf else replace(fastest, judged_seconds=least)

    def _finalists(self, best: PlannedOrder, rivals: Sequence[Rival]) -> dict[int, list[str]]:
        """Orders of rivals beside the best that are forecast to be about as fast; those of one rival are planned together."""
        least = self.cost(best)
        rows = sorted((cost, at, name) for at, rival in enumerate(rivals) for name, cost in self._costs(rival, least).items())
        found = defaultdict[int, list[str]](list)
        for cost, at, name in rows:
            if cost > NEAR * least or sum(map(len, found.values())) == FINALISTS - 1:
                break
            rival = rivals[at]
            is_best = (rival.chosen.recompute, name) == (best.recompute, best.name)
            last_bytes = rival.orders[name].last_bytes if rival.orders else rival.chosen.last_bytes
            if not is_best and len(found[at]) < FINAL_ORDERS + rival.is_plain and last_bytes <= self._last:
                found[at].append(name)
        return {at: names for at, names in found.items() if names}

    def _costs(self, rival: Rival, least: float) -> dict[str, float]:
        """Of each order of a step, what it costs as finalists are ranked.

        Args:
            least: cost of the best.
        """
        costs = {name: self._cost(found) for name, found in rival.orders.items()} or {rival.chosen.name: self.cost(rival.chosen)}
        own = min(costs.values())
        if not rival.is_plain or own > NEAR * PLAIN * least:
            return costs
        return {name: cost / PLAIN * min(1.0, least / own if own else 1.0) for name, cost in costs.items()}
