"""The sections of a report: sentences, plots and a table for each group of figures, or the way to record missing ones."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nntask.io import format_size
from nntask.planning import HEAD, cells, headline
from nntask.telemetry import recomputed_line

from . import figures, plots
from .records import NodeRecord, RunRecord

MOST_CURVES: Final = 14
"""Maximum number of curves in a plot: the number that colours and dashes can distinguish."""
MOST_PLOTS: Final = 24
"""Maximum number of plots of memories."""


@dataclass(frozen=True, slots=True)
class PageLimits:
    """Limits on the size of a page.

    Args:
        steps: first and last traced step to draw; None for a default choice.
        points: most points of a curve.
        bars: most bars of the Gantt chart.
    """

    steps: tuple[int, int] | None = None
    points: int = figures.MOST_POINTS
    bars: int = figures.MOST_BARS


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page.

    Args:
        heading: plain text.
        sentences: HTML, one paragraph each.
        rows: rows of plots.
        table: HTML; "" for none.
    """

    heading: str
    sentences: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    table: str = ""


def sections_of(run: RunRecord, limits: PageLimits) -> Iterator[Section]:
    """Yield all sections, in order."""
    nodes = run.nodes
    yield _training(run, limits)
    yield _memory(nodes, limits)
    yield _movement(nodes, limits)
    if any(node.planned for node in nodes):
        yield _values(nodes)
    yield _workers(nodes)
    yield _steps(run, limits)
    if any(figures.whole_steps(node.trace) for node in nodes):
        yield _codelets(nodes)
        yield _bounds(nodes)
    yield _facts(run)


def _training(run: RunRecord, limits: PageLimits) -> Section:
    wanted = (
        ("loss", "loss", "loss"),
        ("grad_norm", "gradient norm, before clipping", "norm"),
        ("lr", "learning rate", "rate"),
        ("tokens_per_second", "throughput", "tokens/s"),
    )
    drawn = []
    for name, title, unit in wanted:
        if points := figures.curve(run.lines, name, limits.points):
            validation = figures.curve(run.lines, "validation_loss", limits.points) if name == "loss" else []
            curves = {"training": points, "validation": validation} if validation else {title: points}
            drawn.append(plots.line_plot(title, unit, curves, from_zero=name != "loss"))
    return Section("Training", _thinning(len(run.lines), limits, "the mean"), [drawn[:2], drawn[2:]])


def _memory(nodes: Sequence[NodeRecord], limits: PageLimits) -> Section:
    memories = {figures.label(node.name, name): memory for node in nodes for name, memory in figures.memories(node, limits.points).items()}
    if not memories:
        return Section("Memory", ["Memory use is not recorded in this directory."])
    is_known = all(memory.budget is not None for memory in memories.values())
    sentence = "Maximum bytes in use in each step" + (
        "; the dashed line is the budget, if the axis reaches it." if is_known else "; budgets are not recorded in this directory."
    )
    sentences = [sentence, *_thinning(_longest(nodes), limits, "the maximum")]
    fullest = sorted(memories, key=lambda name: -memories[name].share)[:MOST_PLOTS]
    if len(memories) > MOST_PLOTS:
        sentences.append(f"The {MOST_PLOTS} fullest of {len(memories)} memories are drawn.")
    drawn = [plots.memory_plot(name, memory) for name, memory in memories.items() if name in fullest]
    rows = [
        (name, format_size(memory.peak), *(("", "") if memory.budget is None else (format_size(memory.budget), f"{memory.share:.1%}")))
        for name, memory in memories.items()
    ]
    table = _table(("memory", "maximum", "budget", "share"), rows)
    return Section("Memory", sentences, [drawn[at : at + 2] for at in range(0, len(drawn), 2)], table)


def _movement(nodes: Sequence[NodeRecord], limits: PageLimits) -> Section:
    links = {figures.label(node.name, name): link for node in nodes for name, link in figures.links(node, limits.points).items()}
    if not links:
        return Section("Movement", ["No bytes moved between memories, because all data fitted."])
    rows = [(name, f"{link.total / 1e9:,.3f}", f"{link.per_step / 1e9:,.4f}", f"{link.per_second / 1e9:,.4f}") for name, link in links.items()]
    table = _table(("link", "GB in total", "GB per step", "GB/s, mean"), rows)
    sentences = _thinning(_longest(nodes), limits, "the mean")
    busiest = sorted(links, key=lambda name: -links[name].total)[:MOST_CURVES]
    if len(links) > MOST_CURVES:
        sentences.append(f"The {MOST_CURVES} busiest of {len(links)} links are drawn.")
    return Section("Movement", sentences, [[plots.links_plot({name: link for name, link in links.items() if name in busiest})]], table)


