"""Pages of results (`benchmarks/table.py`): each kind of comparison as a row and as a cell, and that nothing committed is left out or stale."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes pages."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("table")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the tables."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rows")


def row(ours: float, theirs: float, unit: str, *, better: str = "more", peer: str = "torch, eager", **more: Any) -> dict[str, Any]:
    """One row of a result."""
    return {"what": "a step", "unit": unit, "ours": ours, "peer": peer, "theirs": theirs, "ratio": ours / theirs, "better": better, **more}


@pytest.mark.parametrize(
    ("ours", "theirs", "unit", "better", "word"),
    [
        (2, 1, "tokens/s", "more", "faster"),
        (1, 2, "tokens/s", "more", "slower"),
        (1, 2, "s", "less", "faster"),
        (2, 1, "us", "less", "slower"),
        (1.004, 1, "s", "less", "as fast"),
        (1e9, 2e9, "bytes", "less", "less"),
        (2, 1, "GB", "less", "more"),
        (0.997, 1, "GB", "less", "as much"),
    ],
)
def test_words_for_a_peer(rows: ModuleType, ours: float, theirs: float, unit: str, better: str, word: str) -> None:
    """Speeds and times are faster or slower, bytes less or more, whichever way round the figures lie."""
    assert rows.comparison(row(ours, theirs, unit, better=better)) == word


def test_only_a_peer_is_compared(rows: ModuleType) -> None:
    """Compared with itself or a limit a row has the bare ratio, with a count or a bar none; a peer's row says which is faster."""
    assert rows.line(row(2, 1, "s", better="less")) == ["a step", "2 s", "torch, eager: 1 s", "2.00, slower", ""]
    assert rows.line(row(2, 1, "s", better="less", peer="one worker")) == ["a step", "2 s", "one worker: 1 s", "2.00", ""]
    assert rows.line(row(2, 1, "s", better="less", peer="lower bound")) == ["a step", "2 s", "lower bound: 1 s", "2.00", ""]
    assert rows.line(row(20, 20, "kills", peer="all", bar="ratio >= 1", met=True)) == ["a step", "20 kills", "all: 20 kills", "", "all: met"]
    assert rows.line(row(5, 60, "s", peer="bar", bar="ours <= 60", met=True)) == ["a step", "5 s", "", "", "≤ 60 s: met"]


def test_a_met_bar_is_met_on_the_slower_side(rows: ModuleType) -> None:
    """A row that is slower than its peer and within its bar says both; a bar that is missed or not resolved says so."""
    near = row(1.04, 1, "s", better="less", bar="ratio <= 1.05", met=True)
    assert rows.line(near)[3:] == ["1.04, slower", "≤ 1.05: met"]
    assert rows.line({**near, "met": False})[4] == "≤ 1.05: **not met**"
    assert rows.line({**near, "met": False, "verdict": "not resolved"})[4] == "≤ 1.05: not resolved"
    assert rows.line({**near, "bar": "ratio in 0.9..1.1"})[4] == "0.9 to 1.1: met"


def test_columns_that_share_a_peer_a_unit_or_a_bar_say_it_once(rows: ModuleType) -> None:
    """The head has it, cells name only a bar that is not met; columns without an entry are left out."""
    pair = [row(2, 1, "s", what=name, peer="before", better="less", bar="ratio <= 1.5", met=met) for name, met in (("a", True), ("b", False))]
    assert rows.tables(pair, {}) == [
        "| measured | nntask, s | before, s | ratio (bar ≤ 1.5) |\n|---|---|---|---|\n| a | 2 | 1 | 2.00 |\n| b | 2 | 1 | 2.00 (**not met**) |"
    ]
    differing = [pair[0], {**pair[1], "peer": "one worker"}]
    assert rows.tables(differing, {})[0].endswith("| b | 2 | one worker: 1 | 2.00 (**not met**) |")


