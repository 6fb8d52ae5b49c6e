"""Words: no class name stands for two things, and names of the product are those of the field.

A coined word names a thing that has a term in the field already. Such words do not come back in names of classes, functions, arguments,
attributes and variables, local ones included. A word that fits every value says nothing, so no variable of a longer function is called by one.
Prose is left to the reader's eye.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("scheduler", "tiles", "nntask", "wrappers")

DOUBLE: Final[Mapping[str, str]] = {
    "Block": "of a transformer, and the rows and heads that one loop of an attention kernel takes",
    "DoesNotFit": "the scheduler's refusal, and the trainer's of the same name with an exit code, which users catch by either",
    "Dropout": "the layer, and the arguments of the dropout inside attention",
    "Session": "a module of PyTorch in training, which programs of users open, and a training run at work, which the loop has",
}
"""Class names that stand for two things, each with the reason why that reads well."""

COINED: Final[Mapping[str, str]] = {
    "agenda": "next-use schedule",
    "band": "layer group",
    "bands": "layer groups",
    "carrier": "transport, channel",
    "carriers": "transports, channels",
    "claim": "reservation; run lock",
    "claims": "reservations",
    "crew": "workers",
    "doomed": "to cancel",
    "due": "next use",
    "dues": "next uses",
    "hire": "start",
    "home": "backing store",
    "homeless": "without backing store",
    "homes": "backing store",
    "horizon": "scheduling window",
    "imagined": "machine model",
    "lend": "borrow",
    "lends": "borrow",
    "lent": "borrowed",
    "offer": "eviction candidate",
    "offers": "eviction candidates",
    "part": "shard; partition; the thing itself",
    "parts": "shards; partitions; the things themselves",
    "place": "memory node; offset; file extent; to pin",
    "places": "memory nodes; offsets; positions",
    "rescue": "force-admit",
    "riddle": "unexplained failure",
    "room": "free bytes; staging buffer; scratch; waiters",
    "rooms": "staging buffers; scratch",
    "settle": "to reach quiescence; to drain",
    "shadow": "layout",
    "shelf": "eviction candidates",
    "shelves": "eviction candidates",
    "sketch": "dry capture",
    "stretch": "fused tasks",
    "stretches": "fused tasks",
}
"""Coined words, each with the field's."""

WHOLE: Final[Mapping[str, str]] = {
    "Share": "data-parallel shard",
    "Target": "machine model",
    "let_in": "to release what is throttled",
}
"""Whole names that were coined although their words are ordinary ones, each with the field's term.

`base` and `lane` are no such names: frozen base weights and the lanes of a sum (partial accumulators, as `--lanes` counts them) are what they say.
"""

EMPTY: Final = frozenset({"found", "at", "made", "kept", "each", "told"})
"""Words that fit every value: names of variables in short functions and of loops only, where one sees what they hold."""
SHORT: Final = 10
"""The largest number of lines of a short function."""
KEPT: Final[Mapping[str, Mapping[str, str]]] = {
    "nntask/hardware": {
        "part": "of a card that --ngpu NxPARTS splits, as the flag calls it",
        "place": "a directory that may not exist yet, as messages call it",
    },
    "nntask/planning": {"is_given_room": "whether all memories have the least that the step needs, so that one is given more all the same"},
    "nntask/training": {"place": "a directory or file that may not exist yet, as messages call it"},
    "scheduler/api": {"place": "the public method of a runtime that pins tasks, as its messages call it"},
    "wrappers/dask": {"place": "the part of an address behind its scheme", "places": "the addresses where nodes listen, each with the node's card"},
    "wrappers/torch": {"lend_tile": "a public function, which programs of users call"},
}
"""By folder, names with a coined word that stay, each with the reason."""


