"""Sphinx directives that make the reference of the command line from the code: commands, flags, environment variables, exit codes.

The flags of a command are found by asking it for its help: what it would hand to tyro is taken instead of printed. So a page shows the flags that
`--help-all` shows, in the same groups, with the same words.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from docutils import nodes
from registry_tables import commands_markdown, environment_markdown, errors_markdown, rows_markdown
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class _Asked(Exception):
    """The settings that a command would show the help of."""

    def __init__(self, settings: type[Any], program: str) -> None:
        super().__init__(program)
        self.settings, self.program = settings, program


def settings_of(words: list[str]) -> tuple[type[Any], str]:
    """The dataclass of a command's flags, and the command with its positional words; `words` as in the shell, "bench", "links"."""
    import tyro

    from wrappers import cli

    def take(settings: type[Any], *, prog: str, **_: Any) -> None:
        raise _Asked(settings, prog)

    real, tyro.cli = tyro.cli, take  # type: ignore[assignment]
    try:
        cli._dispatch([*words, "--help"])
    except _Asked as asked:
        return asked.settings, asked.program
    finally:
        tyro.cli = real
    raise ValueError(f"nntask {' '.join(words)} shows no flags")


def field_texts(settings: type[Any]) -> dict[str, str]:
    """The text under each field of a dataclass, its bases included."""
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                assert isinstance(line.target, ast.Name)
                found[line.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def groups(settings: type[Any]) -> Iterator[tuple[type[Any], list[dataclasses.Field[Any]]]]:
    """Flags of a command by group: each nested dataclass, then the fields of its own; a group of groups is taken apart."""
    own = []
    for field in dataclasses.fields(settings):
        kind = typing.get_type_hints(settings)[field.name]
        if dataclasses.is_dataclass(kind):
            yield from groups(kind)  # type: ignore[arg-type]
        else:
            own.append(field)
    if own:
        yield settings, own


def _signature(field: dataclasses.Field[Any], kind: Any) -> str:
    """The flag as it is typed."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    name = field.name.replace("_", "-")
    if kind is bool:
        return f"--no-{name}" if field.default is True else f"--{name}"
    if typing.get_origin(kind) is Literal:
        return f"--{name} {{{','.join(typing.get_args(kind))}}}"
    return f"--{name} { {int: 'N', float: 'X'}.get(kind, 'TEXT') }"


def _escape(text: str) -> str:
    """Plain text as Markdown that shows it: flags and names as code, nothing else marked up."""
    words = []
    for word in text.replace("<", r"\<").replace("*", r"\*").split(" "):
        core = word.strip("(),.;:")
        words.append(word.replace(core, f"`{core}`") if core.startswith("--") else word)
    return " ".join(words)


def flags_markdown(words: list[str], only: str = "") -> str:
    """The flags of a command as sections of `option` directives, of all groups or of the one with a title."""
    from nntask.config import SUFFIXES

    settings, program = settings_of(words)
    begin, _, positional = program.partition(" ".join(words))
    lines = ["```text", f"{begin}{' '.join(words)}{positional} [flags]", "```", "", _escape(inspect.cleandoc(settings.__doc__ or "")), ""]
    lines += [f":::{{program}} nntask {' '.join(words)}", ":::", ""]
    several = len(list(groups(settings))) > 1
    for group, fields in groups(settings):
        hints, texts = typing.get_type_hints(group), field_texts(group)
        if several:
            title = "Also" if group is settings else inspect.cleandoc(group.__doc__ or group.__name__).split(". ")[0].rstrip(".")
            rest = "" if group is settings else inspect.cleandoc(group.__doc__ or "").partition(". ")[2]
            if only and title != only:
                continue
            lines += [f"### {title}", "", _escape(rest), ""]
        for field in fields:
            if field.name in SUFFIXES:
                continue
            has_default = field.default not in (None, "", True, False) and field.default is not dataclasses.MISSING
            default = f" *Default:* `{field.default}`." if has_default else ""
            text = _escape(texts.get(field.name, ""))
            lines += [f":::{{option}} {_signature(field, hints[field.name])}", f"{text}.{default}", ":::", ""]
    return "\n".join(lines)


class CommandFlags(SphinxDirective):
    """``{command-flags} train``: the flags of a command, with sections for its groups."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"only": str}

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        return self.parse_text_to_nodes(flags_markdown(self.arguments[0].split(), self.options.get("only", "")), allow_section_headings=True)


_TABLES = {
    "commands-table": commands_markdown,
    "environment-table": environment_markdown,
    "rows-table": rows_markdown,
    "errors-table": errors_markdown,
}


class CodeTable(SphinxDirective):
    """``{commands-table}``, ``{environment-table}``, ``{rows-table}``, ``{errors-table}``."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        return self.parse_text_to_nodes(_TABLES[self.name]())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("command-flags", CommandFlags)
    for name in _TABLES:
        app.add_directive(name, CodeTable)
    return {"parallel_read_safe": True}
