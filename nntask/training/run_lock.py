"""Lock of a run directory, which allows one run at a time: the training process holds a lock on a file in it for its lifetime.

The kernel releases the lock when the process ends for any reason, so a killed run can be resumed at once. The file remains and means nothing by
itself. Child processes do not keep the lock: the file is closed when they execute their program, and a run that ends unlocks it explicitly for
children that have not executed yet. On file systems without such locks, such as some network file systems, runs continue without one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..errors import StorageError, UsageError
from ..io.atomic_write import make_directories

LOCK: Final = ".lock"
"""Lock file; it names the process and the machine that hold it, or held it last."""


class RunLock:
    """Lock of a run on its directory, released at the end of the block.

    Args:
        run: directory of the run.
        flag: flag that named the directory.
        check: check repeated under the lock, since another run may have used the directory since the first check.
    """

    def __init__(self, run: Path, flag: str, check: Callable[[], None]) -> None:
        self._run, self._flag, self._check = run, flag, check
        self._fd: int | None = None

    def take(self) -> None:
        """Create the directory if it is missing, and lock it. Idempotent.

        Raises:
            UsageError: another process holds the lock.
            StorageError: the disk is full or failed.
        """
        if self._fd is not None:
            return
        path = self._run / LOCK
        try:
            make_directories(self._run)
            self._fd = _opened(path, os.O_RDWR | os.O_CREAT)  # writable, since NFS needs it for a lock; not inherited by child processes
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", "make room or choose another --run-dir") from error
        _lock(self._fd, fcntl.LOCK_EX, self._run, self._flag)
        with contextlib.suppress(OSError):  # on a full disk, the message to another run cannot name this one
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        self._check()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing alone would leave the lock to a forked child with its own copy of the file
            os.close(self._fd)
            self._fd = None


def check_unlocked(run: Path, flag: str) -> None:
    """Check that no process trains in a directory, without creating anything.

    Raises:
        UsageError: another process does.
    """
    with contextlib.suppress(OSError):  # no such file, or no permission to read it
        fd = _opened(run / LOCK, os.O_RDONLY)
        try:
            _lock(fd, fcntl.LOCK_SH, run, flag)
        finally:
            os.close(fd)


def _opened(path: Path, flags: int) -> int:
    """Open a lock file, which may be foreign: links are refused, since they lead elsewhere, and pipes, since they may block.

    Raises:
        UsageError: the path is a link, or no regular file.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_a_lock(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_a_lock(path)
    return fd


def _not_a_lock(path: Path) -> UsageError:
    return UsageError(f"{path} must be a regular file, the lock of a run, and is a link or a special file", "remove it, or give another --run-dir")


def _lock(fd: int, kind: int, run: Path, flag: str) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = re.fullmatch(r"(\d{1,10}) ([\w.-]{1,253})", os.pread(fd, 300, 0).decode("ascii", errors="replace").strip(), re.ASCII)
        who, stop = ("another process", "stop it")
        if holder is not None:
            who, stop = f"process {holder[1]} on {holder[2]}", f"stop it there with kill {holder[1]}"
        raise UsageError(
            f"is in use: {who} is training in it", f"wait for its end, {stop}, or give another --run-dir", flag=flag, value=run
        ) from None
    except OSError:
        pass  # no locks on this file system
