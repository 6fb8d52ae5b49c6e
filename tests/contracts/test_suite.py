"""The suite's own rules: where helpers live, what may be imported, and what a test says of itself."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support import selection

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax of a file, read once for all tests here."""
    return ast.parse(path.read_text())


def imported(tree: ast.AST) -> set[str]:
    """Modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_helpers_come_from_support() -> None:
    """A test file imports no other test file and no conftest, and changes no search path."""
    for path in FILES:
        assert not [name for name in imported(parsed(path)) if name.startswith(("test_", "conftest"))], path
        assert "sys.path.insert" not in path.read_text().replace('"sys.path.insert"', ""), path


def test_tests_say_what_they_check() -> None:
    """A docstring for each file and each test; no test sleeps."""
    for path in TEST_FILES:
        tree = parsed(path)
        assert ast.get_docstring(tree), path
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert [test.name for test in tests if not ast.get_docstring(test)] == [], path
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "sleep"], path


def test_no_name_is_used_twice() -> None:
    """Files of one name would be one module to pytest."""
    names = [path.name for path in TEST_FILES]
    assert sorted(names) == sorted(set(names))


def written_tests(path: Path) -> dict[str, set[str]]:
    """Functions that are tests, each with the markers that stand before it and those of its file."""
    tree = parsed(path)
    whole = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {
        function.name: {
            node.attr
            for written in (*whole, *function.decorator_list)
            for node in ast.walk(written)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
        }
        for function in functions
    }


def test_the_table_of_more_names_tests() -> None:
    """Its lines are sorted, each names a test or a file once, and a whole file has a reason."""
    lines = selection.TABLE.read_text().splitlines()[1:]
    assert lines == sorted(set(lines))
    for line in lines:
        entry, _, reason = (part.strip() for part in line.partition("#"))
        file, _, test = entry.partition("::")
        assert (TESTS / file).is_file(), f"{file} has moved; change its line of {selection.TABLE.name}"
        assert test in written_tests(TESTS / file) if test else reason, line


def test_make_test_runs_some_of_every_file() -> None:
    """Unless the table gives the reason why it does not, or all tests of the file are long, of pages, or need a device or a browser."""
    listed = selection.listed()
    left_out = []
    for path in TEST_FILES:
        name = str(path.relative_to(TESTS))
        default = [test for test, markers in written_tests(path).items() if not markers & {"long", "pages", "browser"}]
        if default and name not in listed and not name.startswith(("gpu/", "real/")) and all(f"{name}::{test}" in listed for test in default):
            left_out.append(name)
    assert not left_out, f"list these files in {selection.TABLE.name} with a reason, or add a quick test to each"
