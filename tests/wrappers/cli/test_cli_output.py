"""Standard streams that are full, closed, or read by nobody: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.commands import start
from support.deadline import DEADLINE

from nntask.checkpoints import find_checkpoint
from wrappers.cli.output import Doing, complain

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ("", "--help", "plan --help", "devices --json", "models")
SENTENCE = "nntask: cannot write to standard output: No space left on device; files saved so far are complete\n"


def shell(command: str, streams: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command with its streams redirected by a shell."""
    return subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m nntask {command} {streams}'],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_standard_output(command: str, tmp_path: Path) -> None:
    """Exit code 6 and one sentence."""
    done = shell(command, ">/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (6, SENTENCE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_standard_output(command: str, tmp_path: Path) -> None:
    """What is printed goes nowhere, and the exit code is that of the command."""
    done = shell(command, ">&-", tmp_path)
    assert (done.returncode, done.stderr) == (0 if command else 2, "")


def test_a_run_with_its_streams_closed(tmp_path: Path) -> None:
    """It trains and saves; no file of it takes the number of a stream."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    (tmp_path / "small.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3})
    )
    flags = "--config-path small.json --dataset text --dataset-path text.txt --tokenizer bytes --batch 1 --steps 1 --sample-tokens 0 --run-dir run"
    done = shell(f"train {flags}", "<&- >&- 2>&-", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    exported = shell("export run model", ">/dev/full", tmp_path)
    assert (exported.returncode, exported.stderr) == (6, SENTENCE)
    assert (tmp_path / "model" / "config.json").is_file()
    written = shell("generate run --max-new-tokens 2", ">/dev/full", tmp_path)
    assert (written.returncode, written.stderr) == (6, SENTENCE)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_training_whose_output_goes_nowhere_is_saved(tmp_path: Path, is_terminal: bool) -> None:
    """If the reader of a pipe ends, or a terminal closes, the steps done are saved first; the exit code says that the run is not complete."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    (tmp_path / "small.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3})
    )
    flags = "--config-path small.json --dataset text --dataset-path text.txt --tokenizer bytes --batch 1 --sample-tokens 0 --run-dir run"
    command = [sys.executable, "-m", "nntask", "train", *flags.split(), "--steps", "1000000"]
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    take_terminal = f"import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, {command})"
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal] if is_terminal else command,
        stdin=theirs if is_terminal else subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=is_terminal,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    os.close(theirs)
    shown = b""
    while b"step 3/" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    _, err = process.communicate(timeout=DEADLINE)
    saved = find_checkpoint(tmp_path / "run")
    assert saved.step >= 3
    if process.returncode != 129:  # the signal of the terminal has come before a write failed
        why = "Input/output error" if is_terminal else "Broken pipe"
        ending = f"interrupted after step {saved.step}; continue with: nntask train --resume run\n"
        assert (process.returncode, err) == (6, f"nntask: cannot write to standard output: {why}; {ending}")


EVENT = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
def happen():
    if {breaks}:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    if {number}:
        signal.raise_signal({number})
def hook(event, args):
    if event == "os.rename" and str(args[1]).endswith("/{file}"):
        happen()
sys.addaudithook(hook)
if "{file}" == "closing":
    import scheduler.api.runtime as runtime
    honest = runtime.Runtime.__exit__
    def close(self, *error):
        happen()
        return honest(self, *error)
    runtime.Runtime.__exit__ = close
elif "{file}" == "start":
    happen()
"""


@pytest.mark.parametrize(("breaks", "number"), [(True, 0), (False, signal.SIGHUP), (True, signal.SIGHUP)], ids=["broken", "signal", "both"])
@pytest.mark.parametrize("file", ["start", "config.toml", "step-000002", "summary.json", "closing"])
def test_a_training_that_is_interrupted_or_unread_never_exits_with_0(file: str, breaks: bool, number: int, tmp_path: Path) -> None:
    """At whichever moment of a run: 128 + signal after a signal, otherwise 6 after lines that could not be printed."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    flags = "--model tiny --dataset text --dataset-path text.txt --tokenizer bytes --seq-len 16 --batch 1 --steps 2 --ncpu 1 --sample-tokens 2"
    process = start("train", *flags.split(), "--run-dir=run", script=EVENT.format(file=file, breaks=breaks, number=int(number)), cwd=tmp_path)
    _, err = process.communicate(timeout=DEADLINE)
    unread = breaks and file != "closing"  # nothing is printed after that
    killed = file == "start" and number  # no run has begun that could be saved
    assert process.returncode % 256 in ((128 + number, 256 - number) if killed else (128 + number if number else 6 * unread,)), err
    assert "Traceback" not in err or killed
    if unread and not number:
        left = "nothing was saved" if file in ("start", "config.toml") else "all 2 steps were done"
        assert err.startswith("nntask: cannot write to standard output: Broken pipe; "), err
        assert left in err


