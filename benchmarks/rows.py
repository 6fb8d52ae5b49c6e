"""Comparisons of a result as Markdown tables: plain rows, or a grid if `benchmarks/pages.toml` splits their names.

Only another program is a peer, and only compared with a peer is nntask called faster or slower. Compared with nntask under other conditions, or with
a limit (a bound, the speed of a copy), a row has the bare ratio; a count has none. A peer, a unit or a bar that a whole column shares moves to its
head. A bar that the head shows is met unless the cell says otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

Row = Mapping[str, Any]
"""A comparison, as `common.compare` returns it."""
Kind = Literal["peer", "self", "limit", "count"]

KINDS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "peer": ("torch", "dask.threaded", "distributed", "the same, malloc", "llama.cpp"),
    "self": (
        "unlimited",
        "all of it",
        "nntask's own tiles",
        "before",
        "blocking copies",
        "eager + lru",
        "everything fits",
        "dense model of the active size",
        "none",
        "one client at a time",
        "of",
        "its budget",
        "fp32",
        "block",
        "device",
        "the better",
        "one worker",
        "sequences of",
        "around position",
        "best of",
        "the same, not traced",
        "cached",
        "a step without it",
        "single tasks",
        "a node's share",
        "measured",
        "0.0118 + 0.365 x sequences",
    ),
    "limit": (
        "sgemm peak",
        "copy",
        "one large GEMM",
        "LP bound",
        "lower bound",
        "the step",
        "(n - 1) / n",
        "allowed",
        "its budget and",
        "python -c pass",
        "import numpy",
    ),
    "count": ("bar", "all", "asked for", "this one"),
}
"""First words of the names of compared figures, by kind. The longest match wins."""

SPEEDS: Final = ("tokens/s", "steps/s", "GB/s", "GF/s")
TIMES: Final = ("s", "ms", "us", "s a step")
BYTES: Final = ("bytes", "GB", "GB a step", "TB a step")
UNITS: Final = {"us": "µs", "GF/s": "Gflop/s", "s a step": "s/step", "GB a step": "GB/step", "TB a step": "TB/step"}
"""Spelling of a unit on pages, if it differs from the results."""
NO_PEER: Final = ("bar", "this one")
"""Compared figures that are only the limit of a bar."""


def kind_of(row: Row) -> Kind:
    """Return the kind of the figure that a row is compared with.

    Raises:
        ValueError: `KINDS` lacks its name.
    """
    found = [(len(start), kind) for kind, starts in KINDS.items() for start in starts if row["peer"].startswith(start)]
    if not found:
        raise ValueError(f"{row['what']!r} is compared with {row['peer']!r}, whose kind is unknown; add it to KINDS of benchmarks/rows.py")
    return max(found)[1]


def comparison(row: Row) -> str:
    """Return one word for a row with a peer: faster or slower, less or more; "as fast" and "as much" within a percent.

    Raises:
        ValueError: the unit is neither a speed, a time nor a number of bytes.
    """
    equal = f"{row['ratio']:.2f}" == "1.00"
    better = row["ratio"] > 1 if row["better"] == "more" else row["ratio"] < 1
    if row["unit"] in SPEEDS + TIMES:
        return "as fast" if equal else "faster" if better else "slower"
    if row["unit"] in BYTES:
        return "as much" if equal else "less" if better else "more"
    raise ValueError(f"{row['what']!r} is in {row['unit']!r}, which benchmarks/rows.py cannot compare")


def verdict(row: Row) -> str:
    """Return the verdict on a row with a bar: met, not met or not resolved."""
    return row.get("verdict") or ("met" if row["met"] else "not met")


def tally(results: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Count the bars of some results by verdict."""
    return Counter(verdict(row) for result in results for row in result["comparisons"] if "bar" in row)


def bar_of(row: Row) -> str:
    """Return a row's bar in signs; "all" for a count that must be complete; empty without a bar."""
    if "bar" not in row:
        return ""
    subject, relation, limit = row["bar"].split()
    if kind_of(row) == "count" and (subject, relation, limit) == ("ratio", ">=", "1"):
        return "all"
    sign = {">=": "≥ ", "<=": "≤ ", "in": ""}[relation]
    return f"{sign}{limit.replace('..', ' to ')}" + (f" {UNITS.get(row['unit'], row['unit'])}" if subject == "ours" and row["unit"] else "")


def figure(value: float, unit: str) -> tuple[str, str]:
    """Return a figure and its unit as pages show them; "yes" and "no" for a figure without a unit."""
    if unit == "bytes":
        return (f"{value / 1e9:.2f}", "GB") if value >= 1e8 else (f"{value / 1e6:.1f}", "MB")
    if unit == "":
        return "yes" if value else "no", ""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}", UNITS.get(unit, unit)


