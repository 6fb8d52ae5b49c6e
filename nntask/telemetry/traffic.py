"""Closing report on traffic: bytes over each link, evictions, recomputation, waits of workers, and use of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..hardware.machine_model import DISK
from ..io.units import format_size
from .metrics import Totals

LINKS: Final = 6
"""Largest number of lines about links."""


def is_worth_telling(totals: Totals, stats: Mapping[str, Any]) -> bool:
    """Return whether a run has traffic to report: several memories, stalls for lack of memory, or recomputation."""
    return totals.steps > 0 and (len(stats["budget_bytes"]) > 1 or totals.stall_seconds > 0 or totals.recomputed_tasks > 0)


def traffic_report(totals: Totals, stats: Mapping[str, Any]) -> list[str]:
    """Return lines that report the traffic.

    Args:
        totals: sums over steps of this process, at least one.
        stats: counters of its runtime.
    """
    steps, seconds = totals.steps, max(totals.seconds, 1e-9)
    links = sorted(totals.moved_bytes.items(), key=lambda item: -item[1])
    if len(links) > LINKS:
        links = [*links[: LINKS - 1], (f"over {len(links) - LINKS + 1} other links", sum(nbytes for _, nbytes in links[LINKS - 1 :]))]
    lines = [f"moved {link}: {nbytes / steps / 1e9:.3f} GB a step, {nbytes / seconds / 1e9:.2f} GB/s" for link, nbytes in links]
    if totals.recomputed_tasks:
        lines.append("recomputed: " + recomputed_line(totals.recomputed_tasks, totals.recompute_seconds, totals.busy_seconds, steps))
    used = {node: f"{node} {format_size(nbytes)} of {format_size(stats['budget_bytes'][node])}" for node, nbytes in stats["peak_bytes"].items()}
    peaks, reserved = ", ".join(text for node, text in used.items() if node != DISK), f"; reserved: {used[DISK]}" if DISK in used else ""
    share = totals.stall_seconds / (seconds * max(len(stats["busy_seconds"]), 1))
    waited = f"workers waited for data or room {share:.1%} of the time"
    lines.append(f"peak: {peaks}{reserved}")
    lines.append(f"evictions: {totals.evictions / steps:.0f} a step; {totals.hit_rate:.1%} of inputs were in place; {waited}")
    return lines


def recomputed_line(num_tasks: float, seconds: float, busy_seconds: float, steps: int) -> str:
    """Return a line about measured recomputation.

    Args:
        num_tasks, seconds: tasks that recomputed values in all `steps`, and seconds in their kernels, of all workers together.
        busy_seconds: seconds in all kernels of these steps.
    """
    share = seconds / busy_seconds if busy_seconds else 0.0
    return f"{num_tasks / steps:,.0f} tasks a step, {seconds / steps:.3g} s a step in kernels, {share:.1%} of the time in kernels"
