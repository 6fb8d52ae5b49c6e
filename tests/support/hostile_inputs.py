"""The table of hostile inputs: for each parser the content of one file by a name that says what is wrong with it.

Contents are functions where they are large. `docs/results/hostile_inputs.md` is made from the table by tests/fuzz/page.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from support.hostile_data import ARRAYS, IDS, IMAGES, LINES, TABLES
from support.hostile_models import CONFIGS, GGUF, INDICES, SAFETENSORS, TOKENIZERS
from support.hostile_runs import REPORTS, STATES
from support.untrusted import PARSERS, write_valid

Content = bytes | Mapping[str, bytes]
"""Of the parser's own file, or of other files by name."""

INPUTS: Final[Mapping[str, Mapping[str, Content | Callable[[], Content]]]] = {
    "safetensors": SAFETENSORS,
    "index": INDICES,
    "GGUF": GGUF,
    "config": CONFIGS,
    "tokenizer": TOKENIZERS,
    "JSON lines": LINES,
    "tables": TABLES,
    "token ids": IDS,
    "state": STATES,
    "images": IMAGES,
    "arrays": ARRAYS,
    "report": REPORTS,
}
"""Parser -> name of the input -> content."""


def write_hostile(parser: str, name: str, directory: Path) -> Path:
    """Write a hostile input; returns the path that the parser is called with."""
    path = write_valid(parser, directory)
    given = INPUTS[parser][name]
    content = given() if callable(given) else given
    for file, raw in ({path.name: content} if isinstance(content, bytes) else content).items():
        (directory / file).write_bytes(raw)
    return directory / PARSERS[parser].file


def page() -> str:
    """The page of the table, in Markdown."""
    counts = [f"| {parser} | {len(inputs)} |" for parser, inputs in INPUTS.items()]
    total = sum(map(len, INPUTS.values()))
    lines = [
        "# Hostile inputs",
        "",
        "Made from `tests/support/hostile_inputs.py`, the table of the tests, by `python tests/fuzz/page.py`; a test fails when they differ.",
        "Each input is a small valid one in which one file is another, and goes through the reader that the commands use. The bars:",
        "the reader returns, or raises an error of nntask's with a sentence; it writes nothing and starts nothing; it takes at most 10",
        "seconds of processor time, and memory of at most 4 times the input and 64 MiB, by Python's count and by the system's.",
        "[What nntask trusts](../guides/trust.md) says what is promised.",
        "",
        "| parser | inputs |",
        "|---|---|",
        *counts,
        f"| all | {total} |",
    ]
    for parser, inputs in INPUTS.items():
        lines += ["", f"## {parser[0].upper()}{parser[1:]}", "", *(f"- {name}" for name in inputs)]
    return "\n".join(lines) + "\n"
