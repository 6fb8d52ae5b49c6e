"""The suite's own rules: where helpers live, what may be imported, and what a test says of itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def foreign_helpers(path: Path) -> Iterator[str]:
    """What a file of tests takes from elsewhere than `support`."""
    yield from (f"imports {name}" for name in sorted(imported(parsed(path))) if name.startswith(("test_", "conftest")))
    if "sys.path.insert" in path.read_text().replace('"sys.path.insert"', ""):
        yield "changes sys.path"


def faults_of(path: Path) -> Iterator[str]:
    """What a file of tests lacks or must not do: docstrings of the file and of each test, and sleeps."""
    tree = parsed(path)
    if not ast.get_docstring(tree):
        yield "has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node):
            yield f"{node.name} has no docstring"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            yield f"sleeps in line {node.lineno}; wait for an event"


def test_helpers_come_from_support() -> None:
    """A test file imports no other test file and no conftest, and changes no search path."""
    faults = [f"{path.relative_to(TESTS)}: {fault}" for path in FILES for fault in foreign_helpers(path)]
    assert not faults, "\n".join(faults)


def test_tests_say_what_they_check() -> None:
    """A docstring for each file and each test; no test sleeps."""
    faults = [f"{path.relative_to(TESTS)}: {fault}" for path in TEST_FILES for fault in faults_of(path)]
    assert not faults, "\n".join(faults)


def test_all_faults_of_a_file_are_listed(tmp_path: Path) -> None:
    """Not the first one alone."""
    file = tmp_path / "test_bad.py"
    file.write_text("import time\nfrom conftest import x\ndef test_a(): time.sleep(1)\ndef test_b(): " + "sys.path.insert" + "(0, x)\n")
    assert sorted(faults_of(file)) == [
        "has no docstring",
        "sleeps in line 3; wait for an event",
        "test_a has no docstring",
        "test_b has no docstring",
    ]
    assert list(foreign_helpers(file)) == ["imports conftest", "changes sys.path"]


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
    faults = []
    for line in lines:
        entry, _, reason = (part.strip() for part in line.partition("#"))
        file, _, test = entry.partition("::")
        if not (TESTS / file).is_file():
            faults.append(f"{file} has moved; change its line of {selection.TABLE.name}")
        elif test and test not in written_tests(TESTS / file):
            faults.append(f"{line}: {file} has no such test")
        elif not test and not reason:
            faults.append(f"{line}: say after # why the whole file is listed")
    assert not faults, "\n".join(faults)


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
