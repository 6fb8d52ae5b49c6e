"""JSON files from outside: decoded, or refused with one sentence whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from .json_text import decoded
from .regular_file import read_text

_MOST_LEVELS: Final = 100
"""Of lists and objects in each other; whoever shows or compares such a value recurses as deep."""


def read_json(file: Path, what: str, advice: str = "copy it again") -> Any:
    """The decoded content of a file.

    Args:
        file: the file.
        what: noun before the file's name in error messages.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read, is larger than 100 MiB, is not JSON, or nested more than 100 levels deep.
    """
    try:
        values = decoded(read_text(file))
        _check_levels(values)
        return values
    except OSError as error:
        raise DataError(f"{what} {file} cannot be read: {error.strerror}; {advice}") from None
    except ValueError as error:
        raise DataError(f"{what} {file} is not whole JSON: {error}; copy it again") from None


def read_object(file: Path, what: str, advice: str = "copy it again") -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        file: the file.
        what: noun before the file's name in error messages.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read, is larger than 100 MiB, is not JSON, or holds another JSON value than an object.
    """
    values = read_json(file, what, advice)
    if not isinstance(values, dict):
        raise DataError(f"{what} {file} must be a JSON object, got {json.dumps(values)[:80]}; copy it again")
    return values


def _check_levels(values: Any) -> None:
    """Check that a value is not nested too deeply.

    Raises:
        ValueError: it is.
    """
    level = [values]
    for _ in range(_MOST_LEVELS):
        level = [each for some in level if isinstance(some, (dict, list)) for each in (some.values() if isinstance(some, dict) else some)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
