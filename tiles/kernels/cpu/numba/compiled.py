"""Compilation of loops over fp32 arrays: by Numba, at their first call, for this machine's vector width, cached on disk.

Only modules of this folder import Numba, and kernels import them when they first run, so commands without kernels do not pay for it (0.5 s). The
cache is next to the source (`__pycache__`), or in Numba's user cache if that is not writable, so a machine compiles once. Loops release the GIL,
allocate nothing, and give the same bits for the same shapes: they have no threads and a fixed order of operations.

Functions shared by loops are `inlined`, never called. Otherwise each compiled loop would contain its own copy of the function, optimised for that
loop but under a common name, and a process runs the copy that it loads first. Bits then depended on the order in which loops were loaded (by 1e-8
in the losses of the run that compiled them).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

from . import compiler_memory

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

REASSOCIATE: Final = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered into vector lanes. NaN and infinities are kept: a loss that diverged must show, and running maxima begin at -inf."""
EXACT: Final = {"contract", "nsz"}
"""Rounding tricks survive; a product and a sum may become one instruction."""

f32 = np.float32

compiler_memory.begin()


def _larger(context: Any, a: Any, b: Any) -> Any:
    """Generate LLVM's maxnum, the only maximum that it vectorises; the result for NaN is undefined."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        function = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return a(a, b), generate


larger: Final = cast(Callable[[Any, Any], Any], intrinsic(_larger))
"""Return the larger of two fp32 numbers, in loops."""

ZERO, ONE, TWO, THREE = f32(0.0), f32(1.0), f32(2.0), f32(3.0)


def inlined(fastmath: set[str]) -> Callable[[F], F]:
    """Declare a part of loops, which is compiled into each loop that uses it. Only loops may call it."""

    def enter(function: F) -> F:
        return cast(F, numba.njit(forceinline=True, error_model="numpy", fastmath=fastmath)(function))

    return enter


def _content() -> int:
    """Return a checksum of the sources of this folder."""
    checksum = 0
    for file in sorted(Path(__file__).parent.glob("*.py")):
        checksum = zlib.crc32(file.read_bytes(), checksum)
    return checksum


_CONTENT: Final = _content()


def _watching_all(dispatcher: Any) -> Any:
    """Make the cache of a compiled function depend on all files of this folder; by itself, Numba compares only the function's own file."""
    index = dispatcher._cache._cache_file  # of Numba's class IndexDataCacheFile, which compares its stamp with that of the file on disk
    index._source_stamp = (index._source_stamp, _CONTENT)
    return dispatcher


def compiled(fastmath: set[str]) -> Callable[[F], F]:
    """Compile at the first call and cache on disk; if no directory is writable, in memory only."""

    def enter(function: F) -> F:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            return cast(F, _watching_all(numba.njit(cache=True, **options)(function)))
        except RuntimeError:  # Numba found no place for its cache
            return cast(F, numba.njit(**options)(function))

    return enter
