"""Decoding of a safetensors header, as strict as the safetensors package, so that both readers see the same model."""

from __future__ import annotations

import json
from typing import Any, Final

from .json_text import check_size

_MOST_DIGITS: Final = 19
"""Number of decimal digits of 2**63."""


def decoded_header(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a header.

    Raises:
        ValueError: the header is not a JSON object in UTF-8, would take far more memory than its text, repeats a name, or has a number larger than
            any file.
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
            raise ValueError(f"the name {name} occurs twice")
        found[name] = value
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a size must have at most {_MOST_DIGITS} digits, got {len(digits)}")
    return int(digits)
