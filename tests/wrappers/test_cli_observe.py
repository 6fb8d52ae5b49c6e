"""What the command tells about data that moves: --explain, the closing report, the summary, the HTML report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wrappers.cli import main

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --lr=1e-3 --ncpu=2 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split(), "--steps=2", "--run-dir=run"]


@pytest.fixture(autouse=True)
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps(SMALL))
    return folder


def test_a_run_short_of_memory_says_where_the_bytes_went(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The closing lines, sums of metrics.jsonl in summary.json, plots of them in the report, a table for each explained placement."""
    assert main([*TRAIN, "--ram=400KB", "--disk=tier", "--explain=adam"]) == 0
    out = capsys.readouterr().out
    for beginning in ("placement 3 of adam (task ", "moved ram->disk: ", "moved disk->ram: ", "peak: ram ", "evictions: "):
        assert f"\n{beginning}" in out
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((here / "run" / "summary.json").read_text())
    for link in ("ram->disk", "disk->ram"):
        assert summary["moved_bytes"][link] == sum(line["moved_bytes"][link] for line in lines) > 0
    assert summary["evictions"] == sum(line["evictions"] for line in lines) > 0
    assert summary["peak_bytes"]["ram"] <= 400_000
    assert 0 < summary["hit_rate"] < 1
    assert main(["report", "run"]) == 0
    page = (here / "run" / "report.html").read_text()
    assert "bytes over each link" in page
    assert "<td>ram-&gt;disk</td>" in page


def test_a_run_with_room_says_nothing_of_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither lines nor plots of what did not happen."""
    assert main(TRAIN) == 0
    out = capsys.readouterr().out
    assert "moved" not in out
    assert "peak:" not in out
    assert main(["report", "run"]) == 0
    page = (here / "run" / "report.html").read_text()
    assert "Nothing moved between memories" in page
    assert "bytes over each link" not in page


def test_an_unknown_task_is_a_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with the names there are, before anything is written."""
    for more in ([], ["--dry-run"]):
        assert main([*TRAIN, "--explain=gemm", *more]) == 2
        assert "--explain must name a task of the step, got 'gemm'; the tasks are: activation" in capsys.readouterr().err
    assert main([*TRAIN, "--explain=adam", "--dry-run"]) == 0
    assert not (here / "run").exists()