def test_a_dry_run_that_nobody_reads_is_no_failure(tmp_path: Path) -> None:
    """As with other commands that print: at the first line, or at the settings."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    flags = "--model tiny --dataset text --dataset-path text.txt --tokenizer bytes --seq-len 16 --batch 1 --steps 2 --ncpu 1 --dry-run"
    process = start("train", *flags.split(), script=EVENT.format(file="start", breaks=True, number=0), cwd=tmp_path)
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, "")
    assert not (tmp_path / "runs").exists()


def test_an_error_that_nobody_can_read(tmp_path: Path) -> None:
    """The exit code still says what happened."""
    assert shell("devices --ram much", ">/dev/full 2>/dev/full", tmp_path).returncode == 2


@pytest.mark.parametrize("command", [["devices"], ["train", "--steps=1", "--sample-tokens=0", "--run-dir=run"]], ids=lambda command: command[0])
def test_a_system_that_starts_no_more_threads(command: list[str], tmp_path: Path) -> None:
    """A limit of processes, here a stack that no memory holds, gives exit code 6 and one sentence, and the command does not hang."""
    process = start(*command, script="import threading; threading.stack_size(1 << 46)", cwd=tmp_path)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 6, err
    assert err.splitlines()[-1].startswith("nntask: the system starts no more threads for this process; raise its limit of processes (ulimit -u")
    assert "Traceback" not in err


NO_MORE_FILES = """
import contextlib, errno, io, os, shutil, sys
from wrappers.cli import main
left = refused = None
def hook(event, args):
    global left, refused
    if event == "open" and left is not None and isinstance(args[0], str) and not args[0].endswith((".py", ".pyc", ".pyi")):
        left -= 1
        if left < 0:
            refused = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), args[0])
sys.addaudithook(hook)
for count in (1000, *range(0, 1000, 23)):
    left, refused = count, False
    print(f"-- {{count}}", file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()):
        code = main({argv})
    left = None
    shutil.rmtree("run", ignore_errors=True)
    print(f"exit {{code}}", file=sys.stderr)
    if count < 1000 and (code == 0 or not refused):
        break
"""


@pytest.mark.parametrize("disk", [[], ["--ram=12MiB", "--disk=tier"]], ids=["memory", "disk"])
def test_a_system_that_opens_no_more_files(disk: list[str], tmp_path: Path) -> None:
    """Whichever file meets the limit, the command blames the limit, and neither that file nor its directory. Best effort is all that may follow."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    argv = ["train", "--dataset=text", "--dataset-path=text.txt", "--seq-len=16", "--batch=1", "--steps=2", "--ncpu=1", "--run-dir=run", *disk]
    process = start("--help", script=NO_MORE_FILES.format(argv=argv), cwd=tmp_path)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    first, *limited, last = [part.partition("\n")[2] for part in err.split("-- ")[1:]]
    assert len(limited) > 5
    sentence = "nntask: the system opens no more files for this process; raise its limit of open files (ulimit -n)\nexit 6\n"
    assert [part for part in limited if part != sentence] == []
    assert (first, last) == ("exit 0\n", "exit 0\n")


def test_a_reader_that_has_ended(tmp_path: Path) -> None:
    """A broken pipe is no error."""
    done = shell("plan --help", "| true", tmp_path)
    assert done.stderr == ""


def test_errors_show_names_of_files_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """Escape codes of a name become text, letters stay letters, and megabytes are left out."""
    complain("\x1b]0;owned\x07größer\x9b31m\u202e\nall is well is not a name; choose another")
    complain("x" * 10_000)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "nntask: \\x1b]0;owned\\x07größer\\x9b31m\\u202e\\nall is well is not a name; choose another"
    assert second == f"nntask: {'x' * 4000}... (6,000 more characters)"


def test_a_planner_that_takes_long_says_what_it_is_doing() -> None:
    """Nothing before the silence is over, then the latest message and each later one, repeated if none follows; nothing after the command."""
    logger, shown, is_shown = logging.getLogger("some.planner"), list[str](), threading.Event()

    def show(sentence: str) -> None:
        shown.append(sentence)
        is_shown.set()

    with Doing("some", 0.01, show):
        logger.info("capturing %d minibatches", 4)
        logger.info("comparing orders")
        assert is_shown.wait(30)
        logger.info("running it")
    logger.info("done")
    assert shown[-2:] == ["comparing orders", "running it"]
    with Doing("some", 1000, show):
        logger.info("fast")
    assert shown[-1] == "running it"
    is_repeated = threading.Event()
    with Doing("some", 0.01, lambda sentence: is_repeated.set() if sentence == "slow (0 s so far)" else None, every=0.01):
        logger.info("slow")
        assert is_repeated.wait(30)
