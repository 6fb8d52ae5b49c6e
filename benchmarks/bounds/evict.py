"""Bytes that a recorded step moves to and from the disk tier under eviction policies and orders, in virtual time.

Every order of the step runs with the eviction policy `next-use`; the other policies run under the submission order, `layers` and the planned order.
There is one worker, so that the executed order is the planned one. Each order is shown with a lower bound by linear programming (`byte_bound`; needs
SciPy). Bytes depend on durations only through prefetching, so tasks run at a fixed rate of operations, and copies at 1 GB/s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class EvictSettings:
    """Compare eviction policies and all orders of a step by the bytes they move, beside a lower bound. Takes minutes."""

    json: bool = False
    """print JSON"""
    model: str = "gpt2"
    """preset"""
    batch: int = 8
    """minibatches of one sequence"""
    seq_len: int | None = None
    """tokens per sequence (default: 1024, or as many as the model takes)"""
    budgets: str = "2,4,8"
    """RAM in parts of what the step needs"""
    bound: bool = True
    """solve the linear program, if SciPy is there"""


def run(settings: EvictSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the same figures as lines of text.

    Raises:
        UsageError: a flag is wrong.
        DoesNotFit: the step fits none of the budgets.
    """
    from jobs import captured, named

    from nntask import DoesNotFit, UsageError
    from nntask.config import check_values
    from scheduler.planning import candidates

    try:
        divisors = [int(text) for text in settings.budgets.split(",")]
    except ValueError:
        divisors = []
    if not divisors or min(divisors) < 1:
        raise UsageError(f"--budgets must be whole numbers of 1 or more with commas, got {settings.budgets!r}; for example --budgets 2,4,8")
    train = named(settings.model, settings.batch, seq_len=settings.seq_len)
    check_values(train)
    plan = captured(train)
    needed, least, positions = plan.needed_bytes(), plan.minimum_bytes(is_last=False, computes=True), candidates(plan)
    if needed // min(divisors) < least:
        raise DoesNotFit(
            f"--budgets {settings.budgets} are at most {needed // min(divisors):,} B of the {needed:,} B that the step needs, "
            f"and its hungriest task takes {least:,} B; for example --budgets {needed // least}"
        )
    with_bound = settings.bound and find_spec("scipy") is not None
    rows = [row for divisor in divisors for row in _rows(plan, divisor, positions, with_bound)]
    figures = {"needed_bytes": needed, "tasks": len(plan.tasks), "model": settings.model, "batch": settings.batch, "rows": rows}
    lines = list(_lines(figures))
    if settings.bound and not with_bound:
        lines.append('the lower bound needs SciPy: pip install -e ".[bench]", or leave it out with --no-bound')
    return figures, lines


def _rows(plan: Any, divisor: int, positions: Mapping[str, list[int]], with_bound: bool) -> Iterator[dict[str, Any]]:
    """Yield the figures of every order at 1/divisor of the step's need, and of every eviction policy under some of them.

    Args:
        positions: positions of the tasks, by name of the order.
    """
    from scheduler import DoesNotFit
    from scheduler.machine import Models
    from scheduler.planning import AUTO, NONE, SUBMISSION, PlanningMachine, choose_plan
    from scheduler.simulation import simulate

    budget = plan.needed_bytes() // divisor
    models = Models()
    planned = choose_plan(plan, AUTO, NONE, PlanningMachine(memory=budget, last=1 << 60, computes_on_last=False))
    bounds = {name: _bound(plan, order, budget) if with_bound else None for name, order in positions.items()}
    for name in positions:
        for evict, sched in (("next-use", "prio"), ("lru", "prio"), ("fifo", "prio"), ("lru", "eager")):
            if (sched == "eager" and name != SUBMISSION) or (evict != "next-use" and name not in (SUBMISSION, "layers", planned.name)):
                continue
            begin = perf_counter()
            chosen = choose_plan(plan, name, NONE, PlanningMachine(memory=budget, last=1 << 60, computes_on_last=False))
            row: dict[str, Any] = {"budget": f"1/{divisor}", "budget_bytes": budget, "order": name, "evict": evict, "sched": sched}
            try:
                found = simulate(
                    chosen.plan,
                    workers=[("cpu", 0, 1)],
                    nodes=[("ram", budget), ("disk", 1 << 50)],
                    policy=sched,
                    duration=models.task_seconds,
                    transfer=lambda source, target, nbytes: 1e-4 + nbytes / 2.5e8,  # one of four requests in flight
                    storage=True,
                    channels=4,
                    eviction=evict,
                )
            except DoesNotFit as error:
                yield {**row, "moved_bytes": None, "refusal": str(error)}
                continue
            moved = sum(found.moved_bytes.values())
            bound = bounds[name]
            yield {
                **row,
                "moved_bytes": moved,
                "evictions": found.num_evictions,
                "lower_bound_bytes": bound,
                "over_bound": moved / bound if bound else None,
                "planned": name == planned.name,
                "took_seconds": perf_counter() - begin,
            }


def _bound(plan: Any, order: list[int], budget: int) -> float | None:
    """Return the minimum number of bytes that this order moves; None if it does not fit."""
    from access_trace import trace_of
    from byte_bound import lower_bound

    try:
        return lower_bound(trace_of(plan, order), budget).total
    except ValueError:  # a single task exceeds the budget
        return None


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"{figures['model']}, {figures['batch']} minibatches, {figures['tasks']:,} tasks; needs {figures['needed_bytes'] / 1e9:.2f} GB"
    yield f"{'budget':>6}  {'order':13} {'evict':9} {'sched':6} {'moved':>9}  {'bound':>9}  ratio"
    for row in figures["rows"]:
        if row["moved_bytes"] is None:
            yield f"{row['budget']:>6}  {row['order']:13} {row['evict']:9} {row['sched']:6} does not fit"
            continue
        bound = row["lower_bound_bytes"]
        shown = f"{bound / 1e9:6.2f} GB" if bound is not None else "        -"
        ratio = f"{row['over_bound']:5.2f}" if row["over_bound"] else "    -"
        chosen = "  (planned)" if row["planned"] and row["evict"] == "next-use" else ""
        yield f"{row['budget']:>6}  {row['order']:13} {row['evict']:9} {row['sched']:6} {row['moved_bytes'] / 1e9:6.2f} GB  {shown}  {ratio}{chosen}"


if __name__ == "__main__":
    from jobs import main

    sys.exit(main(EvictSettings, run))
