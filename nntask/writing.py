"""Files and directories that appear whole or not at all.

What is new is made in a hidden directory beside its place, ``.writing-NAME-xxxxxxxx``, forced to disk, and gets its name last. A failure leaves what
was there before, and nothing else. A killed process leaves its hidden directory, which nobody holds a lock on any more; the next writer of that name
removes it. A directory that is replaced waits in the hidden one until the new one has its name, and if that never happened it is put back then.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PREFIX: Final = ".writing-"
_NEW: Final = "new"
_OLD: Final = "old"


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """The path of a file or directory to make, which becomes `target` when the block ends, and is removed when it fails.

    Raises:
        OSError: the disk is full or failed. What was at `target` is there still; if it could not be put back, the message says where it lies.
    """
    target = target.absolute()
    if not target.parent.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):  # others do not take the new directory for a stale one before it is locked
        remove_stale(target.parent, target.name)
        aside = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{target.name}-", dir=target.parent))
        lock = os.open(aside, os.O_RDONLY)
        _lock(lock)
    try:
        yield aside / _NEW
        _fsync_all(aside / _NEW)
        _put_in_place(aside, target)
    finally:
        _clear(aside, target)
        os.close(lock)


def remove_stale(parent: Path, name: str = "") -> None:
    """Remove what killed writers left in a directory, those of one name or all."""
    for aside in parent.glob(f"{PREFIX}{glob.escape(name)}-????????" if name else f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                _clear(aside, parent / aside.name.removeprefix(PREFIX).rpartition("-")[0])
            finally:
                os.close(lock)


def fsync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_all(path: Path) -> None:
    """Force a file, or a directory and all that is in it, to disk."""
    if path.is_dir():
        for each in path.iterdir():
            _fsync_all(each)
    fsync(path)


def _put_in_place(aside: Path, target: Path) -> None:
    old = aside / _OLD
    if target.is_dir():
        os.rename(target, old)
    try:
        os.replace(aside / _NEW, target)
    except OSError as error:
        if not _put_back(old, target):
            raise OSError(error.errno, f"{error.strerror}; what was there before lies in {old} now, move it back") from error
        raise
    fsync(target.parent)


def _put_back(old: Path, target: Path) -> bool:
    """Undo the first half of a replacement if the second did not happen; returns whether nothing is left to do."""
    if old.exists() and not os.path.lexists(target):
        try:
            os.rename(old, target)
        except OSError:
            return False
    return True


def _clear(aside: Path, target: Path) -> None:
    if _put_back(aside / _OLD, target):
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_EX)