def _values(nodes: Sequence[NodeRecord]) -> Section:
    """Return the planner's decisions about recomputable values, compared with the measured figures.

    If several nodes decided alike, the first of them is shown.
    """
    alike: dict[tuple[str, str], list[NodeRecord]] = {}
    for node in nodes:
        if node.planned:
            alike.setdefault((node.planned["order"], node.planned["recompute"]), []).append(node)
    sentences, tables = list[str](), list[str]()
    for found in alike.values():
        first = found[0]
        where = f"On {', '.join(node.name for node in found)}, recomputed" if first.name else "Recomputed"
        sentences += [f"{escaped(where)} instead of kept: {escaped(headline(first.planned))}.", *_as_planned(first)]
        if rows := cells(first.planned):
            tables.append(_table(HEAD, rows))
    return Section("Kept, moved or recomputed", sentences, table="".join(tables))


def _as_planned(node: NodeRecord) -> Iterator[str]:
    """Yield the recomputation, traffic and time of a node's steps, compared with its plan."""
    again, planned = figures.recomputed(node.lines), node.planned
    if again is not None:
        yield f"Measured: {recomputed_line(again.tasks, again.seconds, again.busy_seconds, again.steps)}."
    if node.lines and cells(planned):
        moved, seconds = (planned[name][planned["order"]] for name in ("forecast_bytes", "forecast_seconds"))
        measured = sum(sum(figures.numbers(line, "moved_bytes").values()) for line in node.lines) / len(node.lines)
        yield (
            f"Forecast per step: {moved / 1e9:,.3g} GB moved and {seconds:.3g} s; measured: {measured / 1e9:,.3g} GB and "
            f"{figures.elapsed(node.lines)[-1] / len(node.lines):.3g} s. Seconds in the table are for all values of a kind."
        )


def _workers(nodes: Sequence[NodeRecord]) -> Section:
    found = {figures.label(node.name, worker): share for node in nodes for worker, share in figures.shares(node).items()}
    if not found:
        return Section("Workers", ["The time of workers is not recorded in this directory."])
    sentence = (
        "A worker waits for data or memory while a task is ready for it and the task's data is in transit or does not fit; "
        "it is idle while no task is ready. Over all steps."
    )
    rows = [(name, f"{share.busy:.1%}", f"{share.stalled:.1%}", f"{share.idle:.1%}") for name, share in found.items()]
    return Section("Workers", [sentence], [[plots.shares_plot(found)]], _table(("worker", "in kernels", "waiting for data or memory", "idle"), rows))


def _steps(run: RunRecord, limits: PageLimits) -> Section:
    """Return the Gantt chart of the traced steps."""
    gantt = figures.gantt(run.nodes, limits.steps, limits.bars)
    if gantt is None:
        last = run.lines[-1]["step"]
        how = f"nntask train --resume {shlex.quote(str(run.path))} --steps {last + 4} --trace-steps {last + 2}:{last + 3}"
        sentence = (
            "No step of this run was traced. A trace shows each task and copy, the time of each codelet, and how far a step is from its bounds. "
            f"Record one with <code>--trace-steps 10:11</code> in a new run, or resume this one for a few steps: <code>{escaped(how)}</code>"
        )
        return Section("Steps", [sentence])
    sentences = []
    if gantt.num_found > len(gantt.bars):
        sentences.append(
            f"The {len(gantt.bars):,} longest of {gantt.num_found:,} tasks and copies are drawn, which have {gantt.coverage:.1%} of their time."
        )
    traced = figures.traced_steps(run.nodes)
    if gantt.steps is not None and (traced[0], traced[-1]) != gantt.steps:
        sentences.append(f"Steps {traced[0]} to {traced[-1]} were traced; <code>--steps A:B</code> draws others.")
    if not any(figures.whole_steps(node.trace) for node in run.nodes):
        sentences.append("No step was traced completely, so there are no figures of codelets and bounds.")
    if len(run.nodes) > 1:
        sentences.append("The nodes' clocks are not adjusted.")
    chart = plots.gantt_plot(gantt)
    fullest = sorted(gantt.memory, key=lambda name: -max(nbytes for _, nbytes in gantt.memory[name]))[:MOST_CURVES]
    if len(gantt.memory) > MOST_CURVES:
        sentences.append(f"The {MOST_CURVES} fullest of {len(gantt.memory)} memories are drawn.")
    memory = [[plots.traced_memory_plot({name: points for name, points in gantt.memory.items() if name in fullest}, chart)]] if fullest else []
    return Section("Steps", sentences, [[chart], *memory])


