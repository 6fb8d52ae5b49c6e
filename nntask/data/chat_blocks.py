"""The Jinja in which chat templates are written: a sandbox with what transformers gives to templates, and ``{% generation %}`` blocks."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

FIXED: Final = datetime(2024, 7, 26)
"""The date that templates are told while data are made."""


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
    """Renders templates and tells what their blocks wrote.

    Attributes:
        now: what templates are told that the date is; fixed unless it is set, so that data are always the same.
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
        """The text, and the first and last (excluded) character of each block."""
        self._blocks.pieces, self._blocks.found = [], []
        for piece in template.generate(**values):
            self._blocks.pieces.append(piece)
        return "".join(self._blocks.pieces), list(self._blocks.found)


def environment() -> ChatEnvironment:
    """A new environment."""
    return ChatEnvironment()


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