def test_rows_of_equal_figures_share_a_line(rows: ModuleType) -> None:
    """Names that the pattern matches are joined if their figures are equal, and make a table of their own."""
    made = [row(value, 1, "nats", what=f"{name}, `Class`", peer="bar") for name, value in (("a", 2), ("b", 3), ("c", 2))]
    assert rows.tables([*made, row(1, 1, "s", peer="before")], {"same": r"(\w+), `\w+`"})[0].splitlines()[2:] == ["| a, c | 2 |", "| b | 3 |"]


@pytest.mark.parametrize(
    ("pattern", "peers", "expected"),
    [
        (r"(?P<row>.*): (?P<column>.*) @ .*", ("before", "before"), ["nntask / before | x, s | y, MB", "a | 2 / 1: 2.00 | 2.0 / 1.0: 2.00"]),
        (r"(?P<row>.*): (?P<column>.*) @ .*", ("before", "block"), ["measured | x / before, s | y / block, MB", "a | 2 / 1: 2.00 | 2.0 / 1.0: 2.00"]),
        (r"(?P<row>.*): (?P<column>x|y) @ (?P<row2>.*)", ("before", "block"), ["measured | nntask | x, s | y, MB", "a; before | 2 s | 1: 2.00 | "]),
    ],
)
def test_grids(rows: ModuleType, pattern: str, peers: tuple[str, str], expected: list[str]) -> None:
    """A pattern names row and column; a peer is in the corner, in the heads, or in the names of the rows."""
    made = [
        row(2 * scale * times, scale * times, unit, what=f"{name}: {column}", peer=peer, better="less")
        for name, times in (("a", 1), ("b", 3))
        for column, peer, unit, scale in zip("xy", peers, ("s", "bytes"), (1, 1e6), strict=True)
    ]
    (text,) = rows.tables(made, {"grids": [pattern]})
    assert [line.removeprefix("| ").removesuffix(" |") for line in text.splitlines()[::2]][: len(expected)] == expected


def test_a_cell_of_two_bars_has_both(rows: ModuleType) -> None:
    """Two rows of one comparison share a cell; nntask's figure has a column if all cells of a row share it."""
    first = row(2, 8, "us", what="a", peer="dask.threaded", better="less", bar="ours <= 3", met=True)
    second = {**first, "what": "a, again", "bar": "ratio <= 0.2", "met": False}
    other = {**first, "peer": "dask.threaded, 50 at a time"}
    (text,) = rows.tables([first, second, other], {"grids": [r"(?P<row>a)(?:, again)? @ (?P<column>.*)"]})
    assert text.splitlines()[2] == "| a | 2 | 8 µs: 0.25, faster (≤ 3 µs: met; ≤ 0.2: **not met**) | 8 µs: 0.25, faster |"


def test_what_nobody_has_classified_is_refused(table: ModuleType, rows: ModuleType) -> None:
    """A peer without a kind, a unit that cannot be compared and a result without a section are errors that name them."""
    with pytest.raises(ValueError, match="compared with 'jax'"):
        rows.line(row(1, 2, "s", peer="jax"))
    with pytest.raises(ValueError, match="'kills'"):
        rows.comparison(row(1, 2, "kills"))
    results = table.load(table.RESULTS)
    with pytest.raises(ValueError, match="differing: new"):
        table.pages({**results, "new": results["bf16"]})
    with pytest.raises(ValueError, match="differing: bf16"):
        table.pages({name: result for name, result in results.items() if name != "bf16"})


def test_every_figure_is_on_its_page(table: ModuleType, rows: ModuleType) -> None:
    """Each comparison's figures and ratio are in its section, and the pages show as many missed bars as the results have."""
    results = table.load(table.RESULTS)
    pages = table.pages(results)
    for page in table.PAGES:
        sections = pages[f"{page['name']}.md"].split("\n## ")[1:]
        for section, text in zip(page["section"], sections, strict=True):
            for each in results[section["benchmark"]]["comparisons"]:
                words = set(text.replace(":", " ").replace(",\n", " ").replace(", ", " ").replace(")", " ").split())
                figures = [rows.figure(each["ours"], each["unit"])[0]]
                figures += [] if each["peer"] in rows.NO_PEER else [rows.figure(each["theirs"], each["unit"])[0]]
                figures += rows.ratio_of(each).split(", ")[:1]
                assert {figure for figure in figures if figure} <= words, (section["title"], each["what"], figures)
    bodies = [text.partition("\n## ")[2] for name, text in pages.items() if name != "index.md"]
    verdicts = rows.tally(results.values())
    assert sum(text.count("**not met**") for text in bodies) == verdicts["not met"]
    assert sum(text.count("not resolved") for text in bodies) == verdicts["not resolved"]
    count = f"All results have {verdicts.total()} bars: {verdicts['met']} are met, {verdicts['not met']} are not, and {verdicts['not resolved']} lie"
    assert count in table.headlines(results)
    assert verdicts.total() == sum("bar" in each for result in results.values() for each in result["comparisons"]) > 0