def _codelets(nodes: Sequence[NodeRecord]) -> Section:
    rows = figures.codelets(nodes)
    peaks = [peak for node in nodes if (peak := figures.number(node.machine, "peak_flops")) is not None]
    against = "The peak is not recorded in this directory."
    if peaks:
        against = (
            f"The peak is the rate that {'the nodes' if len(peaks) > 1 else 'all workers together'} reached in products before the first step, "
            f"{sum(peaks) / 1e9:,.1f} GF/s, of which a worker has its share; a higher rate means that the machine was busier then, "
            "or that other products than square ones of 512 and 1,024 suit it better."
        )
    table = _table(
        ("codelet", "tasks per step", "ms per step", "share", "GF/s", "of peak", "GB/s"),
        [
            (
                row.name,
                f"{row.tasks:,.0f}",
                f"{1e3 * row.seconds:,.2f}",
                f"{row.share:.1%}",
                "" if row.flops_per_second is None else f"{row.flops_per_second / 1e9:,.1f}",
                "" if row.of_peak is None else f"{row.of_peak:.0%}",
                "" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:,.1f}",
            )
            for row in rows
        ],
    )
    traced = max(len(figures.whole_steps(node.trace)) for node in nodes)
    mean = f"Means over {traced} traced steps." if traced > 1 else "Figures of the one traced step."
    rates = "Rates apply while a task runs, and follow from the codelet's cost function; GF counts matrix products only."
    return Section("Codelets", [f"{mean} {rates} {against}"], [[plots.codelets_plot(rows)]], table)


def _bounds(nodes: Sequence[NodeRecord]) -> Section:
    found = {node.name: each for node in nodes if (each := figures.achieved(node.trace)) is not None}
    sentences = [
        "Area: the seconds of all tasks over the number of workers. Critical path: the longest chain of tasks that wait for each other. Link: the "
        "copies that are necessary because lasting data exceeds the memory, at the measured rates. Durations are the traced ones."
    ]
    for name, each in found.items():
        over = f"{each.over_bound:.2f} x its largest bound" if each.over_bound else "no bound"
        sentences.append(f"{escaped(name) + ': a' if name else 'A'} traced step took {1e3 * each.seconds:,.1f} ms, {over}.")
    return Section("Achieved time and bounds", sentences, [[plots.bounds_plot(found)]])


def _facts(run: RunRecord) -> Section:
    """Return the contents of summary.json and machine.json as a table."""
    rows = [(name, _short(value)) for name, value in run.summary.items()]
    for node in run.nodes:
        rows += [(figures.label(node.name, name), _short(value)) for name, value in node.machine.items() if node.name or name not in run.summary]
    cells = "".join(f'<tr><td>{escaped(name)}</td><td class="text">{escaped(value)}</td></tr>' for name, value in rows)
    return Section("Facts", table=f"<table>{cells}</table>")


def _longest(nodes: Sequence[NodeRecord]) -> int:
    return max(len(node.lines) for node in nodes)


def _thinning(count: int, limits: PageLimits, how: str) -> list[str]:
    size = figures.group_size(count, limits.points)
    return [f"{count:,} steps; each point is {how} of {size} of them."] if size > 1 else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    tagged = [("th", head), *(("td", row) for row in rows)]
    lines = ["".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells) for tag, cells in tagged]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def escaped(text: Any) -> str:
    """Return text escaped for HTML."""
    return html.escape(str(text))
