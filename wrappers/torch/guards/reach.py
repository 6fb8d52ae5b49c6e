"""Names that Python code loads in addition to its arguments, read from its bytecode, and the origin of files, classes and modules.

Only loads that the bytecode names are found, not those by `getattr` with a computed name, or through C.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, Literal, NamedTuple

import torch

Origin = Literal["user", "library", "torch"]
"""Author of some code: the program, an installed package, or PyTorch and ours, whose state does not belong to a program."""

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OWN: Final = str(Path(__file__).resolve().parents[3])
_OURS: Final = tuple(os.path.join(_OWN, name) + os.sep for name in ("nntask", "tiles", "scheduler", "wrappers"))
_LIBRARIES: Final = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@lru_cache(maxsize=4096)
def origin_of(filename: str) -> Origin:
    """Return whose code a file has: "torch" for PyTorch and this project, "library" for Python's library and installed packages, else "user"."""
    if filename.startswith((_TORCH, *_OURS)):
        return "torch"
    if filename.startswith("<frozen") or filename.startswith(_LIBRARIES):
        return "library"
    return "user"


def is_foreign(kind: type) -> bool:
    """Return whether a class is defined outside Python's standard library."""
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names or kind.__module__ == "__main__"


@lru_cache(maxsize=4096)
def origin_of_class(kind: type) -> Origin:
    """Return whose code a class is, as `origin_of` does for a file."""
    module = sys.modules.get(kind.__module__)
    return "user" if module is None else origin_of_module(module)


def origin_of_module(module: ModuleType) -> Origin:
    """Return whose code a Python module is, as `origin_of` does for a file."""
    name = module.__name__.partition(".")[0]
    if getattr(module, "__file__", None) is None:
        return "library" if name in sys.stdlib_module_names and name != "__main__" else "user"
    return origin_of(str(module.__file__))


Chain = tuple[str, ...]
"""A name and the attributes that are loaded from it: ("settings", "RATE") for ``settings.RATE``."""


@lru_cache(maxsize=16384)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names that a function and the functions inside it use."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


class Loads(NamedTuple):
    """Loads of a function and of the functions inside it.

    Attributes:
        of_globals: chains that begin with a global.
        of_self: attributes of the first argument.
        of_cells: chains that begin with a variable of an enclosing function.
        imports: chains that begin with a Python module that the function imports.
    """

    of_globals: tuple[Chain, ...]
    of_self: tuple[Chain, ...]
    of_cells: tuple[Chain, ...]
    imports: tuple[Chain, ...]


@lru_cache(maxsize=16384)
def loads_of(code: CodeType) -> Loads:
    """Return the loads of a function."""
    found: list[dict[Chain, None]] = [{}, {}, {}, {}]
    _scan(code, code.co_varnames[0] if code.co_argcount else "", found)
    return Loads(*map(tuple, found))


def _scan(code: CodeType, own: str, found: list[dict[Chain, None]]) -> None:
    """Add the loads of a function to `found`; `own` is its name for the first argument of the outermost function."""
    of_globals, of_self, of_cells, imports = found
    chain: Chain = ()
    target: dict[Chain, None] | None = None
    imported: dict[str, str] = {}  # local name -> Python module
    last_import = ""
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, str(instruction.argval)
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and target is not None:
            chain = (*chain, name)
            continue
        if target is not None and chain:
            target[chain] = None
        chain, target = (), None
        if operation == "IMPORT_NAME":
            last_import = name
        elif operation == "IMPORT_FROM":
            imports[last_import, name] = None
        elif operation in ("STORE_FAST", "STORE_DEREF") and last_import:
            imported[name], last_import = last_import, ""
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain, target = (name,), of_globals
        elif operation in ("LOAD_FAST", "LOAD_DEREF") and name in imported:
            chain, target = (imported[name],), imports
        elif operation in ("LOAD_FAST", "LOAD_DEREF") and own and name == own:
            target = of_self
        elif operation == "LOAD_DEREF":
            chain, target = (name,), of_cells
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, own if own in constant.co_freevars else "", found)
