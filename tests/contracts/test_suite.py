"""The suite's own rules: where helpers live, what may be imported, and what a test says of itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_helpers_come_from_support(path: Path) -> None:
    """A test file imports no other test file and no conftest, and changes no search path."""
    tree = ast.parse(path.read_text())
    assert not [name for name in imported(tree) if name.startswith(("test_", "conftest"))]
    assert "sys.path.insert" not in path.read_text().replace('"sys.path.insert"', "")


@pytest.mark.parametrize("path", [path for path in FILES if path.name.startswith("test_")], ids=lambda path: path.name)
def test_tests_say_what_they_check(path: Path) -> None:
    """A docstring for each file and each test; no test sleeps."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert [test.name for test in tests if not ast.get_docstring(test)] == []
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "sleep"]


def test_no_name_is_used_twice() -> None:
    """Files of one name would be one module to pytest."""
    names = [path.name for path in FILES if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
