"""``nntask report``: loss, memory and movement of a run as one HTML file that needs nothing else, plots drawn as SVG."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .help import parse

_WIDTH: Final = 760
_HEIGHT: Final = 260
_MARGIN: Final = 56
_COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700")
_STYLE: Final = (
    "body{font:14px system-ui,sans-serif;max-width:820px;margin:2em auto;color:#222}"
    "table{border-collapse:collapse}td{padding:2px 12px 2px 0;vertical-align:top}svg{display:block;margin:1em 0}text{font-size:11px;fill:#555}"
)

Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Draw a run: loss, learning rate, speed, memory and what moved against steps."""

    output: str = ""
    """the HTML file (default RUN/report.html)"""


def run(argv: Sequence[str]) -> int:
    """Write the report of a run."""
    from nntask.errors import DataError

    settings, words = parse(ReportSettings, argv, "nntask report", words=("RUN",))
    directory = Path(words[0])
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{directory} has no metrics.jsonl; give the directory of a run of nntask train")
    from nntask.trainer.metrics import read_metrics

    records = read_metrics(metrics)
    if not records:
        raise DataError(f"{metrics} holds no step yet; wait for the first one")
    summary = directory / "summary.json"
    facts = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
    target = Path(settings.output) if settings.output else directory / "report.html"
    try:
        target.write_text(page(directory.resolve().name, records, facts), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror}; choose another file with --output") from None
    print(target)
    return 0


def page(title: str, records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The whole HTML document."""
    plots = [
        plot("loss", {"loss": _column(records, "loss")}),
        plot("gradient norm", {"norm": _column(records, "grad_norm")}),
        plot("tokens per second", {"tok/s": _column(records, "tokens_per_second")}),
        plot("memory held (GiB)", _nodes(records)),
        plot("moved in a step (GB)", _links(records)),
        plot("workers waited for data or room (seconds in a step)", {"seconds": _if_any(_column(records, "stall_seconds"))}),
        plot("evictions in a step", {"evictions": _if_any(_column(records, "evictions"))}),
        plot("learning rate", {"lr": _column(records, "lr")}),
    ]
    rows = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(_short(value))}</td></tr>" for key, value in facts.items())
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{''.join(plots)}<table>{rows}</table></html>\n"
    )


def plot(title: str, series: Series) -> str:
    """A line plot as SVG; points that are None are left out."""
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    x0, x1 = _span([x for x, _ in points])
    y0, y1 = _span([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _MARGIN + (x - x0) / (x1 - x0) * (_WIDTH - _MARGIN - 10)
        return across, _HEIGHT - 28 - (y - y0) / (y1 - y0) * (_HEIGHT - 58)

    parts = [f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'><text x='{_MARGIN}' y='16' font-weight='bold'>{html.escape(title)}</text>"]
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        _, y = place(x0, value)
        parts.append(f"<line x1='{_MARGIN}' x2='{_WIDTH - 10}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{_MARGIN - 6}' y='{y + 4:.1f}' text-anchor='end'>{value:.3g}</text>")
        x, _ = place(x0 + (x1 - x0) * i / 4, y0)
        parts.append(f"<text x='{x:.1f}' y='{_HEIGHT - 10}' text-anchor='middle'>{x0 + (x1 - x0) * i / 4:.0f}</text>")
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
        if len(series) > 1:
            parts.append(f"<text x='{_MARGIN + 140 + 90 * number}' y='16' style='fill:{colour}'>{html.escape(name)}</text>")
    return "".join(parts) + "</svg>"


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _column(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(r["step"]), float(r[name])) for r in records if r.get(name) is not None]


def _nodes(records: Sequence[Mapping[str, Any]]) -> Series:
    names = sorted({node for r in records for node in r.get("resident_peak_bytes", {})})
    return {
        name: [(float(r["step"]), r["resident_peak_bytes"][name] / 2**30) for r in records if name in r.get("resident_peak_bytes", {})]
        for name in names
    }


def _links(records: Sequence[Mapping[str, Any]]) -> Series:
    names = sorted({link for r in records for link in r.get("moved_bytes", {})})
    return {name: [(float(r["step"]), r.get("moved_bytes", {}).get(name, 0) / 1e9) for r in records] for name in names}


def _if_any(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The line, or nothing where it is zero throughout."""
    return line if any(value for _, value in line) else []


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
