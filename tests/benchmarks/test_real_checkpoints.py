"""The script that keeps what real checkpoints were compared with, on made-up figures; the tests that find them are in tests/real."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1.0"></testsuite></testsuites>"""
FIGURES = [
    {"checkpoint": "a", "compared": "logits", "beside": "b", "difference": "1e-6", "memory": 0, "seconds": 0.0, "test": "test_a"},
    {"checkpoint": "a", "compared": "a run", "beside": "c", "difference": "same bits", "memory": 3 << 20, "seconds": 1.25, "test": "test_b"},
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("real_checkpoints")


def test_outcomes_are_counted(script: ModuleType, tmp_path: Path) -> None:
    """Errors are failures, and what was skipped has not passed."""
    (tmp_path / "report.xml").write_text(REPORT)
    assert script.counts(tmp_path / "report.xml") == (4, 3, 3)


def test_figures_become_rows_and_a_bar(script: ModuleType) -> None:
    """A row a figure, with memory and seconds where a command ran; one test that fails misses the bar."""
    found = script.result(FIGURES, 7, 0, {})
    (table,) = found["tables"]
    assert [row[-2:] for row in table["rows"]] == [["", ""], ["3", "1.2"]]
    assert all(len(row) == len(table["head"]) for row in table["rows"])
    assert found["comparisons"][0]["met"]
    assert not script.result(FIGURES, 7, 1, {})["comparisons"][0]["met"]


@pytest.mark.long
@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--no-such-argument", 4)])
def test_without_a_report_nothing_is_kept(script: ModuleType, argument: str, code: int) -> None:
    """pytest's help or refusal is all that there is."""
    assert script.main([argument]) == code
