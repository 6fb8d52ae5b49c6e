"""What is written appears whole or not at all, whoever is killed when."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.deadline import DEADLINE

from nntask.io.atomic_write import written_aside

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal, sys
from pathlib import Path
from nntask.io.atomic_write import written_aside
seen = 0
def hook(event, args):
    global seen
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open", "tempfile.mkdtemp", "shutil.rmtree"):
        seen += 1
        if seen == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
with written_aside(Path(sys.argv[1])) as new:
    new.mkdir()
    (new / "a").write_text("new")
print("done", flush=True)
"""


def make(target: Path, text: str) -> None:
    """A directory with one file."""
    with written_aside(target) as new:
        new.mkdir()
        (new / "a").write_text(text)


def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    """SIGKILL before the n-th file operation while a directory is replaced: the old or the new one is there, at the next writer at the latest."""
    kills = 0
    for count in range(1, 40):
        run = tmp_path / str(count)
        make(run / "out", "old")
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(run / "out"), str(count)], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE
        )
        kills += done.returncode == -signal.SIGKILL
        with pytest.raises(RuntimeError), written_aside(run / "out"):  # one that fails clears up behind the one that was killed
            raise RuntimeError
        assert (run / "out" / "a").read_text() in ("old", "new")
        assert [each.name for each in run.iterdir()] == ["out"]
        if "done" in done.stdout:
            break
    assert kills > 8


def test_a_failure_between_the_renames_is_undone(tmp_path):
    """The old directory gets its name back; what a living process writes is left alone meanwhile."""
    make(tmp_path / "out", "old")
    with written_aside(tmp_path / "out") as other:
        with pytest.raises(FileNotFoundError), written_aside(tmp_path / "out"):
            pass  # nothing was made, so there is nothing to rename
        assert (tmp_path / "out" / "a").read_text() == "old"
        other.mkdir()
    assert list((tmp_path / "out").iterdir()) == []
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_writers_of_one_directory_do_not_disturb_each_other(tmp_path):
    """Runs that build the same cache at once: each write ends well, and the directory is that of one of them."""

    def write(number: int) -> None:
        for _ in range(25):
            make(tmp_path / "out", str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))  # raises what a writer raised
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a").read_text() in "0123"


def test_a_directory_that_another_writer_moves_away_is_not_a_device(tmp_path):
    """The target is away for one look at the file system, the n-th, and back at the next one: the writer reaches its block all the same."""
    target, away = tmp_path / "out", tmp_path / "away"
    make(target, "old")

    def move(_frame: object, event: str, function: object) -> None:
        nonlocal looks
        if event == "c_call" and function is os.stat:
            looks += 1
            if looks == absent:
                target.rename(away)
            elif looks == absent + 1:
                away.rename(target)

    absent, looks = 0, 0
    while absent <= looks:
        absent, looks = absent + 1, 0
        sys.setprofile(move)
        try:
            with pytest.raises(KeyError), written_aside(target):
                raise KeyError
        finally:
            sys.setprofile(None)
    assert absent > 3


def test_directories_have_the_usual_rights(tmp_path):
    """Those of mkdir, not of a temporary directory."""
    (tmp_path / "usual").mkdir()
    make(tmp_path / "out", "x")
    assert os.stat(tmp_path / "out").st_mode == os.stat(tmp_path / "usual").st_mode
