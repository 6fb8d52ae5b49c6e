"""The comparison of `benchmarks/torch_families.py`: a family passes, and one that differs is not called met."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "model": "Toy",
    "difference": 2e-7,
    "same_bits": {"one worker": True, "two simulated devices": True},
    "quarter_budget_bytes": 100,
    "quarter_peak_bytes": 99,
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("torch_families")


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, set()),
        ({"difference": 2e-5}, {"losses within 1e-5 of eager's"}),
        ({"same_bits": {"one worker": False}}, {"the same bits in memory, in a quarter of it, on one worker, on two devices"}),
        ({"quarter_peak_bytes": 101}, {"peak in a quarter of the memory, nearest to its budget"}),
    ],
)
def test_one_family_that_differs_misses_its_bar(script: ModuleType, change: dict[str, Any], missed: set[str]) -> None:
    """Twenty families are enough; a row for each, and bars for all of them."""
    found = {f"family {number}": GOOD for number in range(19)} | {"last": {**GOOD, **change}}
    rows = script.comparisons(found)
    assert {row["what"] for row in rows if "bar" not in row} == {f"{name}, `Toy`" for name in found}
    assert {row["what"] for row in rows if "bar" in row and not row["met"]} == missed
    assert not script.comparisons({"one": GOOD})[-1]["met"]


@pytest.mark.long
def test_a_family_is_measured(script: ModuleType) -> None:
    """Two steps of the smallest one: near eager's losses, the same bits three times, a quarter of the memory kept."""
    pytest.importorskip("transformers")
    found = script.measure("opt", 2)
    assert found["difference"] <= script.NEAR
    assert list(found["same_bits"].values()) == [True] * 3
    assert found["quarter_peak_bytes"] <= found["quarter_budget_bytes"] < found["peak_bytes"]
