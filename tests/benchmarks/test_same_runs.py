"""The comparison of `benchmarks/same_runs.py`: every kind of difference is found, what time decides is none."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
LINE = {"step": 1, "loss": 5.25, "seconds": 0.5, "moved_bytes": {"ram->disk": 10}}
STEP = "step 1/6 | loss 5.6862 | norm 2.51 | lr 1.0e-04 | 580 ms | 3.5k tok/s | 42% of gemm peak | ram 0.2/21.2 GiB | eta 1m55s\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("same_runs")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"a": 1}, {"a": 2}, "[a]: 1 before, 2 now"),
        ({"a": 1}, {"a": 1.0}, "[a]: 1 before, 1.0 now"),
        ({"a": 0}, {"a": False}, "[a]: 0 before, False now"),
        ({"a": 1}, {}, "[a]: is missing"),
        ({}, {"a": 1}, "[a]: is new"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ": its fields stand in another order"),
        ({"a": [1, 2]}, {"a": [1]}, "[a]: 2 entries before, 1 now"),
        ({"a": [1, {"b": "x"}]}, {"a": [1, {"b": "y"}]}, "[a][1][b]: 'x' before, 'y' now"),
    ],
)
def test_a_difference_is_found(script: ModuleType, before: Any, after: Any, words: str) -> None:
    """One line with its place; the value compared with itself has none."""
    assert list(script.differences(before, after)) == [words]
    assert not list(script.differences(before, before))


@pytest.mark.parametrize(
    ("change", "num_differences"),
    [
        ({"loss": float(np.nextafter(5.25, 6))}, 1),
        ({"step": 2}, 1),
        ({"seconds": 0.6, "moved_bytes": {"disk->ram": 20}}, 0),
    ],
)
def test_a_line_of_metrics(script: ModuleType, tmp_path: Path, change: dict[str, Any], num_differences: int) -> None:
    """The last bit of a loss counts; seconds and traffic do not, except where a case is exact."""
    path, found = tmp_path / "metrics.jsonl", {}
    for exact in (False, True):
        for fields in (LINE, {**LINE, **change}):
            path.write_text(json.dumps(fields) + "\n")
            found.setdefault(exact, []).append(script.read(path, script.Case("toy", (), exact=exact)))
    assert len(list(script.differences(*found[False]))) == num_differences
    assert list(script.differences(*found[True]))


@pytest.mark.parametrize(("allowance", "now", "differs"), [(0.0, 100, False), (0.0, 101, True), (0.1, 109, False), (0.1, 111, True), (0.1, 89, True)])
def test_moved_bytes(script: ModuleType, allowance: float, now: int, differs: bool) -> None:
    """Equal without an allowance, else within it."""
    case = script.Case("toy", (), allowance=allowance)
    assert bool(script.case_differences(case, {"traffic": {"a->b": 100}}, {"traffic": {"a->b": now}})) == differs


def test_bytes_that_went_over_another_link(script: ModuleType) -> None:
    """They differ without an allowance, though their sum is the same."""
    assert script.case_differences(script.Case("toy", ()), {"traffic": {"a->b": 100}}, {"traffic": {"b->a": 100}})


def test_a_tensor_that_changes_in_one_bit(script: ModuleType, tmp_path: Path) -> None:
    """Its own line and that of the file differ; the other tensor's does not."""
    found = []
    for value in (1.0, float(np.nextafter(np.float32(1), np.float32(2)))):
        save_file({"a": np.full(3, value, np.float32), "b": np.zeros(2, np.float32)}, tmp_path / "x.safetensors")
        found.append(script.read(tmp_path / "x.safetensors", script.Case("toy", ())))
    assert sorted(line.partition(":")[0] for line in script.differences(*found)) == ["[a]", "[whole file]"]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("580 ms", "61 ms", True),
        ("3.5k tok/s", "801 tok/s", True),
        ("eta 1m55s", "eta 0s", True),
        ("norm 2.51", "norm 2.52", False),
        ("1/6", "1/7", False),
    ],
)
def test_printed_lines(script: ModuleType, old: str, new: str, same: bool) -> None:
    """Times and rates are masked, losses and counts are not; nothing is masked where a case is exact."""
    assert (script.text_of(STEP, script.Case("toy", ())) == script.text_of(STEP.replace(old, new), script.Case("toy", ()))) == same
    exact = script.Case("toy", (), exact=True)
    assert script.text_of(STEP, exact) != script.text_of(STEP.replace(old, new), exact)


def test_the_table(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each run; those that differ, or that nobody recorded, are counted."""
    before = {"sgd": {"files": ["a"]}, "bf16": {"files": ["a"]}}
    after = {"sgd": {"files": ["a"]}, "bf16": {"files": ["b"]}, "LLaMA": {"files": ["a"]}}
    assert script.compare(before, after, shown=5) == 2
    out = capsys.readouterr().out
    assert "sgd   | same\n" in out
    assert "bf16  | 1 differences\n" in out
    assert "LLaMA | 1 differences\n      | is not in the record\n" in out