def trees(package: str) -> Iterator[tuple[Path, ast.Module]]:
    """The parsed modules of a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def names_in(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to classes, functions, arguments, attributes and variables, local ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def empty_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and name of each variable with an empty name in a function that is not short; variables of loops and comprehensions may have one."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (function.end_lineno or 0) - function.lineno >= SHORT:
            of_loops = {id(name) for node in ast.walk(function) if isinstance(node, ast.For | ast.comprehension) for name in ast.walk(node.target)}
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY and id(node) not in of_loops:
                    yield node.lineno, node.id


def coined_names() -> dict[str, set[str]]:
    """By folder (a package's room, or the package), the names with a coined word."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path, tree in trees(package):
            folder = "/".join(path.relative_to(ROOT).parent.parts[:2])
            found[folder].update(name for name in names_in(tree) if terms_for(name))
    return {folder: names for folder, names in found.items() if names}


def terms_for(name: str) -> str:
    """The field's terms for the coined words of a name; empty if it has none."""
    return WHOLE.get(name) or "; ".join(f"{word}: {COINED[word]}" for word in words_of(name) if word in COINED)


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: those between underscores or capitals."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_a_name_is_split_into_words() -> None:
    """By underscores and by capitals, abbreviations kept whole."""
    assert words_of("_make_room2") == ["make", "room"]
    assert words_of("WaitingRoom") == ["waiting", "room"]
    assert words_of("MLPBlock") == ["mlp", "block"]
    assert words_of("MOST_PARTS") == ["most", "parts"]


def test_every_kind_of_name_is_seen() -> None:
    """Classes, functions, arguments, attributes, constants, locals, targets of loops and of `with`, attributes of classes with and without a type."""
    code = """
A = 1
class B:
    c = 1
    d: int = 1
    def e(self, f):
        self.g = h = 1
        with f as i:
            pass
        return [j for j in h], {k: 1 for k, (l, *m) in h}, (n := 1)
"""
    assert sorted(name.lower() for name in names_in(ast.parse(code))) == [*"abcdef", *"ghijklmn", "self"]
    assert terms_for("Share") == "data-parallel shard"
    assert terms_for("shared_share") == ""


def test_no_class_name_stands_for_two_things() -> None:
    """Two classes of one name need a reason in the list, and a name that is no longer double leaves the list."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path, tree in trees(package):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    double = {name: files for name, files in found.items() if len(files) > 1}
    listed = DOUBLE.keys()
    assert not (double.keys() - listed), {name: double[name] for name in double.keys() - listed}
    assert not (listed - double.keys()), f"no longer double: {sorted(listed - double.keys())}"


def test_names_use_no_coined_words() -> None:
    """Classes, functions, arguments and attributes have the field's words; exceptions are listed one by one, and none is listed in vain."""
    found = coined_names()
    listed = {folder: set(KEPT.get(folder, ())) for folder in {*found, *KEPT}}
    new = [f"{folder}: {name} ({terms_for(name)})" for folder, names in sorted(found.items()) for name in sorted(names - listed[folder])]
    assert not new, "use the field's terms:\n" + "\n".join(new)
    gone = {folder: sorted(names - found.get(folder, set())) for folder, names in listed.items() if names - found.get(folder, set())}
    assert not gone, f"renamed, so no longer to be listed: {gone}"


def test_variables_say_what_they_hold() -> None:
    """No variable of a function of more than `SHORT` lines has a name that fits every value."""
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{line} {word}"
        for package in PACKAGES
        for path, tree in trees(package)
        for line, word in empty_names(tree)
    }
    assert not found, "call these variables by what they hold:\n" + "\n".join(sorted(found))


def test_an_empty_name_is_noticed() -> None:
    """As the target of an assignment, of `with` and of `:=`, in a function of more lines than a short one; not as the variable of a loop."""
    code = "def f(x):\n    found = 1\n    with x as made: pass\n    (told := x)\n    for each in x: [at for at in x]\n"
    assert not list(empty_names(ast.parse(code + "    pass\n" * (SHORT - 5))))
    assert sorted(empty_names(ast.parse(code + "    pass\n" * (SHORT - 4)))) == [(2, "found"), (3, "made"), (4, "told")]
