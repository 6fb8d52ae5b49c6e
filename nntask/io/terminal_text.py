"""Texts of files as a terminal may see them, and commands with names of files in them that may be pasted into a shell."""

from __future__ import annotations

import json
import os
import shlex
from typing import Final

LONGEST: Final = 4000
"""Characters of a sentence that are shown."""


def printable(text: str, most: int = LONGEST) -> str:
    """Return a text with escapes for control characters, and without its end if it is longer than `most` characters."""
    whole = "".join(each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii") for each in text[:most])
    left = len(text) - most
    return f"{whole}... ({left:,} more characters)" if left > 0 else whole


def python_text(value: str | os.PathLike[str]) -> str:
    """Return a text or a path as a literal of Python in double quotes, which `python_command` leaves readable."""
    return json.dumps(os.fspath(value), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8


def python_command(code: str) -> str:
    """Return the shell command that runs a line of Python, whatever names are in the line."""
    return f"python -c {shlex.quote(code)}"
