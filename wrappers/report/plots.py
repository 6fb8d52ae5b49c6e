"""The plots of a report, in Bokeh: each function draws figures of `figures`. All conventions of drawing are in this module.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can distinguish; legends and tooltips name the same
distinctions. Dragging zooms in, the reset button zooms out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import ColumnDataSource, CustomJSTickFormatter, FixedTicker, HoverTool, Range1d, Span
from bokeh.plotting import figure

from nntask.io import format_size

from .figures import Achieved, CodeletRow, Gantt, LinkTraffic, Memory, Point, WorkerTime
from .records import Bar

WIDTH: Final = 1180
"""Width of the page's content, which fits a window of 1280; pixels."""
HALF: Final = (WIDTH - 20) // 2
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
GREY: Final = "#9A9A9A"
DARK: Final = "#333333"
_TRACK: Final = 32
"""Height of a track of the Gantt chart, smaller if there are many; pixels."""
_TALLEST: Final = 900
_LETTER: Final = 7
"""Approximate width of a letter in a legend; pixels."""
_FEW: Final = 400
"""Largest number of bars that are drawn with an edge; edges of more bars would hide the bars."""


def line_plot(
    title: str,
    unit: str,
    curves: Mapping[str, Sequence[Point]],
    *,
    x: str = "step",
    width: int = HALF,
    height: int = 250,
    from_zero: bool = True,
) -> Any:
    """Return a plot of curves over steps or seconds.

    Args:
        title: title of the plot.
        unit: unit of y.
        curves: name -> points (x, y).
        x: quantity and unit of the horizontal axis.
        width, height: size in pixels.
        from_zero: whether the vertical axis begins at 0.
    """
    plot = _figure(title, x, unit, width, height)
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        source = ColumnDataSource({"x": np.array([at for at, _ in points], np.float32), "y": np.array([value for _, value in points], np.float32)})
        dash = "solid" if number < len(COLOURS) else "dashed"
        legend = {"legend_label": name} if len(curves) > 1 else {}
        lines = plot.line("x", "y", source=source, name=name, line_width=2, line_color=colour, line_dash=dash, **legend)
        plot.scatter("x", "y", source=source, size=5 if len(points) <= 60 else 1, color=colour, **legend)
        tips = [("", "$name")] if len(curves) > 1 else []
        plot.add_tools(HoverTool(renderers=[lines], mode="vline", tooltips=[*tips, (x, "@x{0,0.[00]}"), (unit, "@y{0.[0000]a}")]))
    if from_zero:
        plot.y_range.start = 0
    return _finish(plot)


def memory_plot(name: str, memory: Memory) -> Any:
    """Return a plot of the bytes in use in a memory over time, with its budget; if little of the budget is used, the axis ends above the peak."""
    unit, size = _unit(memory.peak)
    peak, budget = memory.peak / size, None if memory.budget is None else memory.budget / size
    of = "" if budget is None else f" of {format_size(memory.budget or 0)}, its budget ({memory.share:.1%})"
    curves = {name: [(at, nbytes / size) for at, nbytes in memory.points]}
    plot = line_plot(f"{name}: at most {format_size(memory.peak)}{of}", unit, curves, x="seconds of training")
    plot.y_range = Range1d(0, max(peak * 1.3 if budget is None else min(budget * 1.1, peak * 3), 1e-9))
    if budget is not None:
        plot.add_layout(Span(location=budget, dimension="width", line_color="#D55E00", line_dash="dashed", line_width=2))
    return plot


def links_plot(links: Mapping[str, LinkTraffic]) -> Any:
    """Return a plot of the bytes over each link in a step."""
    curves = {name: [(at, nbytes / 1e9) for at, nbytes in link.points] for name, link in links.items()}
    return line_plot("bytes over each link", "GB in a step", curves, width=WIDTH)


def shares_plot(shares: Mapping[str, WorkerTime]) -> Any:
    """Return a plot of the fractions of each worker's time."""
    names = list(shares)[::-1]
    plot = _figure("time of each worker", "% of the time", "", WIDTH, 90 + _height(len(names)), names)
    kinds = {"in kernels": "busy", "waiting for data or memory": "stalled", "idle": "idle"}
    columns: dict[str, Any] = {"worker": names, **{name: [100 * getattr(shares[worker], name) for worker in names] for name in kinds.values()}}
    source = ColumnDataSource(columns)
    bars = plot.hbar_stack(
        list(kinds.values()), y="worker", height=0.8, source=source, color=[COLOURS[0], COLOURS[1], "#DDDDDD"], legend_label=list(kinds)
    )
    tips = [("", "@worker"), *((text, f"@{name}{{0.0}} %") for text, name in kinds.items())]
    plot.add_tools(HoverTool(renderers=bars, tooltips=tips))
    plot.x_range = Range1d(0, 100)
    return _finish(plot)


