"""The text of the header of a safetensors file, decoded as strictly as safetensors itself does, so that two readers see one model."""

from __future__ import annotations

import json
from typing import Any, Final

from .json_text import check_size

_MOST_DIGITS: Final = 19
"""Of 2**63."""


def decoded_header(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a header.

    Raises:
        ValueError: it is no JSON in UTF-8, would take far more memory than its text, has a name twice, or a number that is larger than any file.
    """
    text = raw.decode("utf-8")
    check_size(text)
    header = json.loads(text, object_pairs_hook=_with_unique_names, parse_int=_whole_number)
    if not isinstance(header, dict):
        raise ValueError("it must be an object")
    return header


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, and sizes have at most {_MOST_DIGITS}")
    return int(digits)
