"""How loops over fp32 arrays are compiled: by Numba, at their first call, for this machine's vector width, and kept on disk.

Only modules of this folder import Numba, and kernels import them when they first run, so commands that run no kernel never pay for it (0.5 s). What
was compiled lies beside the source (`__pycache__`, or Numba's cache of the user where that cannot be written), so a machine compiles once. Numba by
itself notices a change of the file of a loop alone, so `compiled` lets the cache depend on the content of all files of this folder. Loops release the
GIL, allocate nothing, and give the same bits for the same shapes: no threads, no order but their own.

What loops share is `inlined`, never called: each compiled loop would keep its own copy of what it calls, optimised for itself under a common
name, and of equal names a process runs the copy it met first. So bits changed with the order in which loops were loaded (seen as 1e-8 in the
losses of the run that compiled them).
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
"""Sums may be taken in vector lanes. NaN and infinities stay what they are: a loss that diverged must show, and running maxima begin at -inf."""
EXACT: Final = {"contract", "nsz"}
"""Rounding tricks survive; a product and a sum may still be one instruction."""

f32 = np.float32

compiler_memory.begin()


def _larger(context: Any, a: Any, b: Any) -> Any:
    """LLVM's maxnum, the one maximum that it takes in vector lanes; nothing is promised for NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        function = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return a(a, b), generate


larger: Final = cast(Callable[[Any, Any], Any], intrinsic(_larger))
"""The larger of two fp32 numbers, in loops."""

ZERO, ONE, TWO, THREE = f32(0.0), f32(1.0), f32(2.0), f32(3.0)


def inlined(fastmath: set[str]) -> Callable[[F], F]:
    """Make a part of loops, which becomes code of each loop that uses it. Nothing else may call it."""

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
    """Let the cache of a compiled function be of this content of the folder, besides of its own file."""
    index = dispatcher._cache._cache_file  # of Numba's class IndexDataCacheFile, which compares its stamp with that of the file on disk
    index._source_stamp = (index._source_stamp, _CONTENT)
    return dispatcher


def compiled(fastmath: set[str]) -> Callable[[F], F]:
    """Compile at the first call and keep on disk; in memory only where no directory can be written."""

    def enter(function: F) -> F:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            return cast(F, _watching_all(numba.njit(cache=True, **options)(function)))
        except RuntimeError:  # Numba found no place for its cache
            return cast(F, numba.njit(**options)(function))

    return enter