def codelets_plot(rows: Sequence[CodeletRow], most: int = 12) -> Any:
    """Return a plot of the milliseconds per step of the codelets that take most time; the tooltip has the rate."""
    rows = rows[:most][::-1]
    names = [row.name for row in rows]
    plot = _figure("milliseconds per step, all workers together", "ms", "", WIDTH, 70 + 24 * len(names), names)
    source = ColumnDataSource(
        {
            "name": names,
            "ms": [1e3 * row.seconds for row in rows],
            "share": [100 * row.share for row in rows],
            "tasks": [row.tasks for row in rows],
            "rate": [rate_of(row) for row in rows],
        }
    )
    bars = plot.hbar(y="name", right="ms", height=0.8, source=source, color=COLOURS[0])
    tips = [("", "@name"), ("a step", "@ms{0,0.00} ms"), ("share of kernel time", "@share{0.0} %"), ("tasks", "@tasks{0,0}"), ("rate", "@rate")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))
    plot.x_range.start = 0
    return _finish(plot)


def rate_of(row: CodeletRow) -> str:
    """Return a codelet's rate as text: flops per second, with the fraction of the peak if known, or bytes per second."""
    if row.flops_per_second is not None:
        return f"{row.flops_per_second / 1e9:,.1f} GF/s" + ("" if row.of_peak is None else f", {row.of_peak:.0%} of peak")
    return "" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:,.1f} GB/s"


def bounds_plot(found: Mapping[str, Achieved]) -> Any:
    """Return a plot of a step's time and its lower bounds for each node."""
    words = {"area": "area bound", "critical_path": "critical path", "link": "link bound"}
    rows = list[tuple[str, float, str]]()
    for node, achieved in found.items():
        rows.append((_of(node, "a traced step"), achieved.seconds, COLOURS[0]))
        rows += [(_of(node, words.get(name, name)), seconds, GREY) for name, seconds in achieved.bounds.items()]
    rows.reverse()
    plot = _figure("step time compared with lower bounds on it", "ms", "", WIDTH, 70 + 26 * len(rows), [name for name, _, _ in rows])
    source = ColumnDataSource({"name": [row[0] for row in rows], "ms": [1e3 * row[1] for row in rows], "colour": [row[2] for row in rows]})
    bars = plot.hbar(y="name", right="ms", height=0.75, source=source, color="colour")
    plot.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@name"), ("", "@ms{0,0.00} ms")]))
    plot.x_range.start = 0
    return _finish(plot)


def gantt_plot(found: Gantt) -> Any:
    """Return a chart of tasks by worker and copies by link; the codelets that take most time have colours of their own."""
    tracks = found.tracks[::-1]
    row_of = {track: at for at, track in enumerate(tracks)}
    spent: Counter[str] = Counter()
    for bar in found.bars:
        if not bar.nbytes:
            spent[bar.name] += bar.end - bar.start
    named = [name for name, _ in spent.most_common(len(COLOURS))]
    first, last = found.steps or (None, None)
    steps = "" if first is None else f", step {first}" if first == last else f", steps {first} to {last}; each begins at a dotted line"
    plot = _figure(f"tasks by worker and copies by link{steps}", "ms", "", WIDTH, 130 + _height(len(tracks)))
    plot.x_range.range_padding = 0.01
    plot.y_range = Range1d(-0.6, len(tracks) - 0.4)
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(tracks))))
    plot.yaxis.formatter = CustomJSTickFormatter(code="return names[tick] ?? ''", args={"names": tracks})
    for name, colour in [*zip(named, COLOURS, strict=False), ("other codelets", GREY), ("copies", DARK)]:
        bars = [bar for bar in found.bars if _group(bar, named) == name]
        if bars:
            _bars(plot, bars, row_of, name, colour, "white" if len(found.bars) <= _FEW else None)
    for at in found.begins:
        plot.add_layout(Span(location=at / 1e6, dimension="height", line_color=DARK, line_dash="dotted"))
    return _finish(plot)


