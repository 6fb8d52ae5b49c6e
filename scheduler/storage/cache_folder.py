"""Directory of a user's derived files, such as performance models and compiled kernels."""

from __future__ import annotations

import os
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
