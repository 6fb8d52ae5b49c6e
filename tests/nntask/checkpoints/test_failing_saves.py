"""Saves on a disk that is full, read-only, broken or somebody else's, from any of their file operations on: a whole checkpoint remains."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import save_step, tensor
from support.deadline import DEADLINE

from nntask.checkpoints.store import find_checkpoint

TESTS = Path(__file__).resolve().parents[2]
FAILING = """
import os, sys
from pathlib import Path
from support.checkpoints import save_step
from nntask.errors import StorageError

FEW, NONE = 0, 9
NAMES = {"os.rename", "os.symlink", "os.mkdir"} | ({"os.remove", "os.rmdir"} if sys.argv[4] == "removals too" else set())
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
code, lasts = int(sys.argv[2]), sys.argv[3] == "lasting"

def save(run, count):
    seen = 0
    def check():
        nonlocal seen
        seen += 1
        if seen == count or lasts and seen > count:
            raise OSError(code, os.strerror(code))
    def hook(event, args):
        if event in NAMES or event == "open" and args[2] & WRITES:
            check()
    honest = os.fsync
    def fsync(descriptor):
        check()
        honest(descriptor)
    sys.addaudithook(hook)
    os.fsync = fsync
    try:
        save_step(run, 10, keep=1)
    except StorageError as error:
        return error.exit_code
    return FEW if seen >= count else NONE

for count in range(1, 100):
    run = Path(sys.argv[1]) / str(count)
    save_step(run, 5)
    child = os.fork()
    if not child:
        os._exit(save(run, count))
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(count, ended, flush=True)
    if ended == NONE:
        break
"""
"""A child for each file operation of a save, which fails there: once, or from there on."""


LIMITED = """
import os, stat, sys
from pathlib import Path
from support.checkpoints import save_step

code, honest = int(sys.argv[2]), os.fsync

def fail():
    raise OSError(code, os.strerror(code))

def fsync(descriptor):
    fail() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else honest(descriptor)

sys.addaudithook(lambda event, args: fail() if event == "os.symlink" else None)
os.fsync = fsync
for step in (5, 10):
    save_step(Path(sys.argv[1]), step, keep=1)
"""


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script that imports from the tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL], ids=errno.errorcode.get)
def test_a_file_system_without_symlinks_and_fsync_of_directories(code: int, tmp_path: Path) -> None:
    """Checkpoints are saved and replaced, and the newest is found by its step, since the link `latest` is missing."""
    done = run_script(LIMITED, tmp_path / "run", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000010"]
    assert find_checkpoint(tmp_path / "run").step == 10


@pytest.mark.parametrize("lasting", ["lasting", pytest.param("once", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("code", "removals"),
    [
        pytest.param(errno.ENOSPC, "no removals", marks=pytest.mark.long),
        (errno.EROFS, "removals too"),
        pytest.param(errno.EACCES, "removals too", marks=pytest.mark.long),
        pytest.param(errno.EIO, "removals too", marks=pytest.mark.long),
        pytest.param(errno.EDQUOT, "no removals", marks=pytest.mark.long),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_a_failure_of_any_operation_keeps_a_whole_checkpoint(code: int, removals: str, lasting: str, tmp_path: Path) -> None:
    """The save says that it failed or is done, the newest checkpoint loads, and the next save works and leaves nothing else."""
    done = run_script(FAILING, tmp_path, code, lasting, removals)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    ends = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert ends[-1] == 9, "the save has more operations than were tried"
    assert set(ends[:-1]) <= {0, 6}
    assert ends.count(6) > 8
    for count in itertools.count(1):
        run = tmp_path / str(count)
        if not run.exists():
            break
        found = find_checkpoint(run)
        assert found.step in (5, 10)
        found.load({"w": tensor((4, 3), (2, 2))}, {"m": tensor((4, 3), (2, 2))})
        save_step(run, 15, keep=1)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000015"]
        assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "latest"]
