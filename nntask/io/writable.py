"""Files and directories that a command is to write, checked before the work whose result goes there."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError


def check_writable(path: Path, flag: str) -> None:
    """Check that a directory can be created or written, or a file created.

    Args:
        path: the directory or file.
        flag: what names it, for the message; "" for a word of the command line that is no flag.

    Raises:
        UsageError: it cannot.
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
    """Whether files can be made there; asks by making one, because permission bits say little about root and read-only mounts."""
    probe = directory / f".nntask-{os.getpid()}.tmp"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError:
        return False
    return True
