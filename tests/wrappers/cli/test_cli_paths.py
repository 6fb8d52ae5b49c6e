"""Paths and users that a file system or a machine knows nothing of: one sentence, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, refuse, start
from support.deadline import DEADLINE

from nntask.data import TokenFile
from nntask.errors import DataError
from nntask.hf.shard_index import INDEX, indexed_files
from wrappers.cli import main
from wrappers.report.records import read_trace

LONG = "a" * 5000
CONFIG = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3}
TRAIN = ["train", "--config-path=small.json", "--dataset=text", "--dataset-path=text", "--tokenizer=bytes"]
SHORT = [*TRAIN, "--batch=2", "--ncpu=1", "--sample-tokens=0", "--steps=1"]
HOMELESS = """
import os, pwd
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
"""


@pytest.fixture
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and text."""
    (folder / "small.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize(
    "argv",
    [
        ["train", f"--dataset-path={LONG}", "--dataset=text"],
        ["train", f"--resume={LONG}"],
        ["train", f"--config-path={LONG}"],
        [*TRAIN, f"--run-dir={LONG}"],
        [*TRAIN, f"--init-from={LONG}"],
        [*TRAIN, f"--tokenizer-path={LONG}"],
        [*TRAIN, f"--trace-steps=all@{LONG}"],
        [*TRAIN, f"--disk={LONG}"],
        ["generate", LONG, "--prompt=a"],
        ["perplexity", LONG],
        ["report", LONG],
        ["export", LONG, "out"],
        ["quantize", LONG, "out", "--type=q8_0"],
        ["data", "prepare", "--dataset=text", "--dataset-path=text", f"--output={LONG}"],
    ],
    ids=lambda argv: "-".join(argv).replace(LONG, "").strip("-="),
)
def test_a_name_that_no_file_system_takes(argv: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever flag or argument names it, the command ends with a sentence."""
    code, err = refuse(capsys, argv)
    assert code in (2, 4)
    assert LONG[:100] in err
    assert len(err) < len(LONG)


@pytest.mark.parametrize("argv", [["generate", "/run", "--prompt=a"], ["train", "--steps=1"]], ids=["generate", "train"])
def test_a_working_directory_that_was_removed(
    argv: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels cannot be compiled there; a sentence says so before anything else."""
    (here / "gone").mkdir()
    monkeypatch.chdir("gone")
    (here / "gone").rmdir()
    code, err = refuse(capsys, argv)
    assert (code, err) == (2, "nntask: the working directory cannot be used: No such file or directory; change to another one\n")
    for question in (["--help"], ["--version"], [argv[0], "--help"], [argv[0], "-h"], ["train", "--help-all"]):
        try:
            code = main(question)
        except SystemExit as ended:
            code = int(ended.code or 0)
        assert (code, capsys.readouterr().err) == (0, "")


def test_names_of_that_kind_in_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An index of shards is refused; the trace that config.toml names is not there, and the report is drawn."""
    for name in (LONG, "\ud800" * 200, "a\0b"):
        (here / INDEX).write_text(json.dumps({"weight_map": {"wte": name}}))
        with pytest.raises(DataError, match=r"is no file name|has no .*, which"):
            indexed_files(here)
    assert main([*SHORT, "--run-dir=run"]) == 0
    (here / "run" / "config.toml").write_text(f'[observe]\ntrace = "{LONG}"\n')
    assert main(["report", "run"]) == 0


def test_brackets_without_end_in_a_sidecar_and_a_trace(here: Path) -> None:
    """They are nested too deeply for a parser, and are no sidecar and no trace."""
    (here / "train.bin").write_bytes(bytes(200 << 10))
    (here / "train.bin.json").write_text("[" * 60_000)
    with pytest.raises(DataError, match=r"train.bin.json must be"):
        TokenFile(here / "train.bin", vocab_size=300)
    (here / "trace.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="is not whole"):
        read_trace(here / "trace.json")


def test_a_user_without_a_name_and_a_home(here: Path) -> None:
    """With NNTASK_CACHE commands work as ever; without it, what needs the cache says how to name one."""
    assert main([*SHORT, "--run-dir=run"]) == 0
    process = start("report", "run", script=HOMELESS)
    assert process.communicate(timeout=DEADLINE) == ("run/report.html\n", "")
    process = start(*SHORT, "--run-dir=b", script=f'{HOMELESS}\nos.environ.pop("NNTASK_CACHE")')
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 4
    assert err == f"nntask: cannot use the cache {os.devnull}/.cache/nntask: Not a directory; set NNTASK_CACHE to a writable directory with space\n"


@pytest.mark.parametrize("name", [pytest.param(b"l\xc3\xa4uft", marks=pytest.mark.long), b"l\xe4uft"])
def test_any_name_under_a_plain_locale(name: bytes, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run directory whose name the locale cannot write, or that is not UTF-8, trains, saves and is reported where Python has ASCII only."""
    for variable, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0"), ("PYTHONIOENCODING", "ascii")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = here / os.fsdecode(name)
    for argv in ([*SHORT, f"--run-dir={run}"], ["report", str(run)]):
        done = subprocess.run([sys.executable, "-m", "nntask", *argv], capture_output=True, timeout=DEADLINE)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert (run / "checkpoints" / "step-000001" / "model.safetensors").is_file()
    assert (run / "report.html").is_file()
