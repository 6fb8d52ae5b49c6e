"""Checks that output paths are writable, made before the work whose result they receive."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError
from .system_limits import is_open_file_limit


def check_writable(path: Path, flag: str) -> None:
    """Check that a directory can be created or written, or a file created.

    Args:
        path: the directory or file.
        flag: command-line flag that names the path, for the error message; "" for a positional argument.

    Raises:
        UsageError: the path cannot be created or written.
    """
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if path.is_file():
        ok, why = os.access(path, os.W_OK), "the file is not writable"
    else:
        ok, why = nearest.is_dir() and _can_create_in(nearest), f"{nearest} is not a writable directory"
    if not ok:
        raise UsageError(f"{flag} {path} cannot be written: {why}; choose another place, or change its permissions".lstrip())


def _can_create_in(directory: Path) -> bool:
    """Return whether files can be created in a directory.

    Creates one to find out, because permission bits say little about root and about read-only mounts.
    """
    probe = directory / f".nntask-{os.getpid()}.tmp"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        if is_open_file_limit(error):
            raise
        return False
    return True
