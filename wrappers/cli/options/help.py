"""Command lines as settings: plain checks of the flags, and the help, which tyro draws from the settings' docstrings."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from .flags import build, scan, table_of

HELP: Final = ("-h", "--help")
HELP_ALL: Final = "--help-all"
WIDEST: Final = 129
"""Largest number of characters in a line of help: from 130 on, tyro sets two columns."""

S = TypeVar("S")


def parse(settings: type[S], argv: Sequence[str], program: str, *, words: Sequence[str] = (), optional: Sequence[str] = ()) -> tuple[S, list[str]]:
    """Parse a command line.

    Args:
        settings: dataclass of flags, or of groups of flags.
        argv: the words of the command line.
        program: name of the command, for messages and the help.
        words: names of the positional arguments, which are all required.
        optional: names of further positional arguments.

    Returns:
        The settings and the positional words.

    Raises:
        UsageError: as in `flags.scan`, or a positional word is missing.
        SystemExit: the help was requested and printed.
    """
    from nntask import UsageError

    show_requested_help(settings, argv, program, [*words, *(f"[{word}]" for word in optional)])
    table = table_of(settings)
    values, given = scan(argv, table, len(words) + len(optional))
    if len(given) < len(words):
        raise UsageError(f"{program.removeprefix('nntask ')} needs {' '.join(words)}", f"see {program} --help")
    return build(settings(), values, table), given


def show_requested_help(settings: type[Any], argv: Sequence[str], program: str, words: Sequence[str] = ()) -> None:
    """Print the help if a command line asks for it, and exit.

    Raises:
        SystemExit: the help was printed; the code is 0.
    """
    if HELP_ALL in argv or any(token in HELP for token in argv):
        _show_help(settings, program, words, is_all=HELP_ALL in argv)


def _show_help(settings: type[Any], program: str, words: Sequence[str], *, is_all: bool) -> None:
    import tyro

    from nntask.config import EXPERT, SUFFIXES, variables_listed

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit), _one_column():
        usage = " ".join([program, *words])
        tyro.cli(settings, prog=usage, args=["--help"], config=(tyro.conf.OmitArgPrefixes,), description=settings.__doc__)
    plain = _in_plain_words(text.getvalue())
    experts = EXPERT & {name.replace("-", "_") for name in re.findall(r"^  --([\w-]+)", plain, re.MULTILINE)}
    print(_without(plain, SUFFIXES.keys() | (frozenset() if is_all else experts)), end="")
    if experts and not is_all:
        print(f"\n{program} {HELP_ALL} also lists {len(experts)} expert flags, such as --{min(experts).replace('_', '-')}.")
    if is_all and "config" in settings.__dataclass_fields__:  # the command reads a TOML file and the environment
        print("\n" + textwrap.fill(variables_listed(), min(shutil.get_terminal_size().columns, WIDEST), break_on_hyphens=False))
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


def _in_plain_words(text: str) -> str:
    """Return the help without tyro's words for unset values, and with the descriptions of groups as their titles."""
    text = re.sub(r"\{None\}\|(\S+)( *)", lambda match: match[1] + match[2] + " " * 7, text)
    text = text.replace("{None,", "{")
    text = re.sub(r"\s*\(default:\s+(?:None|'')\)", "", text)
    text = "".join(line.rstrip() + "\n" for line in text.splitlines())
    return re.sub(r"^ [\w.]+ options\n( -+)\n  (\S.*?)\n  ---+\n", r" \2\n\1\n", text, flags=re.MULTILINE | re.DOTALL)


def _without(text: str, hidden: frozenset[str] | set[str]) -> str:
    """Return the help without the lines of some flags, and without groups that have no other flag.

    Args:
        hidden: names of fields.
    """
    groups = []
    for group in text.split("\n\n"):
        lines, is_hidden, was_flag = [], False, False
        for line in group.splitlines():
            if (match := re.match(r"  --(?:no-)?([\w-]+)", line)) is not None:
                is_hidden, was_flag = match[1].replace("-", "_") in hidden, True
            if not is_hidden:
                lines.append(line)
        if not was_flag or any(line.startswith("  -") and not line.startswith("  ---") for line in lines):
            groups.append("\n".join(lines))
    return "\n\n".join(groups).rstrip("\n") + "\n"
