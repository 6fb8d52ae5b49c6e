"""One run at a time in a run directory: the training process holds a lock on a file in it for as long as it lives.

The kernel lets go of the lock when the process ends, however it ends, so a run that was killed can be continued at once; the file stays and means
nothing by itself. Processes that the run starts do not keep the lock: the file is closed when they execute their program, and a run that ends lets go
of the lock itself, for those that have not come that far. Where the file system has no such locks, as some network file systems, runs go
on without.
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
"""The file; it names the process and the machine that hold it, or held it last."""


class RunLock:
    """The lock of a run on its directory; let go of at the end of the block.

    Args:
        flag: that named the directory.
        check: called under the lock, since another run may have come and gone since the directory was looked at.
    """

    def __init__(self, run: Path, flag: str, check: Callable[[], None]) -> None:
        self._run, self._flag, self._check = run, flag, check
        self._fd: int | None = None

    def take(self) -> None:
        """Make the directory if need be and hold it. Idempotent.

        Raises:
            UsageError: another process holds it.
            StorageError: the disk is full or failed.
        """
        if self._fd is not None:
            return
        path = self._run / LOCK
        try:
            make_directories(self._run)
            self._fd = _opened(path, os.O_RDWR | os.O_CREAT)  # writable, or NFS gives no lock; not inherited by what the process starts
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; make room or choose another --run-dir") from error
        _lock(self._fd, fcntl.LOCK_EX, self._run, self._flag)
        with contextlib.suppress(OSError):  # a full disk: the message to another run will then not name this one
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        self._check()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would leave it to a process that has just been forked and has its copy still
            os.close(self._fd)
            self._fd = None


def check_unlocked(run: Path, flag: str) -> None:
    """Check that no process trains in a directory, creating nothing.

    Raises:
        UsageError: another process does.
    """
    with contextlib.suppress(OSError):  # no such file, or none of ours
        fd = _opened(run / LOCK, os.O_RDONLY)
        try:
            _lock(fd, fcntl.LOCK_SH, run, flag)
        finally:
            os.close(fd)


def _opened(path: Path, flags: int) -> int:
    """Open a lock file, which may come from somebody else: a link would lead elsewhere, and a pipe would never answer.

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
    return UsageError(f"{path} must be a regular file, the lock of a run, and is a link or a special file; remove it, or give another --run-dir")


def _lock(fd: int, kind: int, run: Path, flag: str) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = re.fullmatch(r"(\d{1,10}) ([\w.-]{1,253})", os.pread(fd, 300, 0).decode("ascii", errors="replace").strip(), re.ASCII)
        who, stop = ("another process", "stop it")
        if holder is not None:
            who, stop = f"process {holder[1]} on {holder[2]}", f"stop it there with kill {holder[1]}"
        raise UsageError(f"{flag} {run} is in use: {who} is training in it; wait for its end, {stop}, or give another --run-dir") from None
    except OSError:
        pass  # no locks on this file system
