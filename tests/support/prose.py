"""Sentences of the repository that house English rewrites: docstrings, entries of Args, comments, strings and pages.

``python tests/support/prose.py PATH...`` prints what the gate of `tests/contracts/test_prose.py` would say about files.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HEADLESS: Final = re.compile(r"(What|Of|As|Where|Those|Who|Whose|Which|By|That)\b")
"""First words of a docstring that lacks its noun or verb."""
CONTINUED: Final = re.compile(r"(of|likewise|as of|that|which|what|where|who|by which|see `|as `)\b", re.IGNORECASE)
"""First words of an entry of Args or Attributes that only goes on with its name."""
_SECTION: Final = re.compile(r"^\s*(Args|Attributes):\s*$")
_ENTRY: Final = re.compile(r"^\s*[`\w*][\w`*, ./]*: (?P<text>.+)$")

PATTERNS: Final[Mapping[str, re.Pattern[str]]] = {
    term: re.compile(pattern, re.IGNORECASE)
    for pattern, term in {
        r"\b(of|by|from|than|with|in|on|at|behind|to|and|but|for|as|or) what\b(?! to\b)": "the noun instead of 'what'",
        r"(^|[.;:,(] )what (is|are|was|were|has|have|had|comes?|goes|runs|takes|makes|needs|leads|stays|happens|happened|does|did)\b": "the noun",
        r"\bwhere (there|that|none|nobody|nothing|no|it|they) ?(is|are|was|were|has|have|can|does|do)?\b": "if, when, unless",
        r"\b(make|makes|made|making)\b(\W+\w+){0,3}\W+again\b": "recompute, rebuild, write again",
        r"\bso many\b|\bas many\b(?!(\W+\w+){1,4}\W+as\b)|\bas much\b(?!(\W+\w+){0,4}\W+as\b)": "the number itself",
        r"\b(told|tells?)\b": "report, say, show",
        r"\b(nobody|whoever)\b|(^|[.;:,(] |\b(by|to|for|of|than) )who\b": "no caller, the user, the program that",
        r"\bbeside\b": "next to, as well as, compared with",
        r"\bbehind\b": "after, following",
        r"\bstands?\b(?! (alone|still|aside))": "is, means, appears",
        r"\bas of `": "the words themselves",
        r"\b(mend(s|ed|ing)?|for ever|hungriest|thrifty|all the same)\b": "fix, indefinitely, ...",
    }.items()
}
"""Remedy -> pattern of a phrase that house English does without."""
_ANY: Final = re.compile("|".join(pattern.pattern for pattern in PATTERNS.values()), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence to rewrite.

    Args:
        line: number of its line, from 1.
        remedy: what to write instead.
        text: the words.
    """

    line: int
    remedy: str
    text: str


def findings(path: Path) -> list[Finding]:
    """Return the sentences of a module or of a page in Markdown that are to be rewritten."""
    source = path.read_text(encoding="utf-8")
    return sorted(_in_module(source) if path.suffix == ".py" else _in_page(source), key=lambda each: each.line)


def _in_module(source: str) -> Iterator[Finding]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.add(value)
                yield from _in_docstring(value.value, value.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings and node.value.count(" ") > 1:
            yield from _phrases(node.value, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _phrases(token.string.lstrip("#: "), token.start[0])


def _in_docstring(text: str, line: int) -> Iterator[Finding]:
    if HEADLESS.match(text.lstrip()):
        yield Finding(line, "a noun or an imperative first", text.lstrip().split("\n")[0][:80])
    is_entry = False
    for number, row in enumerate(text.split("\n"), line):
        is_entry = bool(_SECTION.match(row)) or (is_entry and bool(row.strip()))
        entry = _ENTRY.match(row) if is_entry else None
        if entry and CONTINUED.match(entry["text"]):
            yield Finding(number, "a noun phrase of its own", row.strip()[:80])
        yield from _phrases(row, number)


def _in_page(source: str) -> Iterator[Finding]:
    is_code = False
    for number, row in enumerate(source.split("\n"), 1):
        if row.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield from _phrases(re.sub(r"`[^`]*`|(?<=\])\([^)]*\)", "``", row), number)


def _phrases(text: str, line: int) -> Iterator[Finding]:
    for number, row in enumerate(text.split("\n"), line) if _ANY.search(text) else ():
        for remedy, pattern in PATTERNS.items():
            for match in pattern.finditer(row):
                yield Finding(number, remedy, row[max(match.start() - 30, 0) : match.end() + 20].strip())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        folder = Path(name)
        for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            for each in findings(file):
                print(f"{file}:{each.line}: {each.remedy}: {each.text}")
