"""The stages for a first card, rehearsed over strict libraries: what fails takes nothing else along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cuda_emulator import COMPILER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def first_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import first_card as script

    return script


def session(script: Any, out: Path, **terms: Any) -> Any:
    """A rehearsal."""
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests"))
    return script.Session(out, rehearse=True, env={**os.environ, "PYTHONPATH": paths}, **terms)


@pytest.mark.parametrize("fault", ["exit", "kill", pytest.param("hang", marks=pytest.mark.long), pytest.param("garbage", marks=pytest.mark.long)])
def test_a_command_that_fails_is_told_and_goes_on_behind(fault: str, first_card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies within a check loses that check; one that never gets to any is given up."""
    monkeypatch.setattr(first_card, "FAULTS", (fault,))
    run = session(first_card, tmp_path, fail_every=2)
    run.num_commands = 1  # the next one fails
    run.command("environment", first_card.Command("machine", 60, ""), first_card.time.monotonic() + 60)
    lines = list(run.read("environment"))
    found = [line["check"] for line in lines if "result" in line]
    (failed,) = (line for line in lines if line.get("status") == "failed")
    if fault in ("kill", "garbage"):
        assert failed["check"] == "processor"
        assert found == ["packages", "missing", "nvidia-smi", "cards", "python"]
        assert lines[-1]["status"] == "ended"
    else:
        assert found == []
        assert lines[-1]["status"] == "stopped"
    assert "failed" in first_card.table("environment", lines)


def test_results_outlive_a_broken_line(first_card: Any, tmp_path: Path) -> None:
    """A process that died while it wrote leaves the lines around its own."""
    path = tmp_path / "x.jsonl"
    first_card.append(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": ')
    first_card.append(path, {"c": 2})
    assert list(first_card.read_lines(path)) == [{"a": 1}, {"c": 2}]


def test_stages_fit_their_time(first_card: Any) -> None:
    """The limits of a stage's commands add up to nine minutes at most, and each is a command that there is."""
    import first_card_items as items

    for stage, commands in first_card.STAGES.items():
        assert sum(command.seconds for command in commands) <= first_card.STAGE_SECONDS, stage
    assert {command.name for commands in first_card.STAGES.values() for command in commands} == items.COMMANDS.keys()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
@pytest.mark.parametrize("fail_every", [0, 3])
def test_a_rehearsal_ends_with_the_results_of_the_rest(fail_every: int, first_card: Any, tmp_path: Path) -> None:
    """Of every stage; without failures nothing is missing, and no call is refused."""
    run = session(first_card, tmp_path, fail_every=fail_every)
    for stage in first_card.STAGES:
        run.stage(stage)
    text = (tmp_path / "summary.md").read_text()
    for stage, commands in first_card.STAGES.items():
        lines = list(run.read(stage))
        told = {line["command"] for line in lines if line.get("status") in ("ended", "stopped")}
        assert told == {command.name for command in commands}
        results = [line["result"] for line in lines if "result" in line]
        assert [result for result in results if isinstance(result, dict) and "failed" in result] == []
        assert stage in text
    assert ("failed" in text) == bool(fail_every)


def test_cudnn_is_measured_beside_our_attention(first_card: Any, cuda_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of both passes, the distance from our kernels and whether bits stay; where it is not installed, the reason."""
    from attention_speed import cudnn_seconds
    from support import strict_cudnn
    from support.strict_cuda import installed, opened

    from tiles.kernels.cuda import library_attention

    with installed(cuda_libraries, tmp_path / "code") as cuda:
        (gpu,) = opened(cuda)
        monkeypatch.setitem(sys.modules, "cudnn", None)
        library_attention.frontend.cache_clear()
        assert "nvidia-cudnn-frontend" in cudnn_seconds(gpu, 1, 8, 1, 64)["not there"]
        with strict_cudnn.installed(cuda):
            found = cudnn_seconds(gpu, 1, 8, 1, 64)
            assert found["same bits"]
            assert found["away"] < 0.1
            assert {"forward", "backward"} < found.keys()
        gpu.close()
        assert cuda.found == []


def test_without_a_card_it_is_refused(first_card: Any, tmp_path: Path) -> None:
    """A machine without any driver is told at once, and nothing is written."""
    if first_card.has_driver():
        pytest.skip("there is a driver here")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "first_card.py"), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--rehearse" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_list_of_stages_installs_nothing(tmp_path: Path) -> None:
    """`make first-card ARGS=--list` is a script of the standard library, whatever interpreter there is."""
    make = ["make", "--no-print-directory", "-C", str(ROOT), "first-card", f"VENV={tmp_path / 'none'}"]
    found = subprocess.run([*make, "ARGS=--list", f"PYTHON={sys.executable} -S"], capture_output=True, text=True, check=True)
    assert "pip install" not in found.stdout
    assert "environment\n    machine" in found.stdout
    assert not (tmp_path / "none").exists()
    others = subprocess.run([*make, "--dry-run", "ARGS=--rehearse"], capture_output=True, text=True, check=True)
    assert "pip install" in others.stdout