def _group(bar: Bar, named: Sequence[str]) -> str:
    return "copies" if bar.nbytes else bar.name if bar.name in named else "other codelets"


def _bars(plot: Any, bars: Sequence[Bar], row_of: Mapping[str, int], name: str, colour: str, edge: str | None) -> None:
    """Add bars of one colour, with times in fp32 to keep the page small: they are exact to a ten-millionth of the span."""
    columns: dict[str, Any] = {
        "y": np.array([row_of[bar.track] for bar in bars], np.float32),
        "start": np.array([bar.start / 1e6 for bar in bars], np.float32),
        "end": np.array([bar.end / 1e6 for bar in bars], np.float32),
        "ms": np.array([(bar.end - bar.start) / 1e6 for bar in bars], np.float32),
    }
    tips = [("starts at", "@start{0,0.000} ms"), ("takes", "@ms{0,0.000} ms")]
    if name == "copies":
        columns |= {"name": [bar.name for bar in bars], "mb": np.array([bar.nbytes / 1e6 for bar in bars], np.float32)}
        tips = [("copy of", "@name"), ("", "@mb{0,0.000} MB"), *tips]
    else:
        columns["step"] = np.array([-1 if bar.step is None else bar.step for bar in bars], np.int32)
        if name == "other codelets":
            columns["name"] = [bar.name for bar in bars]
        tips = [("", "@name" if "name" in columns else "$name"), ("step", "@step"), *tips]
    source = ColumnDataSource(columns)
    glyphs = plot.hbar(
        y="y", left="start", right="end", height=0.8, source=source, name=name, fill_color=colour, line_color=edge, line_width=0.5, legend_label=name
    )
    plot.add_tools(HoverTool(renderers=[glyphs], tooltips=tips))


def traced_memory_plot(memory: Mapping[str, Sequence[Point]], chart: Any) -> Any:
    """Return a plot of the bytes in use in each memory during the traced steps.

    Args:
        memory: name -> (nanoseconds, bytes).
        chart: the Gantt chart, whose time axis the plot shares.
    """
    unit, size = _unit(max(nbytes for points in memory.values() for _, nbytes in points))
    curves = {name: [(at / 1e6, nbytes / size) for at, nbytes in points] for name, points in memory.items()}
    plot = line_plot("memory in use in these steps", unit, curves, x="ms", width=WIDTH, height=220)
    plot.x_range = chart.x_range
    plot.min_border_left = chart.min_border_left = 110
    return plot


def _figure(title: str, x: str, y: str, width: int, height: int, names: Sequence[str] | None = None) -> Any:
    """Return an empty plot; `names` are the categories of its y axis."""
    more = {} if names is None else {"y_range": list(names)}
    plot = figure(
        title=title,
        width=width,
        height=height,
        tools="box_zoom,xpan,xwheel_zoom,reset,save",
        active_drag="box_zoom",
        active_scroll=None,
        toolbar_location="right",
        **more,
    )
    plot.xaxis.axis_label, plot.yaxis.axis_label = x, y
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    return plot


def _finish(plot: Any) -> Any:
    """Set the styles of a complete plot, and return it."""
    plot.title.text_font_size = "14px"
    plot.grid.grid_line_color = "#E5E5E5"
    plot.outline_line_color = None
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
    if plot.legend:
        legend = plot.legend[0]
        plot.center.remove(legend)
        plot.add_layout(legend, "above")
        legend.orientation = "horizontal"
        widest = max(len(item.label.value) for item in legend.items)
        legend.ncols = max(1, min(len(legend.items), (WIDTH - 120) // (_LETTER * widest + 30)))
        plot.height += 20 * ((len(legend.items) - 1) // legend.ncols)
        legend.click_policy = "hide"
        legend.label_text_font_size = "12px"
        legend.border_line_color = None
        legend.padding = legend.margin = 2
    return plot


def _height(num_tracks: int) -> int:
    return int(num_tracks * max(8, min(_TRACK, _TALLEST / max(num_tracks, 1))))


def _unit(nbytes: float) -> tuple[str, int]:
    """Return a unit for an axis that reaches `nbytes`, and the bytes of that unit."""
    return ("GiB", 1 << 30) if nbytes >= 1 << 30 else ("MiB", 1 << 20)


def _of(node: str, name: str) -> str:
    return f"{node}: {name}" if node else name