def amount(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    return " ".join(figure(value, unit)).strip()


def ratio_of(row: Row) -> str:
    """Return the ratio of a row, with a word if it has a peer; empty for a count."""
    kind = kind_of(row)
    if kind == "count" or not row["unit"]:
        return ""
    return f"{row['ratio']:.2f}" + (f", {comparison(row)}" if kind == "peer" else "")


def ruled(row: Row) -> str:
    """Return a row's bar with its verdict; empty without a bar."""
    return f"{bar_of(row)}: {shown_verdict(row)}" if "bar" in row else ""


def shown_verdict(row: Row) -> str:
    """Return the verdict as pages show it."""
    return verdict(row).replace("not met", "**not met**")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = ("| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |" for cells in (head, *rows))
    first, *others = lines
    return "\n".join([first, "|---" * len(head) + "|", *others])


def line(row: Row, name: str = "", other: str = "") -> list[str]:
    """Return the five cells of a row: name, figure, compared figure, ratio, bar.

    Args:
        row: the comparison.
        name: name of the row, by default its own.
        other: name of the compared figure, by default its own.
    """
    theirs = "" if row["peer"] in NO_PEER else f"{other or row['peer'].removesuffix(', ms')}: {amount(row['theirs'], row['unit'])}"
    return [name or row["what"], amount(row["ours"], row["unit"]), theirs, ratio_of(row), ruled(row)]


def tables(rows: Sequence[Row], section: Mapping[str, Any]) -> list[str]:
    """Return the tables of a section of a page.

    Args:
        rows: comparisons of its result.
        section: entry of `pages.toml`. `grids` has patterns of "what @ peer", each of which collects the rows of a grid; `drop` is a pattern of words
            that the title or the method already has; `same` is a pattern of rows that become one if their figures are equal.
    """
    left, made = list(rows), []
    for pattern in section.get("grids", ()):
        cells = [(row, match) for row in left if (match := re.fullmatch(pattern, f"{row['what']} @ {row['peer']}"))]
        made.append(grid(cells, section.get("names", {}), section.get("column", "")))
        left = [row for row in left if all(row is not taken for taken, _ in cells)]
    alike = [row for row in left if re.fullmatch(section.get("same", "$^"), row["what"])]
    others = [row for row in left if not any(row is each for each in alike)]
    return [*(plain(part, section.get("drop", "$^"), section.get("same", "$^")) for part in (alike, others) if part), *made]


def plain(rows: Sequence[Row], drop: str, same: str) -> str:
    """Return a table with a line for each row, or for each figure of rows whose names match `same`."""
    merged: dict[tuple[Any, ...], list[Row]] = {}
    for number, row in enumerate(rows):
        merged.setdefault((row["ours"], row["unit"]) if re.fullmatch(same, row["what"]) else (number,), []).append(row)
    lines = []
    for alike in merged.values():
        names = (match[1] if (match := re.fullmatch(same, row["what"])) else re.sub(drop, "", row["what"]) for row in alike)
        lines.append(line(alike[0], ", ".join(names), re.sub(drop, "", alike[0]["peer"].removesuffix(", ms"))))
    head = ["measured", "nntask", "compared with", "ratio", "bar"]
    if len(rows) > 1:
        _hoist(head, lines, rows)
    kept = [number for number in range(len(head)) if number < 2 or any(cells[number] for cells in lines)]
    return table([head[number] for number in kept], ([cells[number] for number in kept] for cells in lines))


def _hoist(head: list[str], lines: Sequence[list[str]], rows: Sequence[Row]) -> None:
    """Move a peer with its unit, and a bar, that all lines share to the head."""
    peers, bars, units = {row["peer"].removesuffix(", ms") for row in rows}, {bar_of(row) for row in rows}, units_of(rows)
    if len(peers) == 1 and not peers & set(NO_PEER):
        head[2] = peers.pop()
        for cells in lines:
            cells[2] = cells[2].removeprefix(f"{head[2]}: ")
    if len(units) == 1 and units != {""}:
        unit = units.pop()
        head[1:3] = [f"{name}, {unit}" for name in head[1:3]]
        for cells in lines:
            cells[1:3] = [cell.removesuffix(f" {unit}") for cell in cells[1:3]]
    if len(bars) == 1 and bars != {""} and all(cells[3] for cells in lines):
        head[3] = f"ratio (bar {bars.pop()})"
        for cells, row in zip(lines, rows, strict=True):
            cells[3] += "" if verdict(row) == "met" else f" ({shown_verdict(row)})"
            cells[4] = ""


def units_of(rows: Iterable[Row]) -> set[str]:
    """Return the units in which pages show the figures of some rows."""
    return {figure(row[side], row["unit"])[1] for row in rows for side in ("ours", "theirs")}


def grid(found: Sequence[tuple[Row, re.Match[str]]], names: Mapping[str, str], default: str) -> str:
    """Return a table of rows by two names.

    Args:
        found: rows with the match of their names. Groups whose names begin with `row` name the row, those with `column` the column.
        names: name of a row or of a column -> the name to show.
        default: name of a column whose groups did not match; empty for the name of the compared figure.
    """
    by_column: dict[str, dict[str, list[Row]]] = {}
    row_names: dict[str, None] = {}
    for row, match in found:
        name, column = _label(match, "row"), _label(match, "column") or default or row["peer"]
        name, column = names.get(name, name), names.get(column, column)
        row_names[name] = None
        by_column.setdefault(column, {}).setdefault(name, []).append(row)
    ours = {name: {(row["ours"], row["unit"]) for cells in by_column.values() for row in cells.get(name, ())} for name in row_names}
    has_own = len(by_column) > 1 and all(len(values) == 1 for values in ours.values())
    are_known = all(row["peer"] in (*NO_PEER, name) or row["peer"] in f"{_label(match, 'column')}; {_label(match, 'row')}" for row, match in found)
    peers = "named" if are_known else "head" if all(len({row["peer"] for row in _all(cells)}) == 1 for cells in by_column.values()) else "cell"
    columns = [Column(name, cells, peers, has_ours=not has_own) for name, cells in by_column.items()]
    head = [_corner(columns), *["nntask"] * has_own, *(column.head() for column in columns)]
    unit = next(iter(units)) if len(units := units_of(row for row, _ in found)) == 1 else ""
    own = {name: [amount(*next(iter(ours[name]))).removesuffix(f" {unit}")] if has_own else [] for name in row_names}
    return table(head, ([name, *own[name], *(column.cell(name) for column in columns)] for name in row_names))


def _corner(columns: Sequence[Column]) -> str:
    """Return the head of the first column, to which a peer, a unit and a bar of all columns move."""
    shared = {name: values.pop() for name in ("peer", "unit", "bar") if len(values := {getattr(column, name) for column in columns}) == 1}
    for column in columns:
        for name in shared:
            column.shown.discard(name)
    peer, unit, bar = (shared.get(name) for name in ("peer", "unit", "bar"))
    title = ", ".join([*[f"nntask / {peer}"] * bool(peer), *[unit] * bool(unit)]) or "measured"
    return title + (f" (bar {bar})" if bar else "")


def _label(match: re.Match[str], start: str) -> str:
    return "; ".join(text for group, text in match.groupdict().items() if group.startswith(start) and text)


def _all(cells: Mapping[str, Sequence[Row]]) -> list[Row]:
    return [row for cell in cells.values() for row in cell]


class Column:
    """A column of a grid, whose head has the unit, the bar and nntask's figure if all cells share them.

    Args:
        name: name of the column.
        cells: name of a row -> the rows of its cell, which share both figures.
        peers: place of the names of compared figures: "head", "cell", or "named" if the names of row or column have them.
        has_ours: cells have nntask's figure, unless all share it.
    """

    def __init__(self, name: str, cells: Mapping[str, Sequence[Row]], peers: Literal["head", "cell", "named"], *, has_ours: bool) -> None:
        self.name = name
        self.cells = cells
        self.peers = peers
        self.shown = {"peer", "unit", "bar"}
        rows = _all(cells)
        self.peer = rows[0]["peer"] if peers == "head" else ""
        units, bars, ours = units_of(rows), {bar_of(row) for row in rows}, {amount(row["ours"], row["unit"]) for row in rows}
        self.unit = units.pop() if len(units) == 1 and len(cells) > 1 else ""
        self.bar = bars.pop() if len(bars) == 1 else None
        self.ours = ours.pop() if has_ours and len(ours) == 1 and len(cells) > 1 else ""
        self.has_ours = has_ours and not self.ours

    def head(self) -> str:
        """Return the head of the column."""
        peer, unit, bar = (getattr(self, name) if name in self.shown else "" for name in ("peer", "unit", "bar"))
        title = f"{self.name} / {peer}" if peer and peer != self.name else self.name
        shared = "; ".join([*[f"nntask {self.ours}"] * bool(self.ours), *[f"bar {bar}"] * bool(bar)])
        return title + (f", {unit}" if unit else "") + (f" ({shared})" if shared else "")

    def cell(self, name: str) -> str:
        """Return the cell of a row, empty if it has none."""
        if name not in self.cells:
            return ""
        row = self.cells[name][0]
        has_peer = row["peer"] not in NO_PEER
        shown = [figure(row[side], row["unit"]) for side, is_wanted in (("ours", self.has_ours), ("theirs", has_peer)) if is_wanted]
        units = {unit for _, unit in shown} - {self.unit}
        text = " / ".join(f"{value} {unit}" if len(units) > 1 else value for value, unit in shown)
        text += f" {units.pop()}" if len(units) == 1 else ""
        text += f" ({row['peer']})" if has_peer and self.peers == "cell" else ""
        text += f": {ratio_of(row)}" if ratio_of(row) else ""
        barred = [row for row in self.cells[name] if "bar" in row]
        rulings = [ruled(row) for row in barred] if self.bar is None else [shown_verdict(row) for row in barred if verdict(row) != "met"]
        return text + (f" ({'; '.join(rulings)})" if rulings else "")
