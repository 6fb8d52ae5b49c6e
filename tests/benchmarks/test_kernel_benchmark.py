"""The kernel benchmark (`benchmarks/kernels.py`) in its small mode: it compares every output with torch's before it times anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadline import DEADLINE

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The script as a command."""
    return subprocess.run([sys.executable, "benchmarks/kernels.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.mark.long
def test_every_case_runs_and_nothing_is_written() -> None:
    """One line per case with four positive rates, one comparison with torch each and one with a copy where memory binds; no result file."""
    results = ROOT / "benchmarks" / "results" / "kernels.json"
    before = results.read_bytes() if results.exists() else None
    done = run("--tiny", "--rounds=1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) (G[BF]/s) \(copy GB/s\)$", done.stdout, re.MULTILINE)
    names = [line[0] for line in lines]
    for word in ("gelu", "layer norm backward", "attention backward", "head and loss", "AdamW", "embedding", "dropout", "fp32 to bf16"):
        assert any(name.startswith(word) for name in names), word
    assert all(float(rate) > 0 for line in lines for rate in line[1:5])
    assert done.stdout.count("torch, one thread") == len(lines)
    assert done.stdout.count("GB/s, copy") == sum(line[5] == "GB/s" for line in lines)
    assert (results.read_bytes() if results.exists() else None) == before


@pytest.mark.long
def test_cases_are_chosen_by_name() -> None:
    """--only takes the cases whose names begin so, and refuses a name that no case has."""
    done = run("--tiny", "--rounds=1", "--only=AdamW")
    assert done.returncode == 0, done.stderr
    assert "AdamW" in done.stdout
    assert "gelu" not in done.stdout
    missing = run("--tiny", "--only=fourier")
    assert missing.returncode == 2
    assert "no case begins so" in missing.stderr
