"""Files and directories that appear complete or not at all.

A new file or directory is created inside a hidden directory next to its target, ``.writing-NAME-xxxxxxxx``, then forced to disk, and finally renamed
to its target. A failure leaves the old target and no other file. A writer holds a lock on its hidden directory; the directory of a killed process is
unlocked, and the next writer of that name removes it. A directory that is being replaced moves into the hidden directory until the new one has its
name. If the process is killed in between, the next writer moves the old directory back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PREFIX: Final = ".writing-"
_NEW: Final = "new"
_OLD: Final = "old"
UNSUPPORTED: Final = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of operations that a file system does not support: some of networks and memory cards have no symbolic links, or no fsync of directories."""


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path for a new file or directory, which replaces `target` if the block succeeds and is removed if it fails.

    A symbolic link at `target` is replaced, not followed.

    Args:
        target: path of the file or directory to write; missing parent directories are created.

    Raises:
        OSError: the disk is full or failed, or `target` is a device, a pipe or a socket. The old `target` is kept; if it could not be moved back, the
            message names its present path.
    """
    target = target.absolute()
    if _is_special(target):
        raise OSError(errno.EINVAL, "it must be a regular file or new, and is a device, a pipe or a socket")
    make_directories(target.parent)
    with _locked(target.parent):  # without this lock, another writer would remove the new directory as stale before it is locked
        _remove_stale(target.parent, target.name)
        aside = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{target.name}-", dir=target.parent))
        lock = os.open(aside, os.O_RDONLY)
        _lock(lock)
    is_done = False
    try:
        yield aside / _NEW
        _fsync_all(aside / _NEW)
        with _locked(target.parent):  # a directory is replaced by two renames, and no other writer may rename in between
            _move_into(aside, target)
        is_done = True
    finally:
        if is_done or not (aside / _OLD).exists():
            shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small text file atomically: a reader sees either the old text or the new text."""
    with written_aside(path) as new:
        new.write_text(text, encoding="utf-8")


def _is_special(path: Path) -> bool:
    """Return whether `path` is a device, a pipe or a socket. One look: between two, another writer can move its old directory away."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def remove_stale(parent: Path, name: str = "") -> None:
    """Remove the hidden directories of killed writers of the target `name` in a directory; "" for all targets."""
    with contextlib.suppress(OSError), _locked(parent):  # else a directory would be moved back between the two renames of a writer
        _remove_stale(parent, name)


def _remove_stale(parent: Path, name: str) -> None:
    for aside in parent.glob(f"{PREFIX}{glob.escape(name)}-????????" if name else f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                if _put_back(aside / _OLD, parent / aside.name.removeprefix(PREFIX).rpartition("-")[0]):
                    shutil.rmtree(aside, ignore_errors=True)
            finally:
                os.close(lock)


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents, and force the new directory entries to disk.

    Raises:
        OSError: the disk is full or failed, or a file is in the way.
    """
    if path.exists():
        return
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync(directory.parent)


def fsync(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk. A file system that does not support fsync of directories is no error.

    Raises:
        OSError: the path does not exist, or the disk failed.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(fd)


def _fsync_all(path: Path) -> None:
    """Force a file, or a directory and all of its content, to disk."""
    if path.is_dir():
        for each in path.iterdir():
            _fsync_all(each)
    fsync(path)


def _move_into(aside: Path, target: Path) -> None:
    old = aside / _OLD
    if target.is_dir():
        os.rename(target, old)
    try:
        os.replace(aside / _NEW, target)
    except BaseException as error:
        if not _put_back(old, target) and isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror}; the old directory is in {old} now, move it back") from error
        raise
    fsync(target.parent)


def _put_back(old: Path, target: Path) -> bool:
    """Move the old directory back to `target` unless `target` exists; return False if the move failed."""
    if old.exists() and not os.path.lexists(target):
        try:
            os.rename(old, target)
        except OSError:
            return False
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # some file systems have no locks
        fcntl.flock(fd, fcntl.LOCK_EX)
