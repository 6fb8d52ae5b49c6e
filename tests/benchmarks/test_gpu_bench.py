"""Rows of `benchmarks/gpu/bench.py` when a peer fails."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS = SimpleNamespace(seconds=1.0, train=lambda config, flags, steps: {"tokens_per_second": 1000.0, "losses": []})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("bench")


@pytest.mark.parametrize(("fits", "theirs"), [(4, 500.0), (0, None)])
def test_a_peer_without_memory_leaves_our_figure(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, fits: int, theirs: float | None) -> None:
    """torch is measured at the largest minibatch that fits; if none does, the row has our rate and the reason."""

    def peer(kind: str, config: Any, steps: int, batch: int, minibatch: int, seconds: float) -> dict[str, float]:
        if minibatch > fits:
            raise RuntimeError("torch ended with 1: out of memory")
        return {"tokens_per_second": 500.0}

    monkeypatch.setattr(bench, "peer", peer)
    row = bench.trained(OURS, "NVIDIA H200", "gpt2-xl", 3)
    assert (row["torch_tokens_per_second"], "1,000 tokens/s" in row["measured"]) == (theirs, True)
    assert row["torch"] == ("torch in minibatches of 4" if theirs else "no figure of torch: torch ended with 1: out of memory")
