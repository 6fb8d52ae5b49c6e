"""The figures of a report, computed from the records of a run. Pure: records in, numbers out; drawing is left to `plots`.

Long runs are thinned so that pages stay small, and each thinned figure says how: curves to means (memory: to maxima) over groups of equally many
steps, Gantt charts to their longest bars.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from .records import Bar, Line, NodeRecord, TraceRecord

MOST_POINTS: Final = 1000
"""Most points of one curve, unless the page is too large."""
MOST_BARS: Final = 10_000
"""Most bars of all tracks together, unless the page is too large."""

Point = tuple[float, float]


def number(line: Line, name: str) -> float | None:
    """Return a number of a line; None if the field is absent or not a finite number."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def numbers(line: Line, name: str) -> dict[str, float]:
    """Return the finite numbers of an object in a line, such as bytes by node; empty if the line has no such object."""
    values = line.get(name)
    return {key: found for key in values if (found := number(values, key)) is not None} if isinstance(values, Mapping) else {}


def thinned(points: Sequence[Point], how: Literal["mean", "max"] = "mean", most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points: the points as they are, or the mean x and the mean or largest y of each group of `group_size` neighbours."""
    size = group_size(len(points), most)
    if size == 1:
        return list(points)
    groups = []
    for first in range(0, len(points), size):
        group = points[first : first + size]
        ys = [y for _, y in group]
        groups.append((sum(x for x, _ in group) / len(group), max(ys) if how == "max" else sum(ys) / len(ys)))
    return groups


def group_size(count: int, most: int = MOST_POINTS) -> int:
    """Return the number of neighbouring points that are merged to one so that at most `most` remain."""
    return max(1, -(-count // most))


def curve(lines: Sequence[Line], name: str, most: int = MOST_POINTS) -> list[Point]:
    """Return (step, value) of a field, thinned."""
    return thinned([(line["step"], value) for line in lines if (value := number(line, name)) is not None], most=most)


def elapsed(lines: Sequence[Line]) -> list[float]:
    """Return the seconds of training until the end of each line's step."""
    total, found = 0.0, []
    for line in lines:
        total += number(line, "seconds") or 0.0
        found.append(total)
    return found


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory over time.

    Args:
        points: (seconds of training, most bytes held in a step), thinned to maxima.
        peak: most bytes held in any step.
        budget: budget in bytes; None if it is unknown.
    """

    points: list[Point]
    peak: float
    budget: float | None

    @property
    def share(self) -> float:
        """The peak divided by the budget; 0 if the budget is unknown."""
        return self.peak / self.budget if self.budget else 0.0


def memories(node: NodeRecord, most: int = MOST_POINTS) -> dict[str, Memory]:
    """Return the memories of a node, by name."""
    held: dict[str, list[Point]] = {}
    for at, line in zip(elapsed(node.lines), node.lines, strict=True):
        for name, nbytes in numbers(line, "resident_peak_bytes").items():
            held.setdefault(name, []).append((at, nbytes))
    budgets = numbers(node.machine, "budget_bytes")
    return {name: Memory(thinned(points, "max", most), max(y for _, y in points), budgets.get(name)) for name, points in held.items()}


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Traffic over one link.

    Args:
        points: (step, bytes in that step), thinned.
        total: bytes over all steps.
        per_step: mean bytes of a step.
        per_second: mean bytes of a second of training.
    """

    points: list[Point]
    total: float
    per_step: float
    per_second: float


def links(node: NodeRecord, most: int = MOST_POINTS) -> dict[str, LinkTraffic]:
    """Return the links of a node that moved any bytes, by name, the busiest first."""
    totals: Counter[str] = Counter()
    for line in node.lines:
        totals.update(numbers(line, "moved_bytes"))
    seconds = (elapsed(node.lines) or [0.0])[-1]
    by_name = {}
    for name, total in totals.most_common():
        points = [(line["step"], numbers(line, "moved_bytes").get(name, 0.0)) for line in node.lines]
        by_name[name] = LinkTraffic(thinned(points, most=most), total, total / len(node.lines), total / seconds if seconds else 0.0)
    return by_name


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Recomputation of a run: recomputed tasks, their kernel seconds, the seconds of all kernels, and the number of steps with these figures."""

    tasks: float
    seconds: float
    busy_seconds: float
    steps: int


def recomputed(lines: Sequence[Line]) -> Recomputed | None:
    """Return the recomputation of a run; None if it recomputed nothing or did not record it."""
    known = [line for line in lines if number(line, "recomputed_tasks") is not None]
    tasks, seconds = (sum(number(line, name) or 0.0 for line in known) for name in ("recomputed_tasks", "recompute_seconds"))
    busy = sum(sum(numbers(line, "busy_seconds").values()) for line in known)
    return Recomputed(tasks, seconds, busy, len(known)) if tasks else None


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """Fractions of a worker's time, which add up to 1: in kernels, waiting for data or free memory, and idle."""

    busy: float
    stalled: float
    idle: float


def shares(node: NodeRecord) -> dict[str, WorkerTime]:
    """Return the time of each worker of a node, by name, over the steps that recorded it."""
    busy, stalled = Counter[str](), Counter[str]()
    seconds = 0.0
    for line in node.lines:
        busy_seconds = numbers(line, "busy_seconds")
        if busy_seconds:
            seconds += number(line, "seconds") or 0.0
            busy.update(busy_seconds)
            stalled.update(numbers(line, "worker_stall_seconds"))
    if not seconds:
        return {}
    result = {}
    for worker, in_kernels in busy.items():
        whole = max(seconds, in_kernels + stalled[worker])  # a kernel that spans two steps counts in the step in which it ends
        result[worker] = WorkerTime(in_kernels / whole, stalled[worker] / whole, (whole - in_kernels - stalled[worker]) / whole)
    return result


@dataclass(frozen=True, slots=True)
class CodeletRow:
    """One codelet in a traced step.

    Args:
        name: name of the codelet.
        tasks: number of its tasks in a step, on all nodes together.
        seconds: seconds of its kernels in a step, of all workers together.
        share: fraction of all seconds in kernels.
        flops_per_second, bytes_per_second: rates while one of its tasks runs; None if its cost function gives none.
        of_peak: flops per second divided by one worker's measured peak of products, while all workers run; None if the peak is unknown.
    """

    name: str
    tasks: float
    seconds: float
    share: float
    flops_per_second: float | None
    bytes_per_second: float | None
    of_peak: float | None


def codelets(nodes: Iterable[NodeRecord]) -> list[CodeletRow]:
    """Return the codelets of completely traced steps, in the order of descending seconds."""
    sums: dict[str, Counter[str]] = {}  # "possible" counts the flops for which the seconds of a codelet would have sufficed at peak
    is_peak_known = True
    for node in nodes:
        whole = whole_steps(node.trace)
        if node.trace is None or not whole:
            continue
        spent: Counter[str] = Counter()
        for bar in node.trace.tasks:
            if bar.step in whole:
                spent[bar.name] += bar.end - bar.start
        peak, workers = number(node.machine, "peak_flops"), len(node.machine.get("workers", ()))
        is_peak_known = is_peak_known and peak is not None and workers > 0
        for name, row in node.trace.about["codelets"].items():
            seconds = spent[name] / 1e9 / len(whole)
            added = {"tasks": row["tasks"], "seconds": seconds, "flops": row["flops"], "nbytes": row["bytes"]}
            sums.setdefault(name, Counter()).update({**added, "possible": seconds * (peak or 0.0) / max(workers, 1)})
    in_kernels = sum(total["seconds"] for total in sums.values())
    rows = [
        CodeletRow(
            name,
            total["tasks"],
            seconds,
            seconds / in_kernels,
            total["flops"] / seconds if total["flops"] else None,
            total["nbytes"] / seconds if total["nbytes"] else None,
            total["flops"] / total["possible"] if total["flops"] and is_peak_known else None,
        )
        for name, total in sums.items()
        if (seconds := total["seconds"])
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def traced_steps(nodes: Iterable[NodeRecord]) -> list[int]:
    """Return the steps that have any traced task, in order."""
    return sorted({bar.step for node in nodes if node.trace is not None for bar in node.trace.tasks if bar.step is not None})


def whole_steps(trace: TraceRecord | None) -> frozenset[int]:
    """Return the steps whose tasks are all in the trace."""
    return frozenset(trace.about.get("steps", ())) if trace is not None else frozenset()


@dataclass(frozen=True, slots=True)
class Achieved:
    """A traced step compared with its lower bounds: mean seconds of the steps, and seconds of each bound by name."""

    seconds: float
    bounds: Mapping[str, float]

    @property
    def over_bound(self) -> float | None:
        """The step's time divided by the largest bound; None without a bound."""
        largest = max(self.bounds.values(), default=0.0)
        return self.seconds / largest if largest else None


def achieved(trace: TraceRecord | None) -> Achieved | None:
    """Return the step time and bounds of a trace; None if no step was traced completely."""
    if trace is None or not whole_steps(trace):
        return None
    return Achieved(float(trace.about["seconds_per_step"]), numbers(trace.about, "bounds_seconds"))


@dataclass(frozen=True, slots=True)
class Gantt:
    """The contents of a Gantt chart.

    Args:
        tracks: workers of all nodes, then links; "node worker" if there are several nodes.
        bars: bars of the tracks, in nanoseconds from the start of the first bar.
        steps: first and last step drawn; None if the tasks belong to no step.
        begins: start of each step's first task, in nanoseconds from the start of the first bar.
        num_found: number of bars of these steps, of which `bars` may be the longest.
        coverage: fraction of the time of `num_found` bars that the drawn bars have.
        memory: (node and memory) -> (nanoseconds from the same start, bytes), thinned to maxima.
    """

    tracks: list[str]
    bars: list[Bar]
    steps: tuple[int, int] | None
    begins: list[int]
    num_found: int
    coverage: float
    memory: Mapping[str, list[Point]]


def gantt(nodes: Sequence[NodeRecord], steps: tuple[int, int] | None = None, most: int = MOST_BARS) -> Gantt | None:
    """Return the bars of the traced steps.

    Args:
        nodes: the nodes.
        steps: first and last step to draw; None for the longest run of first steps with at most `most` tasks together, but at least one step.
        most: maximum number of bars.

    Returns:
        The chart; None if no task was traced, or none of `steps`.
    """
    traced = [(node.name, node.trace) for node in nodes if node.trace is not None]
    tasks = [named(name, bar) for name, trace in traced for bar in trace.tasks]
    counts = Counter(bar.step for bar in tasks if bar.step is not None)
    chosen = steps or _first_steps(counts, most)
    if chosen is not None:
        tasks = [bar for bar in tasks if bar.step is not None and chosen[0] <= bar.step <= chosen[1]]
    if not tasks:
        return None
    begin, end = min(bar.start for bar in tasks), max(bar.end for bar in tasks)
    copies = [named(name, bar) for name, trace in traced for bar in trace.copies if bar.start < end and bar.end > begin]
    bars = tasks + copies
    drawn = sorted(bars, key=lambda bar: bar.start - bar.end)[:most]
    whole = sum(bar.end - bar.start for bar in bars)
    tracks = [label(name, worker) for name, trace in traced for worker in trace.workers]
    tracks += sorted({bar.track for bar in copies})
    memory = {
        label(name, where): thinned([((at - begin), nbytes) for at, nbytes in points if begin <= at <= end], "max")
        for name, trace in traced
        for where, points in trace.memory.items()
    }
    begins: dict[int, int] = {}
    for bar in tasks:
        if bar.step is not None:
            begins[bar.step] = min(begins.get(bar.step, bar.start - begin), bar.start - begin)
    return Gantt(
        tracks,
        [replace(bar, start=bar.start - begin, end=bar.end - begin) for bar in sorted(drawn, key=lambda bar: bar.start)],
        (min(begins), max(begins)) if begins else None,
        sorted(begins.values()),
        len(bars),
        sum(bar.end - bar.start for bar in drawn) / whole if whole else 1.0,
        {name: points for name, points in memory.items() if points},
    )


def _first_steps(counts: Mapping[int, int], most: int) -> tuple[int, int] | None:
    """Return the first step, and the last step up to which there are at most `most` tasks; None if no task belongs to a step."""
    ordered = sorted(counts)
    if not ordered:
        return None
    last, total = ordered[0], 0
    for step in ordered:
        total += counts[step]
        if total > most:
            break
        last = step
    return ordered[0], last


def label(node: str, name: str) -> str:
    """Return the name of a worker, link or memory, with its node's name if the node has one."""
    return f"{node} {name}" if node else name


def named(node: str, bar: Bar) -> Bar:
    """Return a bar whose track has the node's name, too."""
    return replace(bar, track=label(node, bar.track)) if node else bar
