"""What a Python function may read beside its arguments, from its bytecode: names of globals, attributes of modules, attributes of `self`.

Only loads that the bytecode names are found; what is reached by `getattr` with a computed name, or through C, is not.
"""

from __future__ import annotations

import dis
import os
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Final, Literal

import torch

Origin = Literal["user", "library", "torch"]
"""Whose code it is: the program's, an installed package's, or PyTorch's and ours, whose state is no part of a program's."""

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OWN: Final = str(Path(__file__).resolve().parents[2])
_OURS: Final = tuple(os.path.join(_OWN, name) + os.sep for name in ("nntask", "tiles", "scheduler", "wrappers"))
_LIBRARIES: Final = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@lru_cache(maxsize=4096)
def origin_of(filename: str) -> Origin:
    """Return whose code a file has."""
    if filename.startswith((_TORCH, *_OURS)):
        return "torch"
    if filename.startswith("<frozen") or filename.startswith(_LIBRARIES):
        return "library"
    return "user"


Chains = tuple[tuple[str, ...], ...]
"""Chains of names: ("settings", "RATE") for ``settings.RATE``."""


@lru_cache(maxsize=16384)
def loads_of(code: CodeType) -> tuple[Chains, Chains]:
    """Return the globals, and the attributes of the first argument, that a function and those inside it load."""
    found: tuple[dict[tuple[str, ...], None], dict[tuple[str, ...], None]] = {}, {}
    _scan(code, code.co_varnames[0] if code.co_argcount else "", *found)
    return tuple(found[0]), tuple(found[1])


def _scan(code: CodeType, own: str, of_globals: dict[tuple[str, ...], None], of_own: dict[tuple[str, ...], None]) -> None:
    """Note the loads of a function; `own` is the name by which it knows the first argument of the outermost one."""
    chain: tuple[str, ...] = ()
    target: dict[tuple[str, ...], None] | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and target is not None:
            chain = (*chain, str(instruction.argval))
            continue
        if target is not None and chain:
            target[chain] = None
        chain, target = (), None
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain, target = (str(instruction.argval),), of_globals
        elif instruction.opname in ("LOAD_FAST", "LOAD_DEREF") and own and instruction.argval == own:
            target = of_own
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, own if own in constant.co_freevars else "", of_globals, of_own)
