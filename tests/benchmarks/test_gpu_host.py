"""What `benchmarks/gpu/host.py` counts of a recorded step of GPT-2 small on a GPU that computes nothing; times are for the benchmark alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("host")


def test_a_step_starts_two_graphs(host: ModuleType) -> None:
    """After copies of the inputs; few calls of the driver, and at most half of the kernels that there were before tiles started together."""
    found = host.measure("gpt2", 4, graphs=True, profile=False, in_turn=True)
    assert found["started_tasks"] == 5
    assert found["driver_calls"] < 50
    assert found["kernels"] <= host.BEFORE // 2
