"""What the command tells about data that moves or is made again: --explain, the closing report, the summary, the HTML report."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from nntask.planning import cells, headline, value_lines
from wrappers.cli import main

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --lr=1e-3 --ncpu=2 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split(), "--steps=2", "--run-dir=run"]


@pytest.fixture(autouse=True)
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


def test_a_run_short_of_memory_says_where_the_bytes_went(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The closing lines, sums of metrics.jsonl in summary.json, plots of them in the report, a table for each explained placement."""
    assert main([*TRAIN, "--ram=400KB", "--disk=tier", "--explain=adam", "--recompute=none"]) == 0
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
    assert "No bytes moved between memories" in page
    assert "bytes over each link" not in page
    assert "Recomputed instead of kept: none: everything fits." in page
    assert "Measured: " not in page


def test_what_is_made_again_is_said_everywhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of nntask plan, --explain, plan.json and the report are the same; the run adds what it measured."""
    (here / "small.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2})
    )
    flags = [*FLAGS.replace("--batch=4 --minibatch=2", "--batch=8 --minibatch=8 --minibatch-tile=8").split(), "--ram=3MB", "--steps=2"]
    assert main(["plan", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["train", *flags, "--run-dir=run", "--explain=adam"]) == 0
    out = capsys.readouterr().out
    written = json.loads((here / "run" / "plan.json").read_text())
    assert written["recompute"] == plan["recompute"]
    assert written["recompute"] != "none"
    assert (written["seconds_without_recompute"], written["recompute_is_given"]) == (None, False)
    timeless = [{key: value for key, value in each.items() if not key.startswith("seconds")} for each in written["values"]]
    assert timeless == [{key: value for key, value in each.items() if not key.startswith("seconds")} for each in plan["values"]]
    assert main(["plan", *flags]) == 0
    lines = out.splitlines()
    at = lines.index(f"recomputed instead of kept: {headline(written)}")
    assert "s a step; without any it would not fit)" in lines[at]
    assert lines[at + 1 : at + 2 + len(written["values"])] == value_lines(written)
    assert [line.split()[0] for line in value_lines(written)] == [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")
    ]
    steps = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert sum(step["recomputed_tasks"] for step in steps) == summary["recomputed_tasks"] > 0
    assert all(0 < step["recompute_seconds"] < sum(step["busy_seconds"].values()) for step in steps)
    assert "recomputed: " in out
    assert main(["report", "run"]) == 0
    page = html.unescape((here / "run" / "report.html").read_text())
    for row in cells(written):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" in page
    assert f"Recomputed instead of kept: {headline(written)}." in page
    assert f"Measured: {summary['recomputed_tasks'] / 2:,.0f} tasks a step, " in page


def test_an_unknown_task_is_a_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with the names there are, before anything is written."""
    for more in ([], ["--dry-run"]):
        assert main([*TRAIN, "--explain=gemm", *more]) == 2
        assert "--explain must name a task of the step, got 'gemm'; the tasks are: activation" in capsys.readouterr().err
    assert main(["plan", *TRAIN[1:], "--explain=gemm"]) == 2
    assert "--explain must name a task of the step, got 'gemm'" in capsys.readouterr().err
    assert main([*TRAIN, "--explain=adam", "--dry-run"]) == 0
    assert not (here / "run").exists()
