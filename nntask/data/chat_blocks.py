"""Jinja environment of chat templates: a sandbox with the filters and functions of transformers, and ``{% generation %}`` blocks."""

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
"""Filters and methods whose use on the arguments of a function call shows that a template expects an object."""
FIXED: Final = datetime(2024, 7, 26)
"""Date that templates see while training data are rendered."""


class GenerationBlocks(jinja2.ext.Extension):
    """Jinja extension that records the character ranges written by ``{% generation %}`` blocks."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def __init__(self, jinja: jinja2.Environment) -> None:
        super().__init__(jinja)
        self.pieces: list[str] = []
        self.found: list[tuple[int, int]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the node of a block, which calls `_note` with the block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        begin = sum(map(len, self.pieces))
        self.found.append((begin, begin + len(text)))
        return text


class ChatEnvironment:
    """Environment that renders templates and returns the ranges of their ``{% generation %}`` blocks.

    Attributes:
        jinja: sandboxed environment that compiles templates.
        now: date that templates see; `FIXED` by default, so that training data are reproducible.
    """

    def __init__(self) -> None:
        self.jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
        )
        self.jinja.filters["tojson"] = _to_json
        self.jinja.globals["raise_exception"] = _refuse
        self.now = FIXED
        self.jinja.globals["strftime_now"] = lambda form: self.now.strftime(form)
        (self._blocks,) = (each for each in self.jinja.extensions.values() if isinstance(each, GenerationBlocks))

    def rendered(self, template: jinja2.Template, **values: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the first and last (excluded) character of each block."""
        self._blocks.pieces, self._blocks.found = [], []
        for piece in template.generate(**values):
            self._blocks.pieces.append(piece)
        return "".join(self._blocks.pieces), list(self._blocks.found)


@dataclass(frozen=True, slots=True)
class TemplateReads:
    """Parts of a conversation that a template reads, as far as its source shows.

    Args:
        names: names, attributes and string constants in the template's expressions.
        takes_objects: whether the template writes the arguments of function calls as objects without a test for strings.
    """

    names: frozenset[str]
    takes_objects: bool


def reads_of(jinja: jinja2.Environment, source: str) -> TemplateReads:
    """Return the parts of a conversation that the template with the given source reads.

    Raises:
        jinja2.TemplateError: the source has an error.
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
    """Return whether an expression is the arguments of a function call, or a variable of that name."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "arguments"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "arguments"
    return isinstance(node, jinja2.nodes.Name) and node.name == "arguments"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter; the arguments are those of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
