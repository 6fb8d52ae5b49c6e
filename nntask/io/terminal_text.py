"""Safe output of untrusted text: escapes for the terminal, and quoting for commands that a user pastes into a shell."""

from __future__ import annotations

import json
import os
import shlex
from typing import Final

LONGEST: Final = 4000
"""Default number of characters after which a text is cut."""


def printable(text: str, most: int = LONGEST) -> str:
    """Return a text with control characters escaped, cut after `most` characters."""
    whole = "".join(each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii") for each in text[:most])
    left = len(text) - most
    return f"{whole}... ({left:,} more characters)" if left > 0 else whole


def python_text(value: str | os.PathLike[str]) -> str:
    """Return a string or path as a Python literal in double quotes, which stay readable in `python_command`."""
    return json.dumps(os.fspath(value), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8


def python_command(code: str) -> str:
    """Return the shell command that runs a line of Python, quoted for the shell."""
    return f"python -c {shlex.quote(code)}"
