"""The table of hostile inputs: for each parser the content of one file by a name that describes its fault.

Large contents are functions. tests/fuzz/page.py writes `docs/results/hostile_inputs.md` and `benchmarks/results/hostile_inputs.csv` from the table.
"""

from __future__ import annotations

import csv
import io
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
    """Return the page in Markdown: the promises, and the number of inputs of each parser with one of them."""
    lines = "\n".join(f"| {parser} | {len(inputs)} | {list(inputs)[-1]} |" for parser, inputs in INPUTS.items())
    return f"""# Hostile inputs

{sum(map(len, INPUTS.values()))} small valid inputs in which one file is replaced go through the readers that the commands use. A reader returns, or
raises an error of nntask's with a message; it writes nothing and starts nothing; it takes at most 10 seconds of processor time, and memory of at most
4 times the input and 64 MiB, by Python's count and by the system's. [Trust](../guides/trust.md) has the promises,
`benchmarks/results/hostile_inputs.csv` the names of all inputs, `tests/support/hostile_inputs.py` their contents. `python tests/fuzz/page.py` writes
this page and the list.

| parser | inputs | for example |
|---|---|---|
{lines}
"""


def listing() -> str:
    """Return the list of all inputs as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("parser", "input"))
    writer.writerows((parser, name) for parser, inputs in INPUTS.items() for name in inputs)
    return text.getvalue()
