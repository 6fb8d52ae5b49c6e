"""Pages of results (`benchmarks/table.py`): what a row says for each kind of comparison, and that nothing committed is left out or stale."""

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
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("table")


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
def test_words_beside_a_peer(table: ModuleType, ours: float, theirs: float, unit: str, better: str, word: str) -> None:
    """Speeds and times are faster or slower, bytes less or more, whichever way round the figures lie."""
    assert table.comparison(row(ours, theirs, unit, better=better)) == word


def test_only_a_peer_is_compared(table: ModuleType) -> None:
    """Beside itself or a limit a row has the bare ratio, beside a count or a bar none; a peer's row says who is faster."""
    assert table._row(row(2, 1, "s", better="less")) == "| a step | 2 s | torch, eager: 1 s | 2.00, slower |  |"
    assert table._row(row(2, 1, "s", better="less", peer="one worker")) == "| a step | 2 s | one worker: 1 s | 2.00 |  |"
    assert table._row(row(2, 1, "s", better="less", peer="lower bound")) == "| a step | 2 s | lower bound: 1 s | 2.00 |  |"
    assert table._row(row(20, 20, "kills", peer="all", bar="ratio >= 1", met=True)) == "| a step | 20 kills | all: 20 kills |  | all: met |"
    assert table._row(row(5, 60, "s", peer="bar", bar="ours <= 60", met=True)) == "| a step | 5 s |  |  | ≤ 60 s: met |"


def test_a_met_bar_is_met_on_the_slower_side(table: ModuleType) -> None:
    """A row that is slower than its peer and within its bar says both; a bar that is missed or not resolved says so."""
    near = row(1.04, 1, "s", better="less", bar="ratio <= 1.05", met=True)
    assert table._row(near).endswith("| 1.04, slower | ≤ 1.05: met |")
    assert table._row({**near, "met": False}).endswith("| ≤ 1.05: **not met** |")
    assert table._row({**near, "met": False, "verdict": "not resolved"}).endswith("| ≤ 1.05: not resolved |")
    assert table._row({**near, "bar": "ratio in 0.9..1.1"}).endswith("| 0.9 to 1.1: met |")


def test_what_nobody_has_classified_is_refused(table: ModuleType) -> None:
    """A peer without a kind, a unit that cannot be compared and a result without a section are errors that name them."""
    with pytest.raises(ValueError, match="stands beside 'jax'"):
        table._row(row(1, 2, "s", peer="jax"))
    with pytest.raises(ValueError, match="'kills'"):
        table.comparison(row(1, 2, "kills"))
    results = table.load(table.RESULTS)
    with pytest.raises(ValueError, match="differing: new"):
        table.pages({**results, "new": results["bf16"]})
    with pytest.raises(ValueError, match="differing: bf16"):
        table.pages({name: result for name, result in results.items() if name != "bf16"})


def test_every_row_is_on_one_page(table: ModuleType) -> None:
    """The pages have as many rows as the results, and their verdicts add up to the count in the README."""
    results = table.load(table.RESULTS)
    pages = table.pages(results)
    rows = [line for name, text in pages.items() if name != "index.md" for line in text.splitlines() if line.startswith("| ")]
    own = [table for result in results.values() for table in result.get("tables", ())]
    expected = sum(len(result["comparisons"]) for result in results.values()) + sum(len(table["rows"]) + 1 for table in own)
    assert len(rows) - len(results) == expected
    counts = [sum(line.rstrip(" |").endswith(f": {verdict}") for line in rows) for verdict in ("met", "**not met**", "not resolved")]
    count = f"All results have {sum(counts)} bars: {counts[0]} are met, {counts[1]} are not, and {counts[2]} lie within the error"
    assert count in table.headlines(results)
    assert sum(counts) == sum("bar" in each for result in results.values() for each in result["comparisons"]) > 0


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
