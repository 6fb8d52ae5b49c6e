"""Run directories of older versions are continued: the same data, dropout, learning rates and optimizer state, so the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from wrappers.cli import main

RUN = Path(__file__).resolve().parents[2] / "data" / "run_before_rooms"
ROUNDING = 1e-6
"""Relative difference allowed. Sums are rounded differently by AVX2, AVX-512, oneDNN and OpenBLAS: up to 1e-7 was seen here. Other windows of the
data, other dropout masks or lost moments of Adam differ by 1e-3 and more."""


def steps_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("machine", [["--ncpu=1"], ["--ram=200KiB", "--disk=tier:1MiB"]], ids=["in memory", "on disk"])
def test_a_run_made_before_the_rooms_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: list[str]) -> None:
    """It gets the losses and norms that the version which began it gets, and its earlier steps stay as they were written."""
    shutil.copytree(RUN, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    assert main(["train", "--resume=run", "--steps=12", *machine]) == 0
    found, expected = steps_of(Path("run", "metrics.jsonl")), steps_of(RUN / "expected.jsonl")
    assert found[:6] == steps_of(RUN / "run" / "metrics.jsonl")
    for key in ("step", "tokens", "lr"):
        assert [line[key] for line in found[6:]] == [line[key] for line in expected]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found[6:]] == pytest.approx([line[key] for line in expected], rel=ROUNDING, abs=0)
    assert Path("run", "latest").resolve().name == "step-000012"
