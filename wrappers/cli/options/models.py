"""The model that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..output import complain

if TYPE_CHECKING:
    from nntask.inference import ModelSource


def open_source(path: str | Path) -> ModelSource:
    """Open the model in a directory or a GGUF file, and print the notes about its files.

    Raises:
        DataError: it does not exist, contains no model, or its content is broken.
        UsageError: its config belongs to no family, or breaks a rule.
    """
    from nntask.inference import ModelSource

    source = ModelSource.open(path)
    for sentence in source.notes():
        complain(sentence)
    return source
