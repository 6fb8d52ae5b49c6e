"""Decoding of untrusted JSON with a limit on memory: a text of nothing but brackets becomes objects twenty times its size."""

from __future__ import annotations

import json
from typing import Any, Final

_PER_LETTER: Final = 4
_BESIDES: Final = 48 << 20
_CONTAINER_NBYTES: Final = 72
_VALUE_NBYTES: Final = 32
_TEXT_NBYTES: Final = 52
"""Bytes of an empty string; the two constants above are the sizes of an empty list or object, and of a number."""
_SMALL: Final = 1 << 20
"""Number of characters up to which any text takes less than `_BESIDES` bytes when decoded."""


def decoded(text: str) -> Any:
    """Return the decoded value of a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or would take far more memory when decoded.
    """
    if len(text) > _SMALL:
        check_size(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_size(text: str, per_letter: int = _PER_LETTER, besides: int = _BESIDES) -> None:
    """Check that the decoded value of a JSON text fits into a memory limit of ``per_letter * len(text) + besides`` bytes.

    Args:
        text: the JSON text, which is not decoded.
        per_letter: number of bytes allowed for each character of the text.
        besides: number of bytes allowed in addition.

    Raises:
        ValueError: the value would take more.
    """
    nbytes = _CONTAINER_NBYTES * (text.count("[") + text.count("{")) + _VALUE_NBYTES * text.count(",") + _TEXT_NBYTES * (text.count('"') // 2)
    if nbytes > per_letter * len(text) + besides:
        raise ValueError(f"its {len(text):,} characters would take {nbytes:,} bytes when decoded, far more than any such file needs")
