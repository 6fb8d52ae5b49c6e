"""Makes a reference page for each package of the product that has a front door (`__all__`), before Sphinx reads the pages.

A name that several packages export is documented once, in the deepest of them; the others link to it. The pages go to `reference/api`, which git
ignores, so a package that gets a front door gets a page by itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

PACKAGES = ("nntask", "tiles", "scheduler", "wrappers")
INSIDE = ("scheduler.core", "scheduler.execution")
"""Packages that no module outside of theirs may import."""


def doors() -> Iterator[ModuleType]:
    """Packages of the product that export names, outermost first."""
    for root in PACKAGES:
        package = importlib.import_module(root)
        found = [root, *(info.name for info in pkgutil.walk_packages(package.__path__, f"{root}.") if info.ispkg)]
        for name in found:
            if not name.startswith(INSIDE):
                module = importlib.import_module(name)
                if getattr(module, "__all__", None):
                    yield module


def _key(name: str, value: Any) -> tuple[str, Any]:
    """What tells one exported thing from another: equal constants of different names are different things."""
    return name, id(value) if inspect.isclass(value) or inspect.isroutine(value) else repr(type(value))


def pages() -> dict[str, str]:
    """The text of each page by the name of its package."""
    modules = list(doors())
    home: dict[tuple[str, Any], str] = {}
    for module in sorted(modules, key=lambda module: module.__name__.count(".")):
        for name in module.__all__:
            key = _key(name, getattr(module, name))
            if module.__name__.startswith(home.get(key, module.__name__)):  # deeper in the same package
                home[key] = module.__name__
            home.setdefault(key, module.__name__)
    return {module.__name__: _page(module, home) for module in modules}


def _page(module: ModuleType, home: dict[tuple[str, Any], str]) -> str:
    """One package: what it is, names that are documented deeper, and the rest."""
    title = f"``{module.__name__}``"
    lines = [title, "=" * len(title), "", f".. automodule:: {module.__name__}", "   :no-members:", ""]
    elsewhere, here = [], []
    for name in module.__all__:
        value = getattr(module, name)
        place = home[_key(name, value)]
        if place == module.__name__:
            here.append((name, value))
        else:
            elsewhere.append(f"- :py:obj:`{name} <{place}.{name}>`: {_first_sentence(value)}".rstrip(": "))
    if elsewhere:
        lines += ["Names of this package, each on the page of the package that it comes from:", "", *elsewhere, ""]
    for name, value in here:
        if inspect.isclass(value):
            kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
            lines += [
                f".. {kind}:: {module.__name__}.{name}",
                *(["   :members:", "   :special-members: __call__"] if kind == "autoclass" else []),
                "",
            ]
        elif inspect.isroutine(value):
            lines += [f".. autofunction:: {module.__name__}.{name}", ""]
        else:
            text = _constant_text(module, name).replace("\n", "\n   ")
            lines += [f".. py:data:: {module.__name__}.{name}", "", f"   {text}", ""]
    return "\n".join(lines)


def _first_sentence(value: Any) -> str:
    """What a class or a function is, in plain text; nothing for constants."""
    if not (inspect.isclass(value) or inspect.isroutine(value)) or not value.__doc__:
        return ""
    return escape(inspect.cleandoc(value.__doc__).split("\n\n")[0].replace("\n", " "))


def escape(line: str) -> str:
    """A line of a docstring, whose only markup are backticks, as reStructuredText: bars and trailing underscores mean themselves."""
    pieces = re.split(r"(`+[^`]*`+)", line)
    return "".join(piece if number % 2 else re.sub(r"\||(?<=\w)_(?!\w)", r"\\\g<0>", piece) for number, piece in enumerate(pieces))


def escape_docstring(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape the lines of a docstring, but for literal blocks."""
    depth = -1
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if depth >= 0 and line.strip() and indent <= depth:
            depth = -1
        if depth < 0:
            lines[number] = escape(line)
        if line.rstrip().endswith("::") and depth < 0:
            depth = indent


def _constant_text(module: ModuleType, name: str) -> str:
    """The string under a constant's assignment, in whichever module of the package it is; else the beginning of its value."""
    assert module.__file__ is not None
    for path in sorted(Path(module.__file__).parent.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        for line, below in itertools.pairwise(body):
            targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets if isinstance(line, ast.Assign) else []
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
            if is_text and any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return inspect.cleandoc(below.value.value)
    return f"``{name} = {getattr(module, name)!r:.100}``" if len(repr(getattr(module, name))) <= 100 else f"A {type(getattr(module, name)).__name__}."


def write_pages(app: Sphinx) -> None:
    """Write pages that have changed, and remove those of packages that are gone."""
    folder = Path(app.srcdir) / "reference" / "api"
    folder.mkdir(exist_ok=True)
    made = {folder / f"{name}.rst": text for name, text in pages().items()}
    for stale in set(folder.glob("*.rst")) - made.keys():
        stale.unlink()
    for path, text in made.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before the sources are looked for."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon writes markup of its own
    return {"parallel_read_safe": True}
