"""The page of a report: plots and tables in one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from bokeh.embed import components
from bokeh.resources import Resources

from . import figures, plots
from .records import NodeRecord, RunRecord

MOST_BYTES: Final = 5_000_000
"""Of a page."""
_STYLE: Final = """
body { font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; max-width: 1180px; margin: 1.5em auto; padding: 0 20px; color: #222 }
h1 { font-size: 24px; margin: 0 0 .2em }
h2 { font-size: 19px; margin: 1.8em 0 .2em; border-bottom: 1px solid #ccc; padding-bottom: .2em }
p { margin: .4em 0; max-width: 76em }
.note { color: #555; font-size: 14px }
.row { display: flex; flex-wrap: wrap; gap: 20px; margin: .6em 0 }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 1em 0 }
.card { border: 1px solid #ccc; border-radius: 6px; padding: .4em .8em }
.card b { display: block; font-size: 18px }
.card span { color: #555; font-size: 13px }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums }
th, td { padding: 3px 16px 3px 0; text-align: right; border-bottom: 1px solid #eee; vertical-align: top }
th { color: #555; font-weight: 600 }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
td.text { text-align: left; overflow-wrap: anywhere }
code { background: #f2f2f2; padding: 0 3px }
"""

Section = tuple[str, list[str], list[list[Any]], str]
"""Heading, sentences, rows of plots, and what follows them as HTML."""


def page(run: RunRecord, steps: tuple[int, int] | None = None) -> str:
    """The whole document.

    Args:
        steps: the traced steps to draw, instead of a choice.
    """
    sections = [*_sections(run, steps)]
    flat = [plot for _, _, rows, _ in sections for row in rows for plot in row]
    script, divs = components(flat) if flat else ("", ())
    places = iter(divs)
    body = []
    for heading, sentences, rows, after in sections:
        body.append(f"<h2>{_text(heading)}</h2>")
        body += [f'<p class="note">{sentence}</p>' for sentence in sentences]
        body += ['<div class="row">' + "".join(next(places) for _ in row) + "</div>" for row in rows]
        body.append(after)
    title = _text(run.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: nntask report</title><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style>{Resources(mode='inline', components=['bokeh']).render_js() if flat else ''}</head>\n"
        f"<body><h1>nntask report: {title}</h1>{_intro(run)}{''.join(body)}{script}</body></html>\n"
    )


def _intro(run: RunRecord) -> str:
    """What the run was, in a few figures."""
    last = run.lines[-1]
    losses = [loss for line in run.lines if (loss := figures.number(line, "loss")) is not None]
    speeds = [speed for line in run.lines if (speed := figures.number(line, "tokens_per_second")) is not None]
    used = [mfu for line in run.lines if (mfu := figures.number(line, "mfu")) is not None]
    seconds = figures.elapsed(run.lines)[-1]
    cards = [("steps", f"{len(run.lines):,}"), ("seconds of training", f"{seconds:,.1f}")]
    if losses:
        cards.append(("loss, first and last", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    if speeds:
        cards.append(("tokens per second, median", f"{median(speeds):,.0f}"))
    if used:
        cards.append(("of the product peak, median", f"{median(used):.0%}"))
    nodes = [node.name for node in run.nodes if node.name]
    workers = sum(len(node.machine.get("workers", ())) for node in run.nodes)
    if workers:
        cards.append(("workers" + (f" on {len(nodes)} nodes" if nodes else ""), f"{workers}"))
    state = "" if run.summary else f"<p>The run goes on, or was killed, after step {last['step']}: there is no summary.json.</p>"
    boxes = "".join(f'<div class="card"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in cards)
    drag = "Dragging over a plot zooms in, the reset button beside it returns; the pointer shows values; a name in a legend hides its curve."
    return f'<div class="cards">{boxes}</div>{state}<p class="note">{drag}</p>'


def _sections(run: RunRecord, steps: tuple[int, int] | None) -> Iterator[Section]:
    yield _training(run)
    yield _memory(run.nodes)
    yield from _movement(run.nodes)
    yield _workers(run.nodes)
    yield from _traced(run, steps)
    yield _facts(run)


def _training(run: RunRecord) -> Section:
    wanted = (
        ("loss", "loss", "loss"),
        ("grad_norm", "gradient norm, before clipping", "norm"),
        ("lr", "learning rate", "rate"),
        ("tokens_per_second", "throughput", "tokens/s"),
    )
    drawn = [
        plots.line_plot(title, unit, {title: points}, from_zero=name != "loss")
        for name, title, unit in wanted
        if (points := figures.curve(run.lines, name))
    ]
    return "Training", _thinning(len(run.lines), "the mean"), [drawn[:2], drawn[2:]], ""


def _memory(nodes: Sequence[NodeRecord]) -> Section:
    drawn = [plots.memory_plot(figures.label(node.name, name), found) for node in nodes for name, found in figures.memories(node).items()]
    sentences = ["Most bytes held in each step; the dashed line is the budget."]
    if not all(node.machine.get("budget_bytes") for node in nodes):
        sentences = ["Most bytes held in each step; budgets are not recorded in this directory."]
    sentences += _thinning(max(len(node.lines) for node in nodes), "the maximum")
    return "Memory", sentences, [drawn[at : at + 2] for at in range(0, len(drawn), 2)], ""


def _movement(nodes: Sequence[NodeRecord]) -> Iterator[Section]:
    found = {figures.label(node.name, name): link for node in nodes for name, link in figures.links(node).items()}
    if not found:
        yield "Movement", ["Nothing moved between memories: everything fitted where it was used."], [], ""
        return
    rows = [(name, f"{link.total / 1e9:,.3f}", f"{link.per_step / 1e9:,.4f}", f"{link.per_second / 1e9:,.4f}") for name, link in found.items()]
    table = _table(("link", "GB in all", "GB a step", "GB/s, mean"), rows)
    yield "Movement", _thinning(max(len(node.lines) for node in nodes), "the mean"), [[plots.links_plot(found)]], table


def _workers(nodes: Sequence[NodeRecord]) -> Section:
    found = {figures.label(node.name, worker): share for node in nodes for worker, share in figures.shares(node).items()}
    if not found:
        return "Workers", ["How workers spent their time is not recorded in this directory."], [], ""
    sentence = (
        "A worker waits for data or room while a task is ready for it and the task's data is on the way or has no place; "
        "it is idle while none is ready. Over all steps."
    )
    return "Workers", [sentence], [[plots.shares_plot(found)]], ""


def _traced(run: RunRecord, steps: tuple[int, int] | None) -> Iterator[Section]:
    """What only a trace tells: who ran what when, codelets, bounds."""
    found = figures.gantt(run.nodes, steps)
    if found is None:
        last = run.lines[-1]["step"]
        how = f"nntask train --resume {shlex.quote(str(run.path))} --steps {last + 4} --trace-steps {last + 2}:{last + 3}"
        missing = (
            "No step of this run was traced. A trace shows who ran what when, the time of each codelet, and how far a step is from its bounds. "
            f"Get one with <code>--trace-steps 10:11</code> in a new run, or go on for a few steps: <code>{_text(how)}</code>"
        )
        yield "Steps", [missing], [], ""
        return
    chart = plots.gantt_plot(found)
    sentences = []
    if found.num_found > len(found.bars):
        sentences.append(
            f"Drawn are the {len(found.bars):,} longest of {found.num_found:,} tasks and copies, which have {found.coverage:.1%} of their time."
        )
    traced = sorted({bar.step for node in run.nodes if node.trace for bar in node.trace.tasks if bar.step is not None})
    if found.steps is not None and (traced[0], traced[-1]) != found.steps:
        sentences.append(f"Steps {traced[0]} to {traced[-1]} were traced; <code>--steps A:B</code> draws others.")
    if len(run.nodes) > 1:
        sentences.append("The nodes' clocks are taken as they are.")
    rows = [[chart]] + ([[plots.traced_memory_plot(found, chart)]] if found.memory else [])
    yield "Steps", sentences, rows, ""
    yield from _codelets(run.nodes)


def _codelets(nodes: Sequence[NodeRecord]) -> Iterator[Section]:
    rows = figures.codelets(nodes)
    bounds = {node.name: each for node in nodes if (each := figures.achieved(node.trace)) is not None}
    if not rows or not bounds:
        yield "Codelets and bounds", ["No step was traced whole, so there is nothing to say of codelets and bounds."], [], ""
        return
    peaks = [peak for node in nodes if (peak := figures.number(node.machine, "peak_flops")) is not None]
    against = "The peak is not recorded in this directory."
    if peaks:
        against = (
            f"The peak is what {'the nodes' if len(peaks) > 1 else 'all workers together'} reached in fp32 products before the first step, "
            f"{sum(peaks) / 1e9:,.0f} GF/s, a worker's share of it; rates above it mean that something else disturbed that measurement."
        )
    table = _table(
        ("codelet", "tasks a step", "ms a step", "share", "GF/s", "of peak", "GB/s"),
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
    mean = f"Means over {traced} traced steps." if traced > 1 else "Of the one traced step."
    yield (
        "Codelets",
        [f"{mean} Rates are those while a task runs, from the codelet's cost function; GF of matrix products only. {against}"],
        [[plots.codelets_plot(rows)]],
        table,
    )
    sentences = [
        "Area: the seconds of all tasks over the number of workers. Critical path: the longest chain of tasks that wait for each other. Link: what "
        "must come and go because lasting data exceeds the memory, at the measured rates. Durations are the traced ones."
    ]
    for name, each in bounds.items():
        over = f"{each.over_bound:.2f} x its largest bound" if each.over_bound else "no bound"
        sentences.append(f"{_text(name) + ': a' if name else 'A'} traced step took {1e3 * each.seconds:,.1f} ms, {over}.")
    yield "Achieved time and bounds", sentences, [[plots.bounds_plot(bounds)]], ""


def _facts(run: RunRecord) -> Section:
    """summary.json and machine.json as a table."""
    rows = [(name, _short(value)) for name, value in run.summary.items()]
    for node in run.nodes:
        rows += [(figures.label(node.name, name), _short(value)) for name, value in node.machine.items() if name not in run.summary]
    cells = "".join(f'<tr><td>{_text(name)}</td><td class="text">{_text(value)}</td></tr>' for name, value in rows)
    return "Facts", [], [], f"<table>{cells}</table>"


def _thinning(count: int, how: str) -> list[str]:
    size = figures.group_size(count)
    return [f"{count:,} steps; each point is {how} of {size} of them."] if size > 1 else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    tagged = [("th", head), *(("td", row) for row in rows)]
    lines = ["".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) for tag, cells in tagged]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _text(text: Any) -> str:
    return html.escape(str(text))
