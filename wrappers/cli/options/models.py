"""The model that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..output import complain

if TYPE_CHECKING:
    from nntask.inference import ModelSource


def open_source(path: str | Path) -> ModelSource:
    """What a directory or a GGUF file holds, after what is to be said about its files.

    Raises:
        DataError: it does not exist, holds no model, or what it holds is broken.
        UsageError: its config is of no family, or breaks a rule.
    """
    from nntask.inference import ModelSource

    source = ModelSource.open(path)
    for sentence in source.notes():
        complain(sentence)
    return source
