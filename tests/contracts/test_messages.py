"""Messages of our errors are written once: no code cuts them, searches them or replaces words of them, and their parts are attributes."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, get_args

import pytest

from scheduler.core.errors import TaskCause
from scheduler.core.shortage import Cause

ROOT: Final = Path(__file__).resolve().parents[2]
TREES: Final = ("scheduler", "tiles", "nntask", "wrappers", "examples", "benchmarks")
FILES: Final = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))

CUTTING: Final = frozenset(
    {"partition", "rpartition", "split", "rsplit", "replace", "removeprefix", "removesuffix", "startswith", "endswith", "find", "index", "count"}
)
"""Methods of a text that look for words in it. `split` without arguments joins lines, which reads no words."""
WORDS: Final = frozenset({"fact", "remedy", "clause", "subject", "why", "detail"})
"""Attributes of errors and shortages that are texts."""
SEARCHING: Final = frozenset({"search", "match", "fullmatch", "sub", "split", "findall", "finditer"})
"""Functions of `re`."""

FOREIGN: Final[Mapping[str, str]] = {
    "benchmarks/sweep/hf_inputs.py": "transformers tells the number of image tokens only in words",
    "nntask/data/hub.py": "the first line of an error of the Hub",
    "scheduler/drivers/cuda_cupy.py": "cuBLAS and cuDNN have no numbers that tell a broken device from a wrong call",
    "wrappers/dask/training/cluster.py": "OpenSSL's reasons of a failed handshake",
    "wrappers/torch/tasks/devices.py": "PyTorch's figures on a card without free memory, and its CUDA errors of type RuntimeError",
    "wrappers/torch/capture/refusals.py": "the operator in PyTorch's error about control flow",
}
"""Module -> other library's message that it reads."""


UNTESTED: Final[Mapping[str, str]] = {
    "Busy": "control flow of one module, without a message",
    "CublasError": "its number is read by the driver of a card, and the emulator has no cuBLAS",
    "ImpossibleTransition": "the machine raises InvalidEvent in its place",
    "NothingToRead": "control flow of admission, without a message",
    "OperationFailed": "its message becomes the fact of a UsageError",
    "Untold": "control flow of one module, without a message",
}
"""Error class without a test of its own -> the reason."""

_CLASS: Final = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
_QUICK: Final = re.compile(r"(?:str|repr)\([\w.]+\)|\.(?:fact|remedy|clause|subject|why|detail)\b|\.args\[|f\"\{\w+\}\"")
"""What a module has that reads a message; only such modules are parsed."""
_BEGINS: Final = re.compile(r"(?:Error|DoesNotFit|Diverged)\(\s*f?\"(?:--|\{flag)")


@cache
def error_names() -> frozenset[str]:
    """Names of exception classes: those of Python, and those of the packages, by their bases."""
    bases = {name: set(re.findall(r"\w+", parents)) for path in FILES for name, parents in _CLASS.findall(path.read_text())}
    known = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)} | {"NoRoom"}
    while more := {name for name, parents in bases.items() if parents & known} - known:
        known |= more
    return frozenset(known)


