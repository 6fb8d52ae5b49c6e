"""Front doors: what a package offers is imported from it or from one of its rooms, and no import runs in a circle."""

from __future__ import annotations

import ast
import graphlib
import importlib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wrappers", "nntask", "tiles", "scheduler")
OUTSIDE = ("benchmarks", "examples")
"""Folders whose files belong to no package and see only front doors, as programs of users do. Tests look inside."""


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
DOORS = {name for name, path in MODULES.items() if path.with_suffix(".pyi").exists()} | {"scheduler.machine", "wrappers.cli"}
"""Packages and rooms with public names: those with a stub, and two modules that import eagerly."""

API_PAGE = ROOT / "docs/reference/api.md"
"""Page that lists the names for users."""


@cache
def imports(path: Path) -> list[tuple[str, str, int]]:
    """What a file imports, anywhere in it: the module, the name ("" for a whole module) and the line."""
    found: list[tuple[str, str, int]] = []
    here = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.extend((module, alias.name, node.lineno) for alias in node.names)
    return found


def package_of(module: str) -> str:
    """The package at the top of a dotted name."""
    return module.partition(".")[0]


def test_no_import_circle() -> None:
    """Modules of a package import each other in one direction, counting imports inside functions and those for types alone."""
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        found = (f"{origin}.{name}" if f"{origin}.{name}" in MODULES else origin for origin, name, _ in imports(path))
        graph[module] = {each for each in found if each in MODULES and each != module and package_of(each) == package_of(module)}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports run in a circle: {' <- '.join(error.args[1])}")


def test_outside_a_package_only_its_doors_are_used() -> None:
    """Other packages, benchmarks and examples import what a package or one of its rooms offers, never a module behind it."""
    files = [*MODULES.values(), *(path for folder in OUTSIDE for path in sorted((ROOT / folder).rglob("*.py")))]
    deep = [
        f"{path.relative_to(ROOT)}:{line} imports {name or 'all'} of {module}"
        for path in files
        for module, name, line in imports(path)
        if package_of(module) in PACKAGES and package_of(module) != path.relative_to(ROOT).parts[0]
        if module not in DOORS or (name and name not in importlib.import_module(module).__all__)
    ]
    assert not deep, "\n".join(deep)


def test_inside_a_package_modules_import_modules() -> None:
    """A module takes a neighbour's names from where they are defined, so that the arrows inside a package are those one reads."""
    round_about = [
        f"{path.relative_to(ROOT)}:{line} imports {name} by the door {module}"
        for path in MODULES.values()
        for module, name, line in imports(path)
        if package_of(module) == path.relative_to(ROOT).parts[0] and MODULES.get(module, path).with_suffix(".pyi").exists()
        if f"{module}.{name}" not in MODULES
    ]
    assert not round_about, "\n".join(round_about)


@pytest.mark.parametrize("door", sorted(DOORS))
def test_every_public_name_is_there(door: str) -> None:
    """Each name that a door lists can be imported, and none is hidden by a module of the same name."""
    room = importlib.import_module(door)
    missing = [name for name in room.__all__ if not hasattr(room, name)]
    assert not missing, f"{door} lists names that it does not have: {', '.join(missing)}"
    modules = [name for name in room.__all__ if f"{door}.{name}" in MODULES]
    hidden = [name for name in modules if getattr(getattr(room, name), "__name__", "") != f"{door}.{name}"]
    assert not hidden, f"these names of {door} are modules, too: {', '.join(hidden)}"


def test_doors_offer_only_what_others_use() -> None:
    """Each name of a room is imported by another package, a benchmark or an example, or the page of API tiers has it."""
    files = [*MODULES.values(), *(path for folder in OUTSIDE for path in sorted((ROOT / folder).rglob("*.py")))]
    used = {
        (module, name)
        for path in files
        for module, name, _ in imports(path)
        if package_of(module) in PACKAGES and package_of(module) != path.relative_to(ROOT).parts[0]
    }
    rows = [line for line in API_PAGE.read_text().splitlines() if line.startswith("|")]
    unused = [
        f"{door}.{name}"
        for door in sorted(DOORS - {"wrappers.cli"})
        for name in importlib.import_module(door).__all__
        if (door, name) not in used and not any(f"`{door}`" in row and f"`{name}`" in row for row in rows)
    ]
    assert not unused, f"no other package imports these: {', '.join(unused)}"
