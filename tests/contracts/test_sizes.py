"""Limits of size: modules, functions and module docstrings that one reads at a sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE, FUNCTION, DOCSTRING = 400, 50, 12
"""The largest number of lines of each."""
TREES = ("nntask/errors.py", "scheduler/core/errors.py")
"""Modules whose docstring draws the tree of their errors."""


def too_long(path: str, text: str) -> Iterator[str]:
    """What exceeds a limit in a module."""
    lines = text.count("\n")
    if lines > MODULE:
        yield f"{path} has {lines} lines; divide it by what it does ({MODULE} at most)"
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    if docstring.count("\n") + 1 > DOCSTRING and path not in TREES:
        yield f"the docstring of {path} has {docstring.count(chr(10)) + 1} lines; theory goes to docs/internals ({DOCSTRING} at most)"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines ({FUNCTION} at most)"


@pytest.mark.parametrize("package", ["nntask", "tiles", "scheduler", "wrappers"])
def test_nothing_is_too_long(package: str) -> None:
    """No module, function or module docstring of a package exceeds its limit."""
    files = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / package).rglob("*.py"))]
    found = [line for path in files for line in too_long(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_each_limit_is_a_limit() -> None:
    """A line too many is found in a module, a function and a docstring."""
    body = "    pass\n" * (FUNCTION - 1)
    assert not list(too_long("a.py", f"def f():\n{body}"))
    assert len(list(too_long("a.py", f"def f():\n{body}    pass\n"))) == 1
    assert len(list(too_long("a.py", "x = 1\n" * (MODULE + 1)))) == 1
    assert len(list(too_long("a.py", '"""' + "a\n" * DOCSTRING + 'b"""\n'))) == 1
