"""One run at a time in a run directory."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nntask.errors import StorageError, UsageError
from nntask.training.run_directory import check_new_run
from nntask.training.run_lock import LOCK, RunLock, check_unlocked


def locked(run: Path) -> RunLock:
    """A claim that has been taken."""
    lock = RunLock(run, "--run-dir", lambda: None)
    try:
        lock.take()
    except BaseException:
        lock.__exit__()
        raise
    return lock


def test_the_second_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """The message names the first one; what was left of it is no run, so the directory may be used again."""
    run = tmp_path / "run"
    check_unlocked(run, "--run-dir")
    with locked(run):
        words = f"--run-dir {run} is in use: process {os.getpid()} on .*; wait for its end, stop it there with kill {os.getpid()}, or give another"
        with pytest.raises(UsageError, match=words):
            check_unlocked(run, "--run-dir")
        with pytest.raises(UsageError, match=words), locked(run):
            pass
    check_unlocked(run, "--run-dir")
    check_new_run(run)
    with locked(run):
        pass


def test_a_child_does_not_hold_the_directory(tmp_path: Path) -> None:
    """A process that a run has started lives on and keeps nobody out."""
    with locked(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    with locked(tmp_path):
        pass
    child.communicate(b"\n")


def test_a_child_that_still_has_the_file(tmp_path: Path) -> None:
    """Between fork and execution a child has a copy of every open file, and with it would hold the lock."""
    with locked(tmp_path):
        files = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == (tmp_path / LOCK).resolve()]
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=files)
    with locked(tmp_path):
        assert len(files) == 1
    child.communicate(b"\n")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse every lock: runs go on without."""

    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        check_unlocked(tmp_path, "--run-dir")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """One sentence with the place and what to do."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=f"cannot write {tmp_path}/file/{LOCK}: .*choose another --run-dir"),
        locked(tmp_path / "file"),
    ):
        pass


def test_the_directory_is_looked_at_again_under_the_lock(tmp_path: Path) -> None:
    """And nothing is made before the claim is taken, or held after it was refused."""

    def refuse() -> None:
        raise UsageError("another run was here")

    run = tmp_path / "run"
    with RunLock(run, "--run-dir", refuse) as lock:
        assert not run.exists()
        with pytest.raises(UsageError, match="was here"):
            lock.take()
    with locked(run):
        pass
