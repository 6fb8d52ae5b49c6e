"""The numbers of a report, computed from what a run has recorded. Pure: records in, numbers out; nothing here knows how they are drawn.

Long runs are thinned out so that pages stay small, and each figure that is says how: curves to means (of memory: maxima) over equally many steps,
bars to the longest ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from .records import Bar, Line, NodeRecord, TraceRecord

MOST_POINTS: Final = 1000
"""Of one curve, where a page is not too large with as many."""
MOST_BARS: Final = 10_000
"""Of all tracks together, likewise."""

Point = tuple[float, float]


def number(line: Line, name: str) -> float | None:
    """A number of a line; None where it has none, or one that is not finite."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def numbers(line: Line, name: str) -> dict[str, float]:
    """The numbers of an object in a line, such as bytes by node; none where it has no such object."""
    values = line.get(name)
    return {key: found for key in values if (found := number(values, key)) is not None} if isinstance(values, Mapping) else {}


def thinned(points: Sequence[Point], how: Literal["mean", "max"] = "mean", most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: as they are, or the mean x and the mean or largest y of `group_size` neighbours each."""
    size = group_size(len(points), most)
    if size == 1:
        return list(points)
    found = []
    for first in range(0, len(points), size):
        group = points[first : first + size]
        ys = [y for _, y in group]
        found.append((sum(x for x, _ in group) / len(group), max(ys) if how == "max" else sum(ys) / len(ys)))
    return found


def group_size(count: int, most: int = MOST_POINTS) -> int:
    """How many neighbours make one of at most `most` points."""
    return max(1, -(-count // most))


def curve(lines: Sequence[Line], name: str, most: int = MOST_POINTS) -> list[Point]:
    """(step, value) of a field, thinned."""
    return thinned([(line["step"], value) for line in lines if (value := number(line, name)) is not None], most=most)


def elapsed(lines: Sequence[Line]) -> list[float]:
    """Seconds of training until the end of each line's step."""
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
        peak: bytes, over all steps.
        budget: bytes, where it is known.
    """

    points: list[Point]
    peak: float
    budget: float | None

    @property
    def share(self) -> float:
        """The peak over the budget; 0 where that is not known."""
        return self.peak / self.budget if self.budget else 0.0


def memories(node: NodeRecord, most: int = MOST_POINTS) -> dict[str, Memory]:
    """Each memory of a node."""
    held: dict[str, list[Point]] = {}
    for at, line in zip(elapsed(node.lines), node.lines, strict=True):
        for name, nbytes in numbers(line, "resident_peak_bytes").items():
            held.setdefault(name, []).append((at, nbytes))
    budgets = numbers(node.machine, "budget_bytes")
    return {name: Memory(thinned(points, "max", most), max(y for _, y in points), budgets.get(name)) for name, points in held.items()}


@dataclass(frozen=True, slots=True)
class Link:
    """One link over the steps.

    Args:
        points: (step, bytes in it), thinned.
        total: bytes over all steps.
        per_step: bytes, the mean.
        per_second: bytes, the mean over the seconds of training.
    """

    points: list[Point]
    total: float
    per_step: float
    per_second: float


def links(node: NodeRecord, most: int = MOST_POINTS) -> dict[str, Link]:
    """Each link of a node over which anything went, the busiest first."""
    totals: Counter[str] = Counter()
    for line in node.lines:
        totals.update(numbers(line, "moved_bytes"))
    seconds = (elapsed(node.lines) or [0.0])[-1]
    found = {}
    for name, total in totals.most_common():
        points = [(line["step"], numbers(line, "moved_bytes").get(name, 0.0)) for line in node.lines]
        found[name] = Link(thinned(points, most=most), total, total / len(node.lines), total / seconds if seconds else 0.0)
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """How a worker spent its time, as shares of it that add up to 1: in kernels, waiting for data or room, idle otherwise."""

    busy: float
    stalled: float
    idle: float


def shares(node: NodeRecord) -> dict[str, Share]:
    """Each worker of a node, over the steps that say."""
    busy, stalled = Counter[str](), Counter[str]()
    seconds = 0.0
    for line in node.lines:
        found = numbers(line, "busy_seconds")
        if found:
            seconds += number(line, "seconds") or 0.0
            busy.update(found)
            stalled.update(numbers(line, "worker_stall_seconds"))
    if not seconds:
        return {}
    result = {}
    for worker, in_kernels in busy.items():
        whole = max(seconds, in_kernels + stalled[worker])  # a kernel that spans two steps counts where it ends
        result[worker] = Share(in_kernels / whole, stalled[worker] / whole, (whole - in_kernels - stalled[worker]) / whole)
    return result


@dataclass(frozen=True, slots=True)
class CodeletRow:
    """One codelet in a traced step.

    Args:
        tasks: of a step, on all nodes together.
        seconds: of a step, of all workers together.
        share: of the seconds in kernels.
        flops_per_second, bytes_per_second: while one of its tasks runs; None where its cost function names none.
        of_peak: flops per second over the fp32 product peak of one worker, measured while all of them work; None where one is not known.
    """

    name: str
    tasks: float
    seconds: float
    share: float
    flops_per_second: float | None
    bytes_per_second: float | None
    of_peak: float | None


@dataclass(slots=True)
class _Sum:
    """A codelet over all nodes; `possible` are the flops that its seconds would have been enough for."""

    tasks: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0
    possible: float = 0.0

    def row(self, name: str, total: float, is_peak_known: bool) -> CodeletRow:
        """As the report shows it, of so many seconds in kernels."""
        return CodeletRow(
            name,
            self.tasks,
            self.seconds,
            self.seconds / total,
            self.flops / self.seconds if self.flops else None,
            self.nbytes / self.seconds if self.nbytes else None,
            self.flops / self.possible if self.flops and is_peak_known else None,
        )


def codelets(nodes: Iterable[NodeRecord]) -> list[CodeletRow]:
    """The codelets of the steps that were traced whole, most seconds first."""
    sums: dict[str, _Sum] = {}
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
            total, seconds = sums.setdefault(name, _Sum()), spent[name] / 1e9 / len(whole)
            total.tasks += row["tasks"]
            total.seconds += seconds
            total.flops += row["flops"]
            total.nbytes += row["bytes"]
            total.possible += seconds * (peak or 0.0) / max(workers, 1)
    in_kernels = sum(each.seconds for each in sums.values())
    found = [each.row(name, in_kernels, is_peak_known) for name, each in sums.items() if each.seconds]
    return sorted(found, key=lambda row: -row.seconds)


def traced_steps(nodes: Iterable[NodeRecord]) -> list[int]:
    """The steps that some task in a trace belongs to, in order."""
    return sorted({bar.step for node in nodes if node.trace is not None for bar in node.trace.tasks if bar.step is not None})


def whole_steps(trace: TraceRecord | None) -> frozenset[int]:
    """The steps that a trace has all tasks of."""
    return frozenset(trace.about.get("steps", ())) if trace is not None else frozenset()


@dataclass(frozen=True, slots=True)
class Achieved:
    """A traced step beside what bounds it, in seconds: the steps' mean, and bounds by name."""

    seconds: float
    bounds: Mapping[str, float]

    @property
    def over_bound(self) -> float | None:
        """The step's time over the largest bound."""
        largest = max(self.bounds.values(), default=0.0)
        return self.seconds / largest if largest else None


def achieved(trace: TraceRecord | None) -> Achieved | None:
    """What a trace says of that; None where no whole step was traced."""
    if trace is None or not whole_steps(trace):
        return None
    return Achieved(float(trace.about["seconds_per_step"]), numbers(trace.about, "bounds_seconds"))


@dataclass(frozen=True, slots=True)
class Gantt:
    """What is drawn of the traces.

    Args:
        tracks: workers of all nodes, then links; "node worker" where there are several nodes.
        bars: on them, in nanoseconds from the first one's start.
        steps: the first and the last step drawn; None where the tasks belong to none.
        begins: nanoseconds from the first one's start at which each step's first task starts.
        num_found: bars of these steps, of which `bars` may be the longest ones.
        coverage: share of the seconds of `num_found` bars that those drawn have.
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
    """Bars of the traced steps; of as many of the first ones as have at most `most` together, and of one in any case.

    Args:
        steps: first and last step to draw, instead of that choice.

    Returns:
        None where nothing was traced, or none of `steps`.
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
    found = tasks + copies
    kept = sorted(found, key=lambda bar: bar.start - bar.end)[:most]
    whole = sum(bar.end - bar.start for bar in found)
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
        [replace(bar, start=bar.start - begin, end=bar.end - begin) for bar in sorted(kept, key=lambda bar: bar.start)],
        (min(begins), max(begins)) if begins else None,
        sorted(begins.values()),
        len(found),
        sum(bar.end - bar.start for bar in kept) / whole if whole else 1.0,
        {name: points for name, points in memory.items() if points},
    )


def _first_steps(counts: Mapping[int, int], most: int) -> tuple[int, int] | None:
    """The first step and the last one until which there are at most `most` tasks; None where no task belongs to a step."""
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
    """A worker, link or memory of a node."""
    return f"{node} {name}" if node else name


def named(node: str, bar: Bar) -> Bar:
    """A bar with its node's name on the track."""
    return replace(bar, track=label(node, bar.track)) if node else bar
