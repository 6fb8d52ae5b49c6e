"""Directory of a user's derived files, such as performance models and compiled kernels."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def user_cache() -> Path:
    """Return nntask's directory in XDG_CACHE_HOME, or in ~/.cache; it is not created.

    A user without a home directory, such as a number without a name in a container, has no such place, and one in /tmp could be made by others. The
    path is then below /dev/null: nothing is found there, and an attempt to write fails with an `OSError`, which callers expect of any cache.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "nntask"
    try:
        return Path.home() / ".cache" / "nntask"
    except RuntimeError:
        return Path(os.devnull) / "nntask"


def replace_file(path: Path, content: bytes) -> bool:
    """Replace a file as a whole, by a temporary file in the same directory and a rename, so that a reader never sees a part of it.

    Returns:
        Whether the file was written. It is not on a full or read-only disk: a cache may stay as it was.
    """
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except OSError:
        if aside is not None:
            with suppress(OSError):
                os.unlink(aside)
        return False
    return True
