"""The benchmark scripts run, on toys: they print a line for every claim and write nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadline import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"(.+): ours [\d.,e+-]+ [^,]+, (.+) [\d.,e+-]+, ratio [\d.-]+")


@pytest.mark.parametrize(
    ("script", "flags", "claims"),
    [
        (
            "small_tiles",
            "--large=256 --extent=128 --tiles 64 32 --repetitions=1",
            ["replayed GEMM tasks of 64 x", "replayed GEMM tasks of 32 x"],
        ),
        pytest.param(
            "growth",
            "--tiny --batches 1 2 4 --most=32 --lengths 16 64 --tokens=64",
            ["a step's speed", "a step of", "seconds per 10^12 model flops"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "generation",
            "--case=tiny",
            ["gpt2, 128 new tokens of one text, fp32", "gpt2, 128 new tokens of one text, fp32: peak resident memory"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "serve",
            "--case=tiny --minutes=0.1",
            [f"32 clients at once, 16 slots: {what}" for what in ("tokens", "texts", "most")],
            marks=pytest.mark.long,
        ),
        pytest.param("memory/mixed", "--tiny", ["Cholesky, 4 x 4 tiles"] * 2 + ["tiny, 1 GPU and 2 cores"] * 2, marks=pytest.mark.long),
        pytest.param(
            "memory/expert_training",
            "--tiny --only 4",
            ["4 x 512 tokens"] * 3,
            marks=pytest.mark.long,
        ),
        pytest.param("memory/expert_training", "--tiny --suite=lora", ["LoRA on 4-bit experts"] * 4, marks=pytest.mark.long),
        pytest.param("tile_table", "--tiny --shapes tiny:4", ["tiny, 4 sequences: a step in the table's tiles"], marks=pytest.mark.long),
        pytest.param("dask/cluster", "--suite=traffic --tiny", ["tiny on 2 nodes: bytes sent per node and step"], marks=pytest.mark.long),
        pytest.param(
            "dask/cluster", "--suite=cost --tiny", ["tiny on 2 nodes: what Dask adds", "messages that the scheduler"], marks=pytest.mark.long
        ),
        pytest.param("dask/cluster", "--suite=scale --tiny", ["tiny on 2 nodes of this machine"], marks=pytest.mark.long),
        pytest.param("dask/cluster", "--suite=faults --tiny", ["2 random kills", "steps whose", "longest", "processes"], marks=pytest.mark.long),
    ],
)
def test_a_script_prints_its_claims(script, flags, claims):
    """One line each, with a ratio."""
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--rounds=1", "--output=", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    found = [match[1] for match in LINE.finditer(done.stdout)]
    assert len(found) == len(claims), done.stdout
    assert all(line.startswith(claim) for line, claim in zip(found, claims, strict=True)), found
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before