def _names_of_errors(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that are bound to errors: by an `except`, or by an annotation."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.arg) and node.annotation is not None and error_names() & set(re.findall(r"\w+", ast.unparse(node.annotation))):
            found.add(node.arg)
    return found


def cuts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each expression that looks for words in the message of an error."""
    nodes = list(ast.walk(tree))
    errors, messages = {"error", "refusal", "failure", "self"} | _names_of_errors(nodes), set[str]()

    def is_message(node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                return name in errors
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Attribute(attr="__cause__" | "error" | "failure" | "refusal")]):
                return True
            case ast.Call(func=ast.Attribute(value=value, attr="strip" | "lower" | "splitlines" | "rstrip")):
                return is_message(value)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                return attribute in WORDS and name in errors | {"shortage", "lack"}
            case ast.Attribute(value=ast.Attribute(attr="shortage"), attr=attribute):
                return attribute in WORDS
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="args")):
                return name in errors
            case ast.JoinedStr(values=values):
                return any(isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) and part.value.id in errors for part in values)
            case ast.Name(id=name):
                return name in messages
        return False

    for node in nodes:
        if isinstance(node, ast.Assign) and is_message(node.value):
            messages |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attribute), args=args):
                is_search = isinstance(value, ast.Name) and value.id == "re" and attribute in SEARCHING and any(map(is_message, args))
                if is_search or (attribute in CUTTING and (args or attribute != "split") and is_message(value)):
                    yield node.lineno, ast.unparse(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[container]) if is_message(container):
                yield node.lineno, ast.unparse(node)


def _functions(text: str) -> Iterator[ast.AST]:
    """The functions and methods of a module that may read a message, and its other statements."""
    lines = text.splitlines()
    blocks = list(ast.parse(text).body)
    while blocks:
        node = blocks.pop()
        if isinstance(node, ast.ClassDef):
            blocks += node.body
        elif _QUICK.search("\n".join(lines[node.lineno - 1 : node.end_lineno])):
            yield node


def test_no_message_is_read_back() -> None:
    """Who needs a part of an error takes its attribute; words of other libraries are read where nothing else tells a case."""
    found = {}
    for path in FILES:
        text = path.read_text()
        cut = sorted({each for function in _functions(text) for each in cuts(function)}) if _QUICK.search(text) else []
        if cut:
            found[path.relative_to(ROOT).as_posix()] = cut
    faults = [f"{path}:{line} {text}" for path, each in found.items() if path not in FOREIGN for line, text in each]
    assert not faults, "these read the words of an error; use its attributes:\n" + "\n".join(faults)
    assert found.keys() == FOREIGN.keys()


def test_reading_a_message_is_noticed() -> None:
    """Each way in which messages were cut before, and each way around it; quoting a whole message is no cut."""
    shown = "def f(error: DoesNotFit, path: str) -> None:\n    {}"
    for text in (
        'str(error).partition("; raise the budget")[0]',
        'str(error).replace("--ngpu -1", "--restrict=cuda")',
        'story = str(error); "are taken" in story',
        'story = f"{error}"; story.startswith("program ")',
        'error.args[0].removeprefix("--ram ")',
        'error.fact.partition(";")',
        'error.shortage.fact.split(" ", 1)',
        're.search("needs", str(error))',
        'str(self.failure).endswith("taken")',
        "str(error).strip().partition('x')",
    ):
        assert list(cuts(ast.parse(shown.format(text)))), text
    assert list(cuts(ast.parse('try:\n    f()\nexcept OSError as e:\n    "x" in str(e)')))
    for text in ('raise UsageError(f"it failed: {error}")', '" ".join(str(error).split())', 'path.partition(":")', "complain(str(error)[:80])"):
        assert not list(cuts(ast.parse(shown.format(text)))), text


NNTASK_ERRORS: Final = frozenset({"NntaskError", "UsageError", "DoesNotFit", "DataError", "Diverged", "StorageError", "ClusterError"})


def flags_in_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and beginning of each error whose clause begins with a flag, which belongs into the argument `flag`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text), *_]) if name in NNTASK_ERRORS:
                begin: object = text
            case ast.Call(func=ast.Name(id=name), args=[ast.JoinedStr(values=[ast.Constant(value=begin), *_]), *_]) if name in NNTASK_ERRORS:
                pass
            case ast.Call(func=ast.Name(id=name), args=[ast.JoinedStr(values=[ast.FormattedValue(value=value), *_]), *_]) if name in NNTASK_ERRORS:
                begin = "--" if ast.unparse(value) in ("flag", "flag_of(name)") else ""
            case _:
                continue
        if str(begin).startswith("--"):
            yield node.lineno, str(begin)


def test_flags_of_errors_are_attributes() -> None:
    """So that a command can name the variable or key that has set the flag."""
    paths = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(("nntask/", "wrappers/cli/"))]
    suspects = ((path, ast.parse(text)) for path in paths if _BEGINS.search(text := path.read_text()))
    found = [f"{path.relative_to(ROOT)}:{line} {words}" for path, tree in suspects for line, words in flags_in_words(tree)]
    assert not found, "give these flags as the argument flag:\n" + "\n".join(found)
    assert list(flags_in_words(ast.parse('UsageError("--lr must be")')))
    assert list(flags_in_words(ast.parse('DataError(f"--lr {x} must be", "y")')))
    assert list(flags_in_words(ast.parse('UsageError(f"{flag} must be")')))
    assert not list(flags_in_words(ast.parse('UsageError(f"must be {x}", flag="--lr")')))


def more_than_flags(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each argument flag= that holds more than a flag, or a part of its value such as "RATE in --sim-gpu"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "flag" and isinstance(node.value, ast.Constant | ast.JoinedStr):
            parts = [node.value] if isinstance(node.value, ast.Constant) else node.value.values
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
            if not re.fullmatch(r"((\w+ in )?--[a-z][a-z-]*)?", text):
                yield node.value.lineno, ast.unparse(node.value)


def test_flags_of_errors_are_flags_alone() -> None:
    """Their values are the argument value, or in the clause."""
    paths = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(("nntask/", "wrappers/"))]
    suspects = ((path, ast.parse(text)) for path in paths if "flag=" in (text := path.read_text()))
    found = [f"{path.relative_to(ROOT)}:{line} {words}" for path, tree in suspects for line, words in more_than_flags(tree)]
    assert not found, "give the value as the argument value:\n" + "\n".join(found)
    assert list(more_than_flags(ast.parse('UsageError("is wrong", flag=f"--lr {x}")')))
    assert list(more_than_flags(ast.parse('UsageError("is wrong", flag="--auto-tile measured")')))
    assert not list(more_than_flags(ast.parse('UsageError("is wrong", flag="RATE in --sim-gpu")')))


def test_refusals_for_memory_have_their_shortage() -> None:
    """Everywhere but in benchmarks."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if path.parts[len(ROOT.parts)] in ("nntask", "wrappers")
        if "DoesNotFit(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "DoesNotFit"
        if "shortage" not in {keyword.arg for keyword in node.keywords}
        if not (node.args and isinstance(node.args[0], ast.Call) and ast.unparse(node.args[0].func) == "Shortage")
    }
    assert found == set()


