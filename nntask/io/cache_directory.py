"""Directory of files that nntask derives from others and may use again: tokenizers and tokenised text."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory for derived files that may be kept and reused, without creating it."""
    if own := os.environ.get("NNTASK_CACHE"):
        return Path(own)
    from scheduler.storage import user_cache

    return user_cache()
