"""Decisions of a planner about values of a step that could be recomputed: which are kept, moved or recomputed, and the costs of the alternatives.

`order_figures` are the figures that ``nntask plan --json`` contains and a run writes as plan.json. `headline` and `cells` put them into words for
``nntask plan``, ``--explain`` and the report. They need the figures only, so they also describe a finished run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, Final

from scheduler.planning import AUTO, NONE, PlannedOrder

from ..config.run_config import LanguageRun
from ..hardware.machine_model import MachineModel, pace_on
from ..io.units import format_size
from ..telemetry.columns import aligned

HEAD: Final = ("value", "layers", "bytes", "recomputed", "moved", "kept", "s to recompute all", "s to move all, each way")
"""Titles of the columns of `cells`."""


def order_figures(order: PlannedOrder, run: LanguageRun, target: MachineModel) -> dict[str, Any]:
    """Return the order of a step, its recomputation, and the forecasts by which both were chosen."""
    without = order.recomputation.seconds_without
    return {
        "order": order.name,
        "order_is_given": run.step.order != AUTO,
        "recompute": run.step.recompute if run.step.recompute != AUTO else order.recompute,
        "recompute_is_given": run.step.recompute != AUTO,
        "seconds_without_recompute": None if without == inf else without,
        "values": list(_values(order, target)),
        "forecast_bytes": {name: found.total for name, found in order.forecasts.items()},
        "forecast_seconds": {name: found.seconds for name, found in order.forecasts.items()},
        "judged_seconds": order.judged_seconds or None,
    }


def _values(order: PlannedOrder, target: MachineModel) -> Iterator[dict[str, Any]]:
    """Yield the decision about each group of values that could be recomputed, and the costs of the alternatives; nothing if there was no choice."""
    if not order.forecasts:
        return
    pace = pace_on(order.plan, target)
    gone = {handle for handle, use in order.plan.uses.items() if use.leaves}
    for group in order.recomputation.groups:
        again = [handle for handle in group.leading(1.0) if handle in order.recomputation.handles]
        others = set(group.leading(1.0)).difference(again)
        yield {
            "name": group.name,
            "operation": group.op,
            "layers": len(group.layers) if "*" in group.name else 0,
            "bytes": group.nbytes,
            "again_bytes": sum(handle.spec.size for handle in again),
            "moved_bytes": sum(handle.spec.size for handle in others if handle in gone),
            "kept_bytes": sum(handle.spec.size for handle in others if handle not in gone),
            "seconds_again": group.seconds,
            "seconds_moved": group.nbytes * max(1 / pace.read, 1 / pace.write),
        }


def headline(figures: Mapping[str, Any]) -> str:
    """Return a phrase on the recomputation and the forecasts by which it was chosen."""
    asked = figures["recompute"]
    if figures["recompute_is_given"]:
        return f"{asked} (given)"
    if figures["values"]:
        chosen, without = figures["forecast_seconds"][figures["order"]], figures["seconds_without_recompute"]
        beside = "" if asked == NONE else "; without any it would not fit" if without is None else f", without any {without:.3g} s"
        return f"{asked} (chosen; forecast {chosen:.3g} s a step{beside})"
    return f"{asked}: everything fits" if not figures["forecast_bytes"] else f"{asked}: it could not save time"


def cells(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row under `HEAD` for each kind of values that could be recomputed, cheapest first; unknown seconds are left empty."""
    rows = []
    for value in figures["values"]:
        nbytes = value["bytes"]
        shares = [f"{value[key] / nbytes:.0%}" if value[key] else "" for key in ("again_bytes", "moved_bytes", "kept_bytes")]
        seconds = [f"{value[key]:.2g}" if value[key] else "" for key in ("seconds_again", "seconds_moved")]
        rows.append((value["name"], f"{value['layers'] or ''}", format_size(nbytes), *shares, *seconds))
    return rows


def value_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return `cells` as lines of text; none if there was no choice."""
    return aligned([HEAD, *rows]) if (rows := cells(figures)) else []
