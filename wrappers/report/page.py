"""The page of a report: all sections in one HTML file, which needs no other file and no network."""

from __future__ import annotations

from statistics import median
from typing import Final

from bokeh.embed import components
from bokeh.resources import Resources

from . import figures
from .records import RunRecord
from .sections import PageLimits, escaped, sections_of

MOST_BYTES: Final = 5_000_000
"""Largest page in bytes."""
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


def page(run: RunRecord, steps: tuple[int, int] | None = None) -> str:
    """Return the HTML document; curves and charts are thinned until it has at most `MOST_BYTES`.

    Args:
        run: the run.
        steps: first and last traced step to draw; None for a default choice.
    """
    encoded = b""
    for divisor in (1, 4, 16, 64):
        text = _document(run, PageLimits(steps, figures.MOST_POINTS // divisor, figures.MOST_BARS // divisor))
        encoded = text.encode(errors="backslashreplace")  # a file name may not be valid UTF-8
        if len(encoded) <= MOST_BYTES:
            break
    return encoded.decode()


def _document(run: RunRecord, limits: PageLimits) -> str:
    """Return the document within the limits."""
    sections = list(sections_of(run, limits))
    plots = [plot for section in sections for row in section.rows for plot in row]
    script, divs = components(plots) if plots else ("", ())
    elements = iter(divs)
    body = []
    for section in sections:
        body.append(f"<h2>{escaped(section.heading)}</h2>")
        body += [f'<p class="note">{sentence}</p>' for sentence in section.sentences]
        body += ['<div class="row">' + "".join(next(elements) for _ in row) + "</div>" for row in section.rows]
        body.append(section.table)
    title = escaped(run.name)
    code = Resources(mode="inline", components=["bokeh"]).render_js() if plots else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: nntask report</title><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style>{code}</head>\n"
        f"<body><h1>nntask report: {title}</h1>{_intro(run)}{''.join(body)}{script}</body></html>\n"
    )


def _intro(run: RunRecord) -> str:
    """Return the headline figures of the run."""
    losses, speeds, used = (
        [value for line in run.lines if (value := figures.number(line, name)) is not None] for name in ("loss", "tokens_per_second", "mfu")
    )
    cards = [("steps", f"{len(run.lines):,}"), ("seconds of training", f"{figures.elapsed(run.lines)[-1]:,.1f}")]
    if losses:
        cards.append(("loss, first and last", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    scored = [value for line in run.lines if (value := figures.number(line, "validation_loss")) is not None]
    if scored:
        cards.append(("validation loss, smallest and last", f"{min(scored):.4f}, {scored[-1]:.4f}"))
    if speeds:
        cards.append(("tokens per second, median", f"{median(speeds):,.0f}"))
    if used:
        cards.append(("fraction of the product peak, median", f"{median(used):.0%}"))
    workers = sum(len(node.machine.get("workers", ())) for node in run.nodes)
    if workers:
        cards.append((f"workers on {len(run.nodes)} nodes" if run.nodes[0].name else "workers", f"{workers}"))
    boxes = "".join(f'<div class="card"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>' for name, value in cards)
    ended = "" if run.summary else f"<p>The run has not ended, or was killed, after step {run.lines[-1]['step']}: it has no summary.json.</p>"
    how = "Drag over a plot to zoom in; its reset button zooms out. Point at a curve for its values; click a name in a legend to hide its curve."
    return f'<div class="cards">{boxes}</div>{ended}<p class="note">{how}</p>'
