"""Reading of untrusted JSON files: every fault of a file becomes a `DataError` of one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from .json_text import decoded
from .regular_file import read_text

_MOST_LEVELS: Final = 100
"""Largest nesting depth of lists and objects; printing or comparing a value recurses to its depth."""


def read_json(file: Path, what: str, advice: str = "copy it again") -> Any:
    """Return the decoded content of a file.

    Args:
        file: the file.
        what: noun before the file's name in error messages.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read, is larger than 100 MiB, is not JSON, or is nested more than 100 levels deep.
    """
    try:
        values = decoded(read_text(file))
        _check_levels(values)
        return values
    except OSError as error:
        raise DataError(f"{what} {file} cannot be read: {error.strerror}", advice) from None
    except ValueError as error:
        raise DataError(f"{what} {file} is not whole JSON: {error}", "copy it again") from None


def read_object(file: Path, what: str, advice: str = "copy it again") -> dict[str, Any]:
    """Return the JSON object in a file; the arguments are those of `read_json`.

    Raises:
        DataError: `read_json` refuses the file, or it holds a JSON value that is not an object.
    """
    values = read_json(file, what, advice)
    if not isinstance(values, dict):
        raise DataError(f"{what} {file} must be a JSON object, got {json.dumps(values)[:80]}", "copy it again")
    return values


def _check_levels(values: Any) -> None:
    """Raise ValueError if a value is nested more than `_MOST_LEVELS` deep."""
    level = [values]
    for _ in range(_MOST_LEVELS):
        level = [each for some in level if isinstance(some, (dict, list)) for each in (some.values() if isinstance(some, dict) else some)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
