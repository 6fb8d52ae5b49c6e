"""Texts of files as a terminal may see them."""

from __future__ import annotations

from typing import Final

LONGEST: Final = 4000
"""Characters of a sentence that are shown."""


def printable(text: str, most: int = LONGEST) -> str:
    """Return a text with escapes for control characters, and without its end if it is longer than `most` characters."""
    whole = "".join(each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii") for each in text[:most])
    left = len(text) - most
    return f"{whole}... ({left:,} more characters)" if left > 0 else whole
