"""The architecture: imports run one way, the core is pure, every module says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.deadline import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("wrappers", "nntask", "tiles", "scheduler")
"""From the top floor down."""
MODULES = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))
CORE = sorted((ROOT / "scheduler" / "core").rglob("*.py"))
PURE = {"__future__", "bisect", "collections", "copy", "dataclasses", "heapq", "itertools", "math", "typing", "zlib"}
"""What the core may import of the standard library; nothing of it knows threads, time, chance or the outside."""
INDEPENDENT = ("dependencies", "memory.coherence", "memory.extents", "performance_model")


@cache
def imports(path: Path) -> frozenset[str]:
    """Names of the modules a file imports; relative ones begin with a dot."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots, base = "." * node.level, node.module or ""
            found.update([dots + base] if base else [dots + alias.name for alias in node.names])
    return frozenset(found)


def test_import_contracts_hold() -> None:
    """import-linter finds every contract of pyproject.toml kept."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT / "scheduler" / "core")))
def test_core_is_pure(path: Path) -> None:
    """A module of the core imports pure modules of the standard library and its neighbours, nothing else."""
    foreign = {name for name in imports(path) if not name.startswith(".") and name.partition(".")[0] not in PURE}
    up = "." * len(path.relative_to(ROOT / "scheduler").parts)  # dots that lead to `scheduler` itself
    outside = {name for name in imports(path) if name.startswith(up)}
    assert not foreign | outside, f"{path.name} imports {sorted(foreign | outside)}"


@pytest.mark.parametrize("name", INDEPENDENT)
def test_parts_of_the_core_are_independent(name: str) -> None:
    """Dependencies, coherence, extents and performance models know records and errors, not each other."""
    leaves = {name.rpartition(".")[2] for name in imports(ROOT / "scheduler" / "core" / f"{name.replace('.', '/')}.py")}
    assert not leaves & {other.rpartition(".")[2] for other in INDEPENDENT}


def foreign_imports(path: Path) -> Iterator[str]:
    """Packages that a module must not import: those of the floors above it, peft, and torch outside wrappers/torch."""
    package = path.relative_to(ROOT).parts[0]
    above = set(FLOORS[: FLOORS.index(package)]) - ({"wrappers"} if path == ROOT / "nntask" / "__main__.py" else set())
    refused = above | {"peft"} | (set() if ROOT / "wrappers" / "torch" in path.parents else {"torch"})
    yield from sorted(refused & {name.partition(".")[0] for name in imports(path)})


def test_modules_say_what_they_are() -> None:
    """The first statement of a module is a docstring."""
    silent = [str(path.relative_to(ROOT)) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "these modules have no docstring:\n" + "\n".join(silent)


def test_imports_run_one_way() -> None:
    """From the floor above to the one below; torch is imported by tests, benchmarks and wrappers/torch only, peft by tests."""
    faults = [f"{path.relative_to(ROOT)} imports {name}" for path in MODULES for name in foreign_imports(path)]
    assert not faults, "\n".join(faults)


OUTSIDE_THE_CORE = [path for path in MODULES if path not in CORE] + [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]


def reaches_into_a_machine(tree: ast.AST) -> list[str]:
    """Attributes of a scheduler's machine that are its own: everything private of what is called `machine`."""
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__") and _is_machine(node.value)
    ]


def _is_machine(value: ast.expr) -> bool:
    return (isinstance(value, ast.Name) and value.id == "machine") or (isinstance(value, ast.Attribute) and value.attr in ("machine", "_machine"))


def test_nobody_reaches_into_the_machine() -> None:
    """Drivers, planners and reports ask a machine for what it tells (`Machine.memory`, `workers`, `stalls`, ...), and none of them for its parts."""
    found = {str(path.relative_to(ROOT)): reaches_into_a_machine(ast.parse(path.read_text())) for path in OUTSIDE_THE_CORE}
    assert not {path: attributes for path, attributes in found.items() if attributes}


def test_reaching_into_a_machine_is_noticed() -> None:
    """The parts of a machine are private, but for those with counters, so the rule above refuses each of them."""
    machine = next(path for path in CORE if path.name == "machine.py")
    parts = {
        target.attr
        for node in ast.walk(ast.parse(machine.read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    assert {part for part in parts if not part.startswith("_")} == {"conditions", "handlers", "memory", "num_finished", "num_unfinished", "stalls"}
    assert reaches_into_a_machine(ast.parse("self.engine.machine._dispatch.joined")) == ["_dispatch"]
    assert reaches_into_a_machine(ast.parse("list(machine._replicas.copies)")) == ["_replicas"]


def test_every_module_is_imported_without_cupy() -> None:
    """GPUs are looked for when they are asked for, and only then."""
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in ('cupy', 'cupy_backends', 'cudnn', 'torch'): sys.modules[name] = None\n"
        "import nntask, scheduler, tiles, wrappers\n"
        "for package in (nntask, scheduler, tiles, wrappers):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if module.name != 'nntask.__main__' and not module.name.startswith('wrappers.torch.'): importlib.import_module(module.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
