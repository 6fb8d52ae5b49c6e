"""The page "nntask" of the Dask dashboard, in Bokeh: throughput and loss by step, and memory by node, updated once a second from the board."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Final

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, HoverTool
from bokeh.plotting import figure
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from wrappers.report.plots import COLOURS, GREY

if TYPE_CHECKING:
    from .board import Board

MILLISECONDS: Final = 1000
"""Period of the updates in milliseconds."""
GIB: Final = 1 << 30


def document(board: Board, extra: dict[str, Any], doc: Any) -> None:
    """Fill a document of the dashboard's server."""
    view = View(board)
    view.update()
    doc.title = "Dask: nntask"
    doc.add_root(column(view.heading, view.throughput, view.loss, view.memory, sizing_mode="stretch_width"))
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    doc.add_periodic_callback(view.update, MILLISECONDS)


class View:
    """Plots of a board; `update` brings them up to date.

    Args:
        board: the state of the jobs.
    """

    def __init__(self, board: Board) -> None:
        self._board, self._seen = board, -1
        self.heading = Div(text="", sizing_mode="stretch_width")
        self.speeds, self.losses = (ColumnDataSource({"xs": [], "ys": [], "name": [], "colour": []}) for _ in range(2))
        self.memories = ColumnDataSource({"name": [], "used": [], "budget": [], "share": []})
        self.throughput = _lines("throughput by node", "tokens/s", self.speeds, "bottom_right")
        self.loss = _lines("loss", "loss", self.losses, "top_right")
        self.memory = _bars("memory by node, within its budget", self.memories)

    def update(self) -> None:
        """Draw the records that are new on the board."""
        if self._seen == self._board.version:
            return
        self._seen = self._board.version
        nodes = list(self._board.nodes())
        names = [_label(job, node) for job, node, _ in nodes]
        colours = [COLOURS[at % len(COLOURS)] for at in range(len(nodes))]
        for source, field in ((self.losses, 1), (self.speeds, 2)):
            curves = [[(row[0], row[field]) for row in state.steps if row[field] is not None] for _, _, state in nodes]
            source.data = {
                "xs": [[x for x, _ in each] for each in curves],
                "ys": [[y for _, y in each] for each in curves],
                "name": names,
                "colour": colours,
            }
        rows = [
            (f"{_label(job, node)} {memory}", used, state.budget.get(memory)) for job, node, state in nodes for memory, used in state.resident.items()
        ]
        self.memory.y_range.factors = [name for name, _, _ in reversed(rows)]
        self.memory.height = 90 + 28 * max(len(rows), 1)
        self.memories.data = {
            "name": [name for name, _, _ in rows],
            "used": [used / GIB for _, used, _ in rows],
            "budget": [(budget or 0) / GIB for _, _, budget in rows],
            "share": ["" if not budget else f"{used / budget:.0%}" for _, used, budget in rows],
        }
        self.heading.text = "<br>".join(_sentences(self._board)) or "No run has reported a step yet."


def _sentences(board: Board) -> list[str]:
    """Return the progress of each job, as one HTML line."""
    sentences = []
    for job, nodes in board.jobs.items():
        latest = [state.steps[-1] for state in nodes.values()]
        speeds = [speed for _, _, speed in latest if speed is not None]
        losses = [loss for _, loss, _ in latest if loss is not None]
        words = [f"step {max(step for step, _, _ in latest):,}", f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"]
        words += [f"{sum(speeds):,.0f} tokens/s"] * bool(speeds) + [f"loss {losses[-1]:.4f}"] * bool(losses)
        sentences.append(f"<b>{html.escape(job)}</b>: {', '.join(words)}")
    return sentences


def _lines(title: str, unit: str, source: ColumnDataSource, legend: str) -> Any:
    plot = figure(
        title=title, height=260, sizing_mode="stretch_width", tools="box_zoom,xpan,xwheel_zoom,reset", active_drag="box_zoom", active_scroll=None
    )
    plot.xaxis.axis_label, plot.yaxis.axis_label = "step", unit
    lines = plot.multi_line("xs", "ys", source=source, line_width=2, line_color="colour", legend_field="name")
    plot.add_tools(HoverTool(renderers=[lines], tooltips=[("", "@name"), ("step", "$data_x{0}"), (unit, "$data_y{0,0.[0000]}")]))
    plot.toolbar.logo = None
    plot.legend.location = legend
    plot.legend.orientation = "horizontal"
    return plot


def _bars(title: str, source: ColumnDataSource) -> Any:
    plot = figure(title=title, height=120, y_range=["-"], sizing_mode="stretch_width", tools="reset")
    plot.xaxis.axis_label = "GiB"
    plot.x_range.start = 0
    bars = plot.hbar(y="name", right="used", height=0.8, source=source, color=COLOURS[0])
    frames = plot.hbar(y="name", right="budget", height=0.8, source=source, fill_alpha=0, line_color=GREY)
    tips = [("", "@name"), ("used", "@used{0.000} GiB"), ("budget", "@budget{0.000} GiB"), ("", "@share")]
    plot.add_tools(HoverTool(renderers=[bars, frames], tooltips=tips))
    plot.toolbar.logo = None
    return plot


def _label(job: str, node: str) -> str:
    return f"{job} {node}"
