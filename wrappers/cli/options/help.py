"""Command lines as settings: plain checks first, then tyro for the help and the settings object."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from .flags import build, scan, table_of

WIDEST: Final = 129
"""Most characters of a line of help: from 130 on tyro sets two columns."""

S = TypeVar("S")


def parse(settings: type[S], argv: Sequence[str], program: str, *, words: Sequence[str] = (), optional: Sequence[str] = ()) -> tuple[S, list[str]]:
    """Parse a command line.

    Args:
        settings: dataclass of flags, or of groups of flags.
        argv: the words of the command line.
        program: name of the command, for messages and the help.
        words: names of the positional arguments; all are required.
        optional: names of those after them, which may be left out.

    Returns:
        The settings and the positional words.

    Raises:
        UsageError: as in `flags.scan`, or a positional word is missing.
        SystemExit: the help was requested and printed.
    """
    from nntask import UsageError

    if any(token in ("-h", "--help") for token in argv):
        show_help(settings, program, [*words, *(f"[{word}]" for word in optional)])
    table = table_of(settings)
    values, found = scan(argv, table, len(words) + len(optional))
    if len(found) < len(words):
        raise UsageError(f"{program.removeprefix('nntask ')} needs {' '.join(words)}; see {program} --help")
    return build(settings(), values, table), found


def show_help(settings: type[Any], program: str, words: Sequence[str] = ()) -> None:
    """Print the help that tyro makes of the fields' docstrings, and exit.

    Raises:
        SystemExit: always, with code 0.
    """
    import tyro

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit), _one_column():
        usage = " ".join([program, *words])
        tyro.cli(settings, prog=usage, args=["--help"], config=(tyro.conf.OmitArgPrefixes,), description=settings.__doc__)
    print(_without_none(text.getvalue()), end="")
    raise SystemExit(0)


@contextlib.contextmanager
def _one_column() -> Iterator[None]:
    """Let tyro set the groups of flags one below the other: with two columns, words removed from one would shift the other."""
    width, columns = os.environ.get("COLUMNS"), shutil.get_terminal_size().columns
    os.environ["COLUMNS"] = str(min(columns, WIDEST))
    try:
        yield
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def _without_none(text: str) -> str:
    """Return the help without tyro's words for unset values, and without the name of the outermost group."""
    text = re.sub(r"\{None\}\|(\S+)( *)", lambda match: match[1] + match[2] + " " * 7, text)
    text = text.replace("{None,", "{")
    text = re.sub(r"\s*\(default:\s+(?:None|'')\)", "", text)
    text = re.sub(r"^ train\.(\w+ options)", r" \1", text, flags=re.MULTILINE)
    return "".join(line.rstrip() + "\n" for line in text.splitlines())
