"""Runs whose directory becomes full, read-only or somebody else's: one sentence, and the continuation from the checkpoint before loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, numbers, start
from support.deadline import DEADLINE
from support.fault_runs import FLAGS, prepare, undisturbed

from nntask.checkpoints.store import find_checkpoint, step_directories
from nntask.training import session
from wrappers.cli import main

TRAIN = ["train", *FLAGS.split(), "--steps=8", "--save-every=2"]
NOBODY = 65534


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with what a run needs."""
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float, float]]:
    """Every line of the run where nothing happens."""
    return undisturbed(tmp_path_factory.mktemp("truth"), TRAIN)


def content(folder: Path) -> dict[str, bytes]:
    """Names and bytes of all files below a directory."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


FAILS = """
import os, sys
is_saved = False
def hook(event, args):
    global is_saved
    if event == "os.rename" and str(args[1]).endswith("/step-000004"):
        is_saved = True
    elif is_saved and (event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink") or event == "open" and args[2] & 0o103):
        raise OSError({code}, os.strerror({code}))
sys.addaudithook(hook)
"""
"""Nothing can be written, made or removed any more once step 4 has its name."""


@pytest.mark.parametrize("code", [errno.EROFS, *(pytest.param(each, marks=pytest.mark.long) for each in (errno.EACCES, errno.ENOSPC, errno.ESTALE))])
def test_a_directory_that_takes_no_more(code: int, here: Path, truth: list[tuple[int, float, float, float]]) -> None:
    """Exit 6 and one sentence; once it takes files again the run ends as if nothing had happened."""
    process = start(*TRAIN, "--run-dir=a", script=FAILS.format(code=code))
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 6, err
    assert os.strerror(code) in err
    assert "step-000004 is safe" in err
    assert err.count("\n") == 1
    assert find_checkpoint(here / "a").step == 4
    assert main(["train", "--resume=a"]) == 0
    assert numbers(here / "a") == truth


def test_a_run_says_at_its_start_that_no_checkpoint_fits(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both figures, before hours of training."""
    monkeypatch.setattr(session, "free_bytes", lambda directory: 1024)
    assert main([*TRAIN, "--steps=1", "--run-dir=b"]) == 0
    written = sum(path.stat().st_size for path in (here / "b" / "latest").glob("*.safetensors"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("a checkpoint needs"))
    needed = float(line.split()[3])
    fact, remedy = f"a checkpoint needs {needed:g} KiB, and 1 KiB are free at b: none can be saved", "name a directory on another disk by --run-dir"
    assert line == f"{fact}; delete files there, or {remedy}"
    assert 0.8 * written < needed * 1024 <= written


def mounted(size: str, script: str, folder: Path) -> str:
    """Run a shell script in a mount namespace of its own, with a file system in memory at ``disk``; returns what it prints."""
    (folder / "disk").mkdir()
    command = f'mount -t tmpfs -o size={size} none disk || exit 77\nnntask() {{ {sys.executable} -m nntask "$@"; }}\n{script}'
    if shutil.which("unshare") is None:
        pytest.skip("this machine has no command unshare")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = ["unshare", "--mount", "sh", "-c", command]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode in (1, 77) and ("unshare" in done.stderr or done.returncode == 77):
        pytest.skip(f"this process may mount nothing: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("size", ["64k", "96k", "128k", "160k", "192k", "256k"])
def test_a_file_system_without_room(size: str, here: Path, truth: list[tuple[int, float, float, float]]) -> None:
    """Wherever the room ends: exit 6 and one sentence, what is called safe is whole, and a copy of it goes on elsewhere."""
    run = f"nntask {' '.join(TRAIN)} --keep-checkpoints=9 --run-dir=disk/a > out 2> err; echo $?; cp -a disk/a kept; true"
    code = int(mounted(size, run, here))
    err = (here / "err").read_text()
    assert code == 6, err
    assert err.count("\n") == 1
    for directory in step_directories(here / "kept"):
        find_checkpoint(directory).verify("model.safetensors", "optimizer.safetensors")
    if step_directories(here / "kept"):
        assert " is safe" in err
        assert main(["train", "--resume=kept"]) == 0
        assert numbers(here / "kept") == truth


@pytest.mark.long
def test_a_file_system_that_is_read_only(here: Path) -> None:
    """A run on it is not continued, in one sentence; it can be looked at, and nothing of it changes."""
    train = f"nntask {' '.join(TRAIN)} --run-dir=disk/a > out && cp -a disk/a before && mount -o remount,ro disk"
    resume = "nntask train --resume=disk/a --steps=10 > out 2> err; echo $?; nntask generate disk/a --prompt-ids 1 > out 2>&1; cp -a disk/a after"
    code = int(mounted("8m", f"{train}\n{resume}", here))
    err = (here / "err").read_text()
    assert code in (2, 6), err
    assert err.count("\n") == 1
    assert "Traceback" not in (here / "out").read_text()
    assert content(here / "before") == content(here / "after")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root may give files away and then do without its rights")
@pytest.mark.parametrize("is_open", [False, True])
def test_a_run_of_another_user(is_open: bool, here: Path) -> None:
    """One sentence, and nothing of the run changes; also where its directory can be written, and its files cannot."""
    assert main([*TRAIN, "--run-dir=a"]) == 0
    before = content(here / "a")
    for path in (here / "a", *(here / "a").rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    if is_open:
        (here / "a").chmod(0o777)
    without_rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]
    command = [*without_rights, sys.executable, "-m", "nntask", "train", "--resume=a", "--steps=10"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode in (2, 6), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert content(here / "a") == before