def fields_of(cls: ast.ClassDef) -> set[str]:
    """Public attributes that the methods of a class set."""
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] for node in ast.walk(cls) if isinstance(node, ast.Assign | ast.AnnAssign)
    )
    attributes = (part for group in targets for target in group for part in ast.walk(target) if isinstance(part, ast.Attribute))
    return {each.attr for each in attributes if ast.unparse(each.value) == "self" and each.attr != "args" and not each.attr.startswith("_")}


def unread_fields(cls: ast.ClassDef, tests: Iterable[str]) -> list[str]:
    """Fields of an error that no test reads, of those that name its class; "its message" if none of them compares that."""
    naming = [text for text in tests if re.search(rf"\b{cls.name}\b", text)]
    unread = [name for name in sorted(fields_of(cls)) if not any(re.search(rf"\.{name}\b|\"{name}\"", text) for text in naming)]
    message = rf"raises\([^)]*\b{cls.name}\b[^)]*match=|\b{cls.name}\(|\bstr\("
    return unread if any(re.search(message, text) for text in naming) else [*unread, "its message"]


def test_fields_and_messages_of_errors_are_tested() -> None:
    """By a test that names the class; errors without a message only control the flow of one module."""
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if "contracts" not in path.parts]
    classes = [
        (path.relative_to(ROOT).as_posix(), node)
        for path in FILES
        if path.relative_to(ROOT).as_posix().startswith(("scheduler/", "tiles/", "nntask/", "wrappers/"))
        if _CLASS.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name in error_names() and not node.name.startswith("_")
    ]
    found = {f"{path} {cls.name}": unread for path, cls in classes if cls.name not in UNTESTED and (unread := unread_fields(cls, tests))}
    assert not found
    assert UNTESTED.keys() <= {cls.name for _, cls in classes if unread_fields(cls, tests)}
    (lost,) = ast.parse("class Lost(Exception):\n    def __init__(self):\n        self.why, self._raw = 1, 2").body
    assert isinstance(lost, ast.ClassDef)
    assert unread_fields(lost, ["Lost().why"]) == []
    assert unread_fields(lost, ["isinstance(error, Lost)"]) == ["why", "its message"]


@pytest.mark.parametrize("cause", [*get_args(Cause), *get_args(TaskCause)])
def test_each_cause_is_produced_by_a_test(cause: str) -> None:
    """By a program or a step that is refused; `test_errors` only makes each error by hand, to compare its sentence."""
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_errors.py" and "contracts" not in path.parts)
    assert any(re.search(rf'cause[^\n]*"{cause}"|Shortage\("{cause}"', path.read_text()) for path in tests)


def remedies_in_clauses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each error whose clause holds a semicolon, after which a remedy begins."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text)]) if name in NNTASK_ERRORS:
                parts: list[object] = [text]
            case ast.Call(func=ast.Name(id=name), args=[ast.JoinedStr(values=values)]) if name in NNTASK_ERRORS:
                parts = [value.value for value in values if isinstance(value, ast.Constant)]
            case _:
                continue
        if any("; " in str(part) for part in parts):
            yield node.lineno, ast.unparse(node)


def test_remedies_of_errors_are_attributes() -> None:
    """So that a caller can give a better one; the message joins both."""
    paths = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(("nntask/", "wrappers/", "tiles/"))]
    suspects = ((path, ast.parse(text)) for path in paths if re.search(r"(?:Error|DoesNotFit|Diverged)\(", text := path.read_text()))
    found = [f"{path.relative_to(ROOT)}:{line} {words[:100]}" for path, tree in suspects for line, words in remedies_in_clauses(tree)]
    assert not found, "give the remedy as the second argument:\n" + "\n".join(found)
    assert list(remedies_in_clauses(ast.parse('UsageError(f"must be {x}; write 1", flag="--lr")')))
    assert not list(remedies_in_clauses(ast.parse('UsageError(f"must be {x}", "write 1", flag="--lr")')))
