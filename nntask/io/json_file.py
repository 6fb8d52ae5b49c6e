"""JSON files from outside: decoded, or refused with one sentence whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ..errors import DataError

LARGEST_NBYTES: Final = 100 << 20


def read_json(file: Path, what: str, advice: str = "copy it again") -> Any:
    """The decoded content of a file.

    Args:
        file: the file.
        what: noun before the file's name in error messages.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read, is larger than 100 MiB, or is not JSON.
    """
    try:
        if file.stat().st_size > LARGEST_NBYTES:
            raise ValueError("it is larger than 100 MiB")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{what} {file} cannot be read: {error.strerror}; {advice}") from None
    except (ValueError, RecursionError) as error:
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