def test_situations_are_counted(table: ModuleType) -> None:
    """The counts of the page add up to the rows of the list, whose outcomes are the four that the page explains."""
    script = importlib.import_module("situations")
    found = script.load(table.RESULTS / "situations.csv")
    assert {each["outcome"] for each in found} == script.OUTCOMES.keys()
    (totals,) = [line for line in script.page(found).splitlines() if line.startswith("| all |")]
    assert sum(int(cell) for cell in totals.split("|")[2:-1]) == len(found)


def test_stale_pages_are_found(table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check passes on what has just been written, and names a page that was changed and a figure that is missing."""
    elsewhere = ["--site", str(tmp_path / "site"), "--plots", str(tmp_path / "plots")]
    assert table.main(elsewhere) == 0
    assert table.main([*elsewhere, "--check"]) == 0
    page = tmp_path / "site" / "kernels.md"
    page.write_text(page.read_text().replace("**not met**", "met", 1))
    (tmp_path / "plots" / "speed.svg").unlink()
    assert table.main([*elsewhere, "--check"]) == 1
    err = capsys.readouterr().err
    assert "kernels.md" in err
    assert "speed.svg" in err
    assert "memory.md" not in err


def test_markers_are_needed(table: ModuleType) -> None:
    """A page without the two markers, or with them the wrong way round, is refused."""
    assert table.filled(f"a\n{table.BEGIN}\nold\n{table.END}\nb", "new") == f"a\n{table.BEGIN}\nnew\n{table.END}\nb"
    for text in ("a", table.BEGIN, f"{table.END}{table.BEGIN}"):
        with pytest.raises(ValueError, match="needs the lines"):
            table.filled(text, "new")


def test_figures_are_drawings_for_light_and_dark_pages(table: ModuleType) -> None:
    """Every figure is well-formed, has a title, uses only colours that both sets have, and stays within its frame."""
    svg, figures = importlib.import_module("svg"), importlib.import_module("figures")
    assert svg.LIGHT.keys() == svg.DARK.keys()
    for text in figures.figures(table.load(table.RESULTS)).values():
        root = ElementTree.fromstring(text)
        assert (root.findtext(f"{SVG}title") or "").strip() == root.get("aria-label")
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for element in root.iter():
            for name in (element.get("class") or "").split():
                assert name.removesuffix("-fill").removesuffix("-line") in {*svg.LIGHT, "code", "bold"}
            assert 0 <= float(element.get("x", 0)) <= width
            assert 0 <= float(element.get("y", 0)) <= height


def test_plots_show_the_results(table: ModuleType) -> None:
    """The bars' labels are the ratios of the committed rows, to a percent and to a tenth of a gigabyte."""
    figures = importlib.import_module("figures")
    drawn = figures.figures(table.load(table.RESULTS))
    memory = json.loads((table.RESULTS / "memory.json").read_text())
    for each in memory["comparisons"]:
        if each["peer"] == "unlimited":
            assert f">{100 * each['ratio']:.0f} %<" in drawn["speed.svg"]
    for each in json.loads((table.RESULTS / "foresight_bytes.json").read_text())["comparisons"]:
        assert f">{each['ours']:.1f}<" in drawn["bytes.svg"]
        assert f">{each['theirs']:.1f}<" in drawn["bytes.svg"]
