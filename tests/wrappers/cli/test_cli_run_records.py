"""What a run says and keeps of itself: validation losses, its directory, a changed schedule, and text for a terminal of few characters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nntask.errors import StorageError
from nntask.telemetry.metrics import Journal, read_metrics
from nntask.training import run_directory
from wrappers.cli import main
from wrappers.report.records import read_run

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3}
FLAGS = ["--config-path=small.json", "--dataset=text", "--dataset-path=text", "--tokenizer=bytes", "--batch=4", "--ncpu=1", "--sample-tokens=0"]


@pytest.fixture(autouse=True)
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


def facts(run: Path) -> Mapping[str, Any]:
    """The contents of summary.json."""
    found: Mapping[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def printed(out: str) -> dict[int, float]:
    """Step -> validation loss, as the run printed them."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): validation loss ([\d.]+)", out)}


def test_validation_losses_are_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the line of their step, in summary.json, in the event file and in the report; also those of a run that is continued."""
    assert main(["train", *FLAGS, "--steps=5", "--eval-every=2", "--run-dir=run", "--report-to=tensorboard"]) == 0
    said = printed(capsys.readouterr().out)
    assert list(said) == [2, 4, 5]
    lines = read_metrics(here / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    found = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert {step: round(loss, 4) for step, loss in found.items()} == said
    assert all(line["validation_tokens"] > 0 and line["validation_bits_per_byte"] > 0 for line in lines if line["step"] in found)
    assert len({frozenset(line) for line in lines if line["step"] not in found}) == 1
    assert main(["train", "--resume=run", "--steps=6", "--eval-every=3", "--report-to=tensorboard"]) == 0
    lines = read_metrics(here / "run" / "metrics.jsonl")
    after = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert list(after) == [2, 4, 5, 6]
    assert {step: after[step] for step in found} == found
    summary = facts(here / "run")
    assert (summary["validation_loss_first"], summary["validation_loss_last"]) == (found[2], after[6])
    assert summary["validation_loss_least"] == min(after.values())
    assert after[summary["validation_loss_least_step"]] == summary["validation_loss_least"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(here / "run" / "tensorboard"))
    events.Reload()
    assert {each.step: each.value for each in events.Scalars("validation/loss")} == pytest.approx(after)
    assert {"validation/bits_per_byte", "validation/tokens", "train/loss"} <= set(events.Tags()["scalars"])
    from wrappers.report.page import page

    document = page(read_run(here / "run"))
    assert f"{summary['validation_loss_least']:.4f}, {after[6]:.4f}" in document
    assert '"validation"' in document


def test_a_run_that_validates_nothing_says_nothing_of_it(here: Path) -> None:
    """No key in any line or in the summary."""
    assert main(["train", *FLAGS, "--steps=1", "--run-dir=run"]) == 0
    assert not any("validation" in key for key in (*facts(here / "run"), *read_metrics(here / "run" / "metrics.jsonl")[0]))


def test_a_validation_grows_the_last_line_alone(tmp_path: Path) -> None:
    """At every moment the file has whole lines; a loss that is not finite is null; a full disk is named."""
    journal = Journal(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        journal.add_line({"step": step, "loss": 1.0 / step})
        if step > 1:
            journal.add_validation(step, {"validation_loss": 4.0 - step if step == 2 else float("nan"), "validation_bits_per_byte": None})
            assert [line["step"] for line in read_metrics(journal.path)] == [*range(1, step + 1)]
    lines = read_metrics(journal.path)
    assert lines == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5, "validation_loss": 2.0}, {"step": 3, "loss": 1 / 3, "validation_loss": None}]
    assert (journal.whole.validation_first, journal.whole.validation_least_step) == (2.0, 2)
    with pytest.raises(AssertionError):
        journal.add_validation(2, {"validation_loss": 1.0})
    journal.close()
    again = Journal(journal.path, 2)
    assert (again.whole.validation_last, again.whole.steps) == (2.0, 2)
    again.add_line({"step": 3, "loss": 0.1})
    again._file.close()
    again._file = open("/dev/full", "r+", encoding="utf-8", buffering=1)  # noqa: SIM115 - the journal closes it
    with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl"):
        again.add_validation(3, {"validation_loss": 1.0})


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own(here: Path) -> None:
    """Processes whose clock stands still all train; a run that is refused leaves no directory behind."""
    code = "import sys, time; time.strftime = lambda form: 'now'; from wrappers.cli import main; sys.exit(main(sys.argv[1:]))"
    command, env = [sys.executable, "-c", code, "train", *FLAGS, "--steps=1"], {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, cwd=here, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    named = sorted(re.search(r"^run: (\S+)$", out, re.MULTILINE)[1] for out in outputs)  # type: ignore[index]
    assert named == ["runs/now-small", "runs/now-small-2", "runs/now-small-3"]
    assert all((here / name / "summary.json").is_file() for name in named)
    before = sorted(path.name for path in (here / "runs").iterdir())
    assert main(["train", *FLAGS, "--steps=1", "--ram=1KB"]) == 3
    assert sorted(path.name for path in (here / "runs").iterdir()) == before


def test_a_refused_first_run_leaves_no_directory(here: Path) -> None:
    """Nor the directory of all runs."""
    assert main(["train", *FLAGS, "--steps=1", "--ram=1KB"]) == 3
    assert main(["train", *FLAGS, "--steps=1", "--dry-run"]) == 0
    assert not run_directory.RUNS.exists()


@pytest.mark.parametrize(
    ("schedule", "first", "then", "words"),
    [
        ("cosine", 4, 8, r"schedule cosine ends after 8 steps and ended after 4: the learning rate goes from 0 in step 4 to \S+ in step 5"),
        ("linear", 4, 6, r"the schedule linear ends after 6 steps and ended after 4"),
        ("constant", 4, 8, ""),
    ],
)  # fmt: skip
def test_more_steps_that_lift_a_decayed_rate_are_said(
    here: Path, capsys: pytest.CaptureFixture[str], schedule: str, first: int, then: int, words: str
) -> None:
    """One line with both rates, which are those of the steps; none where the rate goes on as it was."""
    assert main(["train", *FLAGS, f"--steps={first}", f"--schedule={schedule}", "--warmup-steps=1", "--lr=0.005", "--run-dir=run"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume=run", f"--steps={then}"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall("the schedule .* ends after", out)) == bool(words)
    assert re.search(words, out)
    if words:
        lines = read_metrics(here / "run" / "metrics.jsonl")
        rates = re.search(r"goes from (\S+) in step (\d+) to (\S+) in step", out)
        assert rates is not None
        assert (f"{lines[first - 1]['lr']:.3g}", str(first), f"{lines[first]['lr']:.3g}") == rates.groups()


def test_steps_that_change_no_rate_are_not_mentioned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule that has not begun to decay goes on as it would have."""
    assert main(["train", *FLAGS, "--steps=2", "--schedule=wsd", "--warmup-steps=2", "--run-dir=run"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume=run", "--steps=9"]) == 0
    assert "the schedule" not in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_standard_output_of_any_encoding(here: Path, encoding: str) -> None:
    """Characters that it lacks are replaced in text, and escaped in JSON; the exit code is that of the command."""
    for path in (here / "text").iterdir():
        path.write_text("\u0442\u0435\u043a\u0441\u0442 \u6587 \u00fc " * 200, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}

    def run(*args: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-m", "nntask", *args], cwd=here, env=env, capture_output=True, check=False)

    flags = [flag for flag in FLAGS if "sample" not in flag]
    trained = run("train", *flags, "--steps=1", "--sample-tokens=8", "--run-dir=run", "--prompt", "\u0442\u0435\u043a\u0441\u0442 \u00fc")
    assert (trained.returncode, trained.stderr) == (0, b"")
    prompt = "\u0442\u0435 \u00fc"
    plain, structured = (run("generate", "run", "--prompt", prompt, "--max-new-tokens=4", *more) for more in ([], ["--json"]))
    assert (plain.returncode, plain.stderr, structured.returncode, structured.stderr) == (0, b"", 0, b"")
    shown = plain.stdout.decode(encoding)
    assert shown.startswith(prompt.encode(encoding, "replace").decode(encoding))
    assert json.loads(structured.stdout.decode(encoding))["prompt"] == prompt


def test_a_run_whose_steps_are_done_is_continued_by_its_last_validation(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed in its last validation has nothing else to do: the result joins the line of the last step."""
    assert main(["train", *FLAGS, "--nepochs=1", "--val-path=text/3.txt", "--dataset-select=2", "--eval-every=500", "--run-dir=run"]) == 0
    last = read_metrics(here / "run" / "metrics.jsonl")[-1]
    capsys.readouterr()
    assert main(["train", "--resume=run"]) == 0
    again = read_metrics(here / "run" / "metrics.jsonl")[-1]
    assert printed(capsys.readouterr().out).keys() == {last["step"]}
    assert again == last
    assert "validation_loss" in again


def test_a_link_to_nothing_in_place_of_the_runs_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unmounted disk: one sentence, and no wait."""
    (here / "runs").symlink_to("/no such disk/runs")
    assert main(["train", *FLAGS, "--steps=1"]) in (2, 6)
    assert capsys.readouterr().err.count("\n") == 1
