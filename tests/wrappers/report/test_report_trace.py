"""The trace of a real run in its report: figures of whole steps against those worked out from its events."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from scheduler.execution.trace import TRACE_FORMAT
from wrappers.cli import main
from wrappers.report.records import read_trace

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --ncpu=2 --sample-tokens=0"


@pytest.fixture(autouse=True)
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--trace-steps=3:3 --steps=4 --sim-gpu=1", [3]),
        ("--trace-steps=all --steps=3", [1, 2, 3]),
    ],
)
def test_a_run_describes_its_traced_steps(here: Path, flags: str, steps: list[int]) -> None:
    """Each step whole, in a file in the run's directory; area, time and number of tasks are those of its events, no bound is above a step."""
    assert main(["train", *FLAGS.split(), "--run-dir=run", *flags.split()]) == 0
    trace = read_trace(here / "run" / "trace.json.gz")
    about, machine = trace.about, json.loads((here / "run" / "machine.json").read_text())
    by_step = defaultdict(list)
    for bar in trace.tasks:
        if bar.step is not None:
            by_step[bar.step].append(bar)
    assert about["format"] == TRACE_FORMAT
    assert about["steps"] == sorted(by_step) == steps
    assert {len(bars) for bars in by_step.values()} == {machine["tasks_per_step"]}
    assert sum(row["tasks"] for row in about["codelets"].values()) == machine["tasks_per_step"]
    assert about["codelets"]["matmul"]["flops"] > 0
    bars = [bar for each in by_step.values() for bar in each]
    seconds = (max(bar.end for bar in bars) - min(bar.start for bar in bars)) / 1e9 / len(by_step)
    assert about["seconds_per_step"] == pytest.approx(seconds, rel=1e-6)
    bounds, workers = about["bounds_seconds"], len(machine["workers"])
    if len(by_step) == 1:
        assert bounds["area"] == pytest.approx(sum(bar.end - bar.start for bar in bars) / 1e9 / workers, rel=1e-3)
        assert max(bar.end - bar.start for bar in bars) / 1e9 <= bounds["critical_path"] + 1e-9
        assert max(bounds.values()) <= seconds
    for before, after in zip(sorted(by_step), sorted(by_step)[1:], strict=False):
        assert min(bar.start for bar in by_step[before]) <= min(bar.start for bar in by_step[after])
    assert trace.workers == machine["workers"]


def test_a_resumed_run_numbers_its_steps(here: Path) -> None:
    """Steps after the checkpoint go on from its number, and the report draws them."""
    assert main(["train", *FLAGS.split(), "--run-dir=run", "--steps=2"]) == 0
    assert main(["train", "--resume=run", "--steps=6", "--trace-steps=4:5"]) == 0
    assert read_trace(here / "run" / "trace.json.gz").about["steps"] == [4, 5]
    assert main(["report", "run", "--steps=5:5"]) == 0
    assert "tasks by worker and copies by link, step 5" in (here / "run" / "report.html").read_text()
