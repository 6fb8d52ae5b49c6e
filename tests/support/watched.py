"""Calls under watch: the error that a reader raises, what it writes and starts, and the time and memory that it takes.

The bounds hold for every reader of files from elsewhere. Memory is one of two figures: the peak of Python's allocations, which counts arrays that
nobody has touched yet, or the peak of resident memory, which counts that of libraries. To trace allocations takes memory itself, so a call is
watched for one of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nntask.errors import NntaskError

MOST_SECONDS: Final = 10.0
PER_BYTE: Final = 4
BESIDES: Final = 64 << 20
"""Bytes of memory that a reader may take besides `PER_BYTE` for each byte of its file."""
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: Final = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "os.mkfifo"})
_STARTS: Final = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "socket.connect"})
_OWN: Final = ("/proc/self/clear_refs", "/dev/null")
_NOTES: list[str] = []
_IS_ON: list[bool] = []


@dataclass(slots=True)
class Outcome:
    """What a call did.

    Args:
        value: what it returned; None if it raised.
        error: what it raised; None if it returned.
        seconds: processor time, 0 of a traced call, which takes several times as long; tests share a machine, and pytest ends those that wait.
        nbytes: peak memory above what was in use before.
        writes: paths that it wrote or changed, and programs and connections that it started.
    """

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    nbytes: int = 0
    writes: list[str] = field(default_factory=list)


def watch(call: Callable[[], Any], *, traced: bool = False) -> Outcome:
    """Call a function; return what it did.

    Args:
        call: the function.
        traced: whether memory is that of Python's allocations; else it is resident memory.
    """
    _listen()
    found = Outcome()
    before = _resident("VmRSS")
    Path(_OWN[0]).write_text("5")  # resets the peak of resident memory
    if traced:
        tracemalloc.start()
    _NOTES.clear()
    begin = time.process_time()
    _IS_ON.append(True)
    try:
        found.value = call()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found.error = error.with_traceback(None) if isinstance(error, NntaskError) else error
    finally:
        _IS_ON.clear()
        found.seconds = 0.0 if traced else time.process_time() - begin
        found.nbytes = tracemalloc.get_traced_memory()[1] if traced else _resident("VmHWM") - before
        tracemalloc.stop()
    found.writes = list(_NOTES)
    return found


def check(found: Outcome, nbytes: int) -> None:
    """Check that a reader of a file of `nbytes` bytes kept all bounds."""
    if found.error is not None and not isinstance(found.error, NntaskError):
        raise AssertionError(f"a reader raised {type(found.error).__name__}: {str(found.error)[:300]}") from found.error
    assert found.writes == []
    assert found.seconds <= MOST_SECONDS
    assert found.nbytes <= PER_BYTE * nbytes + BESIDES, f"{found.nbytes / 2**20:.0f} MiB for a file of {nbytes / 2**20:.2f} MiB"
    if found.error is not None:
        said = str(found.error)
        assert said


def check_reader(read: Callable[[Path], object], path: Path, *, traced: bool = False) -> Outcome:
    """Read a file under watch and check the bounds; returns the outcome.

    Args:
        read: the reader.
        path: the file, or the directory that holds it.
        traced: see `watch`.
    """
    found = watch(lambda: read(path), traced=traced)
    check(found, _size(path))
    return found


@contextlib.contextmanager
def in_directory(path: Path) -> Iterator[None]:
    """Make a directory the current one."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def _resident(key: str) -> int:
    """A figure of this process in bytes: VmRSS, or VmHWM, the peak since `watch` began."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None  # Linux
    return int(found[1]) << 10


def _listen() -> None:
    """Install the audit hook, once in a process, since hooks stay."""
    if not hasattr(sys, "_nntask_watch"):
        sys.addaudithook(_heard)
        sys._nntask_watch = True  # type: ignore[attr-defined]


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _IS_ON:
        return
    if event == "open":
        path, mode, flags = args
        wants = bool(flags & _WRITING) if mode is None else any(letter in mode for letter in "wax+")
        if wants and not isinstance(path, int) and "__pycache__" not in str(path) and str(path) not in _OWN:
            _NOTES.append(f"open {path}")
    elif event == "subprocess.Popen" and args[0] == sys.executable:
        return  # the confined process of tokenizers and templates
    elif (event in _CHANGES and "__pycache__" not in str(args)) or event in _STARTS:
        _NOTES.append(f"{event} {args!r}"[:200])
