"""Places that a command is told to write to, checked before the work whose result goes there."""

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
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if path.is_file():
        ok, why = os.access(path, os.W_OK), "the file is not writable"
    else:
        ok, why = place.is_dir() and _can_create_in(place), f"{place} is not a writable directory"
    if not ok:
        raise UsageError(f"{flag} {path} cannot be written: {why}; choose another place".lstrip())


def _can_create_in(directory: Path) -> bool:
    """Whether files can be made there; asks by making one, because permission bits say little about root and read-only mounts."""
    probe = directory / f".nntask-{os.getpid()}.tmp"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError:
        return False
    return True
