"""Hostile inputs of a table, each through the reader of its parser: no other errors than ours, nothing written, and little memory and time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hostile_inputs import INPUTS, listing, page, write_hostile
from support.untrusted import PARSERS
from support.watched import check_reader

ROOT = Path(__file__).resolve().parents[2]
SLOW = (
    *("two hundred thousand keys", "200,000 texts without letters", "200,000 texts of two letters", "fifty thousand tensors without values"),
    *("a hundred thousand tensors of one value", "gzip of 100 MiB of blank lines", "100,000 empty chunks", "zstd of a page of 100 MiB"),
    *("the same step a hundred thousand times", "a hundred thousand names", "line feeds alone", "a trace of 200 MiB of spaces"),
    *("gzip of pages of 100 MiB", "three million empty lists", "a text that unpacks to 200 MiB", "a million texts of two letters"),
    *("a colour profile of 200 MiB", "a head of brackets", "a hundred thousand keys", "gzip of a line of 100 MiB", "a line of 8 MiB without an end"),
    *("labels of a hundred thousand names", "xz of a line of 40 MiB", "bzip2 of a line of 40 MiB", "grey of 7,000 x 7,000"),
    *("a million empty objects", "colours with alpha of 5,000 x 5,000", "colours of 5,000 x 5,000", "a hundred thousand nodes"),
    *("lines of empty lists, 8 MiB", "pieces of which all parts are tokens", "all words of two letters as pieces", "a hundred texts of a MiB"),
    *("a text of 8 MiB a hundred times", "grey of 16 bits, 6,000 x 6,000", "a trace of empty objects", "a palette of 7,000 x 7,000"),
)
"""Inputs that take more than about half a second to make and read."""
CASES = [
    pytest.param(parser, name, id=f"{parser}: {name}", marks=[pytest.mark.long] * (name in SLOW))
    for parser, inputs in INPUTS.items()
    for name in inputs
]


@pytest.mark.parametrize(("parser", "name"), CASES)
def test_hostile_inputs(parser: str, name: str, tmp_path: Path) -> None:
    """The reader returns, or raises an error of ours, within the bounds of time and of both kinds of memory."""
    path = write_hostile(parser, name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for traced in (False, True):
        check_reader(PARSERS[parser].read, path, traced=traced)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_page_has_the_table() -> None:
    """The page of the site and the list are generated from the table, which has at least 300 inputs, and 20 of each parser."""
    assert (ROOT / "docs" / "results" / "hostile_inputs.md").read_text(encoding="utf-8") == page()
    assert (ROOT / "benchmarks" / "results" / "hostile_inputs.csv").read_text(encoding="utf-8") == listing()
    assert min(map(len, INPUTS.values())) >= 20
    assert len(CASES) >= 300
    assert set(SLOW) <= {name for inputs in INPUTS.values() for name in inputs}
