"""Decoding of untrusted JSON, with a limit on its memory: a text of brackets becomes objects of twenty times its size."""

from __future__ import annotations

import json
from typing import Any, Final

_PER_LETTER: Final = 4
_BESIDES: Final = 48 << 20
_CONTAINER_NBYTES: Final = 72
_VALUE_NBYTES: Final = 32
_TEXT_NBYTES: Final = 52
_SMALL: Final = 1 << 20
"""Letters of a text that takes less than `_BESIDES` whatever it is."""
"""Bytes of an empty list or object, of a number, and of a text without its letters."""


def decoded(text: str) -> Any:
    """Return the value of a text of JSON.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or would take far more memory than the text.
    """
    if len(text) > _SMALL:
        check_size(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_size(text: str, per_letter: int = _PER_LETTER, besides: int = _BESIDES) -> None:
    """Check that the value of a text of JSON takes no far more memory than the text.

    Args:
        text: the text.
        per_letter: bytes that the value may take for each letter.
        besides: bytes that it may take besides.

    Raises:
        ValueError: it would take more.
    """
    nbytes = _CONTAINER_NBYTES * (text.count("[") + text.count("{")) + _VALUE_NBYTES * text.count(",") + _TEXT_NBYTES * (text.count('"') // 2)
    if nbytes > per_letter * len(text) + besides:
        raise ValueError(f"its {len(text):,} letters would become lists and objects of {nbytes:,} bytes, which no such file has")
