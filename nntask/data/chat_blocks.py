"""The Jinja in which chat templates are written: a sandbox with what transformers gives to templates, and ``{% generation %}`` blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_OF_OBJECTS: Final = ("tojson", "items", "dictsort")
"""Filters and methods that write the arguments of a function call as an object."""


class GenerationBlocks(jinja2.ext.Extension):
    """Notes which characters ``{% generation %}`` blocks write."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def __init__(self, jinja: jinja2.Environment) -> None:
        super().__init__(jinja)
        self.pieces: list[str] = []
        self.found: list[tuple[int, int]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A block that calls `_note` with its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        begin = sum(map(len, self.pieces))
        self.found.append((begin, begin + len(text)))
        return text


class ChatEnvironment:
    """Renders templates and tells what their blocks wrote."""

    def __init__(self) -> None:
        self.jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
        )
        self.jinja.filters["tojson"] = _to_json
        self.jinja.globals["raise_exception"] = _refuse
        self.jinja.globals["strftime_now"] = _fixed_time
        (self._blocks,) = (each for each in self.jinja.extensions.values() if isinstance(each, GenerationBlocks))

    def rendered(self, template: jinja2.Template, **values: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the first and last (excluded) character of each block."""
        self._blocks.pieces, self._blocks.found = [], []
        for piece in template.generate(**values):
            self._blocks.pieces.append(piece)
        return "".join(self._blocks.pieces), list(self._blocks.found)


@dataclass(frozen=True, slots=True)
class TemplateReads:
    """What a template reads of a conversation, as far as its source tells.

    Args:
        names: names, attributes and string constants in its expressions.
        takes_objects: whether it writes the arguments of function calls as objects and does not ask whether they are strings.
    """

    names: frozenset[str]
    takes_objects: bool


def reads_of(jinja: jinja2.Environment, source: str) -> TemplateReads:
    """Return what a template reads.

    Raises:
        jinja2.TemplateError: the source has a mistake.
    """
    tree = jinja.parse(source)
    asks_for_strings = any(each.name == "string" and _is_arguments(each.node) for each in tree.find_all(jinja2.nodes.Test))
    written = [each.node for each in tree.find_all(jinja2.nodes.Filter) if each.name in _OF_OBJECTS]
    written += [each.node for each in tree.find_all(jinja2.nodes.Getattr) if each.attr in _OF_OBJECTS]
    writes_objects = any(node is not None and _is_arguments(node) for node in written)
    return TemplateReads(frozenset(_names(tree)), writes_objects and not asks_for_strings)


def _names(tree: jinja2.nodes.Template) -> Iterator[str]:
    for node in tree.find_all((jinja2.nodes.Name, jinja2.nodes.Getattr, jinja2.nodes.Const)):
        if isinstance(node, jinja2.nodes.Name):
            yield node.name
        elif isinstance(node, jinja2.nodes.Getattr):
            yield node.attr
        elif isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
            yield node.value


def _is_arguments(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is the arguments of a function call, or a variable of that name."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "arguments"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "arguments"
    return isinstance(node, jinja2.nodes.Name) and node.name == "arguments"


def environment() -> ChatEnvironment:
    """A new environment."""
    return ChatEnvironment()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes; arguments as of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _fixed_time(form: str) -> str:
    """The date that templates ask for: always the same, so that the data are."""
    return datetime(2024, 7, 26).strftime(form)
